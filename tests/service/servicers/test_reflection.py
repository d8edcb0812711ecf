"""Reflection over the wire: what grpcurl and its like would see."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from grpc_reflection.v1alpha.reflection_pb2_grpc import (
    ServerReflectionStub,
    add_ServerReflectionServicer_to_server,
)

from service.servicers.reflection import reflection_servicer

SERVICES = {
    "grpc.health.v1.Health": {"Check", "Watch"},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo"},
    "inference.GRPCInferenceService": {
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
    },
    "mhsa.encoder.v1.EncoderService": {"Encode", "EncodeStream", "GetModel"},
}


@asynccontextmanager
async def reflection() -> AsyncIterator[ServerReflectionStub]:
    server = grpc.aio.server()
    add_ServerReflectionServicer_to_server(reflection_servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ServerReflectionStub(channel)
    await server.stop(0)


async def ask(stub: ServerReflectionStub, request: ServerReflectionRequest) -> ServerReflectionResponse:
    async for response in stub.ServerReflectionInfo(iter([request])):
        return response
    raise AssertionError("no answer")


async def test_every_service_is_listed() -> None:
    async with reflection() as stub:
        answer = await ask(stub, ServerReflectionRequest(list_services=""))
        assert {service.name for service in answer.list_services_response.service} == SERVICES.keys()


async def test_every_service_is_described_with_its_methods() -> None:
    async with reflection() as stub:
        for name, methods in SERVICES.items():
            answer = await ask(stub, ServerReflectionRequest(file_containing_symbol=name))
            files = [
                FileDescriptorProto.FromString(raw) for raw in answer.file_descriptor_response.file_descriptor_proto
            ]
            found = {f"{f.package}.{s.name}": {m.name for m in s.method} for f in files for s in f.service}
            assert methods <= found[name]
