"""What `python -m benchmarks.overload` prints: what became of each load, where refusals spent their time, the verdicts.

A figure is taken in each round, and the median over rounds is what is judged: one round in which the machine was
disturbed does not decide. A goodput is a ratio to the capacity of its own round.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from statistics import fmean, median
from typing import NamedTuple

from rich.table import Table

from benchmarks.open_loop import Offered
from benchmarks.outcomes import EVERYBODY, Outcome, Tally, is_given_up, percentile_or_nan
from benchmarks.report import new_table
from benchmarks.terms import OURS, RIVALS, TIMEOUT_SECONDS
from service.request import Priority

LOADS = ("0.5x", "1x", "2x", "4x")
OVERLOADS = ("2x", "4x")
MIN_GOODPUT = 0.95
MAX_REFUSAL_SECONDS = 0.02
# Later than that, and the load was not the one that was planned; up to it, being late counts against the server.
MAX_LAG_SECONDS = 0.05
LOADS_NOTE = """\
Medians over rounds. Goodput: tokens a second answered in time, as a ratio to our capacity. In time, refused, late: of
the requests; given up: refused, but only after a wait of 0.2 s. Accepted: those that were not refused. CPUs: how many
the server and the load generator kept busy.
"""
REFUSALS_NOTE = """\
Medians over rounds, in ms, from when a request was to be sent until its refusal was read. Of that: how late it was
sent; what the handler took, at most, by the server's histogram; and what an empty call took beside the same load, which
has no tokens and never meets the scheduler: gRPC, and the wait of event loops for a CPU.
"""

FORETOLD_NOTE = """\
Foretold: by the simulator, for the same requests at the same moments, from the server's own cost model and the round's
capacity. Medians over rounds.
"""


@dataclass(frozen=True, slots=True)
class Stream:
    """Callers of one kind: what they ask, in multiples of capacity. Those of a group are one tenant."""

    load: float
    group: str = EVERYBODY
    priority: Priority = Priority.NORMAL


SCENARIOS = {load: (Stream(float(load[:-1])),) for load in LOADS} | {
    "a flood": (Stream(4.0, "flooding"), Stream(1.0, "other")),
    "a flood of low priority": (Stream(4.0, "low", Priority.LOW), Stream(0.2, "high", Priority.HIGH)),
}


class Row(NamedTuple):
    """A server in a scenario."""

    server: str
    scenario: str

    def __str__(self) -> str:
        return f"{self.server}, {self.scenario}"


@dataclass(frozen=True, slots=True)
class Round:
    """Our capacity before and after the rows that are compared with it, and every row."""

    capacities: tuple[Offered, ...]
    slices: Mapping[Row, Offered]
    foretold: Mapping[Row, Tally] = field(default_factory=dict)

    @property
    def capacity(self) -> float:
        """Tokens a second."""
        return fmean(part.tally.goodput() for part in self.capacities)

    @property
    def lag_seconds(self) -> float:
        """How late the generator was, at the 99th percentile of its worst slice."""
        return max((percentile_or_nan(part.lags, 99) for part in self.slices.values()), default=0.0)


Quantity = Callable[[Round, Row], float]


def goodput(part: Round, row: Row) -> float:
    """Over the round's capacity."""
    return part.slices[row].tally.goodput() / part.capacity


def accepted(percent: float, group: str | None = None) -> Quantity:
    """Seconds of the accepted."""
    return lambda part, row: percentile_or_nan(part.slices[row].tally.accepted_seconds(group), percent)


def refusals(percent: float) -> Quantity:
    """Seconds of the refused."""
    return lambda part, row: percentile_or_nan(part.slices[row].tally.refusal_seconds(), percent)


def portion(is_one: Callable[[Outcome], bool], group: str | None = None) -> Quantity:
    """Which part of the requests is one of those."""
    return lambda part, row: part.slices[row].tally.portion(is_one, group)


def share(group: str) -> Quantity:
    """A group's part of the goodput."""
    return lambda part, row: part.slices[row].tally.share(group)


