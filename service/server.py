"""The only wiring: builds the parts, starts them in order, and takes them down in reverse.

Start: bind both ports, so that a taken one is found before minutes of loading; answer health with NOT_SERVING and calls
with UNAVAILABLE; load one model after the other, since ONNX Runtime's sessions must not be created side by side; then
SERVING.

End: NOT_SERVING; go on serving for `drain_seconds`, while load balancers notice; refuse new work with UNAVAILABLE over
a listener that is still open, so that callers get an answer and not a reset; wait for what was accepted, at most
`grace_seconds`; exit.
"""

import asyncio
import contextlib
import logging
import math
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server
from prometheus_client import CollectorRegistry

from protos import encoder_pb2, open_inference_pb2
from protos.encoder_pb2_grpc import add_EncoderServiceServicer_to_server
from protos.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from service.callers import read_callers
from service.config import Settings, changed
from service.errors import StartupError
from service.interceptors import RequestInterceptor
from service.loading import load_model
from service.logs import fields
from service.metrics import Metrics
from service.metrics_page import MetricsPage
from service.repository import Repository, find_bundles
from service.servicers.encode_stream import StreamBounds
from service.servicers.encoder import EncoderServicer
from service.servicers.health import HealthServicer
from service.servicers.meter import Instruments
from service.servicers.open_inference import OpenInferenceServicer
from service.servicers.reflection import reflection_servicer
from service.tls import ServedCertificate
from service.version import installed_version

if TYPE_CHECKING:
    from service.tracing import Tracing

HEALTH_NAMES = (
    encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name,
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)
# After the last answer: for gRPC's own threads to put it on the wire.
_FLUSH_SECONDS = 0.2
# For the last traces, of which a collector that does not answer would take 10.
_TRACES_SECONDS = 2.0

log = logging.getLogger(__name__)


class Server:
    """gRPC, metrics and models of one process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bundles = find_bundles(settings.models)
        self.metrics = Metrics(CollectorRegistry())
        self.repository = Repository(self._bundles)
        self._page = MetricsPage(
            self.metrics.registry, settings.host, settings.metrics_port, lambda: self.repository.is_ready
        )
        self.is_dead = asyncio.Event()
        self._draining = asyncio.Event()
        self._health = HealthServicer(HEALTH_NAMES)
        self.instruments = Instruments(self.metrics, tracing=_open_tracing(settings))
        self._interceptor = RequestInterceptor(self.instruments, read_callers(settings))
        self._grpc = grpc.aio.server(interceptors=[self._interceptor], options=_options(settings))
        bounds = StreamBounds(
            settings.max_stream_requests, settings.max_message_bytes, max_seconds=_max_stream_seconds(settings)
        )
        encoder = EncoderServicer(self.repository, self.instruments, bounds, self._draining)
        add_EncoderServiceServicer_to_server(encoder, self._grpc)
        add_GRPCInferenceServiceServicer_to_server(OpenInferenceServicer(self.repository), self._grpc)
        add_HealthServicer_to_server(self._health, self._grpc)
        add_ServerReflectionServicer_to_server(reflection_servicer(), self._grpc)
        self.grpc_port = settings.grpc_port
        self.metrics_port = settings.metrics_port

    async def start(self) -> None:
        """Listen, NOT_SERVING. Raises `StartupError` when a port or a certificate cannot be had."""
        settings = self._settings
        release = installed_version()
        facts = fields(event="starting", release=release, settings=changed(settings))
        log.info("starting mhsa-serve %s", release, extra=facts)
        try:
            self._page.start()
        except OSError as error:
            raise StartupError(f"--metrics-port {settings.metrics_port} on {settings.host}: {error.strerror}") from None
        except UnicodeError:
            raise StartupError(f"--host {settings.host[:64]!r} is no host name") from None
        self.metrics_port = self._page.port
        self.grpc_port = _bind(self._grpc, settings, self.metrics)
        await self._grpc.start()
        facts = fields(event="listening", grpc_port=self.grpc_port, metrics_port=self.metrics_port)
        log.info("listening: gRPC on port %d, metrics on port %d", self.grpc_port, self.metrics_port, extra=facts)

    async def load(self) -> None:
        """Bring every model's series into being, load one after the other, then SERVING. Raises `StartupError`."""
        for bundle in self._bundles:
            name, version = bundle.name, str(bundle.version)
            is_ready = partial(self.repository.is_model_ready, name, version)
            self.metrics.of_model(name, version).watch_ready(is_ready)
        for bundle in self._bundles:
            model = await load_model(
                bundle,
                self._settings,
                self.metrics,
                on_health=self._on_health,
                on_death=self.is_dead.set,
                tracing=self.instruments.tracing,
            )
            self.repository.add(model)
        self._health.set_serving(True)
        served = [f"{bundle.name}/{bundle.version}" for bundle in self._bundles]
        log.info("serving %s", ", ".join(served), extra=fields(event="serving", models=served))

    async def announce_end(self) -> None:
        """Say NOT_SERVING, and serve on."""
        self.repository.is_lame_duck = True
        self._health.set_serving(False)

    async def drain(self) -> None:
        """Serve on for a while, then refuse, and wait for what was accepted."""
        seconds = self._settings.drain_seconds
        log.info("not serving; draining in %.1f s", seconds, extra=fields(event="leaving"))
        await asyncio.sleep(seconds)
        num_in_flight = self._interceptor.num_in_flight
        log.info("draining: new requests are refused, %d are in flight", num_in_flight, extra=fields(event="draining"))
        self.repository.is_draining = True
        self._draining.set()
        for model in self.repository.models:
            model.batcher.stop_waiting()
        try:
            async with asyncio.timeout(self._settings.grace_seconds):
                await self._interceptor.wait_until_idle()
        except TimeoutError:
            num_in_flight = self._interceptor.num_in_flight
            facts = fields(event="grace_over")
            log.warning("%d requests are not done after the grace; they fail", num_in_flight, extra=facts)

    async def flush(self) -> None:
        """Write and send what has been held back of logs and traces."""
        self.instruments.failures.close()
        if self.instruments.tracing is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self.instruments.tracing.close), _TRACES_SECONDS)

    async def stop(self) -> None:
        """Close everything at once, in reverse order of the start."""
        await self._grpc.stop(None)
        for model in self.repository.models:
            await model.batcher.stop()
        self._page.stop()

    def _on_health(self) -> None:
        """One model's engine failed its test, or works again; health is that of all of them."""
        self._health.set_healthy(self.repository.is_healthy)


