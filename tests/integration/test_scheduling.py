"""What callers see of the scheduler, over the wire: real server, batcher and scheduler, an engine that waits for us.

Waiting is counted in batches, shares in tokens. Only the first test looks at a clock, since it is about one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from protos.encoder_pb2 import PRIORITY_HIGH, PRIORITY_LOW, EncodeResponse
from service.batcher import Batcher
from service.request import Request
from tests.fakes import HIDDEN_SIZE
from tests.stepped import BOUNDS, FAST, Stepped, answer_to, stepped, until
from tests.wire import encode_request, infer_request, send

Sequences = Sequence[Sequence[int]]
BLOCKER = 999
DEADLINE_EXCEEDED, EXHAUSTED = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED


async def block(server: Stepped) -> "asyncio.Task[EncodeResponse]":
    """Occupy the engine: what comes now waits, until the test lets the run end."""
    call = asyncio.ensure_future(server.wire.encoder.Encode(encode_request([[BLOCKER]])))
    await server.engine.wait_for_batches(1)
    return call


def rows_of(answer: EncodeResponse) -> NDArray[np.float32]:
    return np.frombuffer(answer.pooled, "<f4").reshape(-1, HIDDEN_SIZE)


def first_ids(server: Stepped) -> list[int]:
    """Of every sequence that has run, in the order of runs."""
    return [sequence[0] for batch in server.engine.batches for sequence in batch]


# Deadlines


class TimedBatcher(Batcher):
    """Notes by how much later than a bare timer for the same moment each request with a deadline ended."""

    lateness: list[float]

    async def submit(self, request: Request) -> None:
        if request.deadline is None:
            return await super().submit(request)
        loop = asyncio.get_running_loop()
        timer = loop.create_future()
        loop.call_at(request.deadline, lambda: timer.set_result(time.monotonic()))
        try:
            await super().submit(request)
        finally:
            ended = time.monotonic()
            self.lateness.append(ended - await timer)


async def test_deadlines_are_answered_as_they_pass_while_the_engine_is_busy() -> None:
    TimedBatcher.lateness = []
    async with stepped(FAST, batcher_type=TimedBatcher) as server:
        blocker = await block(server)
        calls = []
        for number in range(60):
            message = infer_request([[1 + number]])
            # 20 ms apart, so that no two pass together. The client has no deadline of its own: it waits for our answer.
            message.parameters["timeout"].int64_param = 300_000 + 20_000 * number
            calls.append(server.wire.inference.ModelInfer(message))
        codes = [await call.code() for call in calls]
        server.engine.let_go()
        await blocker

    assert codes == [DEADLINE_EXCEEDED] * 60
    assert first_ids(server) == [BLOCKER]
    # A bare timer in the same event loop has the same machine under it, however noisy, so what is left is ours.
    assert median(TimedBatcher.lateness) <= 0.005


async def test_what_has_expired_or_was_cancelled_is_never_run() -> None:
    expiring, leaving, streamed, staying = range(100, 110), range(200, 210), range(300, 303), range(400, 405)
    async with stepped(FAST) as server:
        wire = server.wire
        blocker = await block(server)
        leavers = [wire.encoder.Encode(encode_request([[i], [i]])) for i in leaving]
        stream = wire.encoder.EncodeStream()
        for i in streamed:
            await send(stream, str(i), [[i]])
        stayers = [wire.encoder.Encode(encode_request([[i]])) for i in staying]
        expired = [wire.encoder.Encode(encode_request([[i]]), timeout=0.3) for i in expiring]
        codes = [await call.code() for call in expired]
        for call in (*leavers, stream):
            call.cancel()
        await server.wait_for_requests(1 + len(staying))
        assert server.scheduler.used.sequences == len(staying)
        server.engine.let_go()
        await asyncio.gather(blocker, *stayers)
        await server.wait_for_requests(0)

        assert (server.scheduler.used.tokens, server.scheduler.used.bytes) == (0, 0)
    assert codes == [DEADLINE_EXCEEDED] * len(expiring)
    assert sorted(first_ids(server)) == [*staying, BLOCKER]


async def test_the_rest_of_a_request_is_not_run_once_its_caller_has_left() -> None:
    async with stepped() as server:
        call = server.wire.encoder.Encode(encode_request([[1] * 16] * 100))
        await server.engine.wait_for_batches(1)
        stayer = asyncio.ensure_future(server.wire.encoder.Encode(encode_request([[2]])))
        await server.wait_for_requests(2)
        assert sorted(await server.engine.step()) == [[1] * 16] * 3 + [[2]]
        call.cancel()
        await server.wait_for_requests(1)
        server.engine.let_go()
        await stayer

        assert (server.scheduler.used.requests, server.scheduler.used.sequences) == (0, 0)
    assert len(server.engine.batches) == 2


async def test_a_run_that_nobody_waits_for_any_more_is_stopped() -> None:
    async with stepped() as server:
        call = server.wire.encoder.Encode(encode_request([[1]]))
        await server.engine.wait_for_batches(1)
        call.cancel()
        await until(lambda: server.engine.num_stopped == 1)
        server.engine.let_go()
        answer = await server.wire.encoder.Encode(encode_request([[2]]))

    np.testing.assert_array_equal(rows_of(answer), [answer_to(2)])


# A giant


@pytest.mark.parametrize("giants_tenant", ["", "another"])
async def test_beside_a_giant_single_ones_wait_for_the_running_batch_and_no_more(giants_tenant: str) -> None:
    metadata = (("mhsa-tenant", giants_tenant),) if giants_tenant else ()
    giant = [[1 + number % 900] * 4 for number in range(10_000)]
    async with stepped() as server:
        encode = server.wire.encoder.Encode
        call = asyncio.ensure_future(encode(encode_request(giant), metadata=metadata))
        await server.engine.wait_for_batches(1)
        for number in range(100):
            single = asyncio.ensure_future(encode(encode_request([[950]])))
            await server.wait_for_requests(2)  # the engine is at one of the giant's batches
            assert [950] in await server.engine.step(), f"single number {number} waits for a second batch"
            await server.engine.step()
            np.testing.assert_array_equal(rows_of(await single), [answer_to(950)])
        assert not call.done()
        server.engine.let_go()
        rows = rows_of(await call)

    np.testing.assert_array_equal(rows, np.stack([answer_to(sequence[0]) for sequence in giant]))


# Callers


async def keep_asking(server: Stepped, tenant: str, sequences: Sequences) -> None:
    while True:
        await server.wire.encoder.Encode(encode_request(sequences), metadata=(("mhsa-tenant", tenant),))


async def shares(
    server: Stepped, callers: dict[str, tuple[int, Sequence[Sequence[int]]]], num_batches: int
) -> Counter[int]:
    """Tokens run, by their id, of callers who each have so many such requests waiting at any time."""
    tasks = [
        asyncio.create_task(keep_asking(server, tenant, sequences))
        for tenant, (count, sequences) in callers.items()
        for _ in range(count)
    ]
    # The first runs are of those who came first: they are over when everybody is there.
    for _ in range(num_batches):
        await server.wait_for_requests(len(tasks))
        await server.engine.step()
    counted = Counter(i for batch in server.engine.batches[1:] for sequence in batch for i in sequence)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counted


@pytest.mark.parametrize(
    ("count", "sequences"),
    [(200, [[2] * 8]), (8, [[2] * 16] * 500), (1, [[2] * 4] * 10_000)],
    ids=["many", "large", "giant"],
)
async def test_a_caller_who_floods_leaves_another_its_half(count: int, sequences: Sequences) -> None:
    async with stepped() as server:
        tokens = await shares(server, {"flooding": (count, sequences), "other": (16, [[1] * 8])}, 60)

    assert tokens[1] >= 0.45 * tokens.total()


async def test_a_caller_of_three_times_the_weight_has_three_quarters() -> None:
    async with stepped(weights={"large": 3.0}) as server:
        tokens = await shares(server, {"large": (40, [[1] * 8]), "small": (40, [[2] * 8])}, 60)

    # Counts lie at most two batches apart, of sixty.
    assert 0.7 <= tokens[1] / tokens.total() <= 0.8


# Priorities


async def test_a_request_of_high_priority_passes_those_that_wait() -> None:
    async with stepped() as server:
        encode = server.wire.encoder.Encode
        calls = [await block(server)]
        calls += [asyncio.ensure_future(encode(encode_request([[1] * 16] * 2))) for _ in range(10)]
        await server.wait_for_requests(11)
        calls.append(asyncio.ensure_future(encode(encode_request([[2] * 16], priority=PRIORITY_HIGH))))
        await server.wait_for_requests(12)
        batch = await server.engine.step()
        server.engine.let_go()
        await asyncio.gather(*calls)

    assert [2] * 16 in batch


async def test_what_is_displaced_is_told_when_to_come_back() -> None:
    async with stepped(bounds=BOUNDS._replace(requests=3)) as server:
        encode = server.wire.encoder.Encode
        calls = [await block(server)]
        low = [encode(encode_request([[1]], priority=PRIORITY_LOW)) for _ in range(2)]
        await server.wait_for_requests(3)
        full = encode(encode_request([[1]], priority=PRIORITY_LOW))
        assert await full.code() is EXHAUSTED
        calls.append(asyncio.ensure_future(encode(encode_request([[2]], priority=PRIORITY_HIGH))))
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(call.code()) for call in low], return_when="FIRST_COMPLETED"
        )
        server.engine.let_go()
        await asyncio.gather(*calls)
        codes = [await call.code() for call in low]
        (displaced,) = [call for call, code in zip(low, codes, strict=True) if code is EXHAUSTED]
        metadata = dict(await displaced.trailing_metadata())

    assert [task.result() for task in done] == [EXHAUSTED]
    assert sorted(code.name for code in codes) == ["OK", "RESOURCE_EXHAUSTED"]
    assert int(metadata["grpc-retry-pushback-ms"]) > 0


# Bounds


async def test_the_bytes_of_messages_and_answers_are_bounded_until_they_are_answered() -> None:
    giant = encode_request([[2] * 4] * 1000)  # a message of 17 kB; what is made of it and its answer take 820 kB
    async with stepped(bounds=BOUNDS._replace(bytes=1_000_000)) as server:
        encode = server.wire.encoder.Encode
        first = asyncio.ensure_future(encode(giant))
        await server.engine.wait_for_batches(1)
        refused = encode(giant)
        code, details = await refused.code(), await refused.details()
        server.engine.let_go()
        await first
        await encode(giant)

    assert code is EXHAUSTED
    assert "bytes are in flight" in (details or "")
