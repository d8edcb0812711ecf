"""The load generator, on calls that are written out here: it waits for the clock and for nobody's answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from benchmarks.load import LoadError
from benchmarks.open_loop import Call, Generator, Message, Schedule
from benchmarks.outcomes import Window

WINDOW = Window(0.0, 1.0)
MESSAGE = Message(b"m", (3, 4), "group", (("key", "value"),))


class FakeCall:
    """A method of a server; `answer` is awaited for each call."""

    def __init__(self, answer: Callable[[], Awaitable[None]]) -> None:
        self._answer = answer
        self.timeouts: list[float | None] = []

    def __call__(self, data: bytes, *, timeout: float | None, metadata: tuple[tuple[str, str], ...]) -> Awaitable[None]:
        assert (data, metadata) == (MESSAGE.data, MESSAGE.metadata)
        self.timeouts.append(timeout)
        return self._answer()


def generator(call: FakeCall) -> Generator:
    return Generator([cast(Call, call)])


def error(code: grpc.StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), "the reason")


def schedule(*times: float) -> Schedule:
    return Schedule((MESSAGE,) * len(times), times, 10.0, WINDOW)


async def test_a_request_is_sent_though_the_one_before_is_not_answered() -> None:
    both = asyncio.Barrier(2)

    async def meet() -> None:
        await both.wait()

    sender = generator(FakeCall(meet))
    await sender.offer(schedule(0.0, 0.0))
    assert [outcome.is_ok for outcome in sender.outcomes] == [True, True]


async def test_time_and_deadline_run_from_when_a_request_was_to_be_sent() -> None:
    async def answer() -> None:
        """At once."""

    call = FakeCall(answer)
    sender = generator(call)
    await sender.offer(schedule(-3.0))  # the generator is three seconds behind
    (outcome,) = sender.outcomes
    assert outcome.seconds >= 3.0
    assert sender.lags[0] >= 3.0
    assert call.timeouts[0] is not None
    assert call.timeouts[0] <= 7.0
    assert (outcome.at, outcome.num_tokens, outcome.timeout_seconds, outcome.group) == (-3.0, 7, 10.0, "group")


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_a_refusal_is_an_outcome(code: grpc.StatusCode) -> None:
    async def refuse() -> None:
        raise error(code)

    sender = generator(FakeCall(refuse))
    await sender.offer(schedule(0.0))
    assert [outcome.is_refused for outcome in sender.outcomes] == [True]


async def test_any_other_error_ends_the_slice() -> None:
    async def fail() -> None:
        raise error(grpc.StatusCode.INTERNAL)

    with pytest.raises(ExceptionGroup) as caught:
        await generator(FakeCall(fail)).offer(schedule(0.0))
    assert caught.group_contains(LoadError, match="INTERNAL: the reason")


async def test_callers_who_wait_have_one_request_each_in_flight_and_no_deadline() -> None:
    num_in_flight, most = 0, 0

    async def answer() -> None:
        nonlocal num_in_flight, most
        num_in_flight += 1
        most = max(most, num_in_flight)
        await asyncio.sleep(0)
        num_in_flight -= 1

    calls = [FakeCall(answer) for _ in range(3)]
    sender = Generator([cast(Call, call) for call in calls])
    await sender.saturate([MESSAGE], 3, until=0.01)
    assert most == 3
    assert {timeout for call in calls for timeout in call.timeouts} == {None}
