"""A real grpc.aio server on loopback, with the two APIs, their interceptor and a fake batcher behind them."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry

from protos.encoder_pb2_grpc import EncoderServiceStub, add_EncoderServiceServicer_to_server
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub, add_GRPCInferenceServiceServicer_to_server
from service.interceptors import RequestInterceptor
from service.metrics import Metrics
from service.repository import Repository
from service.servicers.encoder import EncoderServicer
from service.servicers.open_inference import OpenInferenceServicer
from tests.fakes import FakeBatcher, fake_model, fake_repository


@dataclass
class Wire:
    """A running server and a channel to it."""

    batcher: FakeBatcher
    repository: Repository
    metrics: Metrics
    interceptor: RequestInterceptor
    draining: asyncio.Event
    target: str
    channel: grpc.aio.Channel
    encoder: "EncoderServiceStub" = field(init=False)
    inference: "GRPCInferenceServiceStub" = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = EncoderServiceStub(self.channel)
        self.inference = GRPCInferenceServiceStub(self.channel)

    def sample(self, name: str, **labels: str) -> float:
        """The value of a series; one that does not exist fails the test."""
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no series {name}{labels}"
        return value


@asynccontextmanager
async def running(
    repository: Repository | None = None,
    *,
    batcher: FakeBatcher | None = None,
    tokens: Iterable[str] = (),
    max_stream_requests: int = 4,
) -> AsyncIterator[Wire]:
    """A server on a free port, stopped at the end."""
    batcher = batcher or FakeBatcher()
    repository = repository or fake_repository(fake_model(batcher))
    metrics = Metrics(CollectorRegistry())
    interceptor = RequestInterceptor(metrics, tokens)
    draining = asyncio.Event()
    server = grpc.aio.server(interceptors=[interceptor], options=[("grpc.so_reuseport", 0)])
    servicer = EncoderServicer(repository, metrics, max_stream_requests, draining)
    add_EncoderServiceServicer_to_server(servicer, server)
    add_GRPCInferenceServiceServicer_to_server(OpenInferenceServicer(repository), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            yield Wire(batcher, repository, metrics, interceptor, draining, target, channel)
    finally:
        await server.stop(None)
