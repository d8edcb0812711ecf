"""The log of requests that did not end well: a line each, and of a flood a few lines and a count."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import grpc
import pytest

from service.errors import EngineError, InvalidRequestError, NotFoundError, QueueFullError, UnavailableError
from service.logs import JsonFormatter, caller, request_id
from service.servicers.failure_log import MAX_LINES, WINDOW_SECONDS, FailureLog
from service.servicers.status import failure_of, failure_of_departure
from tests.fakes import FakeBatcher
from tests.wire import encode_request, receive, running, send

FULL = failure_of(QueueFullError("the queue holds 9 tokens", 0.5), "id")
INVALID = failure_of(InvalidRequestError("token id is 7777"), "id")
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Timers:
    """Runs nothing until told to."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.functions: list[Callable[[], None]] = []

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self.seconds.append(seconds)
        self.functions.append(function)

    def run(self) -> None:
        functions, self.functions = self.functions, []
        for function in functions:
            function()


class Lines(logging.Handler):
    """What was logged, as the JSON objects of a log file."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.objects: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.objects.append(json.loads(self.format(record)))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("service.servicers")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel("NOTSET")


def messages(lines: Lines) -> list[object]:
    return [line["message"] for line in lines.objects]


def test_of_a_flood_the_first_lines_are_written_and_then_how_many_more_there_were(lines: Lines) -> None:
    timers = Timers()
    log = FailureLog(timers.call_later)
    for _ in range(1000):
        log.write(FULL, 0.001)
    assert messages(lines) == ["not served: the queue holds 9 tokens"] * MAX_LINES
    timers.run()

    assert messages(lines)[MAX_LINES:] == [f"{1000 - MAX_LINES} more requests were not served: queue_full"]
    assert lines.objects[-1]["left_out"] == 1000 - MAX_LINES
    assert (timers.seconds, timers.functions) == ([WINDOW_SECONDS], []), "one timer for a window, however many lines"


def test_after_a_second_lines_are_written_again(lines: Lines) -> None:
    timers = Timers()
    log = FailureLog(timers.call_later)
    for _ in range(MAX_LINES + 1):
        log.write(FULL, 0.001)
    timers.run()
    log.write(FULL, 0.001)

    assert len(lines.objects) == MAX_LINES + 1 + 1


def test_a_window_that_left_nothing_out_ends_in_silence(lines: Lines) -> None:
    timers = Timers()
    log = FailureLog(timers.call_later)
    for _ in range(MAX_LINES):
        log.write(FULL, 0.001)
    timers.run()

    assert len(lines.objects) == MAX_LINES


def test_a_flood_of_one_reason_hides_no_other(lines: Lines) -> None:
    log = FailureLog(Timers().call_later)
    for _ in range(100):
        log.write(FULL, 0.001)
    log.write(INVALID, 0.001)

    assert lines.objects[-1]["reason"] == "invalid"


def test_what_was_left_out_is_said_when_the_server_stops(lines: Lines) -> None:
    timers = Timers()
    log = FailureLog(timers.call_later)
    for _ in range(MAX_LINES + 2):
        log.write(FULL, 0.001)
    log.close()
    timers.run()

    assert messages(lines)[MAX_LINES:] == ["2 more requests were not served: queue_full"]


@pytest.mark.parametrize(
    ("failure", "level"),
    [
        (FULL, "warning"),
        (failure_of(UnavailableError("loading"), "id"), "warning"),
        (INVALID, "info"),
        (failure_of_departure(None), "info"),
    ],
    ids=lambda value: getattr(value, "reason", None),
)
def test_what_an_operator_can_act_on_is_a_warning(lines: Lines, failure: object, level: str) -> None:
    FailureLog(Timers().call_later).write(failure, 0.001)  # type: ignore[arg-type]  # parametrize loses the type

    assert lines.objects[0]["level"] == level


# With a real server and client


async def test_a_refused_request_is_one_line_with_its_ids_code_reason_and_model(lines: Lines) -> None:
    metadata = (("x-request-id", "call-1"), ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"))
    async with running() as wire:
        await wire.encoder.Encode(encode_request([[5000]]), metadata=metadata).code()

    (line,) = lines.objects
    assert line.pop("ts")
    assert float(str(line.pop("seconds"))) >= 0
    assert line == {
        "level": "info",
        "logger": "service.servicers.failure_log",
        "message": "not served: invalid",
        "request_id": "call-1",
        "trace_id": TRACE,
        "method": "Encode",
        "model": "fake",
        "version": "1",
        "code": "INVALID_ARGUMENT",
        "reason": "invalid",
    }


async def test_a_request_that_is_served_is_no_line(lines: Lines) -> None:
    async with running() as wire:
        await wire.encoder.Encode(encode_request([[1]]))

    assert lines.objects == []


async def test_nothing_that_a_caller_sent_is_in_the_log(lines: Lines) -> None:
    secret = (("authorization", "Bearer hunter2"),)
    async with running(tokens=["other"]) as wire:
        await wire.encoder.Encode(encode_request([[5000]]), metadata=secret).code()
    async with running() as wire:
        for message in (encode_request([[5000]]), encode_request([[1]], model="hunter2")):
            await wire.encoder.Encode(message, metadata=secret).code()

    assert [line["reason"] for line in lines.objects] == ["unauthenticated", "invalid", "not_found"]
    for line in lines.objects:
        assert "5000" not in str(line["message"])
        assert "hunter2" not in str(line)


async def test_a_tenants_name_that_is_none_is_refused_with_the_rule_and_without_the_name(lines: Lines) -> None:
    async with running(fairness="tenant") as wire:
        await wire.encoder.Encode(encode_request([[1]]), metadata=(("mhsa-tenant", "hunter 2"),)).code()

    assert messages(lines) == ["not served: mhsa-tenant is not 1 to 64 of A-Z a-z 0-9 . _ : / + @ -"]


async def test_a_caller_without_a_token_is_refused_with_what_is_missing(lines: Lines) -> None:
    async with running(tokens=["other"]) as wire:
        await wire.encoder.Encode(encode_request([[1]])).code()

    (message,) = messages(lines)
    assert str(message).startswith("not served: the metadata has no 'authorization: Bearer <token>'")


async def test_what_was_left_out_is_not_put_on_the_request_that_came_first(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer runs in the context that set it, which is a request's."""
    monkeypatch.setattr("service.servicers.failure_log.WINDOW_SECONDS", 0.0)
    request_id.set("first")
    caller.set("alice")
    log = FailureLog()
    for _ in range(MAX_LINES + 1):
        log.write(FULL, 0.001)
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, later.set)
    await later.wait()

    assert lines.objects[0]["caller"] == "alice"
    assert lines.objects[-1].keys() & {"request_id", "caller"} == set()
    assert lines.objects[-1]["left_out"] == 1


