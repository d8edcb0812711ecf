"""A real grpc.aio server on loopback, with the two APIs, their interceptor and a fake batcher behind them."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from prometheus_client import CollectorRegistry

from protos.encoder_pb2 import EncodeRequest, EncodeStreamRequest, EncodeStreamResponse
from protos.encoder_pb2_grpc import EncoderServiceStub, add_EncoderServiceServicer_to_server
from protos.open_inference_pb2 import ModelInferRequest
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub, add_GRPCInferenceServiceServicer_to_server
from service.callers import Callers
from service.config import Fairness
from service.interceptors import RequestInterceptor
from service.metrics import Metrics
from service.repository import Repository
from service.servicers.encode_stream import StreamBounds
from service.servicers.encoder import EncoderServicer
from service.servicers.meter import Instruments
from service.servicers.open_inference import OpenInferenceServicer
from service.tokens import Token
from service.tracing import Tracing
from tests.fakes import FakeBatcher, fake_model, fake_repository

if TYPE_CHECKING:
    from protos.encoder_pb2_grpc import EncoderServiceAsyncStub
    from protos.open_inference_pb2_grpc import GRPCInferenceServiceAsyncStub


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
    encoder: "EncoderServiceAsyncStub" = field(init=False)
    inference: "GRPCInferenceServiceAsyncStub" = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = EncoderServiceStub(self.channel)
        self.inference = GRPCInferenceServiceStub(self.channel)

    def raw(self, method: str) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
        """A unary method whose messages are bytes."""
        return self.channel.unary_unary(method, bytes, bytes)

    def raw_stream(self, method: str) -> "grpc.aio.StreamStreamMultiCallable[bytes, bytes]":
        """A streaming method whose messages are bytes."""
        return self.channel.stream_stream(method, bytes, bytes)

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
    fairness: Fairness = "token",
    max_stream_requests: int = 4,
    max_stream_seconds: float | None = None,
    max_stream_bytes: int = 1024 * 1024,
    tracing: Tracing | None = None,
) -> AsyncIterator[Wire]:
    """A server on a free port, stopped at the end."""
    batcher = batcher or FakeBatcher()
    repository = repository or fake_repository(fake_model(batcher))
    metrics = Metrics(CollectorRegistry())
    instruments = Instruments(metrics, tracing=tracing)
    interceptor = RequestInterceptor(instruments, Callers([Token.of(token) for token in tokens], fairness))
    draining = asyncio.Event()
    server = grpc.aio.server(interceptors=[interceptor], options=[("grpc.so_reuseport", 0)])
    bounds = StreamBounds(max_stream_requests, max_stream_bytes, max_stream_seconds)
    servicer = EncoderServicer(repository, instruments, bounds, draining)
    add_EncoderServiceServicer_to_server(servicer, server)
    add_GRPCInferenceServiceServicer_to_server(OpenInferenceServicer(repository), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            yield Wire(batcher, repository, metrics, interceptor, draining, target, channel)
    finally:
        await server.stop(None)


def encode_request(sequences: Sequence[Sequence[int]], **fields: Any) -> EncodeRequest:
    """A message of the typed API."""
    ids = [i for sequence in sequences for i in sequence]
    lengths = [len(sequence) for sequence in sequences]
    return EncodeRequest(token_ids=struct.pack(f"<{len(ids)}i", *ids), lengths=lengths, **fields)


def infer_request(ids: Sequence[Sequence[int]], mask: Sequence[Sequence[int]] | None = None) -> ModelInferRequest:
    """A message of the Open Inference Protocol, int64 and raw, that asks for `sentence_embedding`."""
    message = ModelInferRequest(id="7")
    message.outputs.add(name="sentence_embedding")
    for name, rows in (("input_ids", ids), ("attention_mask", mask)):
        if rows is not None:
            values = [value for row in rows for value in row]
            message.inputs.add(name=name, datatype="INT64", shape=[len(rows), len(rows[0])])
            message.raw_input_contents.append(struct.pack(f"<{len(values)}q", *values))
    return message


StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[EncodeStreamRequest, EncodeStreamResponse]"


async def send(call: StreamCall, message_id: str, sequences: Sequence[Sequence[int]], **fields: Any) -> None:
    """Write one request to a stream."""
    await call.write(EncodeStreamRequest(id=message_id, request=encode_request(sequences, **fields)))


async def receive(call: StreamCall) -> EncodeStreamResponse:
    """The stream's next answer."""
    answer = await call.read()
    assert isinstance(answer, EncodeStreamResponse), "the stream has ended"
    return answer
