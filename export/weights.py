"""A checkpoint's weights: safetensors only, and every key accounted for.

A key is one that the model needs, or one that the family says an encoder leaves aside (heads, constant buffers).
Anything missing, unknown or of another shape stops the export; transformers' own loader would initialise what is
missing at random and go on with a warning. A pickle (`.bin`) is refused: reading one runs whatever code is in it.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from export.errors import ExportError

_PICKLES = (".bin", ".pt", ".pth")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in '
    "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
)


@dataclass(frozen=True, slots=True)
class KeyRules:
    """How a family's keys map to the model's: `prefix` is dropped, `renames` maps parts of old names to today's.

    A part is one or more of a key's dotted names. `splits` names parts that hold several weights, one below the other.
    Keys under `unused_prefixes` and those that match a pattern of `buffers` are left aside.
    """

    prefix: str
    unused_prefixes: tuple[str, ...]
    buffers: tuple[str, ...]
    renames: tuple[tuple[str, str], ...] = ()
    splits: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def current_keys(self, name: str) -> list[str]:
        """The key that the model has for a key of the file; several where the file holds several weights in one."""
        dotted = f".{name.removeprefix(self.prefix)}."
        for old, new in self.renames:
            dotted = dotted.replace(f".{old}.", f".{new}.")
        for old, parts in self.splits:
            if f".{old}." in dotted:
                return [dotted.replace(f".{old}.", f".{part}.")[1:-1] for part in parts]
        return [dotted[1:-1]]

    def is_left_aside(self, key: str) -> bool:
        """Whether an encoder has no use for it."""
        return key.startswith(self.unused_prefixes) or any(fnmatchcase(key, pattern) for pattern in self.buffers)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Every key with its shape, in a directory or a file; no tensor is read. Raises `ExportError`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(path):
        try:
            with safetensors.safe_open(file, "pt") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from None
    return shapes


def load_weights(path: Path, model: nn.Module, rules: KeyRules) -> tuple[str, ...]:
    """Give the model its weights, in float32, from a directory or a file; returns the keys that were left aside.

    A model that has its encoder under the family's prefix gets it there. Raises `ExportError`.
    """
    weights = model.state_dict()
    names = {key.removeprefix(rules.prefix): key for key in weights}
    expected = {key: weights[name] for key, name in names.items()}
    found: dict[str, Tensor] = {}
    unused: list[str] = []
    tensors, problems = _read_tensors(path)
    for name, key, tensor in _split(tensors, rules, problems):
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
            f"{path}: {len(problems)} problems with its weights: {'; '.join(sorted(problems))}. "
            "Use a whole checkpoint of the very model that is named"
        )
    model.load_state_dict({names[key]: tensor for key, tensor in found.items()})  # copied, into the model's own float32
    return tuple(sorted(unused))


def _split(tensors: dict[str, Tensor], rules: KeyRules, problems: list[str]) -> Iterator[tuple[str, str, Tensor]]:
    """(key of the file, key of the model, weight) for every weight in the file."""
    for name, tensor in tensors.items():
        keys = rules.current_keys(name)
        num_rows = len(tensor) if tensor.ndim else 1
        if num_rows % len(keys):
            problems.append(f"{name} has {num_rows} rows, expected a multiple of {len(keys)}")
        elif len(keys) == 1:
            yield name, keys[0], tensor
        else:
            yield from ((name, key, part) for key, part in zip(keys, tensor.chunk(len(keys)), strict=True))


def _tensor_problems(name: str, tensor: Tensor, expected: Tensor) -> Iterable[str]:
    if tensor.shape != expected.shape:
        yield f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
    elif tensor.is_floating_point() != expected.is_floating_point():
        wanted = "floating point" if expected.is_floating_point() else expected.dtype
        yield f"{name} is {tensor.dtype}, expected {wanted}"
    elif num_bad := int((~torch.isfinite(tensor)).sum()):
        yield f"{name} has {num_bad} values that are NaN or infinite"


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of all files; and where a key is in two of them, or not in the one that the index names."""
    tensors: dict[str, Tensor] = {}
    problems = []
    for file, promised in _weight_files(path).items():
        try:
            found = safetensors.torch.load_file(file)
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from None
        problems += [f"{key} is in {file.name} and in another file" for key in found.keys() & tensors.keys()]
        if promised is not None:
            problems += [f"{key} is not in {file.name}, where {_INDEX} has it" for key in promised - found.keys()]
            problems += [f"{key} is in {file.name}, where {_INDEX} does not have it" for key in found.keys() - promised]
        tensors |= found
    return tensors, problems


def _unreadable(file: Path, error: Exception) -> ExportError:
    return ExportError(f"{file}: not a readable safetensors file ({error}); fetch it again")


def _weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """The files, each with the keys that the index promises in it; None where there is no index. Or just the one."""
    if directory.is_file():
        if directory.suffix in _PICKLES:
            raise _refuse_pickle(directory, directory.name)
        return {directory: None}
    if (directory / _WHOLE).is_file():
        return {directory / _WHOLE: None}
    if (directory / _INDEX).is_file():
        return _shards(directory / _INDEX)
    if pickles := sorted(file.name for suffix in _PICKLES for file in directory.glob(f"*{suffix}")):
        raise _refuse_pickle(directory, pickles[0])
    raise ExportError(f"{directory}: neither {_WHOLE} nor {_INDEX}; give a directory with the whole checkpoint")


def _refuse_pickle(path: Path, name: str) -> ExportError:
    return ExportError(
        f"{path}: {name} is a pickle, and loading one can run any code in it; convert it where you trust it, "
        f"then export again: {_CONVERT.replace('pytorch_model.bin', name)}"
    )


def _shards(index: Path) -> dict[Path, set[str] | None]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ExportError(f"{index}: no weight_map from keys to files in it; fetch the checkpoint again") from None
    for _, name in weight_map:
        if not isinstance(name, str) or Path(name).name != name:
            raise ExportError(f"{index}: shard {name!r} is not a plain file name; fetch the checkpoint again")
    names = sorted({name for _, name in weight_map})
    return {index.parent / shard: {key for key, name in weight_map if name == shard} for shard in names}
