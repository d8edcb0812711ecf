"""The gate: PyTorch, padded and eager, against `service.engine` on ragged batches. A bundle that fails is not written.

The reference shares nothing with what it judges: transformers' own eager attention on a padded batch with a mask, and
the head's own reference, sequence by sequence. It is compared through the very engine that will serve, on grid.py's
batches.

Besides parity: a sequence's answer must not depend on its batch mates, what stands in unused slots must not change a
bit of the answer, and neither must a batch mate that is NaN from its embedding on.

Its temporary files stand beside the graph: they go when the bundle goes, and only one disk can be full.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from export.checkpoint import Subject
from export.errors import ExportError
from export.graph import OPSET, check_graph, count_fused, write_poisoned
from export.grid import MAX_TOKENS_ALONE, SEED, UNEVEN, make_grid
from export.heads import Head
from export.quality import QualityReport
from export.worst import describe_worst
from service.engine import Engine, first_line, write_optimized
from service.packing import PackedBatch, pack
from service.request import Float32Array, TokenSequence

# Rounding alone: against float64 both sides are off by 1e-6 to 6e-6 on MiniLM-L6, whose token vectors reach 6.
MAX_ERROR = 1e-5
MIN_COSINE = 0.99999
# The same kernels on the same row; only the blocking of the matrix products differs with the batch.
MAX_COMPANY_ERROR = 1e-6


class Answer(NamedTuple):
    """Vectors of a batch: tokens (T, E), pooled (B, N)."""

    tokens: Float32Array
    pooled: Float32Array


@dataclass(frozen=True, slots=True)
class Fusion:
    """What was fused, counted in the file and again after ONNX Runtime's own optimisation."""

    opset: int
    fused_attention_nodes: int
    optimized_attention_nodes: int


