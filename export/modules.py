"""A user's own module: `--module package.module:build`, where `build()` returns a `ServedModule`.

    from export.attention import attend
    from export.modules import ServedModule

    class Encoder(torch.nn.Module):
        def forward(self, inputs, position_ids=None, *, mask=None, packing=None):
            ...  # for each layer: attend(q, k, v, num_heads=8, mask=mask, packing=packing)

    def build():
        return ServedModule(Encoder(), hidden_size=256, num_layers=4, num_heads=8, max_sequence_tokens=99, input_size=9)

`forward` has two forms. Padded, the reference: inputs (B, S) token ids, or (B, S, input_size) vectors, with `mask`
(B, S), True where a token is real, to (B, S, hidden_size); `position_ids` are None and mean 0, 1, 2, ... Packed, what
is exported: inputs (T,) or (T, input_size) with `position_ids` (T,) and `packing`, to (T, hidden_size). Whatever looks
from one token to another goes through `attend`, which takes either form. Nothing of that is believed: fused nodes are
counted against `num_layers`, and packed answers are held against padded ones.

This runs the user's code, as `python -m` would. A checkpoint's own code is never run.
"""

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.attention import Packing
from export.checkpoint import Checkpoint
from export.errors import ExportError
from export.weights import KeyRules, load_weights
from service.packing import pack
from service.request import TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class ServedModule:
    """A module and what the server must know of it. Just one of `vocab_size` and `input_size` is given.

    `num_layers` is how often `forward` calls `attend`.
    """

    module: nn.Module
    hidden_size: int
    num_layers: int
    num_heads: int
    max_sequence_tokens: int
    vocab_size: int = 0
    input_size: int = 0
    pad_token_id: int = 0


def read_module(target: str, weights: Path | None) -> Checkpoint:
    """Import, build and try out a user's module. Raises `ExportError` for every fault of it."""
    where = f"--module {target}"
    served = _build(where, target)
    _check_facts(where, served)
    module = served.module.to("cpu", torch.float32).eval()
    if weights is not None:
        load_weights(weights, module, KeyRules(prefix="", unused_prefixes=(), buffers=()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and (num_bad := int((~torch.isfinite(tensor)).sum())):
            raise ExportError(f"{where}: {name} has {num_bad} values that are NaN or infinite")
    _try_out(where, served, module)
    return Checkpoint(
        path=Path(target),
        family="module",
        encoder=module,
        modules=(),
        hidden_size=served.hidden_size,
        num_layers=served.num_layers,
        num_heads=served.num_heads,
        vocab_size=served.vocab_size,
        type_vocab_size=0,
        pad_token_id=served.pad_token_id,
        max_sequence_tokens=served.max_sequence_tokens,
        unused_keys=(),
        tokenizer_files=(),
        tokenize=None,
        input_size=served.input_size,
    )


def _build(where: str, target: str) -> ServedModule:
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise ExportError(f"{where}: it takes PACKAGE.MODULE:BUILD, for example models.encoder:build")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ExportError(f"{where}: importing {name} failed: {_described(error)}") from error
    build = getattr(imported, attribute, None)
    if not callable(build):
        found = f"{attribute} is {build!r:.64}" if hasattr(imported, attribute) else f"it has no {attribute}"
        raise ExportError(f"{where}: {imported.__file__ or name}: {found}")
    try:
        served = build()
    except (Exception, SystemExit) as error:
        raise ExportError(f"{where}: {attribute}() failed: {_described(error)}") from error
    if not isinstance(served, ServedModule):
        raise ExportError(
            f"{where}: {attribute}() returned {type(served).__name__}, not an export.modules.ServedModule"
        )
    return served


def _check_facts(where: str, served: ServedModule) -> None:
    if not isinstance(served.module, nn.Module):
        raise ExportError(f"{where}: module is {type(served.module).__name__}; it must be a torch.nn.Module")
    for name in ("hidden_size", "num_layers", "num_heads", "max_sequence_tokens"):
        _require_number(where, name, getattr(served, name), 1)
    for name in ("vocab_size", "input_size", "pad_token_id"):
        _require_number(where, name, getattr(served, name), 0)
    if (served.vocab_size > 0) == (served.input_size > 0):
        raise ExportError(
            f"{where}: vocab_size is {served.vocab_size} and input_size {served.input_size}; "
            "give the first for token ids, or the second for vectors, and not both"
        )
    if served.pad_token_id >= max(served.vocab_size, 1):
        raise ExportError(f"{where}: pad_token_id is {served.pad_token_id}; token ids end before {served.vocab_size}")


def _require_number(where: str, name: str, value: object, least: int) -> None:
    if type(value) is not int or not least <= value < 2**31:
        raise ExportError(f"{where}: {name} is {value!r:.64}; it must be a whole number of at least {least}")


def _try_out(where: str, served: ServedModule, module: nn.Module) -> None:
    """Both forms on two sequences, for a word about what is wrong before the exporter's own."""
    columns = torch.arange(min(2, served.max_sequence_tokens))
    sequence = TokenSequence(columns.numpy() * 0, columns.numpy(), columns.numpy() * 0)
    batch = pack([sequence] * 2)
    packing = Packing(*map(torch.from_numpy, (batch.pad_index, batch.unpad_index, batch.lengths, batch.position_ids)))
    num_tokens = len(columns)
    tail = (served.input_size,) if served.input_size else ()
    dtype = torch.float32 if served.input_size else torch.int64
    mask = torch.ones(2, num_tokens, dtype=torch.bool)
    positions = torch.from_numpy(batch.position_ids)
    _call(
        f"{where}: padded, forward(inputs, mask=mask)",
        lambda: module(torch.zeros(2, num_tokens, *tail, dtype=dtype), mask=mask),
        (2, num_tokens, served.hidden_size),
    )
    _call(
        f"{where}: packed, forward(inputs, position_ids, packing=packing)",
        lambda: module(torch.zeros(2 * num_tokens, *tail, dtype=dtype), positions, packing=packing),
        (2 * num_tokens, served.hidden_size),
    )


def _call(what: str, forward: Any, shape: tuple[int, ...]) -> None:
    try:
        with torch.no_grad():
            found = forward()
    except (Exception, SystemExit) as error:
        raise ExportError(f"{what} failed: {_described(error)}") from error
    if not isinstance(found, Tensor) or found.shape != shape or found.dtype != torch.float32:
        kind = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ExportError(f"{what} returned {kind}; by its facts it must be torch.float32 {shape}")


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
