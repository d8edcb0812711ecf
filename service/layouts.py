"""How many runs go on at once, and on how many threads each: measured, because no rule holds everywhere.

On two cores, one-threaded runs side by side give all-MiniLM-L6-v2 10 to 20% more tokens a second than one run over
both: none waits for its slower thread. On dozens of cores they may fall behind, when what they work on no longer fits a
shared cache. That is a busy machine. A lone request is another matter: one run over all cores ends it soonest, so
where it does, and memory allows, a second session is kept for it.

The candidates are gone through in rounds, one after the other for each shape, and of each the fastest run counts: to be
believed, a disturbance has to last through every turn of one candidate and miss the others. Where everything on a
machine starts at once, that happens. But a one-threaded run waits for nothing except a CPU: its CPU time over its time
tells whether the machine was ours. If it was not, nothing is believed, and both kinds of session are kept.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from service.shapes import Shape

E = TypeVar("E")
_Probe = tuple[str, Shape]

# From here on there is something between one thread for a run and all of them.
_MANY_CPUS = 8
_SOME_THREADS = 4
# After so many rounds one that makes no run faster by more than a part is the last: the machine is quiet.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 6
_FASTER = 0.02
# What a round measures, the smallest first: a slow model may not come further before the time is up. Lone runs are
# short, and may well be made more often. Runs side by side have so many sequences for each thread, which gives every
# candidate the same work.
_LONE, _BUSY = "lone", "busy"
_SHORT_LONE, _LONG_LONE = (_LONE, Shape(1, 16)), (_LONE, Shape(1, 64))
_PROBES: tuple[_Probe, ...] = (
    *(_SHORT_LONE, (_BUSY, Shape(2, 16)), _LONG_LONE, (_BUSY, Shape(8, 16))),
    *(_SHORT_LONE, _LONG_LONE, (_BUSY, Shape(2, 64)), _LONG_LONE),
)
# These are made whatever the time, so that there is something to choose by.
_LEAST_PROBES = 2
# The first candidate has the fewest threads for a run: none waits for another that a neighbour has put off its core.
# To be taken before it, one has to give more than this times its rate.
_BETTER = 1.05
# Of the CPU time that it wanted, a one-threaded run has to have had so much for the clock to be believed.
_OURS = 0.8
# A second session has to be worth its memory.
_FASTER_ALONE = 0.95
# A session grows while it serves: as much again as it took while it was tried must be free.
_GROWTH = 2

log = logging.getLogger(__name__)


class Layout(NamedTuple):
    """So many runs at once, each on so many threads."""

    num_runners: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.num_runners} x {self.num_threads}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one candidate: the rate with all its runners busy, and how long lone runs took."""

    layout: Layout
    tokens_per_second: float
    lone_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Choice(Generic[E]):
    """The engine for a busy machine and the one for lone runs, maybe the same; and what they were chosen by.

    Nothing was measured where there was no choice.
    """

    busy: E
    alone: E
    measured: list[Measured]


class Cost(NamedTuple):
    """Of one run: by the clock, and of all CPUs together."""

    seconds: float
    cpu_seconds: float


class Machine(Protocol[E]):
    """Where candidates are tried."""

    def open(self, layout: Layout) -> E: ...
    def run(self, engine: E, shape: Shape, num_runners: int) -> Cost:
        """One run, while so many of them go on at once."""

    def clock(self) -> float: ...
    def resident_bytes(self) -> float:
        """What this process has."""

    def available_bytes(self) -> float:
        """What it may still take."""


