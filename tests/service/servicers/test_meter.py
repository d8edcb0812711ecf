"""Requests as their meter traces them, with a real server and client."""

import logging

import pytest

from service.errors import EngineError, InvalidRequestError
from service.logs import TextFormatter
from tests.tracing import CALLER, NOT_SAMPLED, SAMPLED, TRACE, Traces, attributes, parent_id, trace_id
from tests.wire import Wire, encode_request, infer_request, receive, running, send

ENCODE = "mhsa.encoder.v1.EncoderService/Encode"
STREAM = "mhsa.encoder.v1.EncoderService/EncodeStream"
INFER = "inference.GRPCInferenceService/ModelInfer"


def exemplars(wire: Wire, method: str) -> list[dict[str, str]]:
    """Those of the buckets of a method's duration."""
    samples = [s for family in wire.metrics.registry.collect() for s in family.samples]
    buckets = [s for s in samples if s.name == "mhsa_request_duration_seconds_bucket" and s.labels["method"] == method]
    return [dict(bucket.exemplar.labels) for bucket in buckets if bucket.exemplar is not None]


async def test_each_request_of_either_api_is_a_span_below_its_callers() -> None:
    traces = Traces()
    async with running(tracing=traces.tracing) as wire:
        await wire.encoder.Encode(encode_request([[1, 2], [3]]), metadata=(*SAMPLED, ("x-request-id", "call-1")))
        await wire.inference.ModelInfer(infer_request([[1]]), metadata=SAMPLED)

    encode, infer = traces.one(ENCODE), traces.one(INFER)
    for span in (encode, infer):
        assert (trace_id(span), f"{parent_id(span):016x}") == (TRACE, CALLER)
        assert attributes(span).items() >= {"mhsa.model": "fake", "rpc.response.status_code": "OK"}.items()
    assert attributes(encode).items() >= {"mhsa.sequences": 2, "mhsa.tokens": 3, "mhsa.request_id": "call-1"}.items()


async def test_each_request_of_a_stream_is_a_span_of_its_own() -> None:
    traces = Traces()
    async with running(tracing=traces.tracing) as wire:
        call = wire.encoder.EncodeStream(metadata=SAMPLED)
        for name in "abc":
            await send(call, name, [[1]])
            await receive(call)
        await call.done_writing()
        await call.code()

    spans = traces.all(STREAM)
    assert {f"{parent_id(span):016x}" for span in spans} == {CALLER}
    assert len(spans) == 3


async def test_a_request_in_the_queue_carries_its_span() -> None:
    traces = Traces()
    async with running(tracing=traces.tracing) as wire:
        await wire.encoder.Encode(encode_request([[1]]), metadata=SAMPLED)
        await wire.encoder.Encode(encode_request([[1]]), metadata=NOT_SAMPLED)

    spans = [request.span for request in wire.batcher.requests]
    assert [span and span.trace_id for span in spans] == [TRACE, None]


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [(EngineError("x"), "engine", "INTERNAL"), (InvalidRequestError("x"), "invalid", "INVALID_ARGUMENT")],
)
async def test_a_request_that_failed_says_so_in_its_span(error: Exception, reason: str, code: str) -> None:
    traces = Traces()
    async with running(tracing=traces.tracing) as wire:
        wire.batcher.error = error
        await wire.encoder.Encode(encode_request([[1]])).code()

    found = attributes(traces.one(ENCODE))
    assert (found["error.type"], found["rpc.response.status_code"]) == (reason, code)


async def test_a_caller_that_leaves_ends_its_span() -> None:
    traces = Traces()
    async with running(tracing=traces.tracing) as wire:
        wire.batcher.hold(1)
        call = wire.encoder.Encode(encode_request([[1]]))
        await wire.batcher.wait_for_requests(1)
        call.cancel()
        await wire.interceptor.wait_until_idle()

    assert attributes(traces.one(ENCODE))["error.type"] == "cancelled"


async def test_the_duration_leads_to_the_trace() -> None:
    async with running(tracing=Traces().tracing) as wire:
        await wire.encoder.Encode(encode_request([[1]]), metadata=SAMPLED)
        await wire.inference.ModelInfer(infer_request([[1]]), metadata=NOT_SAMPLED)

    assert exemplars(wire, "Encode") == [{"trace_id": TRACE}]
    assert exemplars(wire, "ModelInfer") == []


async def test_without_tracing_nothing_leads_anywhere() -> None:
    async with running() as wire:
        await wire.encoder.Encode(encode_request([[1]]), metadata=SAMPLED)

    assert exemplars(wire, "Encode") == []
    assert wire.batcher.requests[0].span is None


async def test_a_line_of_the_log_names_a_trace_that_was_begun_here() -> None:
    traces, lines = Traces(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(TextFormatter().format(record))  # type: ignore[method-assign]
    logging.getLogger("service.servicers").addHandler(handler)
    async with running(tracing=traces.tracing) as wire:
        wire.batcher.error = EngineError("x")
        await wire.encoder.Encode(encode_request([[1]])).code()
    logging.getLogger("service.servicers").removeHandler(handler)

    assert f"trace_id={trace_id(traces.one(ENCODE))} " in lines[0]
