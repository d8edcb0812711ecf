"""Checkpoints in Hugging Face and sentence-transformers layout, read from a local directory. Nothing is downloaded.

Whatever would make the answer wrong or run a stranger's code is refused here, before any work is done: `auto_map`
(Python files to run) unless transformers has ported just those, a tokenizer that does not fit the embedding, a model
type that is not supported (families/), weights that do not fit the configuration (weights.py).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from export.classifier import ClassifierHead
from export.errors import ExportError
from export.families import build_classifier, build_encoder, find_family, split_classifier
from export.weights import load_weights
from service.bundle import Task

# What a client needs to turn text into the ids that this model knows.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
# The sizes in config.json under all names that the families have for them, with what is far beyond any model.
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim"), 2**14),
    **dict.fromkeys(("hidden_size", "intermediate_size", "embedding_size", "n_embd", "n_inner", "dim"), 2**20),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 2**27),
}
_VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class Module:
    """One entry of sentence-transformers' modules.json: the class's last name and the directory of its files."""

    kind: str
    path: Path


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """What is verified: a reference, and what its inputs may be.

    `encoder(token_ids, mask=...)` maps (B, S) to (B, S, E); it takes `token_type_ids` where `type_vocab_size` is not 0.
    Where `input_size` is not 0 it is fed with vectors, (B, S, input_size), and `vocab_size` is 0. `tokenize` is None
    where there is no tokenizer.
    """

    encoder: nn.Module
    num_layers: int
    vocab_size: int
    type_vocab_size: int
    pad_token_id: int
    max_sequence_tokens: int
    tokenize: Callable[[str], list[int]] | None
    input_size: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint(Subject):
    """A model with its weights, ready to run, and what its files say about it. `unused_keys` were left aside.

    `classifier` is None for an embedding.
    """

    path: Path
    family: str
    modules: tuple[Module, ...]
    hidden_size: int
    num_heads: int
    unused_keys: tuple[str, ...]
    tokenizer_files: tuple[Path, ...]
    classifier: ClassifierHead | None = field(default=None, kw_only=True)


def read_checkpoint(path: Path, task: Task | None = None) -> Checkpoint:
    """Read and check everything. Raises `ExportError`.

    Unless a `task` is given, a checkpoint whose architecture is a classifier is one, head and all.
    """
    if not path.is_dir():
        raise ExportError(f"{path} is not a directory; give the one that holds the checkpoint's config.json")
    _refuse_broken_links(path)
    modules = _read_modules(path)
    directory = next((module.path for module in modules if module.kind == "Transformer"), path)
    content = read_json(directory / "config.json")
    family = find_family(directory, content)
    _refuse_code(directory, content, family.ported_from)
    _check_sizes(directory / "config.json", content)
    classifier = None
    if _choose_task(directory, content, modules, task) == "classification":
        model, config = build_classifier(directory, family, content)
        unused_keys = load_weights(directory, model, family.keys)
        encoder, classifier = split_classifier(family, model)
        classifier.eval()
    else:
        encoder, config = build_encoder(directory, family, content)
        unused_keys = load_weights(directory, encoder.model, family.keys)
    encoder.eval()
    return Checkpoint(
        path=path,
        family=content["model_type"],
        encoder=encoder,
        classifier=classifier,
        modules=modules,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
        type_vocab_size=getattr(config, "type_vocab_size", 0),
        pad_token_id=config.pad_token_id or 0,  # pads are masked: without a pad token any id serves
        max_sequence_tokens=_read_limit(directory, family.num_positions(config)),
        unused_keys=unused_keys,
        tokenizer_files=tuple(file for name in TOKENIZER_FILES if (file := directory / name).is_file()),
        tokenize=_open_tokenizer(directory, config.vocab_size),
    )


def _choose_task(directory: Path, content: dict[str, Any], modules: tuple[Module, ...], asked: Task | None) -> Task:
    """Classification where the checkpoint has a trained head for it and nothing says that its vectors are pooled."""
    architectures = [str(name) for name in content.get("architectures") or ()]
    is_classifier = any(name.endswith(_CLASSIFIER) for name in architectures)
    if asked == "classification" and not is_classifier:
        found = ", ".join(architectures) or "not given"
        raise ExportError(
            f"{directory}: --task classification needs a ...{_CLASSIFIER}, and architectures in config.json is {found}"
        )
    is_pooled = any(module.kind == "Pooling" for module in modules)
    return asked or ("classification" if is_classifier and not is_pooled else "embedding")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ExportError` when there is none."""
    content = _read_any_json(path)
    if not isinstance(content, dict):
        raise ExportError(f"{path}: not a JSON object; fetch the checkpoint again")
    return content


def _read_any_json(path: Path) -> object:
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ExportError(f"{path}: {error.strerror}; give a checkpoint directory that has this file") from None
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: not JSON ({error}); fetch the checkpoint again") from None
    return content


