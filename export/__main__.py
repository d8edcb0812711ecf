"""`mhsa-export CHECKPOINT --output models`: the steps, a line each. The bundle appears only when all of them are done.

Exit codes: 0 done, 2 refused (one line on stderr says what to do), 130 interrupted. Nothing is left behind but a
bundle that passed.
"""

import argparse
import dataclasses
import json
import logging
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version as version_of
from pathlib import Path

import numpy as np
from rich.console import Console

from export.checkpoint import Checkpoint, read_checkpoint
from export.errors import ExportError
from export.graph import PackedModel, export_graph
from export.grid import Subject, english_sequences
from export.pooling import POOLINGS, PoolingChoice, choose_pooling
from export.verify import ParityReport, reference_answer, verify
from service.bundle import (
    GOLDEN,
    GRAPH,
    PARITY,
    TOKENIZER,
    Golden,
    Manifest,
    Pooling,
    new_bundle,
    write_golden,
    write_manifest,
)
from service.errors import BundleError
from service.request import TokenSequence

# The gate on the exporting machine is 1e-5, of which rounding takes up to 7e-6. Another CPU or a GPU has other kernels,
# whose rounding comes on top, and a good model must not be refused there. Faults are far larger: TF32, a wrong mask or
# another weight are off by 1e-3 and more.
GOLDEN_TOLERANCE = 1e-4

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
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
    checkpoint_path: Path,
    output: Path,
    *,
    name: str | None = None,
    version: str = "1",
    pooling: Pooling | None = None,
    force: bool = False,
    console: Console | None = None,
) -> tuple[Path, ParityReport]:
    """Write <output>/<name>/<version>/; returns that path. Raises `ExportError` or `BundleError`."""
    name = checkpoint_path.resolve().name if name is None else name
    _require_safe(name, version)
    steps = Steps(console or Console(quiet=True))
    destination = output / name / version
    with new_bundle(destination, force=force) as directory:
        with steps.step("read checkpoint") as details:
            checkpoint = read_checkpoint(checkpoint_path)
            choice = choose_pooling(checkpoint, pooling)
            details += _describe(checkpoint, choice)
        subject = _subject(checkpoint, choice)
        with steps.step("export graph") as details:
            model = PackedModel(checkpoint.encoder, choice, has_token_types=checkpoint.type_vocab_size > 0)
            export_graph(model, directory / GRAPH)
            details.append(f"{sum(file.stat().st_size for file in directory.iterdir()) / 2**20:.1f} MiB")
        with steps.step("verify against PyTorch") as details:
            report = verify(subject, directory / GRAPH)
            details.append(f"{report.graph.fused_attention_nodes} fused attention nodes, {len(report.cases)} batches")
        with steps.step("write bundle") as details:
            digest = _write_rest(directory, name, checkpoint, subject, report)
            details.append(f"sha256 {digest}")
    return destination, report


def _require_safe(name: str, version: str) -> None:
    if not _NAME.fullmatch(name):
        raise ExportError(f"name {name!r} is not letters, digits, '.', '_' and '-' (at most 128); give another --name")
    if not _VERSION.fullmatch(version):
        raise ExportError(f"version {version!r} is not a whole number of at least 1; give another --version")


def _describe(checkpoint: Checkpoint, choice: PoolingChoice) -> list[str]:
    details = [
        f"{checkpoint.family}, {checkpoint.num_layers} layers, hidden size {checkpoint.hidden_size}",
        f"at most {checkpoint.max_sequence_tokens} tokens",
        f"{choice.mode} pooling, {'normalized' if choice.normalize else 'not normalized'}",
    ]
    return details + ([f"left aside: {', '.join(checkpoint.unused_keys)}"] if checkpoint.unused_keys else [])


