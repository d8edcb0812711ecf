"""Traces by OpenTelemetry. Imported only if an endpoint is set, so that it costs nothing otherwise.

A request's span starts when the request arrives, because batches link to it. All other spans are made afterwards, from
times that are measured anyway:

    Encode                        server span, child of the caller's
    ├── queue                     from arrival to its first run
    └── run                       from its first run to its last, linked to each batch it was in
    batch                         a trace of its own, since it serves many requests; linked to each
    └── compute                   the engine's part

A batch is traced if one of its requests is. Sampling, headers, certificates, resource attributes and the sizes of the
exporter's queue are set by the SDK's own OTEL_ variables.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from service.version import installed_version

# Source: OpenTelemetry's semantic conventions for gRPC servers; other codes are the caller's fault.
_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_PROPAGATOR = TraceContextTextMapPropagator()
_SCOPE = "mhsa-serve"

_Metadata = Iterable[tuple[str, str | bytes]]


class Tracing:
    """One for each process. `processor` gets the spans that have ended."""

    def __init__(self, processor: SpanProcessor) -> None:
        resource = _resource()
        self._processor = processor
        self._requests = _tracer(TracerProvider(resource=resource, shutdown_on_exit=False), processor)
        # The sampler decides about requests. The batch of a sampled one is always kept, since the request links to it.
        batches = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._batches = _tracer(batches, processor)

    @classmethod
    def to_collector(cls, endpoint: str) -> Self:
        """Send spans to an OTLP collector, on a thread of the SDK; http:// is plain text, https:// is TLS."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def extract(self, metadata: _Metadata) -> Context:
        """The trace context that the caller has sent."""
        return _PROPAGATOR.extract({key: value for key, value in metadata if isinstance(value, str)}, Context())

    def start_request(self, caller: Context, method: str, request_id: str) -> "RequestSpan | None":
        """The span of a request that has arrived; None if it is not sampled. `method` has no leading slash."""
        attributes = {"rpc.system.name": "grpc", "rpc.method": method, "mhsa.request_id": request_id}
        span = self._requests.start_span(method, caller, SpanKind.SERVER, attributes)
        return RequestSpan(self._requests, span) if span.is_recording() else None

    def of_model(self, model: str, version: str) -> "ModelTracing":
        """Traces the batches of one model."""
        return ModelTracing(self._batches, {"mhsa.model": model, "mhsa.version": version})

    def close(self) -> None:
        """Send what has ended, and stop. Without a collector that answers this takes the exporter's timeout."""
        self._processor.shutdown()


class RequestSpan:
    """The span of one request. The runner threads add the batches that it is in."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._arrival: float | None = None
        self._batches: list[tuple[float, float, SpanContext]] = []
        self.trace_id = f"{span.get_span_context().trace_id:032x}"
        self.exemplar = {"trace_id": self.trace_id}

    @property
    def span_context(self) -> SpanContext:
        """What links to it hold."""
        return self._span.get_span_context()

    def describe(self, *, arrival: float, num_sequences: int, num_tokens: int) -> None:
        """Set what the request contains, once it is parsed. `arrival` is in monotonic seconds, like all times."""
        self._arrival = arrival
        self._span.set_attributes({"mhsa.sequences": num_sequences, "mhsa.tokens": num_tokens})

    def add_batch(self, started: float, finished: float, batch: SpanContext) -> None:
        """A batch with this request has run."""
        self._batches.append((started, finished, batch))

    def end(self, code: str, reason: str | None, *, model: str, version: str) -> None:
        """The request is answered, with a gRPC status code; `reason` is that of the metrics, if it failed.

        `model` and `version` are empty if it named no model that is served.
        """
        batches, wall = list(self._batches), _wall_clock()
        if self._arrival is not None:
            first = min((started for started, _, _ in batches), default=time.monotonic())
            _child(self._tracer, "queue", self._span, wall(self._arrival), wall(first))
        if batches:
            first, last = min(started for started, _, _ in batches), max(finished for _, finished, _ in batches)
            links = [Link(batch) for _, _, batch in batches]
            _child(self._tracer, "run", self._span, wall(first), wall(last), links)
        self._span.set_attribute("rpc.response.status_code", code)
        if model:
            self._span.set_attributes({"mhsa.model": model, "mhsa.version": version})
        if reason is not None:
            self._span.set_attribute("error.type", reason)
        if code in _SERVER_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class ModelTracing:
    """Traces the batches of one model; called by the runner threads."""

    def __init__(self, tracer: Tracer, attributes: Mapping[str, AttributeValue]) -> None:
        self._tracer = tracer
        self._attributes = attributes

    def record_batch(
        self,
        requests: Iterable[RequestSpan],
        facts: Mapping[str, AttributeValue],
        times: tuple[float, float, float],
        error: str | None,
    ) -> dict[str, str]:
        """A batch with these traced requests has run; returns the exemplar for its metrics.

        `times`: when packing began, when the engine began, and when the engine ended.
        """
        started, computing, finished = map(_wall_clock(), times)
        requests = list(requests)
        links = [Link(request.span_context) for request in requests]
        attributes = {**self._attributes, **{f"mhsa.batch.{name}": fact for name, fact in facts.items()}}
        span = self._tracer.start_span("batch", Context(), attributes=attributes, links=links, start_time=started)
        _child(self._tracer, "compute", span, computing, finished)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(finished)
        for request in requests:
            request.add_batch(times[0], times[-1], span.get_span_context())
        return {"trace_id": f"{span.get_span_context().trace_id:032x}"}


def _child(tracer: Tracer, name: str, parent: Span, started: int, ended: int, links: Sequence[Link] = ()) -> None:
    tracer.start_span(name, set_span_in_context(parent, Context()), links=links, start_time=started).end(ended)


def _wall_clock() -> Callable[[float], int]:
    """Turns monotonic seconds into nanoseconds of the wall clock, made anew for each span since that can be set."""
    difference = time.time_ns() - time.monotonic_ns()
    return lambda monotonic: difference + int(1e9 * monotonic)


def _tracer(provider: TracerProvider, processor: SpanProcessor) -> Tracer:
    provider.add_span_processor(processor)
    return provider.get_tracer(_SCOPE)


def _resource() -> Resource:
    found = Resource.create({SERVICE_VERSION: installed_version()})
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found if is_named else found.merge(Resource({SERVICE_NAME: "mhsa-serve"}))
