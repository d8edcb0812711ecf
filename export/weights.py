"""A checkpoint's weights: safetensors only, and every key accounted for.

A key is one that the model needs, or one that the family says an encoder leaves aside (heads, constant buffers).
Anything missing, unknown or of another shape stops the export; transformers' own loader would initialise what is
missing at random and go on with a warning. A pickle (`.bin`) is refused: reading one runs whatever code is in it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from export.errors import ExportError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in '
    "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
)


@dataclass(frozen=True, slots=True)
class KeyRules:
    """How a family's keys map to the model's: `prefix` is dropped, `renames` maps old endings to today's.

    Keys in `buffers` and under `unused_prefixes` are left aside.
    """

    prefix: str
    unused_prefixes: tuple[str, ...]
    buffers: tuple[str, ...]
    renames: tuple[tuple[str, str], ...]

    def current_key(self, name: str) -> str:
        """The key that the model has for a key of the file."""
        key = name.removeprefix(self.prefix)
        for old, new in self.renames:
            if key.endswith(old):
                return key.removesuffix(old) + new
        return key

    def is_left_aside(self, key: str) -> bool:
        """Whether an encoder has no use for it."""
        return key in self.buffers or key.startswith(self.unused_prefixes)


def load_weights(directory: Path, model: nn.Module, rules: KeyRules) -> tuple[str, ...]:
    """Give the model its weights, in float32; returns the keys that were left aside. Raises `ExportError`."""
    expected = model.state_dict()
    found: dict[str, Tensor] = {}
    unused, problems = [], []
    for name, tensor in _read_tensors(directory).items():
        key = rules.current_key(name)
        if key in found:
            problems.append(f"{name} repeats {key}")
        elif key in expected:
            found[key] = tensor
            problems += _tensor_problems(name, tensor, expected[key])
        elif rules.is_left_aside(key):
            unused.append(name)
        else:
            problems.append(f"{name} is unknown")
    problems += [f"{key} is missing" for key in expected.keys() - found.keys()]
    if problems:
        raise ExportError(
            f"{directory}: {len(problems)} of its weights do not fit config.json: {'; '.join(sorted(problems))}. "
            "Use a whole checkpoint of the family that config.json names"
        )
    model.load_state_dict({key: tensor.float() for key, tensor in found.items()})
    return tuple(sorted(unused))


def _tensor_problems(name: str, tensor: Tensor, expected: Tensor) -> Iterable[str]:
    if tensor.shape != expected.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
    elif not tensor.is_floating_point():
        yield f"{name} is {tensor.dtype}, expected floating point"
    elif num_bad := int((~torch.isfinite(tensor)).sum()):
        yield f"{name} has {num_bad} values that are NaN or infinite"


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        try:
            tensors |= safetensors.torch.load_file(file)
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{file}: not a readable safetensors file ({error}); fetch it again") from None
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _WHOLE).is_file():
        return [directory / _WHOLE]
    if (directory / _INDEX).is_file():
        return _shards(directory / _INDEX)
    if pickles := sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in directory.glob(suffix)):
        raise ExportError(
            f"{directory}: {pickles[0]} is a pickle, and loading one can run any code in it; "
            f"convert it where you trust it, then export again: {_CONVERT}"
        )
    raise ExportError(f"{directory}: neither {_WHOLE} nor {_INDEX}; give a directory with the whole checkpoint")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ExportError(f"{index}: no weight_map from keys to files in it; fetch the checkpoint again") from None
    if strange := [name for name in names if Path(name).name != name]:
        raise ExportError(f"{index}: shard {strange[0]!r} is not a plain file name; fetch the checkpoint again")
    return [index.parent / name for name in names]
