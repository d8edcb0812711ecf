"""Models and versions: which are under --models, and which one a request means."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from service.batcher import Batcher
from service.bundle import MANIFEST, VERSION, Manifest, Precision
from service.errors import DrainingError, InvalidRequestError, NotFoundError, StartupError, UnavailableError
from service.request import Limits

# Of ext4, at the root of a volume.
_LOST_AND_FOUND = "lost+found"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One version of one model, loaded, verified and warm."""

    name: str
    version: str
    manifest: Manifest
    digest: str
    provider: str
    precision: Precision
    limits: Limits
    batcher: Batcher


@dataclass(frozen=True, slots=True, order=True)
class BundlePath:
    """Where a bundle lies: DIR/<name>/<version>/."""

    name: str
    version: int
    path: Path


def find_bundles(models: Path) -> list[BundlePath]:
    """Every DIR/<name>/<version>/model.json, sorted. Raises `StartupError` where there is none.

    Only directories named by a positive decimal number are versions; a leading dot marks an export in progress. What
    may not be read is passed over with a warning: a volume's lost+found is never ours.
    """
    closed: list[Path] = []
    found = [
        BundlePath(name, int(version), models / name / version)
        for name in _names_in(models, closed)
        if not name.startswith(".") and name != _LOST_AND_FOUND
        for version in _names_in(models / name, closed)
        if VERSION.fullmatch(version) and MANIFEST in _names_in(models / name / version, closed)
    ]
    if not found:
        raise StartupError(_why_nothing(models, closed))
    for directory in closed:
        log.warning("%s: user %d may not read it; nothing in it is served", directory, os.geteuid())
    return sorted(found)


def _names_in(directory: Path, closed: list[Path]) -> list[str]:
    """What is in a directory, if it is one; one that may not be read goes to `closed`."""
    try:
        return os.listdir(directory)
    except PermissionError:
        closed.append(directory)
    except OSError:
        pass
    return []


def _why_nothing(models: Path, closed: list[Path]) -> str:
    if closed:
        return f"--models {models}: user {os.geteuid()} may not read {closed[0]}; let that user read and enter it"
    if not models.is_dir():
        return f"--models {models}: no such directory; it holds <name>/<version>/{MANIFEST}, made with mhsa-export"
    path = models.resolve()
    if (path / MANIFEST).exists():
        return (
            f"--models {models}: this is a bundle; the directory above <name>/<version>/ is wanted: {path.parents[1]}"
        )
    if any(path.glob(f"*/{MANIFEST}")):
        return f"--models {models}: this is one model's directory; the one above it is wanted: {path.parent}"
    return f"--models {models}: no <name>/<version>/{MANIFEST} in it; make one with mhsa-export"


class Repository:
    """The models that were found at start, by name and version.

    `is_lame_duck`: not ready any more, still serving. `is_draining`, later: new work is refused.
    """

    def __init__(self, bundles: list[BundlePath]) -> None:
        self._models: dict[str, dict[int, Model | None]] = {}
        for bundle in bundles:
            self._models.setdefault(bundle.name, {})[bundle.version] = None
        self.is_lame_duck = False
        self.is_draining = False

    def add(self, model: Model) -> None:
        """A model is ready to serve."""
        self._models[model.name][int(model.version)] = model

    @property
    def is_alive(self) -> bool:
        """No loaded model's engine is dead."""
        return all(model.batcher.is_alive for model in self.models)

    @property
    def is_healthy(self) -> bool:
        """Every loaded model's engine works."""
        return all(model.batcher.is_healthy for model in self.models)

    @property
    def is_loaded(self) -> bool:
        """Every model found is loaded, and there is one."""
        found = [model for versions in self._models.values() for model in versions.values()]
        return bool(found) and all(found)

    @property
    def is_ready(self) -> bool:
        """Every model found is loaded and healthy, and the server is staying."""
        is_staying = not (self.is_lame_duck or self.is_draining)
        return is_staying and self.is_loaded and self.is_alive and self.is_healthy

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether one model is loaded and healthy, and the server is staying. Raises `NotFoundError`."""
        try:
            self.get(name, version)
        except UnavailableError:
            return False
        return not self.is_lame_duck

    @property
    def models(self) -> list[Model]:
        """The loaded models."""
        return [model for versions in self._models.values() for model in versions.values() if model is not None]

    def versions(self, name: str) -> list[str]:
        """The versions of a model, lowest first. Raises `NotFoundError`."""
        _, versions = self._find(name)
        return [str(version) for version in sorted(versions)]

    def get(self, name: str, version: str = "") -> Model:
        """The model that a request names: an empty name means the only one, an empty version the highest.

        Raises `InvalidRequestError`, `NotFoundError`, or `UnavailableError` (loading, draining, an engine that is dead
        or does not work).
        """
        name, versions = self._find(name)
        if version and not VERSION.fullmatch(version):
            raise InvalidRequestError(f"version is {version[:32]!r}; it takes a positive decimal number, or nothing")
        number = int(version) if version else max(versions)
        if number not in versions:
            raise NotFoundError(f"model {name!r} has no version {number}")
        model = versions[number]
        if self.is_draining:
            raise DrainingError("the server is draining")
        if model is None:
            raise UnavailableError(f"model {name!r} version {number} is loading")
        if not model.batcher.is_alive:
            raise UnavailableError(f"model {name!r} version {number}: its engine is dead")
        if not model.batcher.is_healthy:
            raise UnavailableError(f"model {name!r} version {number}: its engine does not work; it is tried again")
        return model

    def _find(self, name: str) -> tuple[str, dict[int, Model | None]]:
        if not name:
            if len(self._models) != 1:
                raise InvalidRequestError("the request names no model; it may do so only where one model is served")
            (name,) = self._models
        if name not in self._models:
            raise NotFoundError(f"no model {name[:128]!r}")
        return name, self._models[name]
