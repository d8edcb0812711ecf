"""Long calls against a queue that holds a fraction of them: the client's splitting meets the server's refusals."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from service.client import AsyncEncoderClient, EncoderClient
from tests.integration.server_process import TestedServer

# 4000 x 40 tokens, 20 times what the queue holds.
SEQUENCES = [[1 + (7 * i + j) % 190 for j in range(40)] for i in range(4000)]
QUEUED_TOKENS = 8192
# Matrix products of other heights may sum in another order, on vectors of length 6; fp32's own error is of this size.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[TestedServer]:
    """A queue of four requests at most, as by default."""
    limits = ["--max-queued-tokens", str(QUEUED_TOKENS), "--max-request-tokens", str(QUEUED_TOKENS // 4)]
    with TestedServer(tiny_bundle.parents[1], *limits) as server:
        server.wait_until_serving()
        yield server


@pytest.fixture(scope="module")
def right(server: TestedServer) -> NDArray[np.float32]:
    """Their vectors, from calls so small that each is one request."""
    with EncoderClient(server.target) as client:
        return np.concatenate([client.encode(SEQUENCES[i : i + 6]) for i in range(0, len(SEQUENCES), 6)])


def refused(server: TestedServer) -> float:
    return server.metric("mhsa_requests_total", method="Encode", code="RESOURCE_EXHAUSTED")


def blocking(target: str) -> NDArray[np.float32]:
    with EncoderClient(target) as client:
        return client.encode(SEQUENCES)


async def on_asyncio(target: str) -> NDArray[np.float32]:
    async with AsyncEncoderClient(target) as client:
        return await client.encode(SEQUENCES)


def test_one_long_call_is_never_refused(server: TestedServer, right: NDArray[np.float32]) -> None:
    before = refused(server)

    np.testing.assert_allclose(blocking(server.target), right, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(asyncio.run(on_asyncio(server.target)), right, atol=TOLERANCE, rtol=0)
    assert refused(server) == before


def test_two_long_calls_at_once_are_both_answered(server: TestedServer, right: NDArray[np.float32]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for vectors in pool.map(blocking, [server.target] * 2):
            np.testing.assert_allclose(vectors, right, atol=TOLERANCE, rtol=0)