def candidates(num_cpus: int, num_runners: int = 0) -> tuple[list[Layout], list[Layout]]:
    """For a busy machine, the fewest threads for a run first; and what is only for lone runs."""
    wide = Layout(1, num_cpus)
    if num_runners:
        given = Layout(num_runners, max(1, num_cpus // num_runners))
        return [given], [] if given.num_threads == num_cpus else [wide]
    between = [Layout(num_cpus // _SOME_THREADS, _SOME_THREADS)] if num_cpus >= _MANY_CPUS else []
    return list(dict.fromkeys([Layout(num_cpus, 1), *between, wide])), []


def choose(
    machine: Machine[E],
    for_busy: Sequence[Layout],
    for_lone: Sequence[Layout],
    stop_at: float,
    max_sequence_tokens: int,
) -> Choice[E]:
    """Open the candidates, measure them against each other, and keep the best; the others are closed by letting go.

    The time is looked at between runs; opening, and the shortest run of each kind, are done whatever the time.
    """
    entrants = _open(machine, [*for_busy, *for_lone], max_sequence_tokens)
    if len(entrants) == 1:
        return Choice(entrants[0].engine, entrants[0].engine, [])
    _measure(machine, entrants, stop_at, max_sequence_tokens)
    for kind, shape in set(_PROBES):
        if any((kind, shape) not in entrant.turns for entrant in entrants):
            for entrant in entrants:
                entrant.turns.pop((kind, shape), None)
    first, widest = entrants[0], entrants[-1]
    if first.layout.num_threads == 1 and first.rate < _OURS * first.rate_of_cpus:
        log.warning("the CPUs are not free, so layouts cannot be compared; taking %s (runners x threads)", first.layout)
        busy, alone = first, widest
    else:
        busy = max(entrants[: len(for_busy)], key=lambda one: one.rate if one is first else one.rate / _BETTER)
        alone = min(entrants, key=lambda one: one.lone_seconds if one is busy else one.lone_seconds / _FASTER_ALONE)
    measured = [Measured(entrant.layout, entrant.rate, entrant.lone_seconds) for entrant in entrants]
    return Choice(busy.engine, alone.engine, measured)


class _Turn(NamedTuple):
    """The least that all runs of a probe have taken: by the clock, and of each CPU that the layout has."""

    num_tokens: int
    seconds: float
    cpu_seconds: float


@dataclass(slots=True, eq=False)
class _Entrant(Generic[E]):
    layout: Layout
    engine: E
    turns: dict[_Probe, _Turn] = field(default_factory=dict)

    def note(self, probe: _Probe, num_tokens: int, cost: Cost) -> bool:
        """Whether it was faster than those before by more than noise."""
        cost = cost._replace(cpu_seconds=cost.cpu_seconds / self.layout.num_threads)
        before = self.turns.get(probe, _Turn(num_tokens, *cost))
        self.turns[probe] = _Turn(num_tokens, *map(min, before[1:], cost))
        return cost.seconds < (1 - _FASTER) * before.seconds

    @property
    def lone_seconds(self) -> float:
        return sum(turn.seconds for (kind, _), turn in self.turns.items() if kind == _LONE)

    @property
    def rate(self) -> float:
        return sum(turn.num_tokens for turn in self._busy) / sum(turn.seconds for turn in self._busy)

    @property
    def rate_of_cpus(self) -> float:
        """What the rate would be if every thread always had a CPU, and work for it."""
        return sum(turn.num_tokens for turn in self._busy) / sum(turn.cpu_seconds for turn in self._busy)

    @property
    def _busy(self) -> list[_Turn]:
        return [turn for (kind, _), turn in self.turns.items() if kind == _BUSY]


def _open(machine: Machine[E], layouts: Sequence[Layout], max_sequence_tokens: int) -> list[_Entrant[E]]:
    """One at a time, and no more than there is memory for; the first in any case."""
    entrants: list[_Entrant[E]] = []
    before, most = machine.resident_bytes(), 0.0
    for layout in layouts:
        needed, available = _GROWTH * most, machine.available_bytes()
        if entrants and needed > available:
            log.warning(
                "no memory to try %s (runners x threads): its session needs about %.0f MiB, %.0f MiB are free",
                *(layout, needed / 2**20, available / 2**20),
            )
            break
        entrants.append(_Entrant(layout, machine.open(layout)))
        # First runs take memory, and longer than others.
        machine.run(entrants[-1].engine, Shape(2, min(16, max_sequence_tokens)), 1)
        now = machine.resident_bytes()
        most, before = max(most, now - before), now
    return entrants


def _measure(machine: Machine[E], entrants: Sequence[_Entrant[E]], stop_at: float, max_sequence_tokens: int) -> None:
    for number in range(_MOST_ROUNDS):
        is_faster = False
        for place, probe in enumerate(_PROBES):
            kind, (num_sequences, length) = probe
            for entrant in entrants:
                if (number or place >= _LEAST_PROBES) and machine.clock() > stop_at:
                    return
                num_runners, num_threads = entrant.layout if kind == _BUSY else (1, 1)
                shape = Shape(num_sequences * num_threads, min(length, max_sequence_tokens))
                cost = machine.run(entrant.engine, shape, num_runners)
                is_faster |= entrant.note(probe, num_runners * shape.num_tokens, cost)
        if number + 1 >= _LEAST_ROUNDS and not is_faster:
            return