def lags(percent: float) -> Quantity:
    """Seconds by which requests were sent late."""
    return lambda part, row: percentile_or_nan(part.slices[row].lags, percent)


def empty_calls(percent: float) -> Quantity:
    """Seconds of calls that hold nothing."""
    return lambda part, row: percentile_or_nan(part.slices[row].probes, percent)


def server_cpus(part: Round, row: Row) -> float:
    """CPUs that the server kept busy."""
    return part.slices[row].cpu_seconds / part.slices[row].seconds


def load_cpus(part: Round, row: Row) -> float:
    """CPUs that the load generator kept busy."""
    return part.slices[row].load_cpu_seconds / part.slices[row].seconds


def handler(part: Round, row: Row) -> float:
    """Seconds that 99% of the refused spent in the handler, at most: nothing is answered sooner than a refusal."""
    offered = part.slices[row]
    num_refused = 0.99 * sum(outcome.is_refused for outcome in offered.tally.outcomes)
    return next((bound for bound, count in sorted(offered.handled.items()) if count >= num_refused), nan)


@dataclass(frozen=True, slots=True)
class Wanted:
    """`quantity` of `row` is to be at least `limit`, or at most."""

    name: str
    quantity: Quantity
    row: Row
    limit: float
    is_at_most: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """A wanted figure, with what the rounds found that had something to count."""

    wanted: Wanted
    found: tuple[float, ...]

    @property
    def is_missed(self) -> bool:
        if not self.found:
            return False
        found = median(self.found)
        return not (found <= self.wanted.limit if self.wanted.is_at_most else found >= self.wanted.limit)


WANTED = (
    *(Wanted("goodput over capacity", goodput, Row(OURS, load), MIN_GOODPUT, is_at_most=False) for load in OVERLOADS),
    *(Wanted("p99 of the accepted, s", accepted(99), Row(OURS, load), TIMEOUT_SECONDS) for load in LOADS),
    *(Wanted("p99 of refusals, s", refusals(99), Row(OURS, load), MAX_REFUSAL_SECONDS) for load in OVERLOADS),
)


def judge(rounds: Sequence[Round]) -> list[Verdict]:
    """Every wanted figure, from issue 4."""
    return [Verdict(wanted, tuple(_values(rounds, wanted.row, wanted.quantity))) for wanted in WANTED]


def wanted_table(verdicts: Iterable[Verdict]) -> Table:
    """Every wanted figure, held or missed."""
    table = new_table("wanted figures", ["row", "figure", "wanted", "measured", "over rounds", ""])
    for verdict in verdicts:
        wanted = verdict.wanted
        cells = [str(wanted.row), wanted.name, f"{'<=' if wanted.is_at_most else '>='} {wanted.limit:.2f}"]
        if not verdict.found:
            table.add_row(*cells, "", "", "not measured")
        else:
            spread = f"{min(verdict.found):.3f} to {max(verdict.found):.3f}"
            outcome = "[bold red]missed" if verdict.is_missed else "held"
            table.add_row(*cells, f"{median(verdict.found):.3f}", spread, outcome)
    return table


def loads_table(rounds: Sequence[Round]) -> Table:
    """A line for each row."""
    capacity = median(part.capacity for part in rounds)
    headings = [
        "goodput",
        "in time",
        "refused",
        "given up",
        "late",
        "accepted p50 ms",
        "p99 ms",
        "server CPUs",
        "load CPUs",
    ]
    table = new_table(f"offered load; our capacity is {capacity:,.0f} tokens/s", ["", *headings])
    for row in _rows(rounds, LOADS):
        table.add_row(
            str(row),
            _cell(rounds, row, goodput, "{:.3f}"),
            _cell(rounds, row, portion(lambda outcome: outcome.is_in_time), "{:.0%}"),
            _cell(rounds, row, portion(lambda outcome: outcome.is_refused), "{:.0%}"),
            _cell(rounds, row, portion(is_given_up), "{:.1%}"),
            _cell(rounds, row, portion(lambda outcome: outcome.is_late), "{:.1%}"),
            *(_cell(rounds, row, accepted(percent), "{:.0f}", 1000) for percent in (50, 99)),
            _cell(rounds, row, server_cpus, "{:.2f}"),
            _cell(rounds, row, load_cpus, "{:.2f}"),
        )
    return table


