"""State dicts that are no Hugging Face checkpoint: the plain attention module, Vaswani's encoder, and torch's own.

Sizes are read from the weights. What weights cannot tell comes from config.json beside them, or from --set for a bare
file (facts.py). Keys are counted as for any checkpoint (weights.py), behind whatever one prefix they all have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from tokenizers import Tokenizer
from torch import nn

from export.checkpoint import TOKENIZER_FILES, Checkpoint, check_vocabulary
from export.encoder import Activation, Encoder, EncoderConfig, Norm, Positions
from export.errors import ExportError
from export.facts import MODEL_TYPE, Fact, check_facts
from export.plain import AttentionStack, TorchAttention, TorchEncoder
from export.weights import KeyRules, load_weights, read_shapes

Shapes = Mapping[str, tuple[int, ...]]

_HEADS = Fact("num_heads", most=2**14)
_CAUSAL = Fact("is_causal", choices=(True, False))
_LIMIT = Fact("max_sequence_tokens", most=2**17)


@dataclass(frozen=True, slots=True, eq=False)
class _Built:
    """A model without its weights. `holder` is what the file's keys name, behind `prefix`."""

    encoder: nn.Module
    holder: nn.Module
    prefix: str
    width: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What to ask for, and how to build the model from that and the shapes in the file."""

    facts: Sequence[Fact]
    build: Callable[[Path, Shapes, dict[str, Any]], _Built]


def is_state_dict(model_type: object) -> bool:
    """Whether it is one that is read here."""
    return isinstance(model_type, str) and model_type in _KINDS


def read_state_dict(path: Path, content: Mapping[str, Any]) -> Checkpoint:
    """Read a directory or a bare file of weights; `content` is its config.json, or what was set.

    Raises `ExportError`.
    """
    shapes = read_shapes(path)  # before anything is asked for: a pickle is refused whatever it holds
    model_type = content.get(MODEL_TYPE)
    if not is_state_dict(model_type):
        given = f"{MODEL_TYPE} is {model_type!r}" if model_type is not None else f"no {MODEL_TYPE}"
        raise ExportError(
            f"{path}: {given}, and weights do not tell what they are weights of; "
            f"give --set {MODEL_TYPE}=NAME with one of {', '.join(_KINDS)}"
        )
    kind = _KINDS[str(model_type)]
    facts = check_facts(path, content, kind.facts)
    built = kind.build(path, shapes, facts)
    load_weights(path, built.holder, KeyRules(prefix=built.prefix, unused_prefixes=(), buffers=()))
    is_text = isinstance(built.encoder, Encoder)
    vocab_size = facts["vocab_size"] if is_text else 0
    return Checkpoint(
        path=path,
        family=str(model_type),
        encoder=built.encoder.eval(),
        modules=(),
        hidden_size=built.width,
        num_layers=built.num_layers,
        num_heads=facts["n_heads" if is_text else "num_heads"],
        vocab_size=vocab_size,
        type_vocab_size=0,
        pad_token_id=facts.get("pad_token_id", 0),
        max_sequence_tokens=facts["max_positions" if is_text else "max_sequence_tokens"],
        unused_keys=(),
        tokenizer_files=_tokenizer_files(path) if is_text else (),
        tokenize=_open_tokenizer(path, vocab_size) if is_text else None,
        input_size=0 if is_text else built.width,
    )


def _build_attention(path: Path, shapes: Shapes, facts: dict[str, Any]) -> _Built:
    prefix, num_layers = _find_layers(path, shapes, "q_lin.weight")
    first = f"{prefix}{'' if num_layers is None else '0.'}q_lin.weight"
    width = _width(path, first, shapes, facts["num_heads"])
    stack = AttentionStack(width, facts["num_heads"], num_layers or 1, is_causal=facts["is_causal"])
    return _Built(stack, stack.layers[0] if num_layers is None else stack.layers, prefix, width, len(stack.layers))


def _build_torch_attention(path: Path, shapes: Shapes, facts: dict[str, Any]) -> _Built:
    prefix, num_layers = _find_layers(path, shapes, "in_proj_weight")
    if num_layers is not None:
        raise ExportError(f"{path}: {num_layers} attentions, one after the other; a torch.nn.MultiheadAttention is one")
    width = _width(path, f"{prefix}in_proj_weight", shapes, facts["num_heads"])
    attention = nn.MultiheadAttention(
        width, facts["num_heads"], bias=f"{prefix}in_proj_bias" in shapes, batch_first=True
    )
    return _Built(TorchAttention(attention, is_causal=facts["is_causal"]), attention, prefix, width, 1)


def _build_torch_encoder(path: Path, shapes: Shapes, facts: dict[str, Any]) -> _Built:
    layers, num_layers = _find_layers(path, shapes, "self_attn.in_proj_weight")
    if num_layers is None or not f".{layers}".endswith(".layers."):
        raise ExportError(f"{path}: no layers.0.self_attn.in_proj_weight; it is no torch.nn.TransformerEncoder")
    prefix, first = layers.removesuffix("layers."), f"{layers}0."
    width = _width(path, f"{first}self_attn.in_proj_weight", shapes, facts["num_heads"])
    eps = float(facts["layer_norm_eps"])
    layer = nn.TransformerEncoderLayer(
        width,
        facts["num_heads"],
        dim_feedforward=_inner_width(shapes.get(f"{first}linear1.weight", ()), width),
        activation=facts["activation"],
        layer_norm_eps=eps,
        norm_first=facts["norm_first"],
        bias=f"{first}linear1.bias" in shapes,
        batch_first=True,
    )
    has_norm = f"{prefix}norm.weight" in shapes
    norm = nn.LayerNorm(width, eps, bias=f"{first}norm1.bias" in shapes) if has_norm else None
    encoder = nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False)
    return _Built(TorchEncoder(encoder, is_causal=facts["is_causal"]), encoder, prefix, width, num_layers)


def _build_encoder(path: Path, shapes: Shapes, facts: dict[str, Any]) -> _Built:
    config = EncoderConfig(**{field.name: facts[field.name] for field in fields(EncoderConfig)})
    _require_heads(path, config.n_heads, config.d_model)
    if facts["pad_token_id"] >= config.vocab_size:
        raise ExportError(f"{path}: pad_token_id {facts['pad_token_id']}, the vocabulary has {config.vocab_size}")
    # Before the model is made, as large as config.json says: the file has as much of it.
    for key, shape in (
        ("embedding.weight", (config.vocab_size, config.d_model)),
        *((f"layers.{layer}.ff_in.weight", (config.d_ff, config.d_model)) for layer in range(config.n_layers)),
    ):
        if shapes.get(key) != shape:
            found = f"has shape {shapes[key]}" if key in shapes else "is missing"
            raise ExportError(f"{path}: {key} {found}, by config.json it is {shape}; correct one of them")
    encoder = Encoder(config)
    return _Built(encoder, encoder, "", config.d_model, config.n_layers)


def _find_layers(path: Path, shapes: Shapes, ending: str) -> tuple[str, int | None]:
    """What stands before `ending` in every key that has it: a prefix, with the number of layers or None for just one.

    Raises `ExportError` unless layers are counted from 0 without a gap.
    """
    for part, reason in _REFUSED.items():
        if key := next((key for key in shapes if part in key), None):
            raise ExportError(f"{path}: it has {key}: {reason}")
    stems = sorted(key.removesuffix(ending) for key in shapes if f".{key}".endswith(f".{ending}"))
    if not stems:
        raise ExportError(f"{path}: no {ending} in it; its keys are {_some(shapes) or 'none'}")
    matches = [re.fullmatch(r"(.*\.)?(0|[1-9][0-9]{0,8})\.", stem, re.DOTALL) for stem in stems]
    if len(stems) == 1 and matches[0] is None:
        return stems[0], None
    prefixes = {match[1] or "" for match in matches if match}
    indices = {int(match[2]) for match in matches if match}
    if None in matches or len(prefixes) > 1 or indices != set(range(len(stems))):
        raise ExportError(f"{path}: {ending} is under {_some(stems)}; one prefix and layers from 0 are wanted")
    return prefixes.pop(), len(stems)


def _width(path: Path, key: str, shapes: Shapes, num_heads: int) -> int:
    shape = shapes[key]
    parts = 3 if key.endswith("in_proj_weight") else 1
    if len(shape) != 2 or shape[0] != parts * shape[1] or shape[1] < 1:
        raise ExportError(f"{path}: {key} has shape {shape}; for self-attention it is ({parts} x width, width)")
    _require_heads(path, num_heads, shape[1])
    return shape[1]


def _inner_width(shape: tuple[int, ...], width: int) -> int:
    """Of the feed-forward network. What has another shape is refused when it is loaded: 1 does for that."""
    return shape[0] if len(shape) == 2 and shape[1] == width else 1


def _require_heads(path: Path, num_heads: int, width: int) -> None:
    if width % num_heads:
        raise ExportError(f"{path}: {num_heads} heads do not divide the width of {width}; correct their number")


def _some(names: Sequence[str] | Mapping[str, object]) -> str:
    listed = [name or "no prefix" for name in list(names)[:8]]
    return ", ".join(listed) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _tokenizer_files(path: Path) -> tuple[Path, ...]:
    return tuple(file for name in TOKENIZER_FILES if (file := path / name).is_file())


def _open_tokenizer(path: Path, vocab_size: int) -> Callable[[str], list[int]] | None:
    """The tokenizers library's own file; None where there is none."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ExportError(f"{path}: its tokenizer cannot be read: {error}; fetch it again") from error
    check_vocabulary(path, tokenizer.get_vocab(), vocab_size)
    return lambda text: list(tokenizer.encode(text).ids)


