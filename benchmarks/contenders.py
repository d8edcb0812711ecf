"""Who competes: one row of the report each. All of a trace's rows encode the same part of it in a round.

Rows that are compared stand next to each other: in a round they run within seconds, before the machine has drifted. A
round starts one row further down the list than the last, so that no row always follows the same disturbance.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.field import Field
from benchmarks.load import Address, Shape
from benchmarks.measurement import Slice, tokens_per_second
from benchmarks.offline import Graph
from benchmarks.traces import Batch, Trace, by_budget, by_count, by_length

OFFLINE, SORTED, PADDED = "offline, arrival order", "offline, sorted by length", "padded, arrival order"
ONE, SIXTEEN, MANY, REQUESTS = "1 caller", "16 callers", "64 callers", "4 callers of 16"
SHAPES = {ONE: Shape(1), SIXTEEN: Shape(16), MANY: Shape(64), REQUESTS: Shape(4, 16)}
SPLIT, STREAMS = "4 callers of 16 calls", "16 streams"

BUDGETS = (64, 128, 256, 512)
# In arrival order of the mixed trace, batches of these are full, then two thirds, then under half full.
BATCH_SIZES = (1, 2, 4, 8, 16)
_FILL_SEQUENCES = 128
_SEARCH_TRIES = 3
# A single caller leaves CPUs idle, so its part would take twice as long as the others'.
_ONE_CALLER_SHARE = 2

Measure = Callable[[int], Slice]


def ours(shape: str) -> str:
    """The row of our server under a load shape."""
    return f"ours, {shape}"


def unbatched(shape: str) -> str:
    """The row of the server without batching."""
    return f"unbatched, {shape}"


# In the order in which a reader wants them.
ROWS = (
    *(OFFLINE, SORTED, PADDED),
    *(ours(shape) for shape in (*SHAPES, STREAMS)),
    *(unbatched(shape) for shape in (*SHAPES, SPLIT)),
)


def packed_of(size: int) -> str:
    """The row of the packed graph on batches of so many sequences."""
    return f"packed, batches of {size}"


def padded_of(size: int) -> str:
    """The row of the padded graph on the same batches."""
    return f"padded, batches of {size}"


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
    """Packed and padded on the same batches of so many sequences, in arrival order."""

    def run(graph: Graph, size: int) -> Measure:
        return lambda number: field.run_batches(graph, by_count(trace.part(number)[:_FILL_SEQUENCES], size))

    rows: dict[str, Measure] = {}
    for size in BATCH_SIZES:
        rows |= {packed_of(size): run("packed", size), padded_of(size): run("padded", size)}
    return rows


def rotated(rows: Mapping[str, Measure], number: int) -> Iterator[tuple[str, Measure]]:
    """The rows in the order of a round."""
    names = list(rows)
    start = number % len(names) if names else 0
    yield from ((name, rows[name]) for name in names[start:] + names[:start])
