import io

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import OFFLINE, SIXTEEN, UNDER_HALF, ours, packed, padded
from benchmarks.measurement import Batches, Slice
from benchmarks.report import fill_table, trace_table, wanted_table
from benchmarks.wanted import judge


def make_slice(seconds: float, latencies: tuple[float, ...] = ()) -> Slice:
    return Slice(100, 6000, seconds, 1.5, 0.2, Batches(0.4, 8.0, 480.0), latencies)


def render(table: Table) -> list[list[str]]:
    """The cells of every line that has some."""
    file = io.StringIO()
    Console(file=file, width=200).print(table)
    return [line.split() for line in file.getvalue().splitlines() if line.strip()]


def test_a_row_says_what_was_measured() -> None:
    *_, offline, served = render(
        trace_table("mixed", {ours(SIXTEEN): [make_slice(2.0, (0.1,))], OFFLINE: [make_slice(1.0)]})
    )
    assert offline == ["offline,", "arrival", "order", "100.0", "6,000", "15.00", "0.40", "8.0", "480"]
    assert served == [
        "ours,",
        "16",
        "callers",
        "50.0",
        "3,000",
        "15.00",
        "2.00",
        "100.0",
        "100.0",
        "0.40",
        "8.0",
        "480",
    ]


def test_packed_stands_against_padded_with_the_fill() -> None:
    *_, line = render(
        fill_table("mixed", {packed(UNDER_HALF): [make_slice(1.0)], padded(UNDER_HALF): [make_slice(2.5)]})
    )
    assert line == ["under", "half", "full", "0.40", "6,000", "2,400", "2.50", "2.50", "to", "2.50"]


def test_a_missed_figure_is_called_missed_and_an_unmeasured_one_not_measured() -> None:
    verdicts = judge("mixed", {ours(SIXTEEN): [make_slice(2.0)], OFFLINE: [make_slice(1.0)]})
    first, second = [line for line in render(wanted_table(verdicts)) if line[0] == "mixed"][:2]
    assert first[-6:] == ["0.90", "0.500", "0.50", "to", "0.50", "missed"]
    assert second[-3:] == ["0.95", "not", "measured"]
