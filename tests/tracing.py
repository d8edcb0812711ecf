"""What traces are looked at with: an exporter that keeps them, and a caller's side of one."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from service.tracing import Tracing

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
NOT_SAMPLED = (("traceparent", f"00-{TRACE}-{CALLER}-00"),)


class Traces:
    """Tracing whose spans stay here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """Those that ended, in that order."""
        return self._exporter.get_finished_spans()

    def all(self, name: str) -> list[ReadableSpan]:
        """The spans of a name."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of a name."""
        (span,) = self.all(name)
        return span


def context(span: ReadableSpan) -> SpanContext:
    """A span's own name."""
    found: SpanContext = span.context
    return found


def trace_id(span: ReadableSpan) -> str:
    """As it is written."""
    return f"{context(span).trace_id:032x}"


def parent_id(span: ReadableSpan) -> int:
    """The id of the span above it; 0 for none."""
    return 0 if span.parent is None else span.parent.span_id


def linked(span: ReadableSpan) -> set[int]:
    """The ids of the spans that it is linked to."""
    return {link.context.span_id for link in span.links}


def attributes(span: ReadableSpan) -> dict[str, object]:
    """What it says of itself."""
    return dict(span.attributes or {})
