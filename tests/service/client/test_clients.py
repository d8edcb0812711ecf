"""Both clients against a real server. Each test runs on the blocking client, in a thread, and on the asyncio one."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from service.client import AsyncEncoderClient, EncoderClient
from service.errors import InvalidRequestError, OutOfMemoryError, QueueFullError, RequestError, UnavailableError
from service.request import Priority
from tests.fakes import (
    HIDDEN_SIZE,
    LIMITS,
    FakeBatcher,
    fake_classifier,
    fake_model,
    fake_repository,
    pooled_vector,
    token_vectors,
)
from tests.wire import Wire, running

# client(target, method, *arguments, **options): one call on a client of its own.
Call = Callable[..., Awaitable[Any]]


async def blocking(
    target: str, method: str, *args: Any, token: str | None = None, tenant: str | None = None, **options: Any
) -> Any:
    def call() -> Any:
        with EncoderClient(target, token=token, tenant=tenant) as client:
            return getattr(client, method)(*args, **options)

    return await asyncio.to_thread(call)


async def on_asyncio(
    target: str, method: str, *args: Any, token: str | None = None, tenant: str | None = None, **options: Any
) -> Any:
    async with AsyncEncoderClient(target, token=token, tenant=tenant) as client:
        return await getattr(client, method)(*args, **options)


@pytest.fixture(params=[blocking, on_asyncio], ids=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest) -> Call:
    call: Call = request.param
    return call


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with running() as running_wire:
        yield running_wire


async def test_encode_gives_a_row_for_each_sequence(wire: Wire, client: Call) -> None:
    vectors = await client(wire.target, "encode", [[3, 5], [7]])

    np.testing.assert_array_equal(vectors, [pooled_vector([3, 5]), pooled_vector([7])])
    assert vectors.dtype == np.float32


async def test_encode_tokens_gives_an_array_for_each_sequence(wire: Wire, client: Call) -> None:
    first, second = await client(wire.target, "encode_tokens", [[3, 5], [7]])

    np.testing.assert_array_equal(first, token_vectors([3, 5]))
    np.testing.assert_array_equal(second, token_vectors([7]))


async def test_a_call_beyond_every_limit_comes_back_whole_and_in_order(wire: Wire, client: Call) -> None:
    sequences = [[1 + i % 900] * (1 + i % 16) for i in range(300)]  # the server takes 8 sequences and 64 tokens

    vectors = await client(wire.target, "encode", sequences)

    np.testing.assert_array_equal(vectors, [pooled_vector(sequence) for sequence in sequences])
    assert len(wire.batcher.requests) > 300 / 8


async def test_the_parts_of_a_call_are_on_the_wire_together(wire: Wire, client: Call) -> None:
    held = wire.batcher.hold(1)
    call = asyncio.ensure_future(client(wire.target, "encode", [[1]] * 100))
    await wire.batcher.wait_for_requests(8)
    held.set()

    assert (await call).shape == (100, HIDDEN_SIZE)


async def test_nothing_gives_nothing(wire: Wire, client: Call) -> None:
    assert (await client(wire.target, "encode", [])).shape == (0, HIDDEN_SIZE)
    assert (await client(wire.target, "encode", [], dimensions=2)).shape == (0, 2)
    assert await client(wire.target, "encode_tokens", []) == []


async def test_token_types_and_dimensions_are_sent(wire: Wire, client: Call) -> None:
    vectors = await client(wire.target, "encode", [[3, 5]], token_type_ids=[[0, 1]], dimensions=3)

    expected = pooled_vector([3, 5], types=[0, 1])[:3]
    # The server divides in float64 and rounds to float32, whose spacing below 1 is 6e-8.
    np.testing.assert_allclose(vectors, [expected / np.linalg.norm(expected)], atol=6e-8)


async def test_half_width_on_the_wire_is_float32_here(wire: Wire, client: Call) -> None:
    vectors = await client(wire.target, "encode", [[3]], vector_type="float16")

    np.testing.assert_array_equal(vectors, [pooled_vector([3])])  # small integers and halves are exact in float16
    assert vectors.dtype == np.float32


@pytest.mark.parametrize(
    ("options", "priority"),
    [
        ({}, Priority.NORMAL),
        ({"priority": "high"}, Priority.HIGH),
        ({"priority": "normal"}, Priority.NORMAL),
        ({"priority": "low"}, Priority.LOW),
    ],
)
async def test_the_priority_is_that_of_every_part(
    wire: Wire, client: Call, options: dict[str, str], priority: Priority
) -> None:
    await client(wire.target, "encode", [[1]] * 20, **options)

    assert len(wire.batcher.requests) > 1
    assert {request.priority for request in wire.batcher.requests} == {priority}


async def test_a_model_and_version_may_be_named(wire: Wire, client: Call) -> None:
    assert (await client(wire.target, "encode", [[1]], model="fake", version="1")).shape == (1, HIDDEN_SIZE)
    with pytest.raises(grpc.RpcError) as failure:
        await client(wire.target, "encode", [[1]], model="x")
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_timeout_is_for_the_whole_call(wire: Wire, client: Call) -> None:
    wire.batcher.hold(2)
    with pytest.raises(grpc.RpcError) as failure:
        await client(wire.target, "encode", [[1]] * 40 + [[2]], timeout=0.3)
    await wire.interceptor.wait_until_idle()

    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_part_that_fails_takes_back_those_in_flight_on_asyncio(wire: Wire) -> None:
    wire.batcher.hold(1)
    async with AsyncEncoderClient(wire.target) as client:
        with pytest.raises(grpc.RpcError) as failure:
            await client.encode([[5000]] * 8 + [[1]] * 40)
        await wire.interceptor.wait_until_idle()

    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_part_that_fails_takes_back_those_in_flight_when_blocking(wire: Wire) -> None:
    wire.batcher.hold(1)
    with EncoderClient(wire.target) as client:
        with pytest.raises(grpc.RpcError) as failure:
            await asyncio.to_thread(client.encode, [[5000]] * 8 + [[1]] * 40)
        await wire.interceptor.wait_until_idle()

    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unavailable_is_tried_again(wire: Wire, client: Call) -> None:
    wire.batcher.error = UnavailableError("draining")
    call = asyncio.ensure_future(client(wire.target, "encode", [[1]]))
    await wire.batcher.wait_for_requests(1)
    wire.batcher.error = None

    assert (await call).shape == (1, HIDDEN_SIZE)
    assert len(wire.batcher.requests) == 2


@pytest.mark.parametrize("error", [QueueFullError("full", 0.001), OutOfMemoryError("none left")])
async def test_room_that_comes_back_is_waited_for(wire: Wire, client: Call, error: RequestError) -> None:
    wire.batcher.error = error
    call = asyncio.ensure_future(client(wire.target, "encode", [[1]]))
    await wire.batcher.wait_for_requests(1)
    wire.batcher.error = None

    assert (await call).shape == (1, HIDDEN_SIZE)
    assert len(wire.batcher.requests) == 2


async def test_a_full_queue_is_tried_again_when_it_said_that_there_is_room(wire: Wire, client: Call) -> None:
    wire.batcher.error = QueueFullError("full", 0.5)  # gRPC's own first wait would be 0.1 s
    call = asyncio.ensure_future(client(wire.target, "encode", [[1]]))
    await wire.batcher.wait_for_requests(1)
    wire.batcher.error = None
    await call

    first, second = wire.batcher.requests
    assert second.arrival - first.arrival >= 0.5


async def test_a_queue_that_stays_full_is_tried_five_times(wire: Wire, client: Call) -> None:
    wire.batcher.error = QueueFullError("full", 0.001)
    with pytest.raises(grpc.RpcError) as failure:
        await client(wire.target, "encode", [[1]])

    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(wire.batcher.requests) == 5


async def test_what_is_invalid_is_not_tried_again(wire: Wire, client: Call) -> None:
    wire.batcher.error = InvalidRequestError("no")
    with pytest.raises(grpc.RpcError):
        await client(wire.target, "encode", [[1]])

    assert len(wire.batcher.requests) == 1


async def test_a_token_is_sent_as_bearer(client: Call) -> None:
    async with running(tokens=["a-token"]) as wire:
        await client(wire.target, "encode", [[1]], token="a-token")
        with pytest.raises(grpc.RpcError) as failure:
            await client(wire.target, "encode", [[1]], token="another")
    assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_tenant_is_sent_beside_the_token(client: Call) -> None:
    async with running(tokens=["a-token"], fairness="tenant") as wire:
        await client(wire.target, "encode", [[1]], token="a-token", tenant="acme")

    assert [request.caller for request in wire.batcher.requests] == ["acme"]


async def test_the_model_is_described_and_asked_for_once(wire: Wire) -> None:
    async with AsyncEncoderClient(wire.target) as client:
        assert (await client.model()).hidden_size == HIDDEN_SIZE
        await client.encode([[1]])
        await client.encode([[2]])

    assert wire.sample("mhsa_requests_total", method="GetModel", code="OK") == 1


def roll_out_version_2(wire: Wire) -> None:
    """A version that takes longer sequences is the highest from now on."""
    longer = dataclasses.replace(LIMITS, max_sequence_tokens=32)
    wire.repository.add(fake_model(wire.batcher, version="2", limits=longer))


async def test_the_description_is_asked_for_again_once_another_version_has_answered(wire: Wire) -> None:
    async with AsyncEncoderClient(wire.target) as client:
        assert (await client.model()).version == "1"
        roll_out_version_2(wire)
        await client.encode([[1]])

        assert (await client.model()).version == "2"
    assert wire.sample("mhsa_requests_total", method="GetModel", code="OK") == 2


async def test_the_description_is_asked_for_again_after_a_call_that_failed(wire: Wire) -> None:
    async with AsyncEncoderClient(wire.target) as client:
        with pytest.raises(ValueError, match="takes 16"):
            await client.encode([[1] * 20])
        roll_out_version_2(wire)

        assert (await client.encode([[1] * 20])).shape == (1, HIDDEN_SIZE)


async def test_a_blocking_client_asks_again_too(wire: Wire) -> None:
    with EncoderClient(wire.target) as client:
        with pytest.raises(ValueError, match="takes 16"):
            await asyncio.to_thread(client.encode, [[1] * 20])
        roll_out_version_2(wire)
        await asyncio.to_thread(client.encode, [[1] * 20])  # asks again because a call had failed
        assert (await asyncio.to_thread(client.model)).version == "2"

    with EncoderClient(wire.target) as client:
        await asyncio.to_thread(client.encode, [[1]])
        wire.repository.add(fake_model(wire.batcher, version="3"))
        await asyncio.to_thread(client.encode, [[1]])
        assert (await asyncio.to_thread(client.model)).version == "3"


async def test_an_asyncio_caller_that_is_cancelled_leaves_nothing_behind(wire: Wire) -> None:
    wire.batcher.hold(1)
    async with AsyncEncoderClient(wire.target) as client:
        call = asyncio.create_task(client.encode([[1]] * 100))
        await wire.batcher.wait_for_requests(8)
        call.cancel()
        await wire.interceptor.wait_until_idle()

    assert wire.batcher.num_cancelled == 8


async def test_threads_share_a_blocking_client(wire: Wire) -> None:
    with EncoderClient(wire.target) as client:
        vectors = await asyncio.gather(*(asyncio.to_thread(client.encode, [[i]]) for i in range(16)))

    np.testing.assert_array_equal(np.concatenate(vectors), [pooled_vector([i]) for i in range(16)])


async def test_classify_gives_a_row_of_logits_for_each_sequence(client: Call) -> None:
    async with running(fake_repository(fake_classifier(FakeBatcher()))) as wire:
        logits = await client(wire.target, "classify", [[3, 5], [7]])

    np.testing.assert_array_equal(logits, [pooled_vector([3, 5]), pooled_vector([7])])
    assert logits.dtype == np.float32


async def test_logits_are_not_given_as_embeddings(client: Call) -> None:
    async with running(fake_repository(fake_classifier(FakeBatcher()))) as wire:
        with pytest.raises(ValueError, match="'classifier' is for classification, not embedding; use classify"):
            await client(wire.target, "encode", [[1]])


async def test_embeddings_are_not_given_as_logits(wire: Wire, client: Call) -> None:
    with pytest.raises(ValueError, match="'fake' is for embedding, not classification; use encode"):
        await client(wire.target, "classify", [[1]])


async def test_a_classifiers_token_vectors_can_be_had(client: Call) -> None:
    async with running(fake_repository(fake_classifier(FakeBatcher()))) as wire:
        (vectors,) = await client(wire.target, "encode_tokens", [[3, 5]])

    np.testing.assert_array_equal(vectors, token_vectors([3, 5]))


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
async def test_a_timeout_that_is_none_is_an_error_of_the_caller(wire: Wire, client: Call, timeout: float) -> None:
    with pytest.raises(ValueError, match=r"timeout is .*; it takes seconds above 0, or None for no limit"):
        await client(wire.target, "encode", [[1, 2]], timeout=timeout)


@pytest.mark.parametrize("timeout", [float("inf"), 1e18])
async def test_a_timeout_beyond_all_time_is_no_limit(wire: Wire, client: Call, timeout: float) -> None:
    assert (await client(wire.target, "encode", [[1, 2]], timeout=timeout)).shape == (1, HIDDEN_SIZE)


@pytest.mark.parametrize("name", ["token", "tenant"])
@pytest.mark.parametrize("value", ["", "caf\u00e9", "a\nb"])
async def test_what_metadata_cannot_carry_is_an_error_of_the_caller(
    wire: Wire, client: Call, name: str, value: str
) -> None:
    with pytest.raises(ValueError, match=f"the {name} is empty or has characters other than printable ASCII"):
        await client(wire.target, "encode", [[1, 2]], **{name: value})
