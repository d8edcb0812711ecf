"""What surrounds every call: credentials, counts, ids and the ways a call can end."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub, add_ServerReflectionServicer_to_server
from prometheus_client import CollectorRegistry

from protos.encoder_pb2 import EncodeRequest, EncodeResponse, GetModelRequest
from protos.open_inference_pb2 import ModelReadyRequest, ServerLiveRequest
from service.callers import Callers
from service.errors import QueueFullError
from service.interceptors import METHODS, RequestInterceptor
from service.metrics import Metrics
from service.servicers.health import HealthServicer
from service.servicers.meter import Instruments
from service.servicers.reflection import reflection_servicer
from service.tokens import Token
from tests.wire import Wire, encode_request, infer_request, receive, running, send

TOKENS = ("first-token", "second-token")
ENCODE = "/mhsa.encoder.v1.EncoderService/Encode"
ENCODE_STREAM = "/mhsa.encoder.v1.EncoderService/EncodeStream"


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with running() as running_wire:
        yield running_wire


async def status_of(call: "grpc.aio.Call") -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


# Credentials


@pytest.mark.parametrize(
    "value", ["Bearer first-token", "Bearer second-token", "bearer first-token", "BEARER first-token"]
)
async def test_a_known_token_is_served(value: str) -> None:
    async with running(tokens=TOKENS) as wire:
        await wire.encoder.Encode(encode_request([[1]]), metadata=(("authorization", value),))


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer third-token"),),
        (("authorization", "Bearer first-toke"),),
        (("authorization", "Bearer first-tokenn"),),
        (("authorization", "Bearer "),),
        (("authorization", "first-token"),),
        (("authorization", "Basic first-token"),),
        (("x-authorization", "Bearer first-token"),),
    ],
)
async def test_any_other_credentials_are_refused(metadata: Sequence[tuple[str, str]]) -> None:
    async with running(tokens=TOKENS) as wire:
        calls: list[grpc.aio.Call] = [
            wire.encoder.Encode(encode_request([[1]]), metadata=metadata),
            wire.encoder.EncodeStream(metadata=metadata),
            wire.encoder.GetModel(GetModelRequest(), metadata=metadata),
            wire.inference.ModelInfer(infer_request([[1]]), metadata=metadata),
            wire.inference.ServerLive(ServerLiveRequest(), metadata=metadata),
        ]
        codes = [await call.code() for call in calls]

    assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 5
    assert wire.batcher.requests == []


async def test_the_refusal_says_what_is_wanted_and_is_counted() -> None:
    async with running(tokens=TOKENS) as wire:
        details = await wire.encoder.Encode(encode_request([[1]])).details()

    assert details == "the metadata has no 'authorization: Bearer <token>' with a token this server knows"
    assert wire.sample("mhsa_requests_total", method="Encode", code="UNAUTHENTICATED") == 1
    assert wire.sample("mhsa_errors_total", method="Encode", reason="unauthenticated") == 1


async def test_a_message_is_not_received_from_a_caller_without_credentials() -> None:
    async with running(tokens=TOKENS) as wire:
        call = wire.raw_stream(ENCODE)()

        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED  # and no message has been sent


async def test_without_tokens_every_caller_is_served(wire: Wire) -> None:
    await wire.encoder.Encode(encode_request([[1]]))


async def test_health_is_neither_authenticated_nor_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    async with grpcs_own_services(metrics) as channel:
        check = await HealthStub(channel).Check(HealthCheckRequest(service="a.Service"))
        watch = await HealthStub(channel).Watch(HealthCheckRequest()).read()

    assert (check.status, watch.status) == (check.SERVING, check.SERVING)
    assert sum_of(metrics, "mhsa_requests_total") == 0


async def test_reflection_needs_no_credentials_either() -> None:
    async with grpcs_own_services(Metrics(CollectorRegistry())) as channel:
        asked = iter([ServerReflectionRequest(list_services="")])
        listed = [answer async for answer in ServerReflectionStub(channel).ServerReflectionInfo(asked)]

    assert len(listed[0].list_services_response.service) == 4


async def test_bytes_that_are_no_message_are_the_callers_mistake_in_grpcs_own_services_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with grpcs_own_services(Metrics(CollectorRegistry())) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)(b"\xff\xff")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", bytes, bytes)(b"\xff\xff")
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        reflection = channel.stream_stream(path, bytes, bytes)(iter([b"\xff\xff"]))
        codes = [await call.code() for call in (check, watch, reflection)]

    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 3
    assert not caplog.records  # gRPC would write a traceback for each


@asynccontextmanager
async def grpcs_own_services(metrics: Metrics) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to health and reflection behind an interceptor that knows tokens."""
    server = grpc.aio.server(
        interceptors=[RequestInterceptor(Instruments(metrics), Callers(map(Token.of, TOKENS), "token"))]
    )
    health = HealthServicer(["a.Service"])
    health.set_serving(True)
    add_HealthServicer_to_server(health, server)
    add_ServerReflectionServicer_to_server(reflection_servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


# Callers


async def call_every_way(wire: Wire, metadata: Sequence[tuple[str, str]]) -> set[str]:
    """The callers that the queue was told of, by either API and by a stream."""
    await wire.encoder.Encode(encode_request([[1]]), metadata=metadata)
    await wire.inference.ModelInfer(infer_request([[1]]), metadata=metadata)
    stream = wire.encoder.EncodeStream(metadata=metadata)
    await send(stream, "a", [[1]])
    await receive(stream)
    assert len(wire.batcher.requests) == 3
    return {request.caller for request in wire.batcher.requests}


async def test_the_holder_of_a_token_is_known_to_the_queue_and_his_token_is_not() -> None:
    async with running(tokens=TOKENS) as wire:
        (caller,) = await call_every_way(wire, (("authorization", "Bearer second-token"),))

    assert caller == Token.of("second-token").name
    assert "second" not in caller


async def test_a_tenant_is_known_to_the_queue() -> None:
    async with running(fairness="tenant") as wire:
        assert await call_every_way(wire, (("mhsa-tenant", "acme"),)) == {"acme"}


async def test_callers_do_not_take_the_name_of_one_who_called_before() -> None:
    async with running(fairness="tenant") as wire:
        await wire.encoder.Encode(encode_request([[1]]), metadata=(("mhsa-tenant", "acme"),))
        await wire.encoder.Encode(encode_request([[1]]))

    assert [request.caller for request in wire.batcher.requests] == ["acme", ""]


async def test_a_tenant_that_can_be_none_is_refused_and_counted() -> None:
    async with running(fairness="tenant") as wire:
        metadata = (("mhsa-tenant", "two words"),)
        unary = wire.encoder.Encode(encode_request([[1]]), metadata=metadata)
        stream = wire.encoder.EncodeStream(metadata=metadata)

        for call in (unary, stream):
            assert await status_of(call) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "mhsa-tenant is 'two words'; it takes 1 to 64 of A-Z a-z 0-9 . _ : / + @ -",
            )
    assert wire.batcher.requests == []
    assert wire.sample("mhsa_requests_total", method="Encode", code="INVALID_ARGUMENT") == 1
    assert wire.sample("mhsa_requests_total", method="EncodeStream", code="INVALID_ARGUMENT") == 1


