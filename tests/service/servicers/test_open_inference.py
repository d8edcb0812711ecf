"""The Open Inference Protocol over a real server, with our stubs and with tritonclient."""

import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from protos.open_inference_pb2 import (
    ModelMetadataRequest,
    ModelReadyRequest,
    ServerLiveRequest,
    ServerMetadataRequest,
    ServerReadyRequest,
)
from service.request import Limits, Priority
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
from tests.wire import infer_request, running

ROOT = Path(__file__).resolve().parents[3]


def triton_inputs(ids: list[list[int]], mask: list[list[int]], *, datatype: str = "INT64") -> list[triton.InferInput]:
    dtype = {"INT64": np.int64, "INT32": np.int32}[datatype]
    inputs = []
    for name, rows in (("input_ids", ids), ("attention_mask", mask)):
        tensor = triton.InferInput(name, [len(rows), len(rows[0])], datatype)
        tensor.set_data_from_numpy(np.array(rows, dtype))
        inputs.append(tensor)
    return inputs


async def test_tritonclient_gets_the_vectors_of_padded_rows() -> None:
    ids = [[3, 5, 0], [0, 7, 9], [2, 0, 4]]
    mask = [[1, 1, 0], [0, 1, 1], [1, 0, 1]]  # padded right, padded left, with a hole
    async with running() as wire, triton.InferenceServerClient(wire.target) as client:
        result = await client.infer("fake", triton_inputs(ids, mask), request_id="call 1")

    np.testing.assert_array_equal(
        result.as_numpy("sentence_embedding"),
        [pooled_vector([3, 5], [0, 1]), pooled_vector([7, 9], [1, 2]), pooled_vector([2, 4], [0, 2])],
    )
    states = np.zeros((3, 3, HIDDEN_SIZE))
    states[0, :2] = token_vectors([3, 5], [0, 1])
    states[1, 1:] = token_vectors([7, 9], [1, 2])
    states[2, ::2] = token_vectors([2, 4], [0, 2])
    np.testing.assert_array_equal(result.as_numpy("last_hidden_state"), states)
    assert result.get_response().id == "call 1"


@pytest.mark.parametrize("datatype", ["INT64", "INT32"])
async def test_tritonclient_may_name_one_output(datatype: str) -> None:
    async with running() as wire, triton.InferenceServerClient(wire.target) as client:
        result = await client.infer(
            "fake",
            triton_inputs([[3, 5]], [[1, 1]], datatype=datatype),
            outputs=[triton.InferRequestedOutput("sentence_embedding")],
        )

    np.testing.assert_array_equal(result.as_numpy("sentence_embedding"), [pooled_vector([3, 5])])
    assert result.as_numpy("last_hidden_state") is None


async def test_tritonclients_timeout_and_priority_reach_the_queue() -> None:
    async with running() as wire, triton.InferenceServerClient(wire.target) as client:
        await client.infer("fake", triton_inputs([[3]], [[1]]), timeout=2_000_000, priority=1)

    (request,) = wire.batcher.requests
    assert (request.deadline, request.priority) == (request.arrival + 2.0, Priority.HIGH)


async def test_tritonclients_timeout_does_not_stretch_grpcs_own_deadline() -> None:
    async with running() as wire, triton.InferenceServerClient(wire.target) as client:
        await client.infer("fake", triton_inputs([[3]], [[1]]), timeout=60_000_000, client_timeout=5.0)

    (request,) = wire.batcher.requests
    assert request.deadline is not None
    # The wire rounds a timeout up by at most a tenth of a second.
    assert request.deadline - request.arrival <= 5.1


async def test_tritonclient_is_told_which_priorities_there_are() -> None:
    async with running() as wire, triton.InferenceServerClient(wire.target) as client:
        with pytest.raises(InferenceServerException) as failure:
            await client.infer("fake", triton_inputs([[3]], [[1]]), priority=4)

    assert failure.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert failure.value.message() == "priority is 4; it takes 1 (high) to 3 (low), or 0 for normal"


async def test_tritonclient_sees_the_status_of_an_error() -> None:
    async with running() as wire, triton.InferenceServerClient(wire.target) as client:
        with pytest.raises(InferenceServerException) as failure:
            await client.infer("fake", triton_inputs([[3]], [[0]]))

    assert failure.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert failure.value.message() == "row 0 has no tokens; the least is 1"