async def serve(server: Server) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death; the process's exit code. The process should then just exit.

    Closing gRPC's server instead would answer calls that have come and are not yet read with CANCELLED, which nobody
    retries; a connection that ends is UNAVAILABLE.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await server.start()
    await _first(server.load(), stopping.wait(), server.is_dead.wait())
    if not stopping.is_set():
        await _first(stopping.wait(), server.is_dead.wait())
    # Nothing to drain while a model loads, or with a dead engine. One that is not healthy may have healthy neighbours.
    is_draining = server.repository.is_loaded and server.repository.is_alive
    await server.announce_end()
    if is_draining:
        stopping.clear()
        await _first(server.drain(), stopping.wait())
    await asyncio.sleep(_FLUSH_SECONDS)
    code = 1 if server.is_dead.is_set() else 0
    await server.flush()
    log.info("stopped: exit code %d", code, extra=fields(event="stopped", exit_code=code))
    return code


async def _first(*awaitables: Any) -> None:
    """Wait for the first to end, cancel the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def _open_tracing(settings: Settings) -> "Tracing | None":
    if settings.otlp_endpoint is None:
        return None
    try:
        from service.tracing import Tracing
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("opentelemetry"):
            raise
        raise StartupError("--otlp-endpoint: OpenTelemetry is not installed; install mhsa-serve[otel]") from None
    return Tracing.to_collector(settings.otlp_endpoint)


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        # On by default: a second server would share the port without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Clients that keep idle channels alive would be sent away with too_many_pings.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        *_age_options(settings),
    ]


def _age_options(settings: Settings) -> list[tuple[str, int]]:
    """A client holds on to the addresses it has found while their connections live; so they end, each in its time."""
    if not settings.max_connection_age_seconds:
        return []
    return [
        ("grpc.max_connection_age_ms", math.ceil(1000 * settings.max_connection_age_seconds)),
        ("grpc.max_connection_age_grace_ms", math.ceil(1000 * settings.max_connection_age_grace_seconds)),
    ]


def _max_stream_seconds(settings: Settings) -> float | None:
    """A stream opened at the last moment of a connection has the grace; the second half is for its answers."""
    return settings.max_connection_age_grace_seconds / 2 if settings.max_connection_age_seconds else None


def _bind(server: grpc.aio.Server, settings: Settings, metrics: Metrics) -> int:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    try:
        if settings.tls_cert is None or settings.tls_key is None:
            return server.add_insecure_port(address)
        served = ServedCertificate(settings.tls_cert, settings.tls_key, on_read=metrics.tls_expiry.set)
        return server.add_secure_port(address, served.credentials())
    except RuntimeError:
        raise StartupError(f"--grpc-port {settings.grpc_port} on {settings.host}: taken, or not ours to bind") from None