@dataclass(frozen=True, slots=True)
class CaseParity:
    """One batch of the grid. `company_error`: the largest difference between a sequence alone and in this batch."""

    name: str
    num_sequences: int
    num_tokens: int
    longest: int
    token_error: float
    pooled_error: float
    token_cosine: float
    pooled_cosine: float
    company_error: float


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What verification found, with the limits it was held to. Saved as parity.json.

    `quality` is of the precisions that were made from the verified graph.
    """

    cases: tuple[CaseParity, ...]
    fusion: Fusion
    max_error: float = MAX_ERROR
    min_cosine: float = MIN_COSINE
    max_company_error: float = MAX_COMPANY_ERROR
    quality: tuple[QualityReport, ...] = ()

    def as_table(self) -> Table:
        """The report for people; narrow enough for 80 columns."""
        table = Table(
            title="PyTorch eager against ONNX Runtime", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        table.add_column("batch", no_wrap=True)
        for heading in ("seqs", "tokens", "token err", "pooled err", "1 - cos", "company"):
            table.add_column(heading, justify="right", no_wrap=True)
        for case in self.cases:
            cosine = min(case.token_cosine, case.pooled_cosine)
            errors = (case.token_error, case.pooled_error, 1 - cosine, case.company_error)
            table.add_row(
                case.name, str(case.num_sequences), str(case.num_tokens), *(f"{value:.1e}" for value in errors)
            )
        limits = (self.max_error, self.max_error, 1 - self.min_cosine, self.max_company_error)
        table.add_section()
        table.add_row("limit", "", "", *(f"{limit:.1e}" for limit in limits))
        return table


def verify(subject: Subject, head: Head, graph: Path) -> ParityReport:
    """Hold the graph file against its reference. Raises `ExportError` that names the worst case."""
    has_token_types = subject.type_vocab_size > 0
    facts = verify_fusion(
        graph, num_layers=subject.num_layers, has_token_types=has_token_types, input_size=subject.input_size
    )
    engine = Engine(graph, has_token_types=has_token_types)
    grid = make_grid(subject)
    report = ParityReport(tuple(_compare(name, subject, head, engine, batch) for name, batch in grid.items()), facts)
    _check(report, lambda name, rows: _show(subject, head, engine, grid[name], rows))
    _check_unused_slots(engine, grid[UNEVEN])
    verify_isolation(graph, pack(grid[UNEVEN]), has_token_types=has_token_types)
    return report


def verify_fusion(graph: Path, *, num_layers: int, has_token_types: bool, input_size: int = 0) -> Fusion:
    """Count fused nodes in the file and again in what the engine makes of it. Raises `ExportError`."""
    num_fused = check_graph(graph, num_layers=num_layers, has_token_types=has_token_types, input_size=input_size)
    with tempfile.TemporaryDirectory(dir=graph.parent) as directory:
        optimized = Path(directory) / "optimized.onnx"
        write_optimized(graph, optimized)
        return Fusion(OPSET, num_fused, count_fused(optimized, num_layers))


def verify_isolation(graph: Path, batch: PackedBatch, *, has_token_types: bool) -> None:
    """Make every other sequence NaN from its embedding on: it must show in their answers, and in no other's.

    The others' must be the same to the bit. Raises `ExportError`.
    """
    is_odd = np.arange(batch.num_sequences) % 2 == 1  # (B,)
    with tempfile.TemporaryDirectory(dir=graph.parent) as directory:
        poisoned, nan_id = graph, 0
        if batch.embeddings is None:
            poisoned = Path(directory) / "poisoned.onnx"
            nan_id = write_poisoned(graph, poisoned)
        engine = Engine(poisoned, has_token_types=has_token_types)
        expected = _run(engine, batch)
        for is_ill in (~is_odd, is_odd):
            is_ill_row = np.repeat(is_ill, batch.lengths)  # (T,)
            found = _run(engine, _poison(batch, is_ill_row, nan_id))
            _check_isolation("token", found.tokens, expected.tokens, is_ill_row)
            _check_isolation("pooled", found.pooled, expected.pooled, is_ill)


def _poison(batch: PackedBatch, is_ill_row: NDArray[np.bool], nan_id: int) -> PackedBatch:
    if batch.embeddings is None:
        return dataclasses.replace(batch, token_ids=np.where(is_ill_row, nan_id, batch.token_ids))
    return dataclasses.replace(batch, embeddings=np.where(is_ill_row[:, None], np.float32(np.nan), batch.embeddings))


def reference_answer(subject: Subject, head: Head, sequences: Sequence[TokenSequence]) -> Answer:
    """PyTorch's answer: each token in the column that its position names, a mask, eager attention.

    Where that is too wide, the columns that all sequences leave empty on the left go, and positions are given.
    """
    width = 1 + max(int(sequence.position_ids.max()) for sequence in sequences)
    first = min(int(sequence.position_ids.min()) for sequence in sequences) if width > MAX_TOKENS_ALONE else 0
    width -= first
    shape = (len(sequences), width)
    types = torch.zeros(shape, dtype=torch.long)
    inputs = torch.zeros(*shape, subject.input_size) if subject.input_size else torch.full(shape, subject.pad_token_id)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        columns = torch.from_numpy(sequence.position_ids) - first
        vectors = sequence.embeddings
        inputs[row, columns] = torch.from_numpy(sequence.token_ids if vectors is None else vectors)
        types[row, columns] = torch.from_numpy(sequence.token_type_ids)
        mask[row, columns] = True
    keywords: dict[str, Tensor] = {"token_type_ids": types} if subject.type_vocab_size else {}
    if first:
        keywords["position_ids"] = torch.arange(first, first + width).unsqueeze(0)  # (1, S)
    with torch.no_grad():
        hidden = _encode(subject, inputs, mask, keywords)  # (B, S, E)
        rows = [hidden[row, sequence.position_ids - first] for row, sequence in enumerate(sequences)]
        pooled = [
            head.reference(part, torch.from_numpy(sequence.token_ids))
            for part, sequence in zip(rows, sequences, strict=True)
        ]
    return Answer(torch.cat(rows).numpy(), torch.stack(pooled).numpy())


def _encode(subject: Subject, inputs: Tensor, mask: Tensor, keywords: dict[str, Tensor]) -> Tensor:
    try:
        hidden: Tensor = subject.encoder(inputs, mask=mask, **keywords)
    except (Exception, SystemExit) as error:  # whatever the model's own code raises
        raise ExportError(
            f"PyTorch cannot run this model on {len(inputs)} sequences of up to {inputs.shape[1]} tokens, which its "
            f"configuration allows: {type(error).__name__}: {first_line(error)}"
        ) from error
    return hidden


def _compare(name: str, subject: Subject, head: Head, engine: Engine, sequences: list[TokenSequence]) -> CaseParity:
    batch = pack(sequences)
    expected, found = reference_answer(subject, head, sequences), _run(engine, batch)
    alone = _run_alone(engine, sequences) if len(sequences) > 1 else found
    return CaseParity(
        name,
        batch.num_sequences,
        batch.num_tokens,
        batch.longest,
        token_error=_error(found.tokens, expected.tokens),
        pooled_error=_error(found.pooled, expected.pooled),
        token_cosine=_cosine(found.tokens, expected.tokens),
        pooled_cosine=_cosine(found.pooled, expected.pooled),
        company_error=max(_error(found.tokens, alone.tokens), _error(found.pooled, alone.pooled)),
    )


def _run(engine: Engine, batch: PackedBatch) -> Answer:
    outputs = engine.run(batch, wants_tokens=True)
    assert outputs.token_embeddings is not None  # they were asked for
    return Answer(outputs.token_embeddings, outputs.sentence_embedding)


def _run_alone(engine: Engine, sequences: list[TokenSequence]) -> Answer:
    """The answers to sequences that each had a batch of its own."""
    answers = [_run(engine, pack([sequence])) for sequence in sequences]
    return Answer(*(np.concatenate(rows) for rows in zip(*answers, strict=True)))


def _error(found: Float32Array, expected: Float32Array) -> float:
    """The largest absolute difference; infinite where a number is not finite, so that NaN passes no gate."""
    with np.errstate(invalid="ignore"):
        difference = float(np.abs(found - expected).max())
    return difference if np.isfinite(difference) else float("inf")


def _cosine(found: Float32Array, expected: Float32Array) -> float:
    """The smallest cosine over rows, in float64; 1 where both rows are zero, -1 where a number is not finite.

    A single number, such as a reranker's, has a sign and no direction: near 0 rounding alone decides it.
    """
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return -1.0
    if found.shape[-1] == 1:
        return 1.0
    a, b = found.astype(np.float64), expected.astype(np.float64)
    products, norms = (a * b).sum(-1), np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    is_zero = ~a.any(-1) & ~b.any(-1)
    return float(np.where(is_zero, 1.0, products / np.where(norms > 0, norms, 1.0)).min())


def _check(report: ParityReport, show: Callable[[str, str], str]) -> None:
    """Raise `ExportError` for the number that is furthest past its limit, and `show` where it comes from."""
    ratios = {
        (case.name, rows, quantity, value, limit): value / limit
        for case in report.cases
        for rows, quantity, value, limit in (
            ("token", "largest error of a token vector", case.token_error, MAX_ERROR),
            ("pooled", "largest error of a pooled vector", case.pooled_error, MAX_ERROR),
            ("token", "1 - smallest cosine of a token vector", 1 - case.token_cosine, 1 - MIN_COSINE),
            ("pooled", "1 - smallest cosine of a pooled vector", 1 - case.pooled_cosine, 1 - MIN_COSINE),
            ("alone", "difference between a sequence alone and in company", case.company_error, MAX_COMPANY_ERROR),
        )
    }
    (name, rows, quantity, value, limit), ratio = max(ratios.items(), key=lambda item: item[1])
    if ratio > 1:
        raise ExportError(
            f"the exported graph does not answer as PyTorch does: {quantity} is {value:.2e} in batch {name!r}; "
            f"the limit is {limit:.0e}; {show(name, rows)}. Nothing was written; report it with the checkpoint's name"
        )


def _show(subject: Subject, head: Head, engine: Engine, sequences: list[TokenSequence], rows: str) -> str:
    """The worst of a batch's "token" or "pooled" rows, or of its rows against those of each sequence "alone"."""
    found = _run(engine, pack(sequences))
    expected = _run_alone(engine, sequences) if rows == "alone" else reference_answer(subject, head, sequences)
    is_token = rows == "token" or (rows == "alone" and not np.array_equal(found.tokens, expected.tokens))
    pair = (found.tokens, expected.tokens) if is_token else (found.pooled, expected.pooled)
    return describe_worst(*pair, sequences)