def _refuse_broken_links(directory: Path) -> None:
    """A cache of links whose files are gone looks like a checkpoint without them, which is another model."""
    for file in sorted(directory.iterdir()):
        if file.is_symlink() and not file.exists():
            raise ExportError(f"{file} is a link to a file that is not there; fetch the checkpoint again")


def _read_modules(path: Path) -> tuple[Module, ...]:
    """modules.json, empty if there is none."""
    file = path / "modules.json"
    if not file.exists():
        return ()
    content = _read_any_json(file)
    try:
        if not isinstance(content, list):
            raise TypeError
        entries = [(str(entry["type"]), str(entry["path"])) for entry in content]
    except (TypeError, KeyError):
        raise ExportError(f"{file}: not a list of modules with type and path; fetch the checkpoint again") from None
    return tuple(_module(path, *entry) for entry in entries)


def _module(path: Path, type_name: str, subdirectory: str) -> Module:
    package, _, kind = type_name.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers":
        raise ExportError(f"{path}: module {type_name!r} is Python code of the checkpoint's own, which is never run")
    directory = (path / subdirectory).resolve()
    if not directory.is_relative_to(path.resolve()):
        raise ExportError(f"{path}: module path {subdirectory!r} leaves the checkpoint; correct modules.json")
    if directory.is_dir():
        _refuse_broken_links(directory)
    return Module(kind, directory)


def _refuse_code(directory: Path, content: dict[str, Any], ported: frozenset[str]) -> None:
    """Raise `ExportError` for Python files to run, unless transformers' own class is a port of exactly those.

    That every key fits would not be enough: Python of a checkpoint's own may compute other numbers from the same keys,
    as that which makes a decoder see both ways does, and parity with transformers' class would not show it.
    """
    tokenizer = directory / "tokenizer_config.json"
    named = _code_modules(content) - ported | _code_modules(read_json(tokenizer) if tokenizer.exists() else {})
    if named:
        raise ExportError(
            f"{directory}: its configuration has auto_map, which names Python files to run "
            f"({', '.join(sorted(named))}), and code from a checkpoint is never run; "
            "use a checkpoint for which transformers itself has the class"
        )


def _code_modules(content: dict[str, Any]) -> set[str]:
    """The modules in auto_map, whose values are [repository--]module.Class, or lists of them with null for none."""
    values = content.get("auto_map", {})
    names = values.values() if isinstance(values, dict) else [values]
    flat = [name for value in names for name in (value if isinstance(value, list) else [value]) if name is not None]
    return {str(name).rpartition("--")[2].rpartition(".")[0] or str(name) for name in flat}


def _check_sizes(path: Path, content: dict[str, Any]) -> None:
    """No model has such numbers, and building one takes all memory, or ends deep in a library."""
    for name, limit in _LARGEST.items():
        value = content.get(name, 1)
        if isinstance(value, int) and not 1 <= value <= limit:
            raise ExportError(f"{path}: {name} is {value}; it takes 1 to {limit}; fetch the checkpoint again")
    pad, vocab_size = content.get("pad_token_id"), content.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocab_size, int) and not 0 <= pad < vocab_size:
        raise ExportError(f"{path}: pad_token_id is {pad}; it takes 0 to {vocab_size - 1}, or null")


def _read_limit(directory: Path, num_positions: int) -> int:
    """The longest sequence: the model's positions, or less where sentence-transformers was told so."""
    path = directory / "sentence_bert_config.json"
    limit = read_json(path).get("max_seq_length") if path.exists() else None
    if limit is None:
        return num_positions
    if not isinstance(limit, int) or limit < 1:
        raise ExportError(f"{path}: max_seq_length is {limit!r}; it must be a whole number of at least 1")
    return min(limit, num_positions)


def check_vocabulary(directory: Path, vocabulary: Mapping[str, int], vocab_size: int) -> None:
    """Raise `ExportError` where a tokenizer makes ids that the embedding does not have."""
    largest = max(vocabulary.values(), default=0)
    if largest >= vocab_size:
        raise ExportError(
            f"{directory}: the tokenizer's largest id is {largest}, the embedding has {vocab_size} rows; "
            "use the tokenizer that the model was trained with"
        )


def _open_tokenizer(directory: Path, vocab_size: int) -> Callable[[str], list[int]]:
    if not any((directory / name).is_file() for name in _VOCABULARY_FILES):
        names = " or ".join(_VOCABULARY_FILES)
        raise ExportError(f"{directory}: no tokenizer ({names}); add it, clients need it to make token ids")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ExportError(f"{directory}: its tokenizer cannot be read: {error}; fetch it again") from error
    check_vocabulary(directory, tokenizer.get_vocab(), vocab_size)
    return lambda text: list(tokenizer.encode(text, verbose=False))