# Counts


async def test_calls_are_counted_by_method_and_code(wire: Wire) -> None:
    await wire.encoder.Encode(encode_request([[1]]))
    await wire.encoder.Encode(encode_request([[-1]])).code()
    await wire.inference.ModelInfer(infer_request([[1]]))
    await wire.inference.ModelReady(ModelReadyRequest(name="x")).code()

    assert wire.sample("mhsa_requests_total", method="Encode", code="OK") == 1
    assert wire.sample("mhsa_requests_total", method="Encode", code="INVALID_ARGUMENT") == 1
    assert wire.sample("mhsa_requests_total", method="ModelInfer", code="OK") == 1
    assert wire.sample("mhsa_requests_total", method="ModelReady", code="NOT_FOUND") == 1
    assert wire.sample("mhsa_errors_total", method="Encode", reason="invalid") == 1
    assert wire.sample("mhsa_errors_total", method="ModelReady", reason="not_found") == 1
    assert wire.sample("mhsa_request_duration_seconds_count", method="Encode") == 2


async def test_a_call_is_in_flight_until_it_is_answered(wire: Wire) -> None:
    held = wire.batcher.hold(1)
    call = wire.encoder.Encode(encode_request([[1]]))
    await wire.batcher.wait_for_requests(1)

    assert wire.sample("mhsa_requests_in_flight", method="Encode") == 1
    assert wire.interceptor.num_in_flight == 1
    held.set()
    await call
    assert wire.sample("mhsa_requests_in_flight", method="Encode") == 0
    assert wire.interceptor.num_in_flight == 0