def refusals_table(rounds: Sequence[Round]) -> Table:
    """Where the time of a refusal went, for each row that refused."""
    headings = ["refused p50", "p99", "sent late p99", "handler p99", "empty call p50", "empty call p99"]
    table = new_table("refusals", ["", *headings])
    for row in _rows(rounds, LOADS):
        if any(part.slices[row].tally.refusal_seconds() for part in rounds):
            table.add_row(
                str(row),
                *(_cell(rounds, row, refusals(percent), "{:.1f}", 1000) for percent in (50, 99)),
                _cell(rounds, row, lags(99), "{:.1f}", 1000),
                _cell(rounds, row, handler, "<= {:.1f}", 1000),
                *(_cell(rounds, row, empty_calls(percent), "{:.1f}", 1000) for percent in (50, 99)),
            )
    return table


def groups_table(rounds: Sequence[Round]) -> Table:
    """A line for each kind of callers in scenarios of several. Nothing is wanted of these but to be seen."""
    table = new_table("two kinds of callers", ["", "callers", "load", "share", "in time", "accepted p50 ms", "p99 ms"])
    for row in _rows(rounds, [name for name in SCENARIOS if name not in LOADS]):
        for stream in SCENARIOS[row.scenario]:
            table.add_row(
                str(row),
                stream.group,
                f"{stream.load:g}x",
                _cell(rounds, row, share(stream.group), "{:.0%}"),
                _cell(rounds, row, portion(lambda outcome: outcome.is_in_time, stream.group), "{:.0%}"),
                *(_cell(rounds, row, accepted(percent, stream.group), "{:.0f}", 1000) for percent in (50, 99)),
            )
    return table


def foretold_table(rounds: Sequence[Round]) -> Table:
    """What was measured beside what the simulator says."""
    headings = ["goodput", "foretold", "accepted p50 ms", "foretold", "p99 ms", "foretold"]
    table = new_table("measured and simulated", ["", *headings])
    for row in _rows(rounds, LOADS):
        if all(row in part.foretold for part in rounds):
            cells = [_cell(rounds, row, goodput, "{:.3f}"), _cell(rounds, row, _foretold_goodput, "{:.3f}")]
            for percent in (50, 99):
                cells.append(_cell(rounds, row, accepted(percent), "{:.0f}", 1000))
                cells.append(_cell(rounds, row, _foretold_seconds(percent), "{:.0f}", 1000))
            table.add_row(str(row), *cells)
    return table


def _foretold_goodput(part: Round, row: Row) -> float:
    return part.foretold[row].goodput() / part.capacity


def _foretold_seconds(percent: float) -> Quantity:
    return lambda part, row: percentile_or_nan(part.foretold[row].accepted_seconds(), percent)


def _rows(rounds: Sequence[Round], scenarios: Iterable[str]) -> list[Row]:
    """In the order in which a reader wants them: rounds run them in others."""
    found = {row for part in rounds for row in part.slices}
    rows = (Row(server, scenario) for server in (OURS, *RIVALS) for scenario in scenarios)
    return [row for row in rows if row in found]


def _values(rounds: Sequence[Round], row: Row, quantity: Quantity) -> list[float]:
    """Of the rounds that have the row, and something of it to count."""
    values = (quantity(part, row) for part in rounds if row in part.slices)
    return [value for value in values if not isnan(value)]


def _cell(rounds: Sequence[Round], row: Row, quantity: Quantity, style: str, factor: float = 1.0) -> str:
    values = _values(rounds, row, quantity)
    return style.format(factor * median(values)) if values else ""
