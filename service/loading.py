"""From a bundle on disk to a running model: read, open, verify, calibrate, start."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from service.admission import Bounds
from service.batcher import Batcher
from service.bundle import Bundle, Manifest, Precision, read_bundle
from service.config import Settings
from service.cost_model import Calibration, calibrate
from service.cost_tracker import CostTracker
from service.engine import Engine, differences, first_line
from service.errors import EngineError, StartupError
from service.logs import fields
from service.metrics import Metrics
from service.opening import open_engine, wanted_device
from service.packing import pack
from service.repository import BundlePath, Model
from service.request import Limits
from service.scheduler import Scheduler

T = TypeVar("T")

log = logging.getLogger(__name__)


async def load_model(
    found: BundlePath,
    settings: Settings,
    metrics: Metrics,
    *,
    on_health: Callable[[bool], None],
    on_death: Callable[[], None],
) -> Model:
    """Read, open, verify against the golden outputs, calibrate (which warms) and start one model.

    Raises `StartupError` when any of it fails.
    """
    started = time.monotonic()
    of_model = metrics.of_model(found.name, str(found.version))
    subject = {"model": found.name, "version": str(found.version)}
    log.info("loading model %s version %d", found.name, found.version, extra=fields(event="loading", **subject))
    bundle, engine, precision, calibration = await _in_daemon_thread(lambda: _open_and_verify(found, settings))
    limits = _limits(bundle.manifest, settings)
    max_batch_tokens = settings.max_batch_tokens or calibration.max_batch_tokens
    scheduler = Scheduler(
        CostTracker(calibration.cost, max_batch_tokens, calibration.worst_error),
        _bounds(settings),
        max_batch_tokens=max_batch_tokens,
        num_runners=engine.num_runners,
        max_wait_seconds=settings.max_wait_seconds,
        weights=settings.tenant_weights,
    )
    batcher = Batcher(
        scheduler,
        engine,
        of_model,
        test=lambda: _verify(bundle, engine, precision),
        on_health=on_health,
        on_death=on_death,
    )
    batcher.start()
    of_model.set_info(engine.provider, precision, bundle.digest, wanted_device(settings.device))
    of_model.load_seconds.set(time.monotonic() - started)
    log.info(
        "model %s version %d: %s on %s, %d runners, %d tokens a run, loaded in %.1f s",
        *(found.name, found.version, precision, engine.provider, engine.num_runners),
        *(max_batch_tokens, time.monotonic() - started),
        extra=fields(event="loaded", provider=engine.provider, precision=precision, **subject),
    )
    return Model(
        found.name, str(found.version), bundle.manifest, bundle.digest, engine.provider, precision, limits, batcher
    )


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


def _open_and_verify(found: BundlePath, settings: Settings) -> tuple[Bundle, Engine, Precision, Calibration]:
    bundle = read_bundle(found.path)
    manifest = bundle.manifest
    engine, precision = open_engine(bundle, settings)
    try:
        difference = _verify(bundle, engine, precision)
        calibration = calibrate(
            lambda b: engine.run(b), time.monotonic, manifest.max_sequence_tokens, input_size=manifest.input_size
        )
    except EngineError as error:
        reason = first_line(error.__cause__)
        raise StartupError(f"{found.path}: the engine cannot run it ({reason}); export it again") from error
    log.info(
        "model %s version %d: vectors within %.1e of PyTorch's; "
        "a run takes %.2f ms + %.4f ms a token + %.6f ms a pair, +-%.0f%%",
        *(found.name, found.version, difference),
        *(1e3 * calibration.cost.per_run, 1e3 * calibration.cost.per_token, 1e3 * calibration.cost.per_pair),
        100 * calibration.worst_error,
    )
    return bundle, engine, precision, calibration


def _verify(bundle: Bundle, engine: Engine, precision: Precision) -> float:
    """Replay the golden inputs both ways that the engine runs; the largest difference from PyTorch's vectors."""
    golden, facts = bundle.golden, bundle.manifest.graphs[precision]
    batch = pack(golden.sequences)
    expected = golden.sentence_embedding, golden.token_embeddings
    narrow, wide = (differences(engine, batch, *expected, alone=alone) for alone in (False, True))
    pooled, tokens = max(narrow[0], wide[0]), max(narrow[1], wide[1])
    for what, difference, limit in (
        ("vectors", pooled, facts.pooled_tolerance),
        ("token vectors", tokens, facts.token_tolerance),
    ):
        if difference > limit:
            raise StartupError(
                f"{bundle.path}: on this machine its {precision} {what} differ from PyTorch's by {difference:.1e}, the "
                f"limit is {limit:.1e}; it is not served. Export it again here, or use another onnxruntime"
            )
    return pooled


def _bounds(settings: Settings) -> Bounds:
    return Bounds(
        tokens=settings.max_queued_tokens,
        sequences=settings.max_queued_sequences,
        requests=settings.max_requests_in_flight,
        bytes=settings.max_bytes_in_flight,
    )


def _limits(manifest: Manifest, settings: Settings) -> Limits:
    max_request_tokens = min(settings.max_request_tokens, settings.max_queued_tokens)
    return Limits(
        vocab_size=manifest.vocab_size,
        type_vocab_size=manifest.type_vocab_size,
        hidden_size=manifest.hidden_size,
        output_size=manifest.output_size,
        max_sequence_tokens=min(manifest.max_sequence_tokens, max_request_tokens),
        max_request_sequences=min(settings.max_request_sequences, settings.max_queued_sequences),
        max_request_tokens=max_request_tokens,
        max_request_bytes=settings.max_request_bytes,
        max_message_bytes=settings.max_message_bytes,
        input_size=manifest.input_size,
        is_classifier=manifest.task == "classification",
    )
