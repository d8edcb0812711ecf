"""A bundle's other precisions: made from the fp32 graph, which has passed its gate, and held to gates of their own.

fp16 is for CUDA and judged on the CPU, which computes in fp32 between fp16's roundings. What a GPU's own kernels make
of it, the server sees when it replays the golden outputs there.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from export.checkpoint import Subject
from export.grid import UNEVEN, make_grid
from export.half import write_half
from export.quality import QualityReport, measure_quality, require_quality
from export.quantize import calibration_batches, quantize
from export.texts import calibration_probes, held_out_probes
from export.verify import verify_fusion, verify_isolation
from service.bundle import Golden, GraphFacts, Precision, Task
from service.engine import Engine, differences
from service.packing import PackedBatch, pack

# 1 - cosine with fp32 of any one text. Ranks may lose twice as much: 1 - Spearman's correlation.
TOLERANCES: dict[Precision, float] = {"int8": 0.01, "fp16": 0.001}
# A text alone against the same in company. Integers are the same in any company; fp16 rounds what fp32's kernels leave
# off by 1e-7, and now and then to the other side: one step of a number below 8.
_MAX_COMPANY_ERRORS: dict[Precision, float] = {"int8": 1e-6, "fp16": 2**-8}
# Another CPU or a GPU has other kernels, whose rounding comes on top of what the precision itself loses.
_GOLDEN_ROOM = 1.5
# Of what may be lost: held-out text is a little harder than the text that was calibrated on.
_CALIBRATION_SHARE = 0.8


def add_precision(
    precision: Precision,
    subject: Subject,
    task: Task,
    graph: Path,
    destination: Path,
    golden: Golden,
    tolerance: float | None = None,
) -> tuple[GraphFacts, QualityReport]:
    """Write `destination` from the fp32 `graph`. Raises `ExportError` where it is not good enough."""
    assert subject.tokenize is not None  # refused before anything was made (steps.py)
    probes = calibration_probes(subject.tokenize, subject.max_sequence_tokens)
    calibration = calibration_batches([probe.sequence for probe in probes])
    loss = TOLERANCES[precision] if tolerance is None else tolerance
    kept = _write(precision, graph, destination, calibration, task, loss)
    has_token_types = subject.type_vocab_size > 0
    fusion = verify_fusion(destination, num_layers=subject.num_layers, has_token_types=has_token_types)
    verify_isolation(destination, pack(make_grid(subject)[UNEVEN]), has_token_types=has_token_types)
    engine = Engine(destination, has_token_types=has_token_types)
    report = _judge(precision, subject, task, Engine(graph, has_token_types=has_token_types), engine, loss)
    pooled, tokens = differences(engine, pack(golden.sequences), golden.sentence_embedding, golden.token_embeddings)
    facts = GraphFacts(
        file=destination.name,
        **asdict(fusion),
        token_tolerance=_GOLDEN_ROOM * tokens,
        pooled_tolerance=_GOLDEN_ROOM * pooled,
        kept_in_fp32=kept,
    )
    return facts, report


def _write(
    precision: Precision, graph: Path, destination: Path, calibration: Sequence[PackedBatch], task: Task, loss: float
) -> list[str]:
    if precision == "fp16":
        return write_half(graph, destination, calibration)
    record = quantize(graph, destination, calibration, task=task, min_cosine=1 - _CALIBRATION_SHARE * loss)
    return list(record.kept_in_fp32)


def _judge(
    precision: Precision, subject: Subject, task: Task, reference: Engine, candidate: Engine, loss: float
) -> QualityReport:
    assert subject.tokenize is not None
    report = measure_quality(
        reference,
        candidate,
        held_out_probes(subject.tokenize, subject.max_sequence_tokens),
        precision=precision,
        task=task,
        cosine_limit=1 - loss,
        spearman_limit=1 - 2 * loss,
        company_limit=_MAX_COMPANY_ERRORS[precision],
    )
    require_quality(report)
    return report
