"""Too much work for a real engine: who is refused, how, and that the others are served."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status
from tritonclient.utils import InferenceServerException

from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceStub
from tests.integration.server_process import TestedServer


@pytest.fixture(scope="module")
def server(minilm_bundle: Path) -> Iterator[TestedServer]:
    """With room for one and a half of the requests of `message`, each about a second's work."""
    with TestedServer(minilm_bundle.parents[1], "--max-queued-tokens", "12000") as server:
        server.wait_until_serving()
        yield server


def message(num_sequences: int = 200, length: int = 40) -> pb.EncodeRequest:
    ids = np.full(num_sequences * length, 7, "<i4")
    return pb.EncodeRequest(token_ids=ids.tobytes(), lengths=[length] * num_sequences)


def encode(stub: EncoderServiceStub) -> pb.EncodeResponse | grpc.RpcError:
    try:
        return stub.Encode(message(), timeout=60)
    except grpc.RpcError as error:
        return error


def test_a_full_queue_refuses_with_the_time_to_come_back(server: TestedServer) -> None:
    with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(encode, [EncoderServiceStub(channel)] * 8))
    refusals = [answer for answer in answers if isinstance(answer, grpc.RpcError)]
    assert 0 < len(refusals) < 8, "some are served and some are refused"
    for refusal in refusals:
        assert refusal.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the limit is 12000" in (refusal.details() or "")
        metadata = {entry.key: entry.value for entry in refusal.trailing_metadata()}
        pushback = int(metadata["grpc-retry-pushback-ms"])
        (detail,) = rpc_status.from_call(refusal).details
        retry = RetryInfo.FromString(detail.value).retry_delay
        assert pushback == math.ceil(retry.ToNanoseconds() / 1e6)
        assert 0 < pushback < 10_000
    assert server.metric("mhsa_errors_total", reason="queue_full") == len(refusals)
    assert server.metric("mhsa_queue_tokens") == 0


def test_a_deadline_that_cannot_be_met_is_answered_before_anything_runs(server: TestedServer) -> None:
    before = server.metric("mhsa_sequences_total")
    tensor = triton.InferInput("input_ids", [200, 40], "INT64")
    tensor.set_data_from_numpy(np.full((200, 40), 7))
    with (
        triton.InferenceServerClient(server.target) as client,
        pytest.raises(InferenceServerException, match="the request would be done in") as refused,
    ):
        client.infer("all-MiniLM-L6-v2", [tensor], timeout=20_000)  # microseconds
    assert refused.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert server.metric("mhsa_sequences_total") == before


def test_a_deadline_that_passes_in_the_queue_is_never_run(minilm_bundle: Path) -> None:
    # One runner, and each of the three calls is one run of a second: while the second runs, nothing can be taken.
    options = ("--threads", "1", "--max-batch-tokens", "10000")
    with TestedServer(minilm_bundle.parents[1], *options) as server, ThreadPoolExecutor(3) as pool:
        server.wait_until_serving()
        with grpc.insecure_channel(server.target) as channel:
            stub = EncoderServiceStub(channel)
            busy = [pool.submit(stub.Encode, message(250), timeout=60) for _ in range(3)]
            while (server.metric("mhsa_sequences_total"), server.metric("mhsa_queue_tokens")) != (250, 10000):
                assert not all(call.done() for call in busy)  # in whatever order they came
            with pytest.raises(grpc.RpcError) as late:
                stub.Encode(message(1), timeout=0.05)
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert all(call.result() for call in busy)
        assert server.metric("mhsa_sequences_total") == 750
        assert server.metric("mhsa_batch_sequences_count") == 3
