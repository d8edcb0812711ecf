"""Encode and GetModel over a real server."""

import asyncio
import struct

import grpc
import numpy as np
import pytest

from protos.encoder_pb2 import OUTPUT_POOLED_AND_TOKENS, GetModelRequest, Limits
from tests.fakes import (
    HIDDEN_SIZE,
    LABELS,
    LIMITS,
    FakeBatcher,
    fake_classifier,
    fake_model,
    fake_repository,
    pooled_vector,
    token_vectors,
)
from tests.wire import encode_request, running


async def test_encode_answers_with_each_sequences_vectors_in_order() -> None:
    async with running() as wire:
        response = await wire.encoder.Encode(encode_request([[3, 5], [7]], output=OUTPUT_POOLED_AND_TOKENS))

    rows = np.frombuffer(response.pooled, "<f4").reshape(2, HIDDEN_SIZE)
    np.testing.assert_array_equal(rows, [pooled_vector([3, 5]), pooled_vector([7])])
    tokens = np.frombuffer(response.tokens, "<f4").reshape(3, HIDDEN_SIZE)
    np.testing.assert_array_equal(tokens, [*token_vectors([3, 5]), *token_vectors([7])])


async def test_token_types_reach_the_model() -> None:
    types = struct.pack("<3i", 0, 1, 1)
    async with running() as wire:
        response = await wire.encoder.Encode(encode_request([[3], [5, 7]], token_type_ids=types))

    rows = np.frombuffer(response.pooled, "<f4").reshape(2, HIDDEN_SIZE)
    np.testing.assert_array_equal(rows, [pooled_vector([3]), pooled_vector([5, 7], types=[1, 1])])


async def test_concurrent_calls_each_get_their_own_answer() -> None:
    async with running() as wire:
        calls = [wire.encoder.Encode(encode_request([[i], [i + 1, i]])) for i in range(64)]
        responses = await asyncio.gather(*calls)

    for i, response in enumerate(responses):
        rows = np.frombuffer(response.pooled, "<f4").reshape(2, HIDDEN_SIZE)
        np.testing.assert_array_equal(rows, [pooled_vector([i]), pooled_vector([i + 1, i])])


async def test_an_answer_names_the_version_that_gave_it() -> None:
    batcher = FakeBatcher()
    repository = fake_repository(fake_model(batcher, version="2"), fake_model(batcher, version="10"))
    async with running(repository) as wire:
        newest = await wire.encoder.Encode(encode_request([[1]], model="fake"))
        named = await wire.encoder.Encode(encode_request([[1]], model="fake", version="2"))

    assert (newest.version, named.version) == ("10", "2")


async def test_the_callers_deadline_is_known_to_the_queue() -> None:
    async with running() as wire:
        await wire.encoder.Encode(encode_request([[1]]), timeout=30.0)
        await wire.encoder.Encode(encode_request([[1]]))

    with_deadline, without = wire.batcher.requests
    assert with_deadline.deadline is not None
    # The wire rounds a timeout up by at most a tenth of a second, and time passes.
    assert 29.0 < with_deadline.deadline - with_deadline.arrival < 30.2
    assert without.deadline is None


async def test_a_deadline_that_passes_ends_the_call_and_the_work() -> None:
    async with running() as wire:
        wire.batcher.hold(1)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.encoder.Encode(encode_request([[1]]), timeout=0.1)
        await wire.interceptor.wait_until_idle()

    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_caller_that_leaves_frees_its_place() -> None:
    async with running() as wire:
        wire.batcher.hold(1)
        call = wire.encoder.Encode(encode_request([[1]]))
        await wire.batcher.wait_for_requests(1)
        call.cancel()
        await wire.interceptor.wait_until_idle()

    assert wire.batcher.num_cancelled == 1


async def test_get_model_describes_the_model_and_its_limits() -> None:
    async with running() as wire:
        model = await wire.encoder.GetModel(GetModelRequest())

    assert (model.model, model.version, model.hidden_size, model.vocab_size) == ("fake", "1", 6, 1000)
    assert (model.type_vocab_size, model.pad_token_id, model.pooling, model.normalized) == (2, 0, "mean", False)
    assert (model.precision, model.execution_provider) == ("fp32", "FakeExecutionProvider")
    assert model.bundle_digest == "d" * 64
    assert model.limits == Limits(
        max_sequence_tokens=LIMITS.max_sequence_tokens,
        max_request_sequences=LIMITS.max_request_sequences,
        max_request_tokens=LIMITS.max_request_tokens,
        max_request_bytes=LIMITS.max_request_bytes,
        max_message_bytes=LIMITS.max_message_bytes,
    )


async def test_get_model_says_what_an_embedding_is_and_has_no_labels() -> None:
    async with running() as wire:
        model = await wire.encoder.GetModel(GetModelRequest())

    assert (model.task, model.output_size, list(model.labels)) == ("embedding", 6, [])
    assert (dict(model.prompts), model.default_prompt) == ({}, "")


async def test_get_model_gives_a_classifiers_labels_and_prompts() -> None:
    async with running(fake_repository(fake_classifier(FakeBatcher()))) as wire:
        model = await wire.encoder.GetModel(GetModelRequest())

    assert (model.task, model.output_size, list(model.labels)) == ("classification", 6, LABELS)
    assert (dict(model.prompts), model.default_prompt) == ({"query": "query: "}, "query")


async def test_get_model_of_one_that_is_loading_is_unavailable() -> None:
    async with running(fake_repository(loading=[("slow", 1)])) as wire:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.encoder.GetModel(GetModelRequest(model="slow"))
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