async def test_an_open_stream_is_in_flight_for_the_drain_and_no_request(wire: Wire) -> None:
    call = wire.encoder.EncodeStream()
    await send(call, "a", [[1]])
    await receive(call)
    assert wire.interceptor.num_in_flight == 1
    assert wire.sample("mhsa_requests_in_flight", method="EncodeStream") == 0

    await call.done_writing()
    await wire.interceptor.wait_until_idle()


async def test_every_series_is_there_before_the_first_call(wire: Wire) -> None:
    for method in METHODS.values():
        assert wire.sample("mhsa_requests_total", method=method, code="OK") == 0
        assert wire.sample("mhsa_requests_total", method=method, code="CANCELLED") == 0
        assert wire.sample("mhsa_requests_in_flight", method=method) == 0


async def test_names_that_clients_make_up_add_no_series(wire: Wire) -> None:
    await wire.encoder.Encode(encode_request([[1]], model="made up")).code()
    before = names_of_series(wire.metrics)
    for number in range(1000):
        await wire.encoder.Encode(encode_request([[1]], model=f"model-{number}")).code()
    await wire.raw("/mhsa.encoder.v1.EncoderService/MadeUp")(b"").code()

    assert names_of_series(wire.metrics) == before
    assert wire.sample("mhsa_requests_total", method="Encode", code="NOT_FOUND") == 1001


# What goes back beside the answer


@pytest.mark.parametrize("ids", [[[1]], [[-1]]], ids=["served", "refused"])
async def test_a_caller_is_told_its_calls_id(wire: Wire, ids: list[list[int]]) -> None:
    for call in (
        wire.encoder.Encode(encode_request(ids), metadata=(("x-request-id", "call-1"),)),
        wire.inference.ModelInfer(infer_request(ids), metadata=(("x-request-id", "call-1"),)),
    ):
        assert dict(await call.trailing_metadata())["x-request-id"] == "call-1"


async def test_a_caller_without_an_id_is_told_the_one_it_got(wire: Wire) -> None:
    trailing = await wire.encoder.Encode(encode_request([[1]])).trailing_metadata()

    assert re.fullmatch("[0-9a-f]{16}", str(dict(trailing)["x-request-id"]))


async def test_a_stream_that_ends_well_or_not_tells_its_id(wire: Wire) -> None:
    metadata = (("x-request-id", "call-1"),)
    ended = wire.encoder.EncodeStream(metadata=metadata)
    await ended.done_writing()
    assert dict(await ended.trailing_metadata())["x-request-id"] == "call-1"
    wire.draining.set()
    drained = wire.encoder.EncodeStream(metadata=metadata)
    assert dict(await drained.trailing_metadata())["x-request-id"] == "call-1"


async def test_a_caller_without_credentials_is_told_its_calls_id() -> None:
    async with running(tokens=TOKENS) as wire:
        call = wire.encoder.Encode(encode_request([[1]]), metadata=(("x-request-id", "call-1"),))
        assert dict(await call.trailing_metadata())["x-request-id"] == "call-1"


async def test_a_full_queue_says_when_to_come_back_and_the_calls_id(wire: Wire) -> None:
    wire.batcher.error = QueueFullError("full", retry_seconds=0.2)
    trailing = dict(await wire.encoder.Encode(encode_request([[1]])).trailing_metadata())

    assert {"x-request-id", "grpc-retry-pushback-ms", "grpc-status-details-bin"} <= trailing.keys()


# How calls end


async def test_a_caller_that_cancels_is_counted_as_cancelled(wire: Wire) -> None:
    wire.batcher.hold(1)
    call = wire.encoder.Encode(encode_request([[1]]))
    await wire.batcher.wait_for_requests(1)
    call.cancel()
    await wire.interceptor.wait_until_idle()

    assert wire.sample("mhsa_requests_total", method="Encode", code="CANCELLED") == 1
    assert wire.sample("mhsa_errors_total", method="Encode", reason="cancelled") == 1
    assert wire.sample("mhsa_requests_in_flight", method="Encode") == 0


