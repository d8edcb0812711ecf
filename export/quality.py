"""The gate of a precision that changes the answer: is it still good for what embeddings are for?

Held against fp32, which has passed the gate of verify.py, on real text that was not calibrated on:

- the cosine of every single text's vector with its fp32 vector;
- Spearman's rank correlation of the similarities of all pairs of texts: search and clustering see ranks;
- a text alone against the same text in a batch of 16: the answer does not depend on batch mates.

A classifier's logits are no direction in space. There the cosine is that of the mean token vector, and the ranks are
those of the texts under each label; the worst label counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from export.errors import ExportError
from export.texts import Probe
from service.bundle import Precision, Task
from service.engine import Outputs
from service.packing import PackedBatch, pack, unpack
from service.request import Float32Array

MIN_COSINE = 0.99
MIN_SPEARMAN = 0.98
# As for fp32: what is rounded by rows rounds to the same in any company. Of the largest value, if that is above 1.
MAX_COMPANY_ERROR = 1e-6
_COMPANY = 16
_SHOWN_CHARACTERS = 60

Float64Array = NDArray[np.float64]


class Runs(Protocol):
    """What is judged: `service.engine.Engine`."""

    def run(self, batch: PackedBatch, *, wants_tokens: bool = False) -> Outputs: ...


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What was found on held-out text, and the limits it is held to. `worst_text` has the smallest cosine."""

    num_texts: int
    min_cosine: float
    mean_cosine: float
    spearman: float
    company_error: float
    worst_text: str
    cosine_limit: float = MIN_COSINE
    spearman_limit: float = MIN_SPEARMAN
    company_limit: float = MAX_COMPANY_ERROR
    precision: Precision = "int8"

    def as_table(self) -> Table:
        """The report for people."""
        title = f"{self.precision} against fp32, on {self.num_texts} held-out texts"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        table.add_column("quality")
        for heading in ("found", "limit"):
            table.add_column(heading, justify="right")
        table.add_row("smallest cosine", f"{self.min_cosine:.5f}", f">= {self.cosine_limit:g}")
        table.add_row("mean cosine", f"{self.mean_cosine:.5f}", "")
        table.add_row("Spearman of similarities", f"{self.spearman:.5f}", f">= {self.spearman_limit:g}")
        table.add_row("alone against company", f"{self.company_error:.1e}", f"<= {self.company_limit:g}")
        return table


def measure_quality(
    reference: Runs,
    candidate: Runs,
    probes: Sequence[Probe],
    *,
    precision: Precision = "int8",
    task: Task = "embedding",
    cosine_limit: float = MIN_COSINE,
    spearman_limit: float = MIN_SPEARMAN,
    company_limit: float = MAX_COMPANY_ERROR,
) -> QualityReport:
    """Compare two engines of one model. Nothing is judged yet."""
    expected, found = _answer(reference, probes, 1, task), _answer(candidate, probes, 1, task)
    company = _answer(candidate, probes, _COMPANY, task)
    compare_ranks = _similarity_ranks if task == "embedding" else _label_ranks
    cosines = cosines_of(found.judged, expected.judged)
    return QualityReport(
        precision=precision,
        num_texts=len(probes),
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        spearman=compare_ranks(found.pooled, expected.pooled),
        company_error=max(_error(found.pooled, company.pooled), _error(found.tokens, company.tokens)),
        worst_text=probes[int(cosines.argmin())].text,
        cosine_limit=cosine_limit,
        spearman_limit=spearman_limit,
        company_limit=company_limit,
    )


def require_quality(report: QualityReport) -> None:
    """Raise `ExportError` with the first number that misses its limit."""
    text = " ".join(report.worst_text.split())[:_SHOWN_CHARACTERS]
    misses = (
        # Written so that NaN is a miss.
        (
            not report.min_cosine >= report.cosine_limit,
            f"the cosine with fp32 is {report.min_cosine:.5f} on the text {text!r}; "
            f"the limit is {report.cosine_limit:g}",
        ),
        (
            not report.spearman >= report.spearman_limit,
            f"Spearman's rank correlation with fp32 is {report.spearman:.5f} over {report.num_texts} texts; "
            f"the limit is {report.spearman_limit:g}",
        ),
        (
            not report.company_error <= report.company_limit,
            f"a text alone and in company differ by {report.company_error:.1e}; the limit is {report.company_limit:g}",
        ),
    )
    for is_missed, what in misses:
        if is_missed:
            raise ExportError(
                f"{report.precision} loses too much: {what}. Export fp32 without it, or give a larger --tolerance"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """Of all probes: pooled (B, N), tokens (T, E), and what cosines are taken of."""

    pooled: Float32Array
    tokens: Float32Array
    judged: Float32Array


def _answer(engine: Runs, probes: Sequence[Probe], size: int, task: Task) -> _Answers:
    pooled, tokens, judged = [], [], []
    for start in range(0, len(probes), size):
        batch = pack([probe.sequence for probe in probes[start : start + size]])
        outputs = engine.run(batch, wants_tokens=True)
        assert outputs.token_embeddings is not None  # they were asked for
        pooled.append(outputs.sentence_embedding)
        tokens.append(outputs.token_embeddings)
        judged.append(judged_vectors(outputs, batch, task))
    return _Answers(np.concatenate(pooled), np.concatenate(tokens), np.concatenate(judged))


def judged_vectors(outputs: Outputs, batch: PackedBatch, task: Task) -> Float32Array:
    """What stands for each sequence where cosines are taken: its embedding, or a classifier's mean token vector."""
    if task == "embedding":
        return outputs.sentence_embedding
    assert outputs.token_embeddings is not None  # they are asked for
    return np.stack([rows.mean(0) for rows in unpack(batch, outputs.token_embeddings)])


def cosines_of(found: Float32Array, expected: Float32Array) -> Float64Array:
    """Of each row with its counterpart; -1 where a number is not finite."""
    cosines: Float64Array = (_directions(found) * _directions(expected)).sum(1)
    return np.where(np.isfinite(cosines), cosines, -1.0)


def _directions(rows: Float32Array) -> Float64Array:
    exact = rows.astype(np.float64)
    directions: Float64Array = exact / np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-12)
    return directions


def _similarity_ranks(found: Float32Array, expected: Float32Array) -> float:
    """Spearman's correlation of the cosines of all pairs of rows."""
    pairs = np.triu_indices(len(found), 1)
    similarities = [(_directions(rows) @ _directions(rows).T)[pairs] for rows in (found, expected)]
    return _spearman(*similarities)


def _label_ranks(found: Float32Array, expected: Float32Array) -> float:
    """The smallest of all labels' Spearman correlations of their logits."""
    return min(_spearman(one, other) for one, other in zip(found.T, expected.T, strict=True))


def _spearman(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: NDArray[np.floating]) -> Float64Array:
    """Ranks from 1; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Float64Array = ((last - counts + 1 + last) / 2)[places]
    return ranks


def _error(found: Float32Array, expected: Float32Array) -> float:
    difference = float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
    return difference if np.isfinite(difference) else float("inf")
