"""Who competes: one row of the report each. All of a trace's rows encode the same part of it in a round.

Rows that are compared stand next to each other: in a round they run within seconds, before the machine has drifted. A
round starts one row further down the list than the last, so that no row always follows the same disturbance.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from benchmarks.field import Field
from benchmarks.load import Address, Shape
from benchmarks.measurement import Slice, tokens_per_second
from benchmarks.offline import Graph, fill
from benchmarks.traces import Batch, Trace, by_budget, by_count, by_length

OFFLINE, SORTED, PADDED = "offline, arrival order", "offline, sorted by length", "padded, arrival order"
ONE, SIXTEEN, MANY, REQUESTS = "1 caller", "16 callers", "64 callers", "4 callers of 16"
SHAPES = {ONE: Shape(1), SIXTEEN: Shape(16), MANY: Shape(64), REQUESTS: Shape(4, 16)}
SPLIT, STREAMS = "4 callers of 16 calls", "16 streams"

BUDGETS = (64, 128, 256, 512)
# In arrival order of the mixed trace: full, and then ever emptier.
BATCH_SIZES = (1, 2, 4, 8, 16)
# Where padding is wanted to cost twice as much: batches of these sizes, but only those that are under half full.
_HALF_EMPTY_SIZES = (8, 16)
_HALF_FULL = 0.5
_FILL_SEQUENCES = 128
_SEARCH_TRIES = 3
# A single caller leaves CPUs idle, so its part would take twice as long as the others'.
_ONE_CALLER_SHARE = 2

# From the number of a round to what it measured.
Measure = Callable[[int], Slice]
Choose = Callable[[Batch], list[Batch]]
Row = TypeVar("Row")


def ours(shape: str) -> str:
    """The row of our server under a load shape."""
    return f"ours, {shape}"


def unbatched(shape: str) -> str:
    """The row of the server without batching."""
    return f"unbatched, {shape}"


UNDER_HALF = "under half full"
FILLS = (*(f"batches of {size}" for size in BATCH_SIZES), UNDER_HALF)
# In the order in which a reader wants them.
ROWS = (
    *(OFFLINE, SORTED, PADDED),
    *(ours(shape) for shape in (*SHAPES, STREAMS)),
    *(unbatched(shape) for shape in (*SHAPES, SPLIT)),
)


def packed(batches: str) -> str:
    """The row of the packed graph on some batches."""
    return f"packed, {batches}"


def padded(batches: str) -> str:
    """The row of the padded graph on the same batches."""
    return f"padded, {batches}"


@dataclass(frozen=True, slots=True)
class Budgets:
    """The best token budget of a trace, offline."""

    arrival: int
    by_length: int


def find_budgets(field: Field, sequences: Batch) -> tuple[Budgets, Slice]:
    """The best budgets in both orders, and the best slice in arrival order."""
    best = [_find_budget(field, order) for order in (sequences, by_length(sequences))]
    return Budgets(best[0][0], best[1][0]), best[0][1]


def _find_budget(field: Field, sequences: Batch) -> tuple[int, Slice]:
    found: list[tuple[int, Slice]] = []
    for _ in range(_SEARCH_TRIES):  # one budget after the other, again and again: the best try was disturbed least
        found += [(budget, field.run_batches("packed", by_budget(sequences, budget))) for budget in BUDGETS]
    return max(found, key=lambda pair: tokens_per_second(pair[1]))


def contenders(field: Field, trace: Trace, budgets: Budgets) -> dict[str, Measure]:
    """Every row of a trace but those of `fill_contenders`, in the order in which they run."""

    def run(graph: Graph, number: int) -> Slice:
        return field.run_batches(graph, by_budget(trace.part(number), budgets.arrival))

    def run_sorted(number: int) -> Slice:
        return field.run_batches("packed", by_budget(by_length(trace.part(number)), budgets.by_length))

    def ask(address: Address, shape: Shape) -> Measure:
        share = _ONE_CALLER_SHARE if shape.num_callers == 1 else 1
        return lambda number: field.ask(address, shape, trace.part(number)[: trace.part_size // share], trace.part(0))

    return {
        SORTED: run_sorted,
        PADDED: lambda number: run("padded", number),
        OFFLINE: lambda number: run("packed", number),
        ours(SIXTEEN): ask(field.ours, SHAPES[SIXTEEN]),
        unbatched(SIXTEEN): ask(field.unbatched, SHAPES[SIXTEEN]),
        ours(MANY): ask(field.ours, SHAPES[MANY]),
        unbatched(MANY): ask(field.unbatched, SHAPES[MANY]),
        unbatched(ONE): ask(field.unbatched, SHAPES[ONE]),
        ours(ONE): ask(field.ours, SHAPES[ONE]),
        ours(STREAMS): ask(field.ours, Shape(16, is_stream=True)),
        unbatched(SPLIT): ask(field.unbatched, Shape(4, 16, is_split=True)),
        unbatched(REQUESTS): ask(field.unbatched, SHAPES[REQUESTS]),
        ours(REQUESTS): ask(field.ours, SHAPES[REQUESTS]),
    }


def fill_contenders(field: Field, trace: Trace) -> dict[str, Measure]:
    """Packed and padded on the same batches, in arrival order."""

    def run(graph: Graph, choose: Choose) -> Measure:
        return lambda number: field.run_batches(graph, choose(trace.part(number)[:_FILL_SEQUENCES]))

    choices: list[Choose] = [*(partial(by_count, size=size) for size in BATCH_SIZES), _under_half_full]
    rows: dict[str, Measure] = {}
    for batches, choose in zip(FILLS, choices, strict=True):
        rows |= {packed(batches): run("packed", choose), padded(batches): run("padded", choose)}
    return rows


def _under_half_full(sequences: Batch) -> list[Batch]:
    batches = [batch for size in _HALF_EMPTY_SIZES for batch in by_count(sequences, size)]
    return [batch for batch in batches if fill(batch) < _HALF_FULL]


def rotated(rows: Mapping[str, Row], number: int) -> Iterator[tuple[str, Row]]:
    """The rows in the order of a round."""
    names = list(rows)
    start = number % len(names) if names else 0
    yield from ((name, rows[name]) for name in names[start:] + names[:start])
