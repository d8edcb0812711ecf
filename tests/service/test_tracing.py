"""Traces by what an exporter gets: parents, links, times, attributes, and what is not traced."""

from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from service import tracing
from service.tracing import RequestSpan
from service.version import installed_version
from tests.tracing import CALLER, NOT_SAMPLED, SAMPLED, TRACE, Traces, attributes, context, linked, parent_id, trace_id

METHOD = "mhsa.encoder.v1.EncoderService/Encode"
FACTS = {"sequences": 3, "tokens": 12, "longest": 5, "fill": 0.8}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """At 50 s by the monotonic clock and 1000 s by the wall's."""
    clocks = SimpleNamespace(time_ns=lambda: 1000 * 10**9, monotonic_ns=lambda: 50 * 10**9, monotonic=lambda: 50.0)
    monkeypatch.setattr(tracing, "time", clocks)
    return Traces()


def begin(traces: Traces, metadata: tuple[tuple[str, str], ...] = ()) -> RequestSpan:
    span = traces.tracing.start_request(traces.tracing.extract(metadata), METHOD, "call-1")
    assert span is not None
    return span


def run_batch(traces: Traces, *requests: RequestSpan, times: tuple[float, float, float] = (41, 42, 44)) -> None:
    traces.tracing.of_model("minilm", "3").record_batch(requests, FACTS, times, None)


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_request_is_a_server_span_of_the_callers_trace(traces: Traces) -> None:
    begin(traces, SAMPLED).end("OK", None, model="minilm", version="3")

    span = traces.one(METHOD)
    assert span.kind is SpanKind.SERVER
    assert (trace_id(span), f"{parent_id(span):016x}") == (TRACE, CALLER)
    assert attributes(span) == {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK",
        "mhsa.request_id": "call-1",
        "mhsa.model": "minilm",
        "mhsa.version": "3",
    }


@pytest.mark.parametrize("metadata", [(), (("traceparent", "nonsense"),)], ids=["none", "nonsense"])
def test_a_request_of_no_trace_begins_one(traces: Traces, metadata: tuple[tuple[str, str], ...]) -> None:
    span = begin(traces, metadata)
    span.end("OK", None, model="", version="")

    assert traces.one(METHOD).parent is None
    assert span.trace_id == trace_id(traces.one(METHOD))


def test_what_the_caller_does_not_trace_is_not_traced(traces: Traces) -> None:
    assert traces.tracing.start_request(traces.tracing.extract(NOT_SAMPLED), METHOD, "call-1") is None


def test_the_wait_and_the_run_are_children_with_the_times_that_were_taken(traces: Traces) -> None:
    span = begin(traces)
    span.describe(arrival=40.0, num_sequences=2, num_tokens=9)
    run_batch(traces, span, times=(43, 43, 45))
    run_batch(traces, span, times=(41.5, 42, 44))
    span.end("OK", None, model="minilm", version="3")

    request, queue, run = traces.one(METHOD), traces.one("queue"), traces.one("run")
    assert {parent_id(queue), parent_id(run)} == {context(request).span_id}
    assert seconds(queue) == (990.0, 991.5)
    assert seconds(run) == (991.5, 995.0)
    assert attributes(request).items() >= {"mhsa.sequences": 2, "mhsa.tokens": 9}.items()


def test_a_batch_is_a_trace_of_its_own_linked_with_its_requests_both_ways(traces: Traces) -> None:
    spans = [begin(traces, SAMPLED), begin(traces)]
    run_batch(traces, *spans)
    for span in spans:
        span.describe(arrival=40.0, num_sequences=1, num_tokens=1)
        span.end("OK", None, model="minilm", version="3")

    batch, compute = traces.one("batch"), traces.one("compute")
    assert batch.parent is None
    assert linked(batch) == {context(request).span_id for request in traces.all(METHOD)}
    assert [linked(run) for run in traces.all("run")] == [{context(batch).span_id}] * 2
    assert parent_id(compute) == context(batch).span_id
    assert (seconds(batch), seconds(compute)) == ((991.0, 994.0), (992.0, 994.0))
    assert attributes(batch) == {
        "mhsa.model": "minilm",
        "mhsa.version": "3",
        "mhsa.batch.sequences": 3,
        "mhsa.batch.tokens": 12,
        "mhsa.batch.longest": 5,
        "mhsa.batch.fill": 0.8,
    }


