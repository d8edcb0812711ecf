"""From a bundle on disk to a running model: prepare (read, open, verify, calibrate), then start."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from service.batcher import Batcher
from service.bounds import Bounds
from service.bundle import Manifest
from service.config import Settings
from service.cost_metrics import Costs
from service.cost_tracker import CostTracker
from service.logs import fields, name_model
from service.metrics import Metrics, ModelMetrics
from service.opening import wanted_device
from service.preparing import Prepared, prepare, verify
from service.repository import BundlePath, Model
from service.request import Limits
from service.scheduler import Scheduler

if TYPE_CHECKING:
    from service.tracing import Tracing

T = TypeVar("T")

log = logging.getLogger(__name__)


async def load_model(
    found: BundlePath,
    settings: Settings,
    metrics: Metrics,
    *,
    on_health: Callable[[], None],
    on_death: Callable[[], None],
    tracing: "Tracing | None" = None,
) -> Model:
    """Read, open, verify against the golden outputs, calibrate (which warms) and start one model.

    Raises `StartupError` when any of it fails.
    """
    started = time.monotonic()
    of_model = metrics.of_model(found.name, str(found.version))
    subject = {"model": found.name, "version": str(found.version)}
    log.info("loading model %s version %d", found.name, found.version, extra=fields(event="loading", **subject))
    prepared = await _in_daemon_thread(lambda: prepare(found.path, settings))
    bundle, engine, precision = prepared.bundle, prepared.engine, prepared.precision
    limits = _limits(bundle.manifest, settings)
    if limits.max_sequence_tokens < bundle.manifest.max_sequence_tokens:
        log.warning(
            "sequences above %d tokens are refused, by --max-request-tokens or --max-queued-tokens; the model takes %d",
            *(limits.max_sequence_tokens, bundle.manifest.max_sequence_tokens),
        )
    max_batch_tokens = settings.max_batch_tokens or prepared.calibration.max_batch_tokens
    batcher = Batcher(
        _scheduler(found, settings, prepared, of_model, max_batch_tokens),
        engine,
        of_model,
        test=lambda: verify(bundle, engine, precision),
        on_health=on_health,
        on_death=on_death,
        tracing=None if tracing is None else tracing.of_model(found.name, str(found.version)),
    )
    in_its_name = copy_context()
    in_its_name.run(name_model, found.name, str(found.version))
    in_its_name.run(batcher.start)
    of_model.set_info(engine.provider, precision, bundle.digest, wanted_device(settings.device))
    of_model.load_seconds.set(time.monotonic() - started)
    _log_calibration(found, prepared)
    log.info(
        "model %s version %d: %s on %s, %d tokens a run, loaded in %.1f s",
        *(found.name, found.version, precision, engine.provider, max_batch_tokens, time.monotonic() - started),
        extra=fields(event="loaded", provider=engine.provider, precision=precision, **subject),
    )
    return Model(
        found.name, str(found.version), bundle.manifest, bundle.digest, engine.provider, precision, limits, batcher
    )


def _scheduler(
    found: BundlePath, settings: Settings, prepared: Prepared, of_model: ModelMetrics, max_batch_tokens: int
) -> Scheduler:
    tracker = CostTracker(
        prepared.calibration.cost,
        max_batch_tokens,
        prepared.engine.num_runners,
        prepared.calibration.worst_error,
        on_refit=partial(_note_refit, found, of_model),
    )
    of_model.costs.watch(partial(_costs, prepared, max_batch_tokens, tracker))
    return Scheduler(
        tracker,
        _bounds(settings),
        max_wait_seconds=settings.max_wait_seconds,
        weights=settings.tenant_weights,
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


def _log_calibration(found: BundlePath, prepared: Prepared) -> None:
    engine, calibration = prepared.engine, prepared.calibration
    tried = ", ".join(f"{one.layout} gave {one.tokens_per_second:.0f} tokens/s" for one in prepared.layouts)
    log.info(
        "model %s version %d: vectors within %.1e of PyTorch's; a run takes %s, +-%.0f%%; %d runners x %d threads, "
        "%d for a lone run (%s); calibrated in %.1f s",
        *(found.name, found.version, prepared.difference, calibration.cost, 100 * calibration.worst_error),
        *(engine.num_runners, engine.num_threads, engine.num_threads_alone, tried or "no choice"),
        prepared.calibration_seconds,
        extra=fields(event="calibrated", model=found.name, version=str(found.version)),
    )


def _note_refit(found: BundlePath, of_model: ModelMetrics, tracker: CostTracker) -> None:
    of_model.costs.refits.inc()
    log.info(
        "model %s version %d: runs take %.2f times as long as predicted; fitted again: a run takes %s",
        *(found.name, found.version, tracker.drift, tracker.cost),
        extra=fields(event="refitted", model=found.name, version=str(found.version), drift=tracker.drift),
    )


def _costs(prepared: Prepared, max_batch_tokens: int, tracker: CostTracker) -> Costs:
    engine, cost = prepared.engine, tracker.cost
    return Costs(
        cost_run_seconds=cost.per_run,
        cost_token_seconds=cost.per_token,
        cost_pair_seconds=cost.per_pair,
        cost_error_ratio=tracker.worst_error,
        cost_drift_ratio=tracker.drift,
        batch_budget_tokens=max_batch_tokens,
        plateau_tokens_per_second=engine.num_runners * prepared.calibration.tokens_per_second,
        runners=engine.num_runners,
        run_threads=engine.num_threads,
        lone_run_threads=engine.num_threads_alone,
    )


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
