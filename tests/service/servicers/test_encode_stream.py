"""EncodeStream over a real server: pipelining, errors, and each way that a stream ends."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from grpc.aio import EOF

from protos.encoder_pb2 import OUTPUT_TOKENS, EncodeStreamRequest, EncodeStreamResponse
from protos.encoder_pb2_grpc import EncoderServiceStub
from protos.open_inference_pb2 import ServerLiveRequest
from tests.fakes import LIMITS, FakeBatcher, fake_model, fake_repository, pooled_vector
from tests.wire import StreamCall, Wire, encode_request, receive, running, send

INVALID, INTERNAL = (code.value[0] for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL))


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with running(max_stream_requests=4) as running_wire:
        yield running_wire


async def test_every_answer_carries_its_requests_id_and_vectors(wire: Wire) -> None:
    call = wire.encoder.EncodeStream(
        EncodeStreamRequest(id=str(i), request=encode_request([[i], [i, i]])) for i in range(20)
    )
    answers = {answer.id: answer.response async for answer in call}

    assert answers.keys() == {str(i) for i in range(20)}
    for i in range(20):
        rows = np.frombuffer(answers[str(i)].pooled, "<f4").reshape(2, -1)
        np.testing.assert_array_equal(rows, [pooled_vector([i]), pooled_vector([i, i])])


async def test_answers_overtake_a_slow_one(wire: Wire) -> None:
    slow = wire.batcher.hold(1)
    call = wire.encoder.EncodeStream()
    await send(call, "slow", [[1]])
    await send(call, "fast", [[2]])

    assert (await receive(call)).id == "fast"
    slow.set()
    assert (await receive(call)).id == "slow"


async def test_an_error_is_an_answer_and_leaves_the_stream_open(wire: Wire) -> None:
    call = wire.encoder.EncodeStream()
    await send(call, "bad", [[-1]])
    refused = await receive(call)
    await send(call, "good", [[1]])

    assert (refused.id, refused.error.code) == ("bad", INVALID)
    assert refused.error.message == "sequence 0, token 0: token id is -1; the model takes 0 to 999"
    assert (await receive(call)).WhichOneof("result") == "response"


async def test_a_message_without_a_request_is_refused(wire: Wire) -> None:
    call = wire.encoder.EncodeStream()
    await call.write(EncodeStreamRequest(id="empty"))
    answer = await receive(call)

    assert (answer.error.code, answer.error.message) == (INVALID, "the message has no request")


async def test_an_id_in_flight_is_refused_a_second_time_and_free_afterwards(wire: Wire) -> None:
    held = wire.batcher.hold(1)
    call = wire.encoder.EncodeStream()
    await send(call, "a", [[1]])
    await send(call, "a", [[2]])
    refused = await receive(call)
    held.set()
    answered = await receive(call)
    await send(call, "a", [[3]])

    assert (refused.error.code, refused.error.message) == (INVALID, "the id 'a' is in flight on this stream already")
    assert answered.WhichOneof("result") == "response"
    assert (await receive(call)).WhichOneof("result") == "response"


async def test_an_id_too_long_to_be_repeated_is_refused(wire: Wire) -> None:
    call = wire.encoder.EncodeStream()
    await send(call, "é" * 129, [[1]])

    assert (await receive(call)).error.message == "the id has 258 bytes; the limit is 256"


async def test_no_more_than_the_limit_is_in_flight(wire: Wire) -> None:
    held = wire.batcher.hold(1)
    call = wire.encoder.EncodeStream()
    for number in range(6):
        await send(call, str(number), [[1]])
    await wire.batcher.wait_for_requests(4)
    # One round trip on another call: whatever the server was going to read of the stream by itself, it has read.
    await wire.encoder.Encode(encode_request([[2]]))

    assert len(wire.batcher.requests) == 4 + 1
    held.set()
    assert {(await receive(call)).id for _ in range(6)} == set("012345")


async def test_a_client_that_never_reads_gets_no_further() -> None:
    limits = dataclasses.replace(LIMITS, max_sequence_tokens=4096, max_request_tokens=4096)
    repository = fake_repository(fake_model(batcher := FakeBatcher(), limits=limits))
    # What a client's gRPC takes before it is asked for: fixed at 64 KiB here, where it would grow to megabytes.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024)]
    async with (
        running(repository, batcher=batcher, max_stream_requests=256, max_stream_bytes=256 * 1024) as wire,
        grpc.aio.insecure_channel(wire.target, options) as channel,
    ):
        call = EncoderServiceStub(channel).EncodeStream()

        async def send_all() -> None:
            for number in range(30):
                await send(call, str(number), [[1] * 4096], output=OUTPUT_TOKENS)  # an answer is 96 KiB
            await call.done_writing()

        sending = asyncio.create_task(send_all())
        await batcher.wait_for_requests(2)
        for _ in range(60):  # round trips, in each of which the server could have read a message of the stream
            await wire.inference.ServerLive(ServerLiveRequest())
        num_run = len(batcher.requests)
        assert {answer.id async for answer in call} == {str(number) for number in range(30)}
        await sending

    # Two fill the window. Whatever gRPC's buffers on either side take, 64 KiB and a message each, makes room for more.
    assert num_run <= 5


async def test_one_request_may_hold_more_than_a_stream_if_it_is_alone() -> None:
    async with running(max_stream_bytes=1) as wire:
        call = wire.encoder.EncodeStream()
        for name in "abc":
            await send(call, name, [[1]])

        assert [(await receive(call)).id for _ in "abc"] == ["a", "b", "c"]


async def test_what_is_refused_makes_room_as_well() -> None:
    async with running(max_stream_bytes=1) as wire:
        call = wire.encoder.EncodeStream()
        for name, fields in (("a", {"model": "x"}), ("b", {"dimensions": 7}), ("c", {"output": 9}), ("d", {})):
            await send(call, name, [[1]], **fields)

        answers = [await receive(call) for _ in "abcd"]
    assert [(answer.id, answer.WhichOneof("result")) for answer in answers] == [
        ("a", "error"),
        ("b", "error"),
        ("c", "error"),
        ("d", "response"),
    ]


async def test_after_the_client_half_closes_all_answers_come_and_then_ok(wire: Wire) -> None:
    held = wire.batcher.hold(1)
    call = wire.encoder.EncodeStream()
    for name in "abc":
        await send(call, name, [[1]])
    await call.done_writing()
    await wire.batcher.wait_for_requests(3)
    held.set()

    assert {answer.id async for answer in call} == {"a", "b", "c"}
    assert await call.code() is grpc.StatusCode.OK


async def test_an_idle_stream_that_half_closes_ends_ok(wire: Wire) -> None:
    call = wire.encoder.EncodeStream()
    await call.done_writing()

    assert [answer async for answer in call] == []
    assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_leaves_cancels_everything_it_had_in_flight(wire: Wire) -> None:
    wire.batcher.hold(1)
    call = wire.encoder.EncodeStream()
    for name in "abc":
        await send(call, name, [[1]])
    await wire.batcher.wait_for_requests(3)
    call.cancel()
    await wire.interceptor.wait_until_idle()

    assert wire.batcher.num_cancelled == 3
    assert wire.sample("mhsa_requests_total", method="EncodeStream", code="CANCELLED") == 3
    assert wire.sample("mhsa_requests_in_flight", method="EncodeStream") == 0


async def test_an_idle_stream_ends_unavailable_when_the_server_drains(wire: Wire) -> None:
    call = wire.encoder.EncodeStream()
    await send(call, "a", [[1]])
    await receive(call)
    wire.draining.set()

    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert await call.details() == "the server is draining"


async def test_a_drain_answers_what_was_accepted_before_it_ends_the_stream(wire: Wire) -> None:
    held = wire.batcher.hold(1)
    call = wire.encoder.EncodeStream()
    for name in "abc":
        await send(call, name, [[1]])
    await wire.batcher.wait_for_requests(3)
    wire.draining.set()
    held.set()

    answers = [await receive(call) for _ in "abc"]
    assert {answer.id for answer in answers if answer.HasField("response")} == {"a", "b", "c"}
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_nothing_more_is_read_once_the_server_drains(wire: Wire) -> None:
    held = wire.batcher.hold(1)
    call = wire.encoder.EncodeStream()
    await send(call, "a", [[1]])
    await wire.batcher.wait_for_requests(1)
    wire.draining.set()
    await wire.encoder.Encode(encode_request([[2]]))  # a round trip, in which the stream notices
    await send(call, "late", [[3]])
    await wire.encoder.Encode(encode_request([[2]]))  # another, in which "late" would have been read
    held.set()

    assert (await receive(call)).id == "a"
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert 3 not in [int(request.sequences[0].token_ids[0]) for request in wire.batcher.requests]


async def test_a_stream_opened_during_the_drain_ends_at_once(wire: Wire) -> None:
    wire.draining.set()

    assert await wire.encoder.EncodeStream().code() is grpc.StatusCode.UNAVAILABLE


async def test_an_idle_stream_of_the_greatest_age_ends_unavailable_and_says_why() -> None:
    async with running(max_stream_seconds=0.01) as wire:
        call = wire.encoder.EncodeStream()

        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the stream has been open for 0.01 s; go on with another"


async def test_streams_of_the_greatest_age_answer_all_that_they_took() -> None:
    num_answers, num_streams = 0, 0
    async with running(max_stream_seconds=0.05) as wire:
        while num_answers < 50 or num_streams < 3:
            num_answers += await count_answers(wire.encoder.EncodeStream())
            num_streams += 1

    assert num_answers == len(wire.batcher.requests)


async def test_a_cancellation_from_inside_is_an_error_entry_and_not_silence(wire: Wire) -> None:
    wire.batcher.error = asyncio.CancelledError()
    call = wire.encoder.EncodeStream()
    await send(call, "a", [[1]])

    assert (await receive(call)).error.code == INTERNAL


async def test_bytes_that_are_no_message_end_the_stream_after_what_was_accepted(wire: Wire) -> None:
    call = wire.raw_stream("/mhsa.encoder.v1.EncoderService/EncodeStream")()
    await call.write(EncodeStreamRequest(id="a", request=encode_request([[1]])).SerializeToString())
    await call.write(b"\xff\xff")
    answer = await call.read()

    assert isinstance(answer, bytes)
    assert EncodeStreamResponse.FromString(answer).id == "a"
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_each_message_counts_as_a_request_by_its_code_and_the_stream_does_not(wire: Wire) -> None:
    call = wire.encoder.EncodeStream()
    await send(call, "a", [[1]])
    await send(call, "b", [[-1]])
    await receive(call)
    await receive(call)
    await call.done_writing()
    await call.code()

    assert wire.sample("mhsa_requests_total", method="EncodeStream", code="OK") == 1
    assert wire.sample("mhsa_requests_total", method="EncodeStream", code="INVALID_ARGUMENT") == 1
    assert wire.sample("mhsa_request_duration_seconds_count", method="EncodeStream") == 2
    assert wire.sample("mhsa_errors_total", method="EncodeStream", reason="invalid") == 1


async def test_the_streams_deadline_is_that_of_its_requests(wire: Wire) -> None:
    call = wire.encoder.EncodeStream(timeout=30.0)
    await send(call, "a", [[1]])
    await receive(call)

    assert wire.batcher.requests[0].deadline is not None


async def count_answers(call: StreamCall) -> int:
    """Send and receive by turns until the server ends the stream; how many answers came."""
    num_answers = 0
    # What a write to an ended stream raises; gRPC's asyncio client then calls the stream's own code INTERNAL.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await send(call, "a", [[1]])
            if await call.read() is EOF:
                break
            num_answers += 1
    return num_answers
