"""The bundle on disk, both halves: what `mhsa-export` writes and `mhsa-serve` reads.

    <name>/<version>/
        model.json       the manifest: what it is, its limits, how it was made, sha256 of every other file
        model.fp32.onnx  the packed graph; one file for each precision in the bundle: fp32, fp16, int8
        model.onnx.data  the weights of all of them, each distinct tensor once
        golden.npz       ragged inputs with PyTorch's outputs; the server replays them before it serves
        parity.json      the exporter's whole report
        tokenizer/       the checkpoint's tokenizer files, for clients

A bundle is written beside its destination and renamed when everything in it has been verified, so a directory with the
right name is always whole. The digest of model.json covers all files, through their sha256; a file that is not listed
is refused, since the graph may name any file beside it as its weights.
"""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from service.errors import BundleError, unreadable
from service.request import Float32Array, TokenSequence

FORMAT = "mhsa-bundle/2"
MANIFEST, WEIGHTS, GOLDEN, PARITY, TOKENIZER = (
    "model.json",
    "model.onnx.data",
    "golden.npz",
    "parity.json",
    "tokenizer",
)
# A directory of another name is no version; 18 digits fit an int64.
VERSION = re.compile(r"[1-9][0-9]{0,17}")
_FLAT_IDS = ("token_ids", "position_ids", "token_type_ids")
_VECTORS = "embeddings"
_EXPECTED = ("token_embeddings", "sentence_embedding")
_AGAIN = "export it again"

Pooling = Literal["mean", "cls", "last", "max", "mean_sqrt_len"]
Precision = Literal["fp32", "fp16", "int8"]
Task = Literal["embedding", "classification"]
Input = Literal["token_ids", "embeddings"]


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One precision of the model.

    What was fused, counted in the file and again after ONNX Runtime's own optimisation. The tolerances are the largest
    absolute differences from PyTorch's golden outputs at which the server still serves. `kept_in_fp32` names what is
    computed in fp32 all the same.
    """

    file: str
    opset: int
    fused_attention_nodes: int
    optimized_attention_nodes: int
    token_tolerance: float
    pooled_tolerance: float
    kept_in_fp32: list[str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """model.json.

    `hidden_size` is the width of a token's vector, `output_size` that of a sequence's: an embedding, or logits, one for
    each of `labels`. `type_vocab_size` is 0 for a model without token types. A model whose `input` is vectors has a
    `vocab_size` of 0, and `input_size` is the width of one; for token ids that is 0. `prompts` are texts to put before
    a client's own, by name; `default_prompt` is the name of one, or empty.
    """

    name: str
    family: str
    task: Task
    input: Input
    input_size: int
    hidden_size: int
    output_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    type_vocab_size: int
    pad_token_id: int
    max_sequence_tokens: int
    pooling: Pooling
    normalize: bool
    labels: list[str]
    prompts: dict[str, str]
    default_prompt: str
    graphs: dict[Precision, GraphFacts]
    versions: dict[str, str]
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    format: str = FORMAT


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """Ragged inputs with PyTorch's outputs: token_embeddings (T, E), sentence_embedding (B, output_size)."""

    sequences: tuple[TokenSequence, ...]
    token_embeddings: Float32Array
    sentence_embedding: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A bundle whose files are all there and have the recorded sha256."""

    path: Path
    manifest: Manifest
    digest: str
    golden: Golden

    def graph_path(self, precision: Precision) -> Path:
        """The graph of a precision that the manifest lists."""
        return self.path / self.manifest.graphs[precision].file


def graph_file(precision: Precision) -> str:
    """The name of a graph's file."""
    return f"model.{precision}.onnx"


def read_bundle(path: Path) -> Bundle:
    """Read and check a bundle. Raises `BundleError` with what is wrong and what to do."""
    try:
        raw = (path / MANIFEST).read_bytes()
    except PermissionError as error:
        raise BundleError(unreadable(error)) from None
    except OSError as error:
        reason = f"no readable {MANIFEST} ({error.strerror})"
        raise BundleError(f"{path}: {reason}; give <models>/<name>/<version>, or {_AGAIN}") from None
    manifest = _parse_manifest(path, raw)
    _check_files(path, manifest)
    golden = read_golden(path / GOLDEN, manifest.hidden_size, manifest.output_size, manifest.input_size)
    _check_tolerances(path, manifest, golden)
    return Bundle(path, manifest, hashlib.sha256(raw).hexdigest(), golden)