_REFUSED = {
    "q_proj_weight": "keys or values of another width (kdim, vdim); in self-attention all three are one",
    "bias_k": "an extra key and value (add_bias_kv), which the fused operator does not take",
}
_KINDS = {
    "mhsa": _Kind((_HEADS, _CAUSAL, _LIMIT), _build_attention),
    "mhsa_encoder": _Kind(
        (
            *(Fact(name) for name in ("vocab_size", "d_model", "d_ff")),
            Fact("n_heads", most=2**14),
            Fact("n_layers", most=1000),
            Fact("max_positions", most=2**17),
            Fact("positions", choices=get_args(Positions)),
            Fact("norm", choices=get_args(Norm)),
            Fact("activation", choices=get_args(Activation)),
            _CAUSAL,
            Fact("pad_token_id", least=0),
        ),
        _build_encoder,
    ),
    "torch.nn.TransformerEncoder": _Kind(
        (
            _HEADS,
            Fact("activation", choices=("relu", "gelu")),
            Fact("norm_first", choices=(True, False)),
            Fact("layer_norm_eps", kind=float, least=1e-12, most=1),
            _CAUSAL,
            _LIMIT,
        ),
        _build_torch_encoder,
    ),
    "torch.nn.MultiheadAttention": _Kind(
        (_HEADS, _CAUSAL, Fact("add_zero_attn", choices=(False,)), _LIMIT), _build_torch_attention
    ),
}