def _check_unused_slots(engine: Engine, sequences: list[TokenSequence]) -> None:
    """Point every unused slot at another row: not one bit of the answer may change."""
    batch = pack(sequences)
    expected = _run(engine, batch)
    is_unused = np.arange(batch.longest) >= batch.lengths[:, None]  # (B, S)
    rows = np.random.default_rng(SEED).integers(0, batch.num_tokens, batch.pad_index.shape)
    found = _run(engine, dataclasses.replace(batch, pad_index=np.where(is_unused, rows, batch.pad_index)))
    for one, other in zip(found, expected, strict=True):
        if not np.array_equal(one, other):
            raise ExportError(
                f"what stands in unused slots changes the answer, by up to {_error(one, other):.2e} in batch "
                f"{UNEVEN!r}; the limit is 0; {describe_worst(one, other, sequences)}"
            )


def _check_isolation(kind: str, found: Float32Array, expected: Float32Array, is_ill: NDArray[np.bool]) -> None:
    if not np.array_equal(found[~is_ill], expected[~is_ill]):
        error = _error(found[~is_ill], expected[~is_ill])
        raise ExportError(
            f"a sequence that is NaN changes {kind} vectors of its batch mates, by up to {error:.2e}; the limit is 0"
        )
    # The server tells a failed sequence by numbers that are not finite.
    if np.isfinite(found[is_ill]).all(-1).any():
        raise ExportError(f"a sequence that is NaN has {kind} vectors that are not")
