"""The status table: complete, and each row seen by a real client of either API."""

import logging

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from protos.encoder_pb2 import EncodeRequest
from protos.open_inference_pb2 import ModelInferRequest
from service import errors
from service.errors import (
    DeadlineError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    StoppedError,
    UnauthenticatedError,
    UnavailableError,
)
from service.servicers.status import REASONS, TABLE, failure_of, failure_of_departure
from tests.fakes import FakeBatcher
from tests.wire import encode_request, infer_request, receive, running, send

SECRET = "secret/path of the graph"
EXPECTED = [
    (InvalidRequestError("what was wrong"), grpc.StatusCode.INVALID_ARGUMENT, "what was wrong"),
    (NotFoundError("no such model"), grpc.StatusCode.NOT_FOUND, "no such model"),
    (UnavailableError("loading"), grpc.StatusCode.UNAVAILABLE, "loading"),
    (DrainingError("ending"), grpc.StatusCode.UNAVAILABLE, "ending"),
    (UnauthenticatedError("no token"), grpc.StatusCode.UNAUTHENTICATED, "no token"),
    (QueueFullError("full", retry_seconds=0.25), grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
    (DeadlineError("too late"), grpc.StatusCode.DEADLINE_EXCEEDED, "too late"),
    (
        OutOfMemoryError(SECRET),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the device is out of memory; the server's log has it as request call-1",
    ),
    (EngineError(SECRET), grpc.StatusCode.INTERNAL, "internal error; the server's log has it as request call-1"),
    (
        StoppedError(SECRET),
        grpc.StatusCode.INTERNAL,
        "the run took too long and was stopped; the server's log has it as request call-1",
    ),
    (RequestError(SECRET), grpc.StatusCode.INTERNAL, "internal error; the server's log has it as request call-1"),
    (ValueError(SECRET), grpc.StatusCode.INTERNAL, "internal error; the server's log has it as request call-1"),
]
rows = pytest.mark.parametrize(("error", "code", "message"), EXPECTED, ids=lambda value: type(value).__name__)
METADATA = (("x-request-id", "call-1"),)


def test_every_request_error_has_a_row() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RequestError)}
    assert set(TABLE) == classes


def test_every_reason_is_declared_to_the_metrics() -> None:
    assert set(REASONS) == {error.reason for error in TABLE} | {"cancelled"}


@rows
async def test_encode_ends_with_the_status_of_its_error(error: Exception, code: grpc.StatusCode, message: str) -> None:
    assert await status_of_encode(error) == (code, message)


@rows
async def test_model_infer_ends_with_the_status_of_its_error(
    error: Exception, code: grpc.StatusCode, message: str
) -> None:
    async with running() as wire:
        wire.batcher.error = error
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.inference.ModelInfer(infer_request([[1]]), metadata=METADATA)
    assert (failure.value.code(), failure.value.details()) == (code, message)


@rows
async def test_an_entry_of_a_stream_carries_the_code_of_its_error(
    error: Exception, code: grpc.StatusCode, message: str
) -> None:
    async with running() as wire:
        wire.batcher.error = error
        call = wire.encoder.EncodeStream(metadata=METADATA)
        await send(call, "a", [[1]])
        answer = await receive(call)
    assert (answer.id, answer.error.code, answer.error.message) == ("a", code.value[0], message)
    assert answer.error.retry_seconds == (0.25 if isinstance(error, QueueFullError) else 0)


async def test_a_full_queue_says_when_to_come_back_in_both_ways() -> None:
    async with running() as wire:
        wire.batcher.error = QueueFullError("full", retry_seconds=0.2504)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.encoder.Encode(encode_request([[1]]))

    assert dict(failure.value.trailing_metadata())["grpc-retry-pushback-ms"] == "251"
    status = rpc_status.from_call(failure.value)
    info = RetryInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "full")
    assert info.retry_delay.ToMilliseconds() == 250


async def test_no_other_error_tells_clients_to_come_back() -> None:
    async with running() as wire:
        wire.batcher.error = UnavailableError("loading")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.encoder.Encode(encode_request([[1]]))

    assert "grpc-retry-pushback-ms" not in dict(failure.value.trailing_metadata())


@pytest.mark.parametrize("error", [ValueError(SECRET), EngineError(SECRET)])
async def test_the_log_has_what_the_wire_does_not(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "service"):
        await status_of_encode(error)

    assert "request call-1 failed" in caplog.text
    assert SECRET in caplog.text


async def test_a_failure_of_the_engine_is_one_line_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    error = EngineError("the engine failed on this request")
    error.__cause__ = RuntimeError("[ONNXRuntimeError] : 1 : FAIL : node Add\nand a page more")
    with caplog.at_level(logging.ERROR, "service"):
        await status_of_encode(error)

    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage() == (
        "request call-1 failed: the engine failed on this request; [ONNXRuntimeError] : 1 : FAIL : node Add"
    )


async def test_numbers_that_are_not_finite_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "service"):
        await status_of_encode(EngineError("the model gave numbers that are not finite"))

    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage() == "request call-1 failed: the model gave numbers that are not finite"


async def test_a_bug_has_its_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "service"):
        await status_of_encode(KeyError("a bug"))

    (record,) = caplog.records
    assert record.exc_info is not None


async def test_a_callers_own_mistake_is_not_logged_as_ours(caplog: pytest.LogCaptureFixture) -> None:
    await status_of_encode(InvalidRequestError("what was wrong"))

    assert not caplog.records


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (EncodeRequest(model="x"), grpc.StatusCode.NOT_FOUND),
        (EncodeRequest(model="fake", version="9"), grpc.StatusCode.NOT_FOUND),
        (EncodeRequest(model="fake", version="nine"), grpc.StatusCode.INVALID_ARGUMENT),
        (EncodeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_encode_names_what_it_cannot_serve(message: EncodeRequest, code: grpc.StatusCode) -> None:
    async with running() as wire:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.encoder.Encode(message)
    assert failure.value.code() is code


async def test_model_infer_of_an_unknown_model_is_not_found() -> None:
    async with running() as wire:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.inference.ModelInfer(ModelInferRequest(model_name="x"))
    assert (failure.value.code(), failure.value.details()) == (grpc.StatusCode.NOT_FOUND, "no model 'x'")


def test_a_subclass_without_a_row_takes_that_of_its_parent() -> None:
    class TooFullError(QueueFullError):
        pass

    assert failure_of(TooFullError("full", 1.0), "id").code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("time_remaining", "code"),
    [
        (None, grpc.StatusCode.CANCELLED),
        (3.0, grpc.StatusCode.CANCELLED),
        (0.01, grpc.StatusCode.DEADLINE_EXCEEDED),
        (0.0, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_a_caller_that_left_had_its_deadline_or_its_reasons(
    time_remaining: float | None, code: grpc.StatusCode
) -> None:
    assert failure_of_departure(time_remaining).code is code


async def status_of_encode(error: Exception) -> tuple[grpc.StatusCode, str | None]:
    batcher = FakeBatcher()
    batcher.error = error
    async with running(batcher=batcher) as wire:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.encoder.Encode(encode_request([[1]]), metadata=METADATA)
    return failure.value.code(), failure.value.details()