def test_a_batch_leads_from_its_metrics_to_its_own_trace(traces: Traces) -> None:
    exemplar = traces.tracing.of_model("minilm", "3").record_batch([begin(traces)], FACTS, (41, 42, 44), None)

    assert exemplar == {"trace_id": trace_id(traces.one("batch"))}


def test_the_batch_of_a_sampled_request_is_there_whatever_the_sampler_says_of_new_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    traces = Traces()
    assert traces.tracing.start_request(traces.tracing.extract(()), METHOD, "call-1") is None
    run_batch(traces, begin(traces, SAMPLED))

    assert len(traces.all("batch")) == 1


def test_a_run_that_failed_says_why(traces: Traces) -> None:
    traces.tracing.of_model("minilm", "3").record_batch([begin(traces)], FACTS, (41, 42, 44), "out_of_memory")

    batch = traces.one("batch")
    assert attributes(batch)["error.type"] == "out_of_memory"
    assert batch.status.status_code is StatusCode.ERROR


def test_a_request_that_was_never_run_waited_to_its_end(traces: Traces) -> None:
    span = begin(traces)
    span.describe(arrival=40.0, num_sequences=1, num_tokens=1)
    span.end("DEADLINE_EXCEEDED", "deadline", model="minilm", version="3")

    assert seconds(traces.one("queue")) == (990.0, 1000.0)
    assert traces.all("run") == []


def test_a_request_that_was_refused_before_the_queue_has_no_wait(traces: Traces) -> None:
    begin(traces).end("INVALID_ARGUMENT", "invalid", model="", version="")

    (span,) = traces.spans
    assert attributes(span).keys() == {
        "rpc.system.name", "rpc.method", "rpc.response.status_code", "mhsa.request_id", "error.type"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        ("OK", None, StatusCode.UNSET),
        ("INVALID_ARGUMENT", "invalid", StatusCode.UNSET),
        ("CANCELLED", "cancelled", StatusCode.UNSET),
        ("INTERNAL", "engine", StatusCode.ERROR),
        ("UNAVAILABLE", "draining", StatusCode.ERROR),
        ("DEADLINE_EXCEEDED", "deadline", StatusCode.ERROR),
        ("RESOURCE_EXHAUSTED", "queue_full", StatusCode.UNSET),
        ("UNKNOWN", "internal", StatusCode.ERROR),
        ("UNIMPLEMENTED", "internal", StatusCode.ERROR),
        ("DATA_LOSS", "internal", StatusCode.ERROR),
    ],
)
def test_only_what_the_server_could_not_do_is_an_error(
    traces: Traces, code: str, reason: str | None, status: StatusCode
) -> None:
    begin(traces).end(code, reason, model="", version="")

    span = traces.one(METHOD)
    assert span.status.status_code is status
    assert attributes(span).get("error.type") == reason


@pytest.mark.parametrize(("variable", "name"), [(None, "mhsa-serve"), ("encoder-eu", "encoder-eu")])
def test_the_service_is_named_by_the_operator_or_is_mhsa_serve(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, name: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
    traces = Traces()
    request = begin(traces)
    run_batch(traces, request)
    request.end("OK", None, model="", version="")

    for span in (traces.one(METHOD), traces.one("batch")):
        assert span.resource.attributes["service.name"] == name
        assert span.resource.attributes["service.version"] == installed_version()
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "mhsa-serve"
