"""Every metric's name, help, unit and buckets. The registry is a parameter, so tests and servers never share one.

Label values come only from what the server knows: model and version of a loaded bundle, method and code of the two
APIs, a closed list of reasons. Clients cannot create series. All series exist from the start, so that rate() sees the
first event too.
"""

from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

from service.bounds import Bounds
from service.cost_metrics import CostMetrics
from service.errors import RequestError
from service.version import installed_version

# 1 ms to 10 s: a run takes 3 ms to 100 ms on the machines this was measured on, an overloaded queue seconds.
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
POWERS_OF_TWO = tuple(float(2**k) for k in range(15))
FILL_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)

MODEL = ("model", "version")
OK, CANCELLED = "ok", "cancelled"


class Queue(Protocol):
    """What is shown of a model's queue."""

    @property
    def bounds(self) -> Bounds: ...
    @property
    def used(self) -> Bounds: ...


class Metrics:
    """The server's metrics, in a registry of the caller's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._reasons: tuple[str, ...] = ()
        ProcessCollector(registry=registry)
        self.build_info = Gauge("mhsa_build_info", "1, with the server's release.", ("release",), registry=registry)
        self.build_info.labels(installed_version()).set(1)
        self.requests = Counter(
            "mhsa_requests",
            "Requests by method and gRPC code; each request of a stream counts.",
            ("method", "code"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "mhsa_request_duration_seconds",
            "Whole time of a request in the server.",
            ("method",),
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "mhsa_requests_in_flight",
            "Requests that have come and are not answered.",
            ("method",),
            registry=registry,
        )
        self.errors = Counter(
            "mhsa_errors",
            "Requests that ended in an error, by reason: refused, failed, cancelled.",
            ("method", "reason"),
            registry=registry,
        )
        self.model_outcomes = Counter(
            "mhsa_model_requests",
            "Requests that came to a model's queue, by outcome: ok, or the reason of their error.",
            (*MODEL, "outcome"),
            registry=registry,
        )
        self.sequences = Counter("mhsa_sequences", "Sequences computed.", MODEL, registry=registry)
        self.tokens = Counter("mhsa_tokens", "Tokens computed; nothing is padded.", MODEL, registry=registry)
        self.queue_seconds = Histogram(
            "mhsa_queue_wait_seconds",
            "Wait of a sequence before its run.",
            MODEL,
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.compute_seconds = Histogram(
            "mhsa_compute_seconds",
            "Time of one run of the engine.",
            MODEL,
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.batch_sequences = Histogram(
            "mhsa_batch_sequences", "Sequences in one run.", MODEL, buckets=POWERS_OF_TWO, registry=registry
        )
        self.batch_tokens = Histogram(
            "mhsa_batch_tokens", "Tokens in one run.", MODEL, buckets=POWERS_OF_TWO, registry=registry
        )
        self.batch_fill = Histogram(
            "mhsa_batch_fill_ratio",
            "Real tokens over sequences x longest of one run: low means attention works on empty slots.",
            MODEL,
            buckets=FILL_BUCKETS,
            registry=registry,
        )
        self.queued_sequences = Gauge("mhsa_queue_sequences", "Sequences waiting.", MODEL, registry=registry)
        self.queued_tokens = Gauge("mhsa_queue_tokens", "Tokens waiting.", MODEL, registry=registry)
        self.queue_fullness = Gauge(
            "mhsa_queue_fullness_ratio",
            "Used part of each bound on what waits and what is in flight; at 1 requests are refused or displaced.",
            (*MODEL, "bound"),
            registry=registry,
        )
        self.model_requests = Gauge(
            "mhsa_model_requests_in_flight", "Requests that wait or run.", MODEL, registry=registry
        )
        self.model_bytes = Gauge(
            "mhsa_model_bytes_in_flight",
            "Bytes that the requests in flight hold, their answers included.",
            MODEL,
            registry=registry,
        )
        self.stopped_runs = Counter(
            "mhsa_stopped_runs",
            "Runs that were stopped since every caller had left.",
            MODEL,
            registry=registry,
        )
        self.engine_healthy = Gauge(
            "mhsa_engine_healthy",
            "0 while the engine fails its test or a run does not end; nothing is accepted then.",
            MODEL,
            registry=registry,
        )
        self.engine_failures = Counter(
            "mhsa_engine_failures",
            "Runs that failed, and sequences whose numbers were not finite.",
            MODEL,
            registry=registry,
        )
        self.model_info = Gauge(
            "mhsa_model_info",
            "1 for each model that is served; wanted is the device that it should run on, provider what it runs on.",
            (*MODEL, "provider", "precision", "digest", "wanted"),
            registry=registry,
        )
        self.model_ready = Gauge(
            "mhsa_model_ready",
            "1 while a model is loaded and its engine works, and the server is staying; else 0.",
            MODEL,
            registry=registry,
        )
        self.model_load_seconds = Gauge(
            "mhsa_model_load_seconds",
            "Time to load, verify, warm and calibrate a model.",
            MODEL,
            registry=registry,
        )
        self.costs = CostMetrics(registry, MODEL)
        self.tls_expiry = Gauge(
            "mhsa_tls_certificate_expiry_timestamp_seconds",
            "Unix time at which the first certificate of the chain that is served expires; 0 without TLS.",
            registry=registry,
        )

    def declare_requests(self, methods: Iterable[str], codes: Iterable[str], reasons: Iterable[str]) -> None:
        """Bring the series of both APIs into being, all at 0."""
        codes, self._reasons = tuple(codes), tuple(reasons)
        for method in methods:
            self.request_seconds.labels(method)
            self.in_flight.labels(method)
            for code in codes:
                self.requests.labels(method, code)
            for reason in self._reasons:
                self.errors.labels(method, reason)

    def of_model(self, model: str, version: str) -> "ModelMetrics":
        """The series of one model, all at 0."""
        for outcome in (OK, *self._reasons):
            self.model_outcomes.labels(model, version, outcome)
        return ModelMetrics(self, model, version)


class ModelMetrics:
    """The series of one model, with its labels already filled in."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        labels = (model, version)
        self.sequences = metrics.sequences.labels(*labels)
        self.tokens = metrics.tokens.labels(*labels)
        self.queue_seconds = metrics.queue_seconds.labels(*labels)
        self.compute_seconds = metrics.compute_seconds.labels(*labels)
        self.batch_sequences = metrics.batch_sequences.labels(*labels)
        self.batch_tokens = metrics.batch_tokens.labels(*labels)
        self.batch_fill = metrics.batch_fill.labels(*labels)
        self.engine_failures = metrics.engine_failures.labels(*labels)
        self.load_seconds = metrics.model_load_seconds.labels(*labels)
        self.stopped_runs = metrics.stopped_runs.labels(*labels)
        self.engine_healthy = metrics.engine_healthy.labels(*labels)
        self._model_requests = metrics.model_requests.labels(*labels)
        self._model_bytes = metrics.model_bytes.labels(*labels)
        self._fullness = [metrics.queue_fullness.labels(*labels, bound) for bound in Bounds._fields]
        self._outcomes = metrics.model_outcomes
        self._queued_sequences = metrics.queued_sequences.labels(*labels)
        self._queued_tokens = metrics.queued_tokens.labels(*labels)
        self._ready = metrics.model_ready.labels(*labels)
        self.costs = metrics.costs.of_model(*labels)
        self._info = metrics.model_info
        self._labels = labels

    def watch_queue(self, queue: Queue) -> None:
        """Read what waits and what is in flight at each scrape, so that the gauges cannot go stale."""
        self._queued_sequences.set_function(lambda: queue.used.sequences)
        self._queued_tokens.set_function(lambda: queue.used.tokens)
        self._model_requests.set_function(lambda: queue.used.requests)
        self._model_bytes.set_function(lambda: queue.used.bytes)
        for bound, gauge in enumerate(self._fullness):
            gauge.set_function(partial(_fullness, queue, bound))

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Around one request: counts what becomes of it."""
        outcome = RequestError.reason
        try:
            yield
            outcome = OK
        except RequestError as error:
            outcome = error.reason
            raise
        except CancelledError:
            outcome = CANCELLED
            raise
        finally:
            self._outcomes.labels(*self._labels, outcome).inc()

    def watch_ready(self, is_ready: Callable[[], bool]) -> None:
        """Ask at each scrape whether the model is ready."""
        self._ready.set_function(is_ready)

    def set_info(self, provider: str, precision: str, digest: str, wanted: str) -> None:
        """Say what serves the model, and on which device it should."""
        self._info.labels(*self._labels, provider, precision, digest, wanted).set(1)


def _fullness(queue: Queue, bound: int) -> float:
    return queue.used[bound] / queue.bounds[bound]
