"""The steps of an export, a line each. The bundle appears only when all of them are done."""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
from rich.console import Console

from export.checkpoint import Checkpoint
from export.errors import ExportError
from export.graph import PackedModel, export_graph
from export.grid import MAX_TOKENS_IN_COMPANY, english_sequences, random_sequence
from export.heads import Head
from export.precision import add_precision
from export.quality import QualityReport
from export.sentence_transformers import choose_embedding, read_prompts
from export.sharing import share_weights
from export.sources import Source, open_source
from export.verify import ParityReport, reference_answer, verify
from export.workplace import new_bundle
from service.bundle import (
    GOLDEN,
    PARITY,
    TOKENIZER,
    VERSION,
    WEIGHTS,
    Golden,
    GraphFacts,
    Manifest,
    Pooling,
    Precision,
    Task,
    graph_file,
    read_bundle,
    write_golden,
    write_manifest,
)

# The gate on the exporting machine is 1e-5, of which rounding takes up to 7e-6. Another CPU or a GPU has other kernels,
# whose rounding comes on top, and a good model must not be refused there. Faults are far larger: TF32, a wrong mask or
# another weight are off by 1e-3 and more.
GOLDEN_TOLERANCE = 1e-4

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


class Steps:
    """Prints one line per step, with the seconds it took."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Yields a list; what the step appends to it is printed behind its name."""
        details: list[str] = []
        started = time.perf_counter()
        with self._console.status(f"{name} ..."):
            yield details
        seconds = time.perf_counter() - started
        self._console.print(f"{seconds:6.1f} s  {name}: {'; '.join(details)}", highlight=False, soft_wrap=True)


def export_checkpoint(
    checkpoint_path: Path | None,
    output: Path,
    *,
    name: str | None = None,
    settings: Sequence[str] = (),
    module: str | None = None,
    weights: Path | None = None,
    version: str = "1",
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    task: Task | None = None,
    precisions: Sequence[Precision] = ("fp32",),
    tolerance: float | None = None,
    force: bool = False,
    console: Console | None = None,
) -> tuple[Path, ParityReport]:
    """Write <output>/<name>/<version>/; returns that path. Raises `ExportError` or `StartupError`.

    `tolerance` is what the other precisions may lose to fp32 (export/precision.py).
    """
    origin = Source(checkpoint_path, tuple(settings), module, weights, task)
    name = origin.name if name is None else name
    _require_safe(name, version)
    _require_tolerance(tolerance, precisions)
    steps = Steps(console or Console(quiet=True))
    destination = output / name / version
    with new_bundle(destination, force=force) as directory:
        with steps.step("read checkpoint") as details:
            checkpoint = open_source(origin)
            head = _choose_head(checkpoint, pooling, normalize)
            _require_tokenizer(checkpoint, precisions)
            details += _describe(checkpoint, head)
        with steps.step("export graph") as details:
            model = PackedModel(
                checkpoint.encoder,
                head,
                has_token_types=checkpoint.type_vocab_size > 0,
                input_size=checkpoint.input_size,
            )
            export_graph(model, directory / graph_file("fp32"))
            details.append(_size(directory))
        with steps.step("verify against PyTorch") as details:
            report = verify(checkpoint, head, directory / graph_file("fp32"))
            details.append(f"{report.fusion.fused_attention_nodes} fused attention nodes, {len(report.cases)} batches")
            details.append(f"of up to {max(case.longest for case in report.cases)} tokens a sequence")
        golden = _make_golden(checkpoint, head)
        graphs: dict[Precision, GraphFacts] = {"fp32": _make_facts(report)} if "fp32" in precisions else {}
        for precision in sorted(set(precisions) - {"fp32"}):
            with steps.step(f"make {precision}") as details:
                source, made = directory / graph_file("fp32"), directory / graph_file(precision)
                facts, quality = add_precision(
                    precision, checkpoint, _task(checkpoint), source, made, golden, tolerance
                )
                graphs[precision] = facts
                report = dataclasses.replace(report, quality=(*report.quality, quality))
                details += _describe_quality(facts, quality)
        with steps.step("write bundle") as details:
            _keep_graphs(directory, graphs)
            manifest = _make_manifest(name, checkpoint, head, graphs)
            digest = _write_rest(directory, checkpoint, golden, report, manifest)
            # As the server will: what it would refuse is not left behind.
            read_bundle(directory)
            details += [_size(directory), f"sha256 {digest}"]
    return destination, report


def _require_safe(name: str, version: str) -> None:
    if not _NAME.fullmatch(name):
        raise ExportError(f"name {name!r} is not letters, digits, '.', '_' and '-' (at most 128); give another --name")
    if not VERSION.fullmatch(version):
        raise ExportError(f"version {version!r} is not a whole number of at least 1; give another --version")


def _choose_head(checkpoint: Checkpoint, pooling: Pooling | None, normalize: bool | None) -> Head:
    if checkpoint.classifier is None:
        return choose_embedding(checkpoint, pooling, normalize)
    if pooling is not None or normalize is not None:
        raise ExportError(
            f"{checkpoint.path}: it is a classifier, which has its own way to one vector; leave --pooling and "
            "--normalize out, or give --task embedding to export its encoder without its head"
        )
    kinds = [module.kind for module in checkpoint.modules]
    if kinds not in ([], ["Transformer"]):
        raise ExportError(
            f"{checkpoint.path}: it is a classifier, and its modules are {' > '.join(kinds)}; supported: Transformer "
            "alone, or --task embedding to export its encoder without its head"
        )
    return checkpoint.classifier


