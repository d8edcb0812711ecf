"""What a call says besides its message."""

import asyncio

import pytest

from service.servicers.call import choose_request_id, has_caller_left, trace_id_of


@pytest.mark.parametrize("sane", ["a", "550e8400-e29b-41d4-a716-446655440000", "trace:1/2=@x+y", "x" * 128])
def test_a_sane_request_id_is_kept(sane: str) -> None:
    assert choose_request_id([("user-agent", "x"), ("x-request-id", sane)]) == sane


@pytest.mark.parametrize("insane", ["", "x" * 129, "two words", "line\nbreak", "quote'", "é", b"bytes"])
def test_an_id_that_could_forge_a_log_line_is_replaced(insane: str | bytes) -> None:
    chosen = choose_request_id([("x-request-id", insane)])

    assert chosen != insane
    assert len(chosen) == 16


def test_ids_made_here_differ() -> None:
    assert choose_request_id([]) != choose_request_id([])


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "value", [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-more"]
)
def test_the_id_of_the_callers_trace_is_read(value: str) -> None:
    assert trace_id_of([("user-agent", "x"), ("traceparent", value)]) == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        TRACE,
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01\n",
        b"bytes",
    ],
)
def test_what_is_no_traceparent_names_no_trace(value: str | bytes) -> None:
    assert trace_id_of([("traceparent", value)]) == ""


async def test_a_cancelled_task_knows_that_its_caller_left() -> None:
    seen: list[bool] = []

    async def serve() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(has_caller_left())
            raise

    task = asyncio.create_task(serve())
    await asyncio.wait([asyncio.create_task(asyncio.Event().wait()), task], timeout=0)
    task.cancel()
    await asyncio.wait([task])

    assert seen == [True]


async def test_a_cancelled_future_does_not_look_like_a_caller_that_left() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    try:
        await future
    except asyncio.CancelledError:
        assert not has_caller_left()
