"""The figures that were promised before the server was written, and whether a run holds them.

Each is a ratio of two rows of one trace, the median over rounds. The offline limit that a server is compared with is
the one in arrival order, since a server cannot sort what has not come yet.

How the promise is read where it leaves room. "2 x with requests of 16 sequences" continues its sentence on the short
trace, and the rival there takes one sequence a call; on the mixed trace not even the offline limit is 2 x a server
without batching. "CPU per sequence" is asked where there is something to batch: a single caller's runs hold one
sequence each, on any server.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contenders import (
    MANY,
    OFFLINE,
    ONE,
    REQUESTS,
    SHAPES,
    SIXTEEN,
    SPLIT,
    UNDER_HALF,
    ours,
    packed,
    padded,
    unbatched,
)
from benchmarks.measurement import (
    Quantity,
    Ratio,
    Slice,
    cpu_per_thousand,
    p50,
    ratio,
    sequences_per_second,
)

# What every row measured, round by round.
Slices = Mapping[str, Sequence[Slice]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """`quantity` of `row` over that of `reference` is to be at least `limit`, or at most."""

    quantity_name: str
    quantity: Quantity
    row: str
    reference: str
    limit: float
    is_at_most: bool = False

    def is_held(self, found: Ratio) -> bool:
        return found.median <= self.limit if self.is_at_most else found.median >= self.limit


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure with what was measured; None where a row was left out of the run."""

    trace: str
    wanted: Wanted
    found: Ratio | None

    @property
    def is_missed(self) -> bool:
        return self.found is not None and not self.wanted.is_held(self.found)


def judge(trace: str, slices: Slices) -> list[Verdict]:
    """Every wanted figure of a trace."""
    return [Verdict(trace, wanted, _find(wanted, slices)) for wanted in wanted_figures(trace)]


def wanted_figures(trace: str) -> Iterator[Wanted]:
    """What is wanted on a trace, from issue 2."""
    yield _rate(ours(SIXTEEN), OFFLINE, 0.9)
    yield _rate(ours(REQUESTS), OFFLINE, 0.95)
    for shape in SHAPES:
        yield _rate(ours(shape), unbatched(shape), 1.25 if trace == "short" else 1.0)
    yield _rate(ours(REQUESTS), unbatched(SPLIT), 2.0 if trace == "short" else 1.0)
    yield Wanted("p50", p50, ours(ONE), unbatched(ONE), 1.0, is_at_most=True)
    for shape in (SIXTEEN, MANY, REQUESTS):
        yield Wanted("CPU per sequence", cpu_per_thousand, ours(shape), OFFLINE, 1.15, is_at_most=True)
    if trace == "mixed":
        yield _rate(packed(UNDER_HALF), padded(UNDER_HALF), 2.0)


def _rate(row: str, reference: str, limit: float) -> Wanted:
    return Wanted("sequences/s", sequences_per_second, row, reference, limit)


def _find(wanted: Wanted, slices: Slices) -> Ratio | None:
    if wanted.row not in slices or wanted.reference not in slices:
        return None
    return ratio(slices[wanted.row], slices[wanted.reference], wanted.quantity)
