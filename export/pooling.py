"""Pooling on the packed form: (T, E) rows -> (B, E), one vector per sequence. Chosen by the checkpoint, never guessed.

A wrong pooling gives vectors that look right and rank wrong, so it is read from sentence-transformers' files. Where
they are missing the user must say; where they and the user disagree the export stops.

Slots are selected, not multiplied by zero: a row that is not finite stays its own sequence's trouble.
"""

import typing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from export.attention import Packing
from export.checkpoint import Checkpoint, Module, read_json
from export.errors import ExportError
from service.bundle import Pooling

POOLINGS: tuple[Pooling, ...] = typing.get_args(Pooling)

# sentence-transformers' names, in both layouts of 1_Pooling/config.json that it has written.
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
_NAMES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}

# The smallest norm that is divided by, as in torch.nn.functional.normalize: a zero vector stays zero, not NaN.
_SMALLEST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class PoolingChoice:
    """How token vectors become one: `mode`, then division by the L2 norm if `normalize`."""

    mode: Pooling
    normalize: bool


def pool(rows: Tensor, packing: Packing, choice: PoolingChoice) -> Tensor:
    """(T, E) -> (B, E)."""
    pooled = _POOL[choice.mode](rows, packing)
    if not choice.normalize:
        return pooled
    norms = pooled.square().sum(-1, keepdim=True).sqrt()  # (B, 1)
    return pooled / norms.clamp_min(_SMALLEST_NORM)


def _pool_mean(rows: Tensor, packing: Packing) -> Tensor:
    slots = packing.pad(rows).masked_fill(~packing.is_real().unsqueeze(-1), 0.0)  # (B, S, E)
    return slots.sum(1) / packing.lengths.unsqueeze(1)


def _pool_max(rows: Tensor, packing: Packing) -> Tensor:
    is_unused = ~packing.is_real().unsqueeze(-1)  # (B, S, 1)
    slots = packing.pad(rows)  # (B, S, E)
    largest = slots.masked_fill(is_unused, torch.finfo(rows.dtype).min).amax(1)
    # ONNX Runtime's maximum passes over a NaN, and the answer would look good. The sum does not; 0 x NaN is NaN.
    return largest + 0.0 * slots.masked_fill(is_unused, 0.0).sum(1)


def _pool_cls(rows: Tensor, packing: Packing) -> Tensor:
    return rows.index_select(0, packing.pad_index[:, 0])


def _pool_last(rows: Tensor, packing: Packing) -> Tensor:
    return rows.index_select(0, packing.pad_index[:, 0] + packing.lengths - 1)


_POOL = {"mean": _pool_mean, "max": _pool_max, "cls": _pool_cls, "last": _pool_last}


def choose_pooling(
    checkpoint: Checkpoint, asked_mode: Pooling | None = None, asked_normalize: bool | None = None
) -> PoolingChoice:
    """What the checkpoint declares, or what the user asked for where it declares nothing. Raises `ExportError`."""
    mode, normalize = _read_pooling(checkpoint), _read_normalize(checkpoint)
    if None not in (mode, asked_mode) and mode != asked_mode:
        raise _contradiction(checkpoint, f"--pooling {asked_mode}", f"pools by {mode}")
    if None not in (normalize, asked_normalize) and normalize != asked_normalize:
        says = "normalizes" if normalize else "does not normalize"
        raise _contradiction(checkpoint, "--normalize" if asked_normalize else "--no-normalize", says)
    mode, normalize = mode or asked_mode, asked_normalize if normalize is None else normalize
    if mode is None or normalize is None:
        raise ExportError(
            f"{checkpoint.path}: it does not say how to make one vector of a sequence's; "
            f"give --pooling {'|'.join(POOLINGS)} and --normalize or --no-normalize"
        )
    return PoolingChoice(mode, normalize)


def _contradiction(checkpoint: Checkpoint, option: str, says: str) -> ExportError:
    return ExportError(f"{checkpoint.path}: {option} contradicts the checkpoint, which {says}; leave it out")


def _read_normalize(checkpoint: Checkpoint) -> bool | None:
    if not checkpoint.modules:
        return None
    return any(module.kind == "Normalize" for module in checkpoint.modules)


def _read_pooling(checkpoint: Checkpoint) -> Pooling | None:
    kinds = [module.kind for module in checkpoint.modules]
    if kinds not in _PIPELINES:
        raise ExportError(
            f"{checkpoint.path}: its modules are {' > '.join(kinds)}; supported: Transformer > Pooling [> Normalize]"
        )
    for module in checkpoint.modules:
        if module.kind == "Pooling":
            return _read_mode(module, checkpoint.hidden_size)
    return None


_PIPELINES: list[list[str]] = [
    [],
    ["Transformer"],
    ["Transformer", "Normalize"],
    ["Transformer", "Pooling"],
    ["Transformer", "Pooling", "Normalize"],
]


def _read_mode(module: Module, hidden_size: int) -> Pooling:
    path = module.path / "config.json"
    config: dict[str, Any] = read_json(path)
    width = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise ExportError(f"{path}: it pools {width} components, the model has {hidden_size}; correct one of them")
    if config.get("include_prompt") is False:
        raise ExportError(f"{path}: include_prompt is false; the server does not know which tokens are a prompt")
    modes = _declared_modes(config)
    supported = [_FLAGS.get(mode, _NAMES.get(mode)) for mode in modes]
    if len(supported) != 1 or supported[0] is None:
        raise ExportError(f"{path}: pooling is {' + '.join(modes) or 'none'}; supported: one of {', '.join(POOLINGS)}")
    return supported[0]


def _declared_modes(config: dict[str, Any]) -> list[str]:
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        return [mode] if isinstance(mode, str) else list(mode)
    return [key for key, is_on in config.items() if key.startswith("pooling_mode_") and is_on]
