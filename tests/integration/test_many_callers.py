"""A thousand callers of random sizes at once, a third of whom leave at a random moment."""

import asyncio
import random
from typing import TYPE_CHECKING

import grpc
import numpy as np
from numpy.typing import NDArray

from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceStub
from service.client import EncoderClient
from tests.integration.server_process import TestedServer

if TYPE_CHECKING:  # the stubs' own class; at run time there is one for both kinds of channel
    from protos.encoder_pb2_grpc import EncoderServiceAsyncStub

NUM_CALLS = 1000


def message(rows: list[list[int]]) -> pb.EncodeRequest:
    flat = np.array([i for row in rows for i in row], "<i4")
    return pb.EncodeRequest(token_ids=flat.tobytes(), lengths=[len(row) for row in rows])


async def call(
    stub: "EncoderServiceAsyncStub", rows: list[list[int]], leave_after: float | None
) -> NDArray[np.float32] | None:
    """One caller's vectors; None if it left before they came."""
    pending = stub.Encode(message(rows))
    if leave_after is not None:
        asyncio.get_running_loop().call_later(leave_after, pending.cancel)
    try:
        answer = await pending
    except asyncio.CancelledError:
        return None
    return np.frombuffer(answer.pooled, "<f4").reshape(len(rows), -1)


async def test_every_answer_is_right_and_the_gauges_return_to_zero(minilm_server: TestedServer) -> None:
    rng = random.Random(7)
    pool = [[rng.randrange(1000, 30000) for _ in range(rng.choice([1, 3, 9, 20, 40, 90]))] for _ in range(60)]
    with EncoderClient(minilm_server.target) as client:
        right = client.encode(pool)
    picks = [rng.sample(range(len(pool)), rng.choice([1, 1, 1, 2, 5])) for _ in range(NUM_CALLS)]
    leaves = [rng.uniform(0, 8) if k % 3 == 0 else None for k in range(NUM_CALLS)]
    async with grpc.aio.insecure_channel(minilm_server.target) as channel:
        stub = EncoderServiceStub(channel)
        calls = (call(stub, [pool[i] for i in pick], after) for pick, after in zip(picks, leaves, strict=True))
        answers = await asyncio.gather(*calls)
    for pick, after, answer in zip(picks, leaves, answers, strict=True):
        assert after is not None or answer is not None, "a caller who stayed got no answer"
        if answer is not None:
            np.testing.assert_allclose(answer, right[pick], atol=1e-6, rtol=0)  # alone or in company, fp32's promise
    assert any(answer is None for answer in answers), "nobody left in time; the test shows nothing"
    async with asyncio.timeout(30):
        while minilm_server.metric("mhsa_requests_in_flight") or minilm_server.metric("mhsa_queue_tokens"):
            await asyncio.sleep(0.05)
    assert minilm_server.metric("mhsa_queue_sequences") == 0
    assert minilm_server.metric("mhsa_requests_total", code="CANCELLED") > 0