def write_manifest(directory: Path, manifest: Manifest) -> str:
    """Write model.json with the sha256 of every other file in `directory`; returns the bundle's digest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    digests = {path.relative_to(directory).as_posix(): _sha256(path) for path in files}
    content = dataclasses.asdict(dataclasses.replace(manifest, files=digests))
    raw = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    (directory / MANIFEST).write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def write_golden(path: Path, golden: Golden) -> None:
    """Write golden.npz: flat ids with lengths, vectors where the model takes them, and the expected outputs."""
    vectors = [sequence.embeddings for sequence in golden.sequences if sequence.embeddings is not None]
    arrays = {_VECTORS: np.concatenate(vectors)} if vectors else {}
    np.savez_compressed(
        path,
        allow_pickle=False,
        lengths=np.array([sequence.num_tokens for sequence in golden.sequences], np.int64),
        token_ids=np.concatenate([sequence.token_ids for sequence in golden.sequences]),
        position_ids=np.concatenate([sequence.position_ids for sequence in golden.sequences]),
        token_type_ids=np.concatenate([sequence.token_type_ids for sequence in golden.sequences]),
        token_embeddings=golden.token_embeddings,
        sentence_embedding=golden.sentence_embedding,
        **arrays,
    )


def read_golden(path: Path, hidden_size: int, output_size: int, input_size: int = 0) -> Golden:
    """Read golden.npz. Raises `BundleError` when it is no npz, or an array is missing or has another shape."""
    vectors = (_VECTORS,) if input_size else ()
    try:
        # Opened here: numpy leaves a broken archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("lengths", *_FLAT_IDS, *vectors, *_EXPECTED)}
    except Exception as error:  # numpy, zipfile and zlib have a dozen classes for a damaged file
        raise BundleError(f"{path}: not a golden file ({error}); {_AGAIN}") from None
    lengths = arrays["lengths"]
    if lengths.ndim != 1 or lengths.min(initial=1) < 1 or lengths.size == 0:
        raise BundleError(f"{path}: lengths are {lengths.tolist()}, nothing can be compared; {_AGAIN}")
    num_tokens, num_sequences = int(lengths.sum()), len(lengths)
    # A wrong shape would be broadcast when it is compared, and could pass.
    wanted = dict.fromkeys(_FLAT_IDS, (num_tokens,)) | dict(
        zip(_EXPECTED, ((num_tokens, hidden_size), (num_sequences, output_size)), strict=True)
    )
    wanted |= dict.fromkeys(vectors, (num_tokens, input_size))
    for name, shape in wanted.items():
        if arrays[name].shape != shape:
            raise BundleError(f"{path}: {name} has shape {arrays[name].shape}, expected {shape}; {_AGAIN}")
    columns = [np.split(arrays[name], np.cumsum(lengths)[:-1]) for name in (*_FLAT_IDS, *vectors)]
    sequences = tuple(
        TokenSequence(*parts[:3], embeddings=parts[3] if vectors else None) for parts in zip(*columns, strict=True)
    )
    return Golden(sequences, arrays["token_embeddings"], arrays["sentence_embedding"])


def _check_files(path: Path, manifest: Manifest) -> None:
    """Every file is listed, inside the bundle, and as it was written."""
    files = manifest.files
    for name, recorded in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{path}: {MANIFEST} lists {name!r}, which is not inside the bundle; {_AGAIN}")
        try:
            found = _sha256(path / name)
        except PermissionError as error:
            raise BundleError(unreadable(error)) from None
        except (OSError, ValueError) as error:
            raise BundleError(f"{path / name}: cannot be read ({error}); copy or {_AGAIN}") from None
        if found != recorded:
            raise BundleError(f"{path / name}: sha256 is {found}, {MANIFEST} says {recorded}; copy or {_AGAIN}")
    if missing := {GOLDEN, *(graph.file for graph in manifest.graphs.values())} - files.keys():
        raise BundleError(f"{path}: {MANIFEST} lists no {', '.join(sorted(missing))}; {_AGAIN}")
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
    if unlisted := present - files.keys() - {MANIFEST}:
        raise BundleError(f"{path}: {MANIFEST} does not list {', '.join(sorted(unlisted))}; delete it, or {_AGAIN}")


def _parse_manifest(path: Path, raw: bytes) -> Manifest:
    try:
        content: dict[str, Any] = json.loads(raw, parse_constant=_refuse_constant)
        if content.get("format") != FORMAT:
            raise BundleError(f"{path}: format is {content.get('format')!r}, this server reads {FORMAT!r}; {_AGAIN}")
        content["graphs"] = {name: GraphFacts(**facts) for name, facts in content["graphs"].items()}
        manifest = Manifest(**content)
        _check_types(manifest)
        for facts in manifest.graphs.values():
            _check_types(facts)
        _check_ranges(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path}: {MANIFEST} cannot be read ({error}); {_AGAIN}") from None
    return manifest


def _refuse_constant(name: str) -> float:
    """No difference is larger than NaN: with it as the tolerance every model would pass."""
    raise ValueError(f"{name} is not a number")


def _check_types(record: Manifest | GraphFacts) -> None:
    """What JSON gave is what the fields declare."""
    for name, hint in get_type_hints(type(record)).items():
        value = getattr(record, name)
        if not _is_of(value, hint):
            raise ValueError(f"{name} is {value!r}, expected {hint}")


def _check_ranges(manifest: Manifest) -> None:
    """What no model is, and what would be no limit or no gate."""
    kind_of_input = "vocab_size" if manifest.input == "token_ids" else "input_size"
    for name in ("hidden_size", "output_size", "num_layers", "num_heads", "max_sequence_tokens", kind_of_input):
        if not 1 <= getattr(manifest, name) < 2**31:
            raise ValueError(f"{name} is {getattr(manifest, name)}; it takes 1 to {2**31 - 1}")
    unused = ("input_size",) if manifest.input == "token_ids" else ("vocab_size", "type_vocab_size", "pad_token_id")
    for name in unused:
        if getattr(manifest, name):
            raise ValueError(f"{name} is {getattr(manifest, name)} for a model of {manifest.input}; it takes 0")
    for name in ("type_vocab_size", "pad_token_id"):
        if not 0 <= getattr(manifest, name) < 2**31:
            raise ValueError(f"{name} is {getattr(manifest, name)}; it takes 0 to {2**31 - 1}")
    if not manifest.graphs:
        raise ValueError("graphs is empty; there is nothing to serve")
    if len(manifest.labels) != (manifest.output_size if manifest.task == "classification" else 0):
        raise ValueError(f"{len(manifest.labels)} labels for {manifest.output_size} outputs of {manifest.task}")
    if manifest.default_prompt and manifest.default_prompt not in manifest.prompts:
        raise ValueError(f"default_prompt is {manifest.default_prompt!r}, which is none of prompts")


def _check_tolerances(path: Path, manifest: Manifest, golden: Golden) -> None:
    """A tolerance of 0 passes nothing; one as large as the numbers themselves passes everything."""
    for precision, facts in manifest.graphs.items():
        for name, numbers in (
            ("token_tolerance", golden.token_embeddings),
            ("pooled_tolerance", golden.sentence_embedding),
        ):
            # Not finite at all: nothing comes near it, which is found when it is replayed.
            largest = float(np.nan_to_num(np.abs(numbers), nan=0.0, posinf=0.0).max())
            if not 0 < getattr(facts, name) < max(largest, 1e-3):
                raise BundleError(
                    f"{path}: {precision} has a {name} of {getattr(facts, name)}; it takes more than 0 and less than "
                    f"the largest golden number, {largest:.2g}; {_AGAIN}"
                )


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is dict:
        of_key, of_item = get_args(hint)
        return isinstance(value, dict) and all(_is_of(k, of_key) and _is_of(v, of_item) for k, v in value.items())
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(item, get_args(hint)[0]) for item in value)
    if hint is str and isinstance(value, str):
        return value == value.encode(errors="ignore").decode()  # protobuf takes no half of a surrogate pair
    return type(value) is hint or (hint is float and type(value) is int)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
