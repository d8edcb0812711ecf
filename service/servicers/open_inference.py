"""inference.GRPCInferenceService, the Open Inference Protocol v2.

`ModelReady` of a model that is loading or draining answers ready=false, the protocol's own way to say it; Triton's
UNAVAILABLE makes KServe's client repeat the question three times. A name or version that is not served is NOT_FOUND.
"""

from collections.abc import Sequence
from typing import Any

from grpc.aio import ServicerContext

from protos import open_inference_pb2 as pb
from protos.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from service.codec.infer_inputs import TYPES, VECTORS, input_names
from service.codec.open_inference import decode_infer, encode_infer, output_names
from service.logs import caller, name_model
from service.repository import Repository
from service.request import Limits
from service.servicers.call import arrival_and_deadline, trace
from service.version import installed_version

SERVER_NAME = "mhsa-serve"
# Triton's word for an ONNX graph run by ONNX Runtime; clients compare it.
PLATFORM = "onnxruntime_onnx"
# Triton's word for the parameters priority and timeout.
EXTENSIONS = ("schedule_policy",)

_Tensor = pb.ModelMetadataResponse.TensorMetadata
_Context = ServicerContext[Any, Any]  # Any: no message goes through the context of a unary call


class OpenInferenceServicer(GRPCInferenceServiceServicer):
    """Answers the protocol's six RPCs from the repository's models."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._version = installed_version()

    async def ServerLive(self, _request: pb.ServerLiveRequest, _context: _Context) -> pb.ServerLiveResponse:
        """Whether the process is worth keeping: it is, unless an engine is dead."""
        return pb.ServerLiveResponse(live=self._repository.is_alive)

    async def ServerReady(self, _request: pb.ServerReadyRequest, _context: _Context) -> pb.ServerReadyResponse:
        """Whether every model can serve."""
        return pb.ServerReadyResponse(ready=self._repository.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, _context: _Context) -> pb.ModelReadyResponse:
        """Whether one model can serve."""
        return pb.ModelReadyResponse(ready=self._repository.is_model_ready(request.name, request.version))

    async def ServerMetadata(self, _request: pb.ServerMetadataRequest, _context: _Context) -> pb.ServerMetadataResponse:
        """Name, version, and which of the protocol's extensions there are."""
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=self._version, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, _context: _Context) -> pb.ModelMetadataResponse:
        """Inputs and outputs of one model."""
        model = self._repository.get(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=self._repository.versions(model.name),
            platform=PLATFORM,
            inputs=_inputs(model.limits),
            outputs=_outputs(model.limits),
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: _Context) -> pb.ModelInferResponse:
        """Run a model."""
        arrival, deadline = arrival_and_deadline(context)
        model = self._repository.get(request.model_name, request.model_version)
        name_model(model.name, model.version)
        call = decode_infer(request, model.limits, arrival=arrival, deadline=deadline, caller=caller.get())
        trace(call.request)
        await model.batcher.submit(call.request)
        return encode_infer(call, request_id=request.id, model=model.name, version=model.version)


def _inputs(limits: Limits) -> Sequence[_Tensor]:
    names = [name for name in input_names(limits) if name != TYPES or limits.type_vocab_size]
    return [
        _Tensor(name=name, datatype="FP32", shape=[-1, -1, limits.input_size])
        if name == VECTORS
        else _Tensor(name=name, datatype="INT64", shape=[-1, -1])
        for name in names
    ]


def _outputs(limits: Limits) -> Sequence[_Tensor]:
    pooled, tokens = output_names(limits)
    return [
        _Tensor(name=pooled, datatype="FP32", shape=[-1, limits.output_size]),
        _Tensor(name=tokens, datatype="FP32", shape=[-1, -1, limits.hidden_size]),
    ]
