"""Measures a small grid of runs when a model is loaded, which also warms it: what a run costs, and the token budget.

The budget is the smallest batch at which the rate is within 3% of the best. A larger batch only adds latency: on two
CPU cores MiniLM reaches its plateau between 128 and 256 tokens and falls off it again past 512.

Runs are timed as the server makes them, with every runner busy. Machines are shared and noisy, and a disturbance lasts
longer than a run. So the grid is gone through several times, until no run gets faster, and of each shape the fastest
run counts: what it takes to be wrong about a shape is a disturbance in every round.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from service.cost_model import LEAST_SECONDS, CostModel, Sample, fit
from service.shapes import Shape

# Enough for a CPU's plateau; a device whose rate still rises at the last is tried with more.
_BUDGETS = (16, 32, 64, 128, 256, 512)
_MAX_BUDGET = 16384
_SHORT_TOKENS = 16
# From here on also as one sequence: the same tokens at another length tell the quadratic term apart.
_LEAST_LONG_TOKENS = 64
_PLATEAU = 0.97
# Below it a difference of two rates is noise.
_RISE = 1.01
# After so many rounds one that makes no run faster by more than a part is the last: the machine is quiet.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 4
_FASTER = 0.02
# Where the time was up before the grid was done though its runs have had less than this, others had the machine, and
# the plateau may be further up. A budget stays as it is for as long as the server lives: then it is at least the usual.
_LITTLE_SECONDS = 0.25
_USUAL_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted model and its largest relative error on the grid, which is there too; the token budget and its rate.

    The rate is that of one of the runners, all of them being busy.
    """

    cost: CostModel
    worst_error: float
    max_batch_tokens: int
    tokens_per_second: float
    samples: Sequence[Sample]


def calibrate(
    time_run: Callable[[Shape], float],
    clock: Callable[[], float],
    max_sequence_tokens: int,
    stop_at: float,
) -> Calibration:
    """Measure the grid in rounds, smallest runs first, then larger ones while the rate rises, until the time is up.

    `time_run` gives the seconds of one run while all runners are busy. A run that would end too late by those before it
    is left out; the first is always made.
    """
    short = min(_SHORT_TOKENS, max_sequence_tokens)
    grid = _Grid(time_run, clock, stop_at)
    shapes = list(_shapes(short, max_sequence_tokens))
    grid.measure(shapes)
    has_time = True
    while has_time and _still_rises(grid.fastest, short):
        longer = Shape(2 * max(grid.fastest).num_sequences, short)
        has_time = grid.measure([longer])
    samples = [Sample(s.num_sequences, s.num_tokens, s.length, seconds) for s, seconds in grid.fastest.items()]
    cost = fit(samples)
    errors = [abs(cost.seconds(s.num_sequences, s.num_tokens, s.longest) / s.seconds - 1) for s in samples]
    full = plateau([sample for sample in samples if sample.longest == short])
    is_cut = len(grid.fastest) < len(set(shapes)) and grid.spent_seconds < _LITTLE_SECONDS
    budget = max(full.num_tokens, _USUAL_TOKENS if is_cut else 0)
    return Calibration(cost, max(errors), budget, _rate(full), samples)


def plateau(samples: Sequence[Sample]) -> Sample:
    """The one of the fewest tokens whose rate is within 3% of the best."""
    best = max(map(_rate, samples))
    close = [sample for sample in samples if _rate(sample) >= _PLATEAU * best]
    return min(close, key=lambda sample: sample.num_tokens)


def _shapes(short: int, max_sequence_tokens: int) -> Iterator[Shape]:
    for budget in _BUDGETS:
        yield Shape(max(1, budget // short), short)
        if max(_LEAST_LONG_TOKENS, short + 1) <= budget <= max_sequence_tokens:
            yield Shape(1, budget)


def _still_rises(fastest: dict[Shape, float], short: int) -> bool:
    """Whether the largest of the short runs has the best rate by more than noise, and a larger one is allowed."""
    rates = {shape.num_sequences: shape.num_sequences / s for shape, s in fastest.items() if shape.length == short}
    largest = max(rates)
    best_before = max((rate for count, rate in rates.items() if count < largest), default=0.0)
    return rates[largest] > _RISE * best_before and 2 * largest * short <= _MAX_BUDGET


class _Grid:
    """The fastest run of each shape so far."""

    def __init__(self, time_run: Callable[[Shape], float], clock: Callable[[], float], stop_at: float) -> None:
        self._time_run = time_run
        self._clock = clock
        self._stop_at = stop_at
        # By the clock, which may be another than that of the runs.
        self._lasted: dict[Shape, float] = {}
        self.fastest: dict[Shape, float] = {}
        self.spent_seconds = 0.0

    def measure(self, shapes: Sequence[Shape]) -> bool:
        """Run each shape, again and again until none gets faster. Whether there was time for all."""
        has_time = True
        for number in range(_MOST_ROUNDS):
            is_faster = False
            for shape in shapes:
                if self._lasted and self._clock() + self._expected(shape) > self._stop_at:
                    has_time = False
                    break
                is_faster |= self._run(shape)
            if number + 1 >= _LEAST_ROUNDS and not is_faster:
                break
        return has_time

    def _run(self, shape: Shape) -> bool:
        """Whether it was faster than those before by more than noise."""
        started = self._clock()
        seconds = max(self._time_run(shape), LEAST_SECONDS)
        before = self.fastest.get(shape, seconds)
        self.fastest[shape] = min(seconds, before)
        self._lasted[shape] = self._clock() - started
        self.spent_seconds += seconds
        return seconds < (1 - _FASTER) * before

    def _expected(self, shape: Shape) -> float:
        """How long a run will last, by the last one of its shape or by the largest."""
        like = shape if shape in self._lasted else max(self._lasted, key=lambda measured: measured.num_tokens)
        return self._lasted[like] * max(1, shape.num_tokens / like.num_tokens)


def _rate(sample: Sample) -> float:
    return sample.num_tokens / sample.seconds
