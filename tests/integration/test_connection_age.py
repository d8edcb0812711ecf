"""Connections that reach their age end, and no caller notices: unary calls all succeed, streams are told to go on."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import grpc
import numpy as np
import psutil

from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceStub
from service.client import AsyncEncoderClient
from tests.integration.server_process import TestedServer

if TYPE_CHECKING:
    from protos.encoder_pb2_grpc import EncoderServiceAsyncStub

AGE = ("--max-connection-age-seconds", "0.3", "--max-connection-age-grace-seconds", "8")
# Each ends itself after half the grace: long after its connection was asked to end, and 4 s before gRPC would cut it.
NUM_STREAMS = 2
NUM_CONNECTIONS = 6
REQUEST = pb.EncodeRequest(token_ids=np.full(20, 7, "<i4").tobytes(), lengths=[20])


def encoder(channel: grpc.aio.Channel) -> "EncoderServiceAsyncStub":
    return EncoderServiceStub(channel)


class Ports:
    """The local ports from which this process has been seen connected to a server: one for each connection."""

    def __init__(self, server: TestedServer) -> None:
        self._server = server
        self._process = psutil.Process()
        self._seen: set[int] = set()

    def look(self) -> int:
        """How many connections there have been up to now, at least."""
        for connection in self._process.net_connections("tcp"):  # gRPC speaks IPv4 through IPv6 sockets
            if connection.raddr and connection.raddr.port == self._server.grpc_port:
                self._seen.add(connection.laddr.port)
        return len(self._seen)


async def test_no_call_fails_while_connections_come_and_go(tiny_bundle: Path) -> None:
    codes: Counter[grpc.StatusCode] = Counter()

    async def call_until(is_over: asyncio.Event, stub: "EncoderServiceAsyncStub") -> None:
        while not is_over.is_set():
            try:
                await stub.Encode(REQUEST)
                codes[grpc.StatusCode.OK] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code()] += 1

    with TestedServer(tiny_bundle.parents[1], *AGE) as server:
        target, is_over, ports = server.wait_until_serving(), asyncio.Event(), Ports(server)
        # No policy of retries. But gRPC itself sends again what crossed the end of a connection on the wire, and so was
        # not seen by the server: that must stay on.
        async with grpc.aio.insecure_channel(target) as channel:
            callers = [asyncio.create_task(call_until(is_over, encoder(channel))) for _ in range(16)]
            while ports.look() < NUM_CONNECTIONS:
                await asyncio.sleep(0.02)
            is_over.set()
            await asyncio.gather(*callers)
    assert codes.keys() == {grpc.StatusCode.OK}


async def test_our_client_does_not_notice_either(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], *AGE) as server:
        ports = Ports(server)
        async with AsyncEncoderClient(server.wait_until_serving()) as client:
            while ports.look() < NUM_CONNECTIONS:
                vectors = await client.encode([[1, 2, 3]] * 4)
                assert vectors.shape == (4, 32)


def test_a_stream_is_told_to_go_on_with_another_before_its_connection_is_cut(tiny_bundle: Path) -> None:
    # Not gRPC's asyncio client: it calls a stream that ends during a write INTERNAL, whatever the server said.
    with TestedServer(tiny_bundle.parents[1], *AGE) as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            for _ in range(NUM_STREAMS):
                num_answers, error = stream_for(channel, 60.0)
                assert error is not None
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert error.details() == "the stream has been open for 4 s; go on with another"
                assert num_answers > 0


def test_without_an_age_streams_have_none_either(tiny_bundle: Path) -> None:
    flags = ("--max-connection-age-seconds", "0", "--max-connection-age-grace-seconds", "1")
    with TestedServer(tiny_bundle.parents[1], *flags) as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            assert stream_for(channel, 1.5)[1] is None


def stream_for(channel: grpc.Channel, seconds: float) -> tuple[int, grpc.RpcError | None]:
    """Send and receive by turns for so long; how many answers came, and what ended the stream before that."""
    give_up_at, answers = time.monotonic() + seconds, SimpleQueue[int]()

    def requests() -> Iterator[pb.EncodeStreamRequest]:
        while time.monotonic() < give_up_at:
            yield pb.EncodeStreamRequest(id="a", request=REQUEST)
            answers.get()

    num_answers = 0
    try:
        for _ in EncoderServiceStub(channel).EncodeStream(requests()):
            num_answers += 1
            answers.put(num_answers)
    except grpc.RpcError as error:
        answers.put(0)  # gRPC's thread waits for it
        return num_answers, error
    return num_answers, None