async def test_each_refused_request_of_a_stream_is_a_line(lines: Lines) -> None:
    async with running() as wire:
        call = wire.encoder.EncodeStream()
        for name in "ab":
            await send(call, name, [[5000]])
            await receive(call)
        await call.done_writing()
        await call.code()

    assert [(line["method"], line["reason"]) for line in lines.objects] == [("EncodeStream", "invalid")] * 2


async def test_a_stream_that_the_server_ends_is_a_line(lines: Lines) -> None:
    async with running() as wire:
        wire.draining.set()
        assert await wire.encoder.EncodeStream().code() is grpc.StatusCode.UNAVAILABLE

    assert messages(lines) == ["not served: the server is draining"]


@pytest.mark.parametrize(
    ("error", "reason", "has_traceback"),
    [(KeyError("what broke"), "internal", True), (EngineError("what broke"), "engine", False)],
)
async def test_a_fault_of_ours_is_one_line_however_many_there_are(
    lines: Lines, error: Exception, reason: str, has_traceback: bool
) -> None:
    batcher = FakeBatcher()
    batcher.error = error
    async with running(batcher=batcher) as wire:
        for _ in range(MAX_LINES + 3):
            await wire.encoder.Encode(encode_request([[1]])).code()

    assert [line["level"] for line in lines.objects] == ["error"] * (MAX_LINES + 3)
    assert {(line["method"], line["model"], line["code"], line["reason"]) for line in lines.objects} == {
        ("Encode", "fake", "INTERNAL", reason)
    }
    assert all("what broke" in str(line["exception" if has_traceback else "message"]) for line in lines.objects)
    assert all(("exception" in line) is has_traceback for line in lines.objects)


async def test_a_line_says_who_called(lines: Lines) -> None:
    async with running(fairness="tenant") as wire:
        await wire.encoder.Encode(encode_request([[-1]]), metadata=(("mhsa-tenant", "acme"),)).code()
        await wire.encoder.Encode(encode_request([[-1]])).code()

    assert [line.get("caller") for line in lines.objects] == ["acme", None]


async def test_callers_share_no_ids(lines: Lines) -> None:
    async with running() as wire:
        held = wire.batcher.hold(1)
        calls = [
            wire.encoder.Encode(encode_request([[1]]), metadata=(("x-request-id", name),)) for name in ("one", "two")
        ]
        await wire.batcher.wait_for_requests(2)
        wire.batcher.error = UnavailableError("gone")
        held.set()
        for call in calls:
            await call.code()

    assert {line["request_id"] for line in lines.objects} == {"one", "two"}


def test_the_name_of_a_model_that_is_not_served_is_not_repeated(lines: Lines) -> None:
    FailureLog(Timers().call_later).write(failure_of(NotFoundError("no model 'hunter2'"), "id"), 0.001)

    assert "hunter2" not in str(lines.objects)
