"""What a run costs on this machine: seconds as a function of sequences, tokens and the longest sequence.

    seconds = per_run + per_token * T + per_pair * B * S^2

Everything but attention runs on T rows; attention sees B x S slots and compares each with S. The three numbers are
fitted to a small grid of runs when a model is loaded, which also warms it. From the same grid comes the token budget:
the smallest batch at which the rate is within 3% of the best. A larger batch only adds latency: on two CPU cores MiniLM
reaches its plateau between 128 and 256 tokens and falls off it again past 512.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from service.packing import PackedBatch, pack
from service.request import TokenSequence

# Short sequences, doubled until the rate no longer rises, and a few long ones for the quadratic term.
_BUDGETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SHORT_TOKENS = 16
_LONG_TOKENS = (64, 128, 256, 512)
_PLATEAU = 0.97
_REPEATS = 3
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
    limit_seconds: float = 5.0,
) -> Calibration:
    """Measure the grid, smallest runs first, until the rate falls off its best or the time is up.

    Long sequences have half of the time: without them nothing is known about the quadratic term. The time is looked at
    between runs, so it is passed by one run at most; the first is always made.
    """
    started = clock()
    short = min(_SHORT_TOKENS, max_sequence_tokens)
    samples: list[Sample] = []
    for budget in _BUDGETS:
        samples.append(_measure(run, clock, max(1, budget // short), short, started + limit_seconds / 2))
        is_past_best = len(samples) > 2 and _rate(samples[-1]) < 0.9 * max(map(_rate, samples))
        if is_past_best or clock() > started + limit_seconds / 2:
            break
    budget = plateau(samples)
    for length in _LONG_TOKENS:
        if length > max_sequence_tokens or clock() > started + limit_seconds:
            break
        samples.append(_measure(run, clock, max(1, budget // length), length, started + limit_seconds))
    cost = fit(samples)
    errors = [abs(cost.seconds(s.num_sequences, s.num_tokens, s.longest) / s.seconds - 1) for s in samples]
    return Calibration(cost, max(errors), budget)


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


def _measure(
    run: Callable[[PackedBatch], object], clock: Callable[[], float], num_sequences: int, length: int, stop_at: float
) -> Sample:
    """The fastest of a few runs: the others were disturbed. Fewer if the time is up."""
    columns = np.arange(length)
    # Token id 0 and type 0 exist in every vocabulary; what the ids are changes no time.
    batch = pack([TokenSequence(np.zeros_like(columns), columns, np.zeros_like(columns))] * num_sequences)
    fastest = float("inf")
    for _ in range(_REPEATS):
        started = clock()
        run(batch)
        ended = clock()
        fastest = min(fastest, max(ended - started, _LEAST_SECONDS))
        if ended > stop_at:
            break
    return Sample(num_sequences, batch.num_tokens, length, fastest)


def _rate(sample: Sample) -> float:
    return sample.num_tokens / sample.seconds