async def test_tritonclient_asks_for_health_and_metadata() -> None:
    async with running() as wire, triton.InferenceServerClient(wire.target) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("fake")
        metadata = await client.get_model_metadata("fake", as_json=True)
        server = await client.get_server_metadata()

    assert metadata["platform"] == "onnxruntime_onnx"
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [
        {"name": name, "datatype": "INT64", "shape": ["-1", "-1"]}
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    assert metadata["outputs"] == [
        {"name": "sentence_embedding", "datatype": "FP32", "shape": ["-1", "6"]},
        {"name": "last_hidden_state", "datatype": "FP32", "shape": ["-1", "-1", "6"]},
    ]
    assert server.name == "mhsa-serve"


@pytest.mark.parametrize(
    "imports",
    [
        "import protos.open_inference_pb2, tritonclient.grpc",
        "import tritonclient.grpc, protos.open_inference_pb2",
        "import tritonclient.grpc, service.servicers.open_inference",
    ],
)
def test_tritonclient_and_our_messages_share_a_process_in_any_order(imports: str) -> None:
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True, timeout=60)


async def test_typed_contents_are_answered_raw() -> None:
    message = infer_request([[3, 5]])
    message.raw_input_contents.clear()
    message.inputs[0].contents.int64_contents.extend([3, 5])
    async with running() as wire:
        response = await wire.inference.ModelInfer(message)

    assert (response.id, response.model_name, response.model_version) == ("7", "fake", "1")
    assert response.raw_output_contents[0] == pooled_vector([3, 5]).tobytes()


async def test_a_server_whose_model_still_loads_is_live_and_not_ready() -> None:
    async with running(fake_repository(loading=[("slow", 1)])) as wire:
        assert (await wire.inference.ServerLive(ServerLiveRequest())).live
        assert not (await wire.inference.ServerReady(ServerReadyRequest())).ready
        assert not (await wire.inference.ModelReady(ModelReadyRequest(name="slow"))).ready


async def test_an_engine_that_does_not_work_is_not_ready_and_the_server_lives() -> None:
    async with running() as wire:
        wire.batcher.is_healthy = False
        assert (await wire.inference.ServerLive(ServerLiveRequest())).live
        assert not (await wire.inference.ServerReady(ServerReadyRequest())).ready
        assert not (await wire.inference.ModelReady(ModelReadyRequest(name="fake"))).ready
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await wire.inference.ModelInfer(infer_request([[1]]))
        wire.batcher.is_healthy = True
        assert (await wire.inference.ServerReady(ServerReadyRequest())).ready

    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_whose_engine_is_dead_is_not_live() -> None:
    async with running() as wire:
        wire.batcher.is_alive = False
        assert not (await wire.inference.ServerLive(ServerLiveRequest())).live
        assert not (await wire.inference.ServerReady(ServerReadyRequest())).ready


async def test_no_model_is_ready_while_the_server_drains() -> None:
    async with running() as wire:
        wire.repository.is_draining = True
        assert not (await wire.inference.ServerReady(ServerReadyRequest())).ready
        assert not (await wire.inference.ModelReady(ModelReadyRequest(name="fake"))).ready


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ModelReadyRequest(name="x"), grpc.StatusCode.NOT_FOUND),
        (ModelReadyRequest(name="fake", version="9"), grpc.StatusCode.NOT_FOUND),
        (ModelReadyRequest(name="fake", version="-1"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_readiness_of_what_is_not_served_is_an_error(request_: ModelReadyRequest, code: grpc.StatusCode) -> None:
    async with running() as wire:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await wire.inference.ModelReady(request_)
    assert failure.value.code() is code


async def test_a_model_without_token_types_does_not_list_them() -> None:
    limits = Limits(LIMITS.vocab_size, 0, HIDDEN_SIZE, HIDDEN_SIZE, 16, 8, 64, 4096, 4096)
    async with running(fake_repository(fake_model(FakeBatcher(), limits=limits))) as wire:
        metadata = await wire.inference.ModelMetadata(ModelMetadataRequest(name="fake"))

    assert [tensor.name for tensor in metadata.inputs] == ["input_ids", "attention_mask"]


async def test_metadata_of_a_classifier_names_its_logits() -> None:
    async with running(fake_repository(fake_classifier(FakeBatcher()))) as wire:
        metadata = await wire.inference.ModelMetadata(ModelMetadataRequest(name="classifier"))

    assert [(tensor.name, list(tensor.shape)) for tensor in metadata.outputs] == [
        ("logits", [-1, 6]),
        ("last_hidden_state", [-1, -1, 6]),
    ]


async def test_metadata_lists_every_version_and_field_6_is_left_unset() -> None:
    batcher = FakeBatcher()
    repository = fake_repository(fake_model(batcher, version="2"), fake_model(batcher, version="10"))
    async with running(repository) as wire:
        metadata = await wire.inference.ModelMetadata(ModelMetadataRequest(name="fake"))
        server = await wire.inference.ServerMetadata(ServerMetadataRequest())

    assert list(metadata.versions) == ["2", "10"]
    assert list(server.extensions) == ["schedule_policy"]