def _subject(checkpoint: Checkpoint, choice: PoolingChoice) -> Subject:
    return Subject(
        encoder=checkpoint.encoder,
        pooling=choice,
        num_layers=checkpoint.num_layers,
        vocab_size=checkpoint.vocab_size,
        type_vocab_size=checkpoint.type_vocab_size,
        pad_token_id=checkpoint.pad_token_id,
        max_sequence_tokens=checkpoint.max_sequence_tokens,
        tokenize=checkpoint.tokenize,
    )


def _write_rest(directory: Path, name: str, checkpoint: Checkpoint, subject: Subject, report: ParityReport) -> str:
    (directory / PARITY).write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    (directory / TOKENIZER).mkdir()
    for file in checkpoint.tokenizer_files:
        shutil.copyfile(file, directory / TOKENIZER / file.name)
    write_golden(directory / GOLDEN, _make_golden(subject))
    return write_manifest(directory, _make_manifest(name, checkpoint, subject.pooling, report))


def _make_golden(subject: Subject) -> Golden:
    """Eight ragged sequences, one token and the longest among them, with PyTorch's outputs."""
    assert subject.tokenize is not None
    rng = np.random.default_rng(0)
    lengths = [min(size, subject.max_sequence_tokens) for size in (1, 2, 17, subject.max_sequence_tokens)]
    columns = [np.arange(size) for size in lengths]
    sequences = [
        TokenSequence(rng.integers(0, subject.vocab_size, len(row)), row, np.zeros(len(row), np.int64))
        for row in columns
    ]
    sequences += english_sequences(subject.tokenize, 4, min(64, subject.max_sequence_tokens))
    answer = reference_answer(subject, sequences)
    return Golden(tuple(sequences), answer.tokens, answer.pooled)


def _make_manifest(name: str, checkpoint: Checkpoint, choice: PoolingChoice, report: ParityReport) -> Manifest:
    return Manifest(
        name=name,
        family=checkpoint.family,
        hidden_size=checkpoint.hidden_size,
        num_layers=checkpoint.num_layers,
        num_heads=checkpoint.num_heads,
        vocab_size=checkpoint.vocab_size,
        type_vocab_size=checkpoint.type_vocab_size,
        pad_token_id=checkpoint.pad_token_id,
        max_sequence_tokens=checkpoint.max_sequence_tokens,
        pooling=choice.mode,
        normalize=choice.normalize,
        precision="fp32",
        golden_tolerance=GOLDEN_TOLERANCE,
        graph=report.graph,
        versions={package: version_of(package) for package in _PACKAGES},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    _silence_libraries()
    console = Console()
    try:
        path, report = export_checkpoint(**vars(options), console=console)
    except (ExportError, BundleError, OSError) as error:
        line = " ".join(str(error).split())  # some of it is from libraries, on several lines
        print(f"mhsa-export: {line}", file=sys.stderr)  # noqa: T201  # a command line speaks through stderr
        return 2
    except KeyboardInterrupt:
        print("mhsa-export: interrupted; nothing was written", file=sys.stderr)  # noqa: T201  # as above
        return 130
    console.print(report.as_table())
    console.print(f"bundle: {path}", highlight=False, soft_wrap=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mhsa-export", description="Export a checkpoint to a verified bundle that mhsa-serve serves."
    )
    parser.add_argument(
        "checkpoint_path", metavar="CHECKPOINT", type=Path, help="directory with config.json and safetensors"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="directory of all bundles: <output>/<name>/<version>/"
    )
    parser.add_argument("--name", help="the model's name for clients; the checkpoint directory's name if not given")
    parser.add_argument(
        "--version", default="1", help="a whole number; the server's default is the highest (default: 1)"
    )
    parser.add_argument("--pooling", choices=POOLINGS, help="needed where the checkpoint does not say")
    parser.add_argument("--force", action="store_true", help="replace a bundle of the same name and version")
    return parser.parse_args(arguments)


def _silence_libraries() -> None:
    """Our own lines are the report; the libraries' warnings are noise in it. Errors are exceptions and still pass."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
