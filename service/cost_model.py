"""What a run costs on this machine: seconds as a function of sequences, tokens and the longest sequence.

    seconds = per_run + per_token * T + per_pair * B * S^2

Everything but attention runs on T rows; attention sees B x S slots and compares each with S. The three numbers are
fitted to a small grid of runs when a model is loaded, which also warms it. From the same grid comes the token budget:
the smallest batch at which the rate is within 3% of the best. A larger batch only adds latency: on two CPU cores MiniLM
reaches its plateau between 128 and 256 tokens and falls off it again past 512.

Machines are shared and noisy, and a disturbance lasts longer than a run. So the grid is gone through several times, and
of each shape the fastest run counts: what it takes to be wrong about a shape is a disturbance in every round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from service.packing import PackedBatch, pack
from service.request import TokenSequence

# Enough for a CPU's plateau; a device whose rate still rises at the last is tried with more.
_BUDGETS = (16, 32, 64, 128, 256, 512)
_MAX_BUDGET = 16384
_SHORT_TOKENS = 16
# From here on also as one sequence: the same tokens at another length tell the quadratic term apart.
_LEAST_LONG_TOKENS = 64
_PLATEAU = 0.97
_ROUNDS = 5
# A coarse clock may see no time pass; no run is faster than this.
_LEAST_SECONDS = 1e-6
# How far from the others a column must stand, of length 1, to tell anything of its own.
_RANK_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a run by its shape, for one runner."""

    per_run: float
    per_token: float
    per_pair: float

    def seconds(self, num_sequences: int, num_tokens: int, longest: int) -> float:
        """Predicted seconds of one run of B sequences with T tokens, the longest of S."""
        return self.per_run + self.per_token * num_tokens + self.per_pair * num_sequences * longest * longest

    def share(self, num_tokens: int) -> float:
        """A sequence's fair share of a run: its own work, without the run's fixed cost."""
        return self.per_token * num_tokens + self.per_pair * num_tokens * num_tokens


class Shape(NamedTuple):
    """Of a run of the grid: so many sequences, all of one length."""

    num_sequences: int
    length: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured run."""

    num_sequences: int
    num_tokens: int
    longest: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted model, its largest relative error on the grid, and the measured token budget."""

    cost: CostModel
    worst_error: float
    max_batch_tokens: int


def calibrate(
    run: Callable[[PackedBatch], object],
    clock: Callable[[], float],
    max_sequence_tokens: int,
    limit_seconds: float = 4.0,
    *,
    input_size: int = 0,
) -> Calibration:
    """Measure the grid in rounds, smallest runs first, then larger ones while the rate rises, until the time is up.

    A model with an `input_size` is given vectors.

    The time is looked at between runs, so it is passed by one run at most; the first is always made.
    """
    stop_at = clock() + limit_seconds
    short = min(_SHORT_TOKENS, max_sequence_tokens)
    shapes = list(_shapes(short, max_sequence_tokens))
    fastest: dict[Shape, float] = {}
    for _ in range(_ROUNDS):
        _measure(run, clock, stop_at, shapes, fastest, input_size)
    while clock() < stop_at and _still_rises(fastest, short):
        longer = Shape(2 * max(fastest).num_sequences, short)
        for _ in range(_ROUNDS):
            _measure(run, clock, stop_at, [longer], fastest, input_size)
    samples = [Sample(b, b * length, length, seconds) for (b, length), seconds in fastest.items()]
    cost = fit(samples)
    errors = [abs(cost.seconds(s.num_sequences, s.num_tokens, s.longest) / s.seconds - 1) for s in samples]
    return Calibration(cost, max(errors), plateau([s for s in samples if s.longest == short]))


def plateau(samples: list[Sample]) -> int:
    """The fewest tokens whose rate is within 3% of the best."""
    best = max(map(_rate, samples))
    return min(sample.num_tokens for sample in samples if _rate(sample) >= _PLATEAU * best)


def fit(samples: list[Sample]) -> CostModel:
    """Least squares on relative errors, with no coefficient below 0: the worst negative one is left out, then again.

    What the samples cannot tell apart goes to the tokens: a run of one shape says nothing of a fixed cost, and
    sequences of one length say nothing of the quadratic one.
    """
    seconds = np.array([sample.seconds for sample in samples])
    terms = np.array([(1, s.num_tokens, s.num_sequences * s.longest**2) for s in samples]) / seconds[:, None]
    used = [1]
    for term in (0, 2):
        columns = terms[:, [*used, term]]
        if np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0), _RANK_TOLERANCE) > len(used):
            used.append(term)
    while True:
        found = np.linalg.lstsq(terms[:, used], np.ones(len(samples)), rcond=None)[0]
        if (found >= 0).all():
            coefficients = np.zeros(3)
            coefficients[used] = found
            return CostModel(*coefficients.tolist())
        used.pop(int(found.argmin()))


def _shapes(short: int, max_sequence_tokens: int) -> Iterator[Shape]:
    for budget in _BUDGETS:
        yield Shape(max(1, budget // short), short)
        if max(_LEAST_LONG_TOKENS, short + 1) <= budget <= max_sequence_tokens:
            yield Shape(1, budget)


def _still_rises(fastest: dict[Shape, float], short: int) -> bool:
    """Whether the largest of the short runs has the best rate, and a larger one is allowed."""
    rates = {shape.num_sequences: shape.num_sequences / s for shape, s in fastest.items() if shape.length == short}
    largest = max(rates)
    return rates[largest] == max(rates.values()) and 2 * largest * short <= _MAX_BUDGET


def _measure(
    run: Callable[[PackedBatch], object],
    clock: Callable[[], float],
    stop_at: float,
    shapes: list[Shape],
    fastest: dict[Shape, float],
    input_size: int,
) -> None:
    """Run each shape once and keep its fastest time so far."""
    for shape in shapes:
        started = clock()
        if fastest and started > stop_at:
            return
        batch = pack([_sequence(shape.length, input_size)] * shape.num_sequences)
        started = clock()
        run(batch)
        seconds = max(clock() - started, _LEAST_SECONDS)
        fastest[shape] = min(seconds, fastest.get(shape, seconds))


def _sequence(length: int, input_size: int) -> TokenSequence:
    """Token id 0 and type 0 exist in every vocabulary; what the ids or vectors are changes no time."""
    columns = np.arange(length)
    if input_size:
        return TokenSequence.of_vectors(np.zeros((length, input_size), np.float32), columns)
    return TokenSequence(np.zeros_like(columns), columns, np.zeros_like(columns))


def _rate(sample: Sample) -> float:
    return sample.num_tokens / sample.seconds
