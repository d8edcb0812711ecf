"""What the command line names as the model, opened: a checkpoint, a state dict, or a user's own module."""

import os
from dataclasses import dataclass
from pathlib import Path

from export.checkpoint import Checkpoint, read_checkpoint, read_json
from export.errors import ExportError
from export.facts import MODEL_TYPE, parse_settings
from export.modules import read_module
from export.state_dicts import is_state_dict, read_state_dict
from service.bundle import Task

_NOTHING = "nothing to export; give a CHECKPOINT or --module"


@dataclass(frozen=True, slots=True)
class Source:
    """`path` to a directory or a bare file of weights with `settings`; or `module` and its `weights`, if any."""

    path: Path | None
    settings: tuple[str, ...] = ()
    module: str | None = None
    weights: Path | None = None
    task: Task | None = None

    @property
    def name(self) -> str:
        """The model's, where none is given. Raises `ExportError` where nothing suggests itself."""
        if self.path is None:
            raise ExportError("a module has no name of its own to go by; give --name" if self.module else _NOTHING)
        real = Path(os.path.realpath(self.path))  # not Path.resolve: it raises RuntimeError where links go in circles
        return real.stem if real.is_file() else real.name


def open_source(source: Source) -> Checkpoint:
    """Read and check everything. Raises `ExportError`."""
    found = _open(source)
    if source.task == "classification" and found.classifier is None:
        raise ExportError("--task classification is for checkpoints in transformers' layout; this is none")
    return found


def _open(source: Source) -> Checkpoint:
    if source.module is not None:
        if source.path is not None or source.settings:
            raise ExportError("--module stands in place of CHECKPOINT and --set; give one or the other")
        return read_module(source.module, source.weights)
    if source.weights is not None:
        raise ExportError("--weights is for --module; give the file in place of CHECKPOINT")
    if source.path is None:
        raise ExportError(_NOTHING)
    if source.path.suffix == ".safetensors" and not source.path.exists():
        raise ExportError(f"{source.path}: there is no such file")
    if source.path.is_file():
        return read_state_dict(source.path, parse_settings(source.settings))
    if source.settings:
        raise ExportError(f"{source.path}: --set is for a bare file of weights; correct the directory's config.json")
    config = source.path / "config.json"
    content = read_json(config) if config.is_file() else {}
    if is_state_dict(content.get(MODEL_TYPE)):
        return read_state_dict(source.path, content)
    return read_checkpoint(source.path, source.task)