def _task(checkpoint: Checkpoint) -> Task:
    return "embedding" if checkpoint.classifier is None else "classification"


def _require_tolerance(tolerance: float | None, precisions: Sequence[Precision]) -> None:
    if tolerance is None:
        return
    if not 0 < tolerance < 1:
        raise ExportError(f"--tolerance is {tolerance}; it takes more than 0 and less than 1")
    if set(precisions) <= {"fp32"}:
        raise ExportError(
            "--tolerance is what int8 or fp16 may lose; give --precision with one of them, or leave it out"
        )


def _require_tokenizer(checkpoint: Checkpoint, precisions: Sequence[Precision]) -> None:
    """Before the work is done: int8 and fp16 are judged on texts."""
    if checkpoint.tokenize is None and (others := set(precisions) - {"fp32"}):
        raise ExportError(
            f"{checkpoint.path}: {sorted(others)[0]} is judged on texts, and this model has no tokenizer; "
            "export it with --precision fp32"
        )


def _describe(checkpoint: Checkpoint, head: Head) -> list[str]:
    details = [
        f"{checkpoint.family}, {checkpoint.num_layers} layers, hidden size {checkpoint.hidden_size}",
        f"at most {checkpoint.max_sequence_tokens} tokens",
        f"{head.pooling} pooling, {'normalized' if head.normalize else 'not normalized'}",
    ]
    if checkpoint.classifier is not None:
        details[-1] = f"classification, {len(checkpoint.classifier.labels)} labels"
    return details + ([f"left aside: {', '.join(checkpoint.unused_keys)}"] if checkpoint.unused_keys else [])


def _describe_quality(facts: GraphFacts, quality: QualityReport) -> list[str]:
    details = [
        f"smallest cosine with fp32 {quality.min_cosine:.5f}",
        f"Spearman {quality.spearman:.5f} on {quality.num_texts} texts",
        f"alone against company {quality.company_error:.1e}",
    ]
    return details + ([f"kept in fp32: {', '.join(facts.kept_in_fp32)}"] if facts.kept_in_fp32 else [])


def _keep_graphs(directory: Path, graphs: Mapping[Precision, GraphFacts]) -> None:
    """All weights into one file; the fp32 graph goes where it only was what the others were made from."""
    share_weights([directory / facts.file for facts in graphs.values()], directory / WEIGHTS)
    if "fp32" not in graphs:
        for file in directory.glob(f"{graph_file('fp32')}*"):
            file.unlink()


def _size(directory: Path) -> str:
    return f"{sum(file.stat().st_size for file in directory.iterdir()) / 2**20:.1f} MiB"


def _write_rest(
    directory: Path, checkpoint: Checkpoint, golden: Golden, report: ParityReport, manifest: Manifest
) -> str:
    (directory / PARITY).write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    (directory / TOKENIZER).mkdir()
    for file in checkpoint.tokenizer_files:
        shutil.copyfile(file, directory / TOKENIZER / file.name)
    write_golden(directory / GOLDEN, golden)
    return write_manifest(directory, manifest)


def _make_golden(checkpoint: Checkpoint, head: Head) -> Golden:
    """Eight ragged sequences, from one token to the longest that is verified in company, with PyTorch's outputs.

    Half of them are English text where there is a tokenizer.
    """
    rng = np.random.default_rng(0)
    longest = min(checkpoint.max_sequence_tokens, MAX_TOKENS_IN_COMPANY)
    sizes = [1, 2, 17, longest] if checkpoint.tokenize else [1, 2, 17, longest, 5, 64, 31, 48]
    sequences = [random_sequence(rng, checkpoint, np.arange(min(size, longest))) for size in sizes]
    if checkpoint.tokenize:
        sequences += english_sequences(checkpoint.tokenize, 4, min(64, longest))
    answer = reference_answer(checkpoint, head, sequences)
    return Golden(tuple(sequences), answer.tokens, answer.pooled)


def _make_manifest(name: str, checkpoint: Checkpoint, head: Head, graphs: dict[Precision, GraphFacts]) -> Manifest:
    prompts, default_prompt = read_prompts(checkpoint)
    return Manifest(
        name=name,
        family=checkpoint.family,
        task=_task(checkpoint),
        input="embeddings" if checkpoint.input_size else "token_ids",
        input_size=checkpoint.input_size,
        hidden_size=checkpoint.hidden_size,
        output_size=head.output_size(checkpoint.hidden_size),
        num_layers=checkpoint.num_layers,
        num_heads=checkpoint.num_heads,
        vocab_size=checkpoint.vocab_size,
        type_vocab_size=checkpoint.type_vocab_size,
        pad_token_id=checkpoint.pad_token_id,
        max_sequence_tokens=checkpoint.max_sequence_tokens,
        pooling=head.pooling,
        normalize=head.normalize,
        labels=[] if checkpoint.classifier is None else checkpoint.classifier.labels,
        prompts=prompts,
        default_prompt=default_prompt,
        graphs=graphs,
        # Asked of the modules: onnxruntime is installed under several names.
        versions={package: str(import_module(package).__version__) for package in _PACKAGES},
    )


def _make_facts(report: ParityReport) -> GraphFacts:
    return GraphFacts(
        file=graph_file("fp32"),
        **dataclasses.asdict(report.fusion),
        token_tolerance=GOLDEN_TOLERANCE,
        pooled_tolerance=GOLDEN_TOLERANCE,
        kept_in_fp32=[],
    )
