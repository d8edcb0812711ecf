"""Models and versions: what is under --models, how each is loaded, and which one a request means."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from service.batcher import Batcher
from service.bundle import MANIFEST, Bundle, Manifest, read_bundle
from service.config import Settings
from service.cost_model import Calibration, calibrate
from service.cpu import available_cpus
from service.engine import Engine, first_line, largest_difference
from service.errors import EngineError, InvalidRequestError, NotFoundError, StartupError, UnavailableError
from service.metrics import Metrics
from service.packing import pack
from service.request import Limits
from service.scheduler import Scheduler

T = TypeVar("T")

log = logging.getLogger(__name__)
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One version of one model, loaded, verified and warm."""

    name: str
    version: str
    manifest: Manifest
    digest: str
    provider: str
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

    Only directories named by a positive decimal number are versions; a leading dot marks an export in progress.
    """
    found = [
        BundlePath(path.parent.parent.name, int(path.parent.name), path.parent)
        for path in models.glob(f"*/*/{MANIFEST}")
        if _VERSION.fullmatch(path.parent.name) and not path.parent.parent.name.startswith(".")
    ]
    if not found:
        raise StartupError(f"{models}: no <name>/<version>/{MANIFEST} in it; make one with mhsa-export")
    return sorted(found)


class Repository:
    """The models that were found at start, by name and version.

    `is_lame_duck`: not ready any more, still serving. `is_draining`: new work is refused.
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
    def is_ready(self) -> bool:
        """Every model found is loaded and healthy, and the server is staying."""
        found = [model for versions in self._models.values() for model in versions.values()]
        is_staying = not (self.is_lame_duck or self.is_draining)
        return is_staying and bool(found) and all(model is not None and model.batcher.is_alive for model in found)

    @property
    def models(self) -> list[Model]:
        """The loaded models."""
        return [model for versions in self._models.values() for model in versions.values() if model is not None]

    def versions(self, name: str) -> list[str]:
        """The versions of a model, lowest first. Raises `NotFoundError`."""
        return [str(version) for version in sorted(self._versions(name))]

    def get(self, name: str, version: str = "") -> Model:
        """The model that a request names: an empty name means the only one, an empty version the highest.

        Raises `InvalidRequestError`, `NotFoundError`, or `UnavailableError` (loading, draining, dead engine).
        """
        versions = self._versions(name)
        if version and not _VERSION.fullmatch(version):
            raise InvalidRequestError(f"version is {version[:32]!r}; it takes a positive decimal number, or nothing")
        number = int(version) if version else max(versions)
        if number not in versions:
            raise NotFoundError(f"model {name!r} has no version {number}")
        model = versions[number]
        if self.is_draining:
            raise UnavailableError("the server is draining")
        if model is None:
            raise UnavailableError(f"model {name!r} version {number} is loading")
        if not model.batcher.is_alive:
            raise UnavailableError(f"model {name!r} version {number}: its engine is dead")
        return model

    def _versions(self, name: str) -> dict[int, Model | None]:
        if not name:
            if len(self._models) != 1:
                raise InvalidRequestError("the request names no model; it may do so only where one model is served")
            (name,) = self._models
        if name not in self._models:
            raise NotFoundError(f"no model {name[:128]!r}")
        return self._models[name]


async def load_model(found: BundlePath, settings: Settings, metrics: Metrics, on_death: Callable[[], None]) -> Model:
    """Read, open, verify against the golden outputs, calibrate (which warms) and start one model.

    Raises `StartupError` when any of it fails.
    """
    started = time.monotonic()
    of_model = metrics.of_model(found.name, str(found.version))
    bundle, engine, calibration = await _in_daemon_thread(lambda: _open_and_verify(found, settings))
    limits = _limits(bundle.manifest, settings)
    scheduler = Scheduler(
        calibration.cost,
        max_batch_tokens=settings.max_batch_tokens or calibration.max_batch_tokens,
        max_queued_tokens=settings.max_queued_tokens,
        num_runners=engine.num_runners,
    )
    batcher = Batcher(scheduler, engine, of_model, on_death)
    batcher.start()
    of_model.set_info(engine.provider, bundle.manifest.precision, bundle.digest)
    of_model.load_seconds.set(time.monotonic() - started)
    log.info(
        "model %s version %d: %s on %s, %d runners, %d tokens a run, loaded in %.1f s",
        *(found.name, found.version, bundle.manifest.precision, engine.provider, engine.num_runners),
        *(settings.max_batch_tokens or calibration.max_batch_tokens, time.monotonic() - started),
    )
    return Model(found.name, str(found.version), bundle.manifest, bundle.digest, engine.provider, limits, batcher)


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but SIGTERM need not wait for it: nothing can interrupt ONNX Runtime while it loads."""
    future: Future[T] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="loader", daemon=True).start()
    return await asyncio.wrap_future(future)


def _open_and_verify(found: BundlePath, settings: Settings) -> tuple[Bundle, Engine, Calibration]:
    bundle = read_bundle(found.path)
    manifest = bundle.manifest
    engine = Engine(
        bundle.graph_path,
        device=settings.device,
        num_cpus=settings.threads or available_cpus(),
        has_token_types=manifest.type_vocab_size > 0,
    )
    try:
        difference = _verify(bundle, engine)
        calibration = calibrate(lambda b: engine.run(b), time.monotonic, manifest.max_sequence_tokens)
    except EngineError as error:
        reason = first_line(error.__cause__)
        raise StartupError(f"{found.path}: the engine cannot run it ({reason}); export it again") from error
    log.info(
        "model %s version %d: %s; fitted %s, worst error %.0f%%",
        *(found.name, found.version, f"within {difference:.1e} of PyTorch"),
        *(calibration.cost, 100 * calibration.worst_error),
    )
    return bundle, engine, calibration


def _verify(bundle: Bundle, engine: Engine) -> float:
    """Replay the golden inputs both ways that the engine runs; the largest difference from PyTorch."""
    golden, limit = bundle.golden, bundle.manifest.golden_tolerance
    batch = pack(golden.sequences)
    pooled, tokens = golden.sentence_embedding, golden.token_embeddings
    difference = max(largest_difference(engine, batch, pooled, tokens, alone=alone) for alone in (False, True))
    if difference > limit:
        raise StartupError(
            f"{bundle.path}: on this machine its answers differ from PyTorch's by {difference:.1e}, the limit is "
            f"{limit:.1e}; it is not served. Export it again here, or use another onnxruntime"
        )
    return difference


def _limits(manifest: Manifest, settings: Settings) -> Limits:
    return Limits(
        vocab_size=manifest.vocab_size,
        type_vocab_size=manifest.type_vocab_size,
        hidden_size=manifest.hidden_size,
        max_sequence_tokens=manifest.max_sequence_tokens,
        max_request_sequences=settings.max_request_sequences,
        max_request_tokens=settings.max_queued_tokens,
        max_message_bytes=settings.max_message_bytes,
    )
