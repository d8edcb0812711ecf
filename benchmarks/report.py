"""What a run prints: a table per trace, packed against padded by fill, and the wanted figures."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.contenders import FILLS, ROWS, packed, padded
from benchmarks.measurement import (
    Slice,
    cpu_per_thousand,
    load_cpu_per_thousand,
    mean_batches,
    over_rounds,
    percentile,
    ratio,
    sequences_per_second,
    tokens_per_second,
)
from benchmarks.wanted import Slices, Verdict

_HEADINGS = (
    "sequences/s",
    "tokens/s",
    "CPU s/1000",
    "load CPU s/1000",
    "p50 ms",
    "p99 ms",
    "fill",
    "sequences a run",
    "tokens a run",
)
NOTE = """\
Rates and CPU: medians over rounds. CPU: seconds per 1,000 sequences, of the process that computes; the load generator's
stands beside it. p50 and p99: of the requests of all rounds; 16 sequences in one request, or in 16 calls at once, have
one latency. Fill and sizes of runs: means, from the servers' own metrics. A single caller encodes half of each slice.
Under half full: those of the batches of 8 and 16.
"""


def trace_table(trace: str, slices: Slices) -> Table:
    """One line per row that was measured on a trace."""
    table = new_table(f"{trace} trace", ["", *_HEADINGS])
    for row in ROWS:
        if row in slices:
            table.add_row(row, *_cells(slices[row]))
    return table


def fill_table(trace: str, slices: Slices) -> Table:
    """Packed against padded, by how full the padded batches are."""
    table = new_table(
        f"packed against padded: the same batches of the {trace} trace in arrival order",
        ["", "fill", "packed tokens/s", "padded tokens/s", "packed/padded", "over rounds"],
    )
    for batches in FILLS:
        if packed(batches) in slices and padded(batches) in slices:
            pair = slices[packed(batches)], slices[padded(batches)]
            found = ratio(*pair, tokens_per_second)
            table.add_row(
                batches,
                f"{mean_batches(pair[0]).fill:.2f}",
                *(f"{over_rounds(rows, tokens_per_second):,.0f}" for rows in pair),
                f"{found.median:.2f}",
                f"{found.lowest:.2f} to {found.highest:.2f}",
            )
    return table


def wanted_table(verdicts: Iterable[Verdict]) -> Table:
    """Every wanted figure with the rows that it is made of."""
    table = new_table(
        "wanted figures", ["trace", "ratio of", "row", "over row", "wanted", "measured", "over rounds", ""]
    )
    for verdict in verdicts:
        wanted, found = verdict.wanted, verdict.found
        sign = "<=" if wanted.is_at_most else ">="
        cells = [verdict.trace, wanted.quantity_name, wanted.row, wanted.reference, f"{sign} {wanted.limit:.2f}"]
        if found is None:
            table.add_row(*cells, "", "", "not measured")
        else:
            outcome = "[bold red]missed" if verdict.is_missed else "held"
            table.add_row(*cells, f"{found.median:.3f}", f"{found.lowest:.2f} to {found.highest:.2f}", outcome)
    return table


def _cells(slices: Sequence[Slice]) -> list[str]:
    batches = mean_batches(slices)
    latencies = [latency for part in slices for latency in part.latencies]
    load_cpu = over_rounds(slices, load_cpu_per_thousand)
    return [
        f"{over_rounds(slices, sequences_per_second):,.1f}",
        f"{over_rounds(slices, tokens_per_second):,.0f}",
        f"{over_rounds(slices, cpu_per_thousand):.2f}",
        f"{load_cpu:.2f}" if latencies else "",
        *(f"{1000 * percentile(latencies, percent):.1f}" if latencies else "" for percent in (50, 99)),
        f"{batches.fill:.2f}",
        f"{batches.sequences:.1f}",
        f"{batches.tokens:.0f}",
    ]


def new_table(title: str, headings: Sequence[str]) -> Table:
    """An empty table; columns of numbers are aligned to the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
    return table


_NUMBERS = {
    *_HEADINGS,
    "mixed",
    "short",
    "min cosine",
    "mean cosine",
    "Spearman",
    "company",
    "MiB",
    "limit",
    "found",
    "packed tokens/s",
    "padded tokens/s",
    "packed/padded",
    "wanted",
    "measured",
    "goodput",
    "foretold",
    "load",
    "share",
    "in time",
    "refused",
    "given up",
    "late",
    "accepted p50 ms",
    "server CPUs",
    "load CPUs",
    "refused p50",
    "p99",
    "sent late p99",
    "handler p99",
    "empty call p50",
    "empty call p99",
}
