"""What a run costs on this machine: seconds as a function of sequences, tokens and the longest sequence.

    seconds = per_run + per_token * T + per_pair * B * S^2

Everything but attention runs on T rows; attention sees B x S slots and compares each with S. `calibration.py` measures
the runs that the three numbers are fitted to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A coarse clock may see no time pass; no run is faster than this.
LEAST_SECONDS = 1e-6
# How far from the others a column must stand, of length 1, to tell anything of its own.
_RANK_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a run by its shape, for one runner."""

    per_run: float
    per_token: float
    per_pair: float

    def __str__(self) -> str:
        return (
            f"{1e3 * self.per_run:.2f} ms + {1e3 * self.per_token:.4f} ms a token + {1e3 * self.per_pair:.6f} ms a pair"
        )

    def seconds(self, num_sequences: int, num_tokens: int, longest: int) -> float:
        """Predicted seconds of one run of B sequences with T tokens, the longest of S."""
        return self.per_run + self.per_token * num_tokens + self.per_pair * num_sequences * longest * longest

    def drift(self, run: "Sample") -> float:
        """Observed over predicted seconds of a run."""
        return run.seconds / max(self.seconds(run.num_sequences, run.num_tokens, run.longest), LEAST_SECONDS)

    def scaled(self, factor: float) -> "CostModel":
        """Of a machine that takes so many times as long."""
        return CostModel(factor * self.per_run, factor * self.per_token, factor * self.per_pair)

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


def fit(samples: Sequence[Sample]) -> CostModel:
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
