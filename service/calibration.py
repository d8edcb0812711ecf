"""Measures a small grid of runs when a model is loaded, which also warms it: what a run costs, and the token budget.

The budget is the smallest batch at which the rate is within 3% of the best. A larger batch only adds latency: on two
CPU cores MiniLM reaches its plateau between 128 and 256 tokens and falls off it again past 512.

Runs are timed as the server makes them, with every runner busy. Machines are shared and noisy, and a disturbance lasts
longer than a run. So the grid is gone through several times, and of each shape the fastest run counts: what it takes to
be wrong about a shape is a disturbance in every round.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from service.cost_model import CostModel, Sample, fit
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
_ROUNDS = 4
# A coarse clock may see no time pass; no run is faster than this.
_LEAST_SECONDS = 1e-6


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
    shapes = list(_shapes(short, max_sequence_tokens))
    fastest: dict[Shape, float] = {}
    for _ in range(_ROUNDS):
        _measure(time_run, clock, stop_at, shapes, fastest)
    while clock() < stop_at and _still_rises(fastest, short):
        longer = Shape(2 * max(fastest).num_sequences, short)
        for _ in range(_ROUNDS):
            _measure(time_run, clock, stop_at, [longer], fastest)
    samples = [Sample(s.num_sequences, s.num_tokens, s.length, seconds) for s, seconds in fastest.items()]
    cost = fit(samples)
    errors = [abs(cost.seconds(s.num_sequences, s.num_tokens, s.longest) / s.seconds - 1) for s in samples]
    full = plateau([sample for sample in samples if sample.longest == short])
    return Calibration(cost, max(errors), full.num_tokens, _rate(full), samples)


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


def _measure(
    time_run: Callable[[Shape], float],
    clock: Callable[[], float],
    stop_at: float,
    shapes: Sequence[Shape],
    fastest: dict[Shape, float],
) -> None:
    """Run each shape once and keep its fastest time so far."""
    for shape in shapes:
        if fastest and clock() + _expected(shape, fastest) > stop_at:
            return
        seconds = max(time_run(shape), _LEAST_SECONDS)
        fastest[shape] = min(seconds, fastest.get(shape, seconds))


def _expected(shape: Shape, fastest: dict[Shape, float]) -> float:
    """Seconds of a run by itself, or by the largest so far."""
    like = shape if shape in fastest else max(fastest, key=lambda measured: measured.num_tokens)
    return fastest[like] * max(1, shape.num_tokens / like.num_tokens)


def _rate(sample: Sample) -> float:
    return sample.num_tokens / sample.seconds
