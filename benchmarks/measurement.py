"""What one slice of the run measured, and what several of them say together.

Machines drift: a rate of one minute does not compare with a rate of another. So the figures that count are ratios of
two contenders within one round, and of those the median over rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

Quantity = Callable[["Slice"], float]


@dataclass(frozen=True, slots=True)
class Batches:
    """Means over the runs of the engine. `fill` is real tokens over sequences x longest."""

    fill: float
    sequences: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Slice:
    """One contender over one part of a trace. Times in seconds; `latencies` are those of whole requests, in order.

    `cpu_seconds` is the process that computes, `load_cpu_seconds` the one that asks; 0 where nobody asks.
    """

    num_sequences: int
    num_tokens: int
    seconds: float
    cpu_seconds: float
    load_cpu_seconds: float
    batches: Batches
    latencies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over rounds."""

    median: float
    lowest: float
    highest: float


def tokens_per_second(part: Slice) -> float:
    return part.num_tokens / part.seconds


def sequences_per_second(part: Slice) -> float:
    return part.num_sequences / part.seconds


def cpu_per_thousand(part: Slice) -> float:
    """CPU seconds of the computing process per 1,000 sequences."""
    return 1000 * part.cpu_seconds / part.num_sequences


def load_cpu_per_thousand(part: Slice) -> float:
    """CPU seconds of the load generator per 1,000 sequences."""
    return 1000 * part.load_cpu_seconds / part.num_sequences


def p50(part: Slice) -> float:
    return percentile(part.latencies, 50)


def percentile(latencies: Sequence[float], percent: float) -> float:
    return float(np.percentile(latencies, percent))


def over_rounds(slices: Sequence[Slice], quantity: Quantity) -> float:
    """The median over rounds."""
    return median(map(quantity, slices))


def ratio(slices: Sequence[Slice], others: Sequence[Slice], quantity: Quantity) -> Ratio:
    """Each round's ratio of a quantity of one contender to that of another."""
    ratios = [quantity(one) / quantity(other) for one, other in zip(slices, others, strict=True)]
    return Ratio(median(ratios), min(ratios), max(ratios))


def mean_batches(slices: Sequence[Slice]) -> Batches:
    """The mean over rounds."""
    batches = [part.batches for part in slices]
    return Batches(
        fill=fmean(b.fill for b in batches),
        sequences=fmean(b.sequences for b in batches),
        tokens=fmean(b.tokens for b in batches),
    )