async def test_a_caller_whose_deadline_passed_is_counted_as_that(wire: Wire) -> None:
    wire.batcher.hold(1)
    await wire.encoder.Encode(encode_request([[1]]), timeout=0.05).code()
    await wire.interceptor.wait_until_idle()

    assert wire.sample("mhsa_requests_total", method="Encode", code="DEADLINE_EXCEEDED") == 1
    assert wire.sample("mhsa_errors_total", method="Encode", reason="deadline") == 1


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError("secret"), KeyError("secret")], ids=["cancelled", "unhandled"]
)
async def test_whatever_escapes_from_inside_is_answered_and_tells_nothing(wire: Wire, error: BaseException) -> None:
    wire.batcher.error = error
    metadata = (("x-request-id", "call-1"),)

    for call in (
        wire.encoder.Encode(encode_request([[1]]), metadata=metadata),
        wire.inference.ModelInfer(infer_request([[1]]), metadata=metadata),
    ):
        assert await status_of(call) == (
            grpc.StatusCode.INTERNAL,
            "internal error; the server's log has it as request call-1",
        )
    for method in ("Encode", "ModelInfer"):
        assert wire.sample("mhsa_errors_total", method=method, reason="internal") == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyError("secret")], ids=["cancelled", "unhandled"])
async def test_whatever_escapes_from_a_stream_is_answered(error: BaseException) -> None:
    async def fail(_requests: object, _context: object) -> None:
        raise error

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(fail)
    server = grpc.aio.server(
        interceptors=[RequestInterceptor(Instruments(Metrics(CollectorRegistry())), Callers([], "token"))]
    )
    service = grpc.method_handlers_generic_handler("mhsa.encoder.v1.EncoderService", {"EncodeStream": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(ENCODE_STREAM, bytes, bytes)()
        code, details = await status_of(call)
    await server.stop(None)

    assert code is grpc.StatusCode.INTERNAL
    assert details.startswith("internal error; ")


async def test_an_error_of_a_caller_without_an_id_is_found_in_the_log(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    wire.batcher.error = KeyError("secret")
    with caplog.at_level(logging.ERROR, "service"):
        details = await wire.encoder.Encode(encode_request([[1]])).details()

    request_id = details.removeprefix("internal error; the server's log has it as request ")
    assert f"request {request_id} failed" in caplog.text


@pytest.mark.parametrize("method", ["Encode", "GetModel"])
async def test_bytes_that_are_no_message_are_the_callers_mistake(wire: Wire, method: str) -> None:
    call = wire.raw(f"/mhsa.encoder.v1.EncoderService/{method}")(b"\xff\xff")

    assert await status_of(call) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "2 bytes that are not the method's request message",
    )
    assert wire.sample("mhsa_requests_total", method=method, code="INVALID_ARGUMENT") == 1


async def test_a_method_that_does_not_exist_is_unimplemented(wire: Wire) -> None:
    assert await wire.raw("/inference.GRPCInferenceService/ModelConfig")(b"").code() is (grpc.StatusCode.UNIMPLEMENTED)


async def test_the_server_serves_on_after_a_third_of_the_callers_left(wire: Wire) -> None:
    wire.batcher.hold(0)
    held = wire.batcher.hold(1)
    leaving = [wire.encoder.Encode(encode_request([[0]])) for _ in range(10)]
    staying = [wire.encoder.Encode(encode_request([[1]])) for _ in range(20)]
    await wire.batcher.wait_for_requests(30)
    for call in leaving:
        call.cancel()
    held.set()
    for call in staying:
        await call
    await wire.interceptor.wait_until_idle()

    assert wire.sample("mhsa_requests_total", method="Encode", code="CANCELLED") == 10
    assert wire.sample("mhsa_requests_total", method="Encode", code="OK") == 20


async def test_wrapping_a_method_leaves_its_messages_as_they_are(wire: Wire) -> None:
    raw = await wire.raw(ENCODE)(encode_request([[1]]).SerializeToString())

    assert EncodeResponse.FromString(raw).num_tokens == 1
    assert await wire.encoder.Encode(EncodeRequest()).code() is grpc.StatusCode.INVALID_ARGUMENT


def names_of_series(metrics: Metrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def sum_of(metrics: Metrics, name: str) -> float:
    return sum(s.value for family in metrics.registry.collect() for s in family.samples if s.name == name)
