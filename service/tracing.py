"""Traces by OpenTelemetry; imported only where an endpoint is set, so that it costs nothing where none is.

A request's span is begun when it comes, for the batches it will be in must be able to name it. Everything else is made
after the fact, from times that were taken anyway:

    Encode                        server span, child of the caller's
    ├── queue                     from arrival to its first run
    └── run                       from its first run to its last, linked to each batch it was in
    batch                         a trace of its own: it belongs to many, and is linked to each
    └── compute                   the engine's part

A batch is traced if one of its requests is. Sampling, headers, certificates, resource attributes and the sizes of the
exporter's queue are the SDK's own OTEL_ variables.
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

# Source: OpenTelemetry's semantic conventions for gRPC servers; other codes are the caller's doing.
_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_PROPAGATOR = TraceContextTextMapPropagator()
_SCOPE = "mhsa-serve"

_Metadata = Iterable[tuple[str, str | bytes]]


class Tracing:
    """One for a process. `processor` takes the spans that ended."""

    def __init__(self, processor: SpanProcessor) -> None:
        resource = _resource()
        self._processor = processor
        self._requests = _tracer(TracerProvider(resource=resource, shutdown_on_exit=False), processor)
        # What is sampled is decided with the request; a batch of one that is sampled is there for its link.
        batches = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._batches = _tracer(batches, processor)

    @classmethod
    def to_collector(cls, endpoint: str) -> Self:
        """Send spans to an OTLP collector from a thread of the SDK's; http:// is plain text, https:// is TLS."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def caller_of(self, metadata: _Metadata) -> Context:
        """What the caller says of the trace that it is in."""
        return _PROPAGATOR.extract({key: value for key, value in metadata if isinstance(value, str)}, Context())

    def begin(self, caller: Context, method: str, request_id: str) -> "RequestSpan | None":
        """A request has come; None if it isn't to be traced. `method` is the gRPC path without its first slash."""
        attributes = {"rpc.system.name": "grpc", "rpc.method": method, "mhsa.request_id": request_id}
        span = self._requests.start_span(method, caller, SpanKind.SERVER, attributes)
        return RequestSpan(self._requests, span) if span.is_recording() else None

    def of_model(self, model: str, version: str) -> "ModelTracing":
        """What traces the batches of one model."""
        return ModelTracing(self._batches, {"mhsa.model": model, "mhsa.version": version})

    def close(self) -> None:
        """Send what has ended, and stop. It takes as long as the exporter's timeout if nobody takes it."""
        self._processor.shutdown()


class RequestSpan:
    """The span of one request, from its arrival on; `batches` are noted by the threads that run them."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._arrival: float | None = None
        self._batches: list[tuple[float, float, SpanContext]] = []
        self.trace_id = f"{span.get_span_context().trace_id:032x}"
        self.exemplar = {"trace_id": self.trace_id}

    @property
    def context(self) -> SpanContext:
        """Its name to others."""
        return self._span.get_span_context()

    def describe(self, *, arrival: float, num_sequences: int, num_tokens: int) -> None:
        """Say what it asks for, once that is read. `arrival` is in monotonic seconds, as all times are."""
        self._arrival = arrival
        self._span.set_attributes({"mhsa.sequences": num_sequences, "mhsa.tokens": num_tokens})

    def note_batch(self, started: float, finished: float, batch: SpanContext) -> None:
        """A batch that it was in has run."""
        self._batches.append((started, finished, batch))

    def end(self, code: str, reason: str | None, *, model: str, version: str) -> None:
        """It is answered: with the name of a gRPC code, and if it failed with the reason that the metrics count.

        `model` and `version` are empty where it named none that is served.
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
    """Traces the batches of one model; called from its runners' threads."""

    def __init__(self, tracer: Tracer, attributes: Mapping[str, AttributeValue]) -> None:
        self._tracer = tracer
        self._attributes = attributes

    def note_batch(
        self,
        requests: Iterable[RequestSpan],
        facts: Mapping[str, AttributeValue],
        times: tuple[float, float, float],
        error: str | None,
    ) -> dict[str, str]:
        """A batch has run, with these requests in it that are traced. The exemplar for its metrics.

        `times`: when it began, when the engine began, and when that was done.
        """
        started, computing, finished = map(_wall_clock(), times)
        requests = list(requests)
        links = [Link(request.context) for request in requests]
        attributes = {**self._attributes, **{f"mhsa.batch.{name}": fact for name, fact in facts.items()}}
        span = self._tracer.start_span("batch", Context(), attributes=attributes, links=links, start_time=started)
        _child(self._tracer, "compute", span, computing, finished)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(finished)
        for request in requests:
            request.note_batch(times[0], times[-1], span.get_span_context())
        return {"trace_id": f"{span.get_span_context().trace_id:032x}"}


def _child(tracer: Tracer, name: str, parent: Span, started: int, ended: int, links: Sequence[Link] = ()) -> None:
    tracer.start_span(name, set_span_in_context(parent, Context()), links=links, start_time=started).end(ended)


def _wall_clock() -> Callable[[float], int]:
    """From monotonic seconds to nanoseconds by the clock on the wall. Made anew for each span, since that gets set."""
    difference = time.time_ns() - time.monotonic_ns()
    return lambda monotonic: difference + int(1e9 * monotonic)


def _tracer(provider: TracerProvider, processor: SpanProcessor) -> Tracer:
    provider.add_span_processor(processor)
    return provider.get_tracer(_SCOPE)


def _resource() -> Resource:
    found = Resource.create({SERVICE_VERSION: installed_version()})
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found if is_named else found.merge(Resource({SERVICE_NAME: "mhsa-serve"}))
