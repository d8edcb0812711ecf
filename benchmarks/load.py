"""The load generator: callers that each send their next request when the last one is answered.

It shares the machine with the server that it measures, so it does as little as it can: requests are bytes beforehand,
answers stay bytes, and one event loop in one process of its own serves all callers. Each caller has its own connection,
as separate clients have. All callers draw from one list of requests and a slice ends when all of it is answered: the
work is the same for every contender.

Latency is that of a whole request. Where a caller sends its sequences in calls of their own, all at once, it is from
the first call to the last answer.
"""

import asyncio
import signal
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass

import grpc
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.measurement import Batches, Slice
from benchmarks.traces import Batch, by_count
from protos.encoder_pb2 import (
    PRIORITY_HIGH,
    PRIORITY_LOW,
    PRIORITY_NORMAL,
    EncodeRequest,
    EncodeStreamRequest,
    EncodeStreamResponse,
)
from service.request import Priority

SERVICE = "/mhsa.encoder.v1.EncoderService"
# A connection for each channel, though all lead to one address.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
_WARM_UP_REQUESTS = 4
_CONNECT_SECONDS = 10.0

_PRIORITIES = {Priority.HIGH: PRIORITY_HIGH, Priority.NORMAL: PRIORITY_NORMAL, Priority.LOW: PRIORITY_LOW}

# One exchange with a server: a request's messages, to the last answer.
Exchange = Callable[[Sequence[bytes]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How callers ask: `request_sequences` at a time, in one call or in `is_split` calls of one sequence at once."""

    num_callers: int
    request_sequences: int = 1
    is_split: bool = False
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """A server on this machine."""

    pid: int
    grpc_port: int
    metrics_port: int


class LoadError(Exception):
    """A request was not answered."""


def prepare() -> None:
    """Prepare this process: it is stopped by its parent, not by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def measure(address: Address, shape: Shape, sequences: Batch, warm_up: Batch) -> Slice:
    """Encode all sequences. Raises `LoadError`."""
    with failures_named(address):
        return asyncio.run(_measure(address, shape, sequences, warm_up))


@contextmanager
def failures_named(address: Address) -> Iterator[None]:
    """Raises `LoadError` for what goes wrong with a server: gRPC's own errors cannot be pickled."""
    try:
        yield
    except (grpc.aio.AioRpcError, psutil.Error, OSError) as error:
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        raise LoadError(f"the server on port {address.grpc_port} failed: {reason}") from None


async def _measure(address: Address, shape: Shape, sequences: Batch, warm_up: Batch) -> Slice:
    server = psutil.Process(address.pid)
    requests, warm_up_requests = serialise(shape, sequences), serialise(shape, warm_up)
    async with AsyncExitStack() as stack:
        exchanges = [await _connect(stack, address, shape) for _ in range(shape.num_callers)]
        await run_callers(exchanges, warm_up_requests[: max(_WARM_UP_REQUESTS, shape.num_callers)])
        before, cpu, load_cpu = scrape(address), cpu_seconds(server), time.process_time()
        started = time.perf_counter()
        latencies = await run_callers(exchanges, requests)
        seconds = time.perf_counter() - started
        load_cpu, cpu = time.process_time() - load_cpu, cpu_seconds(server) - cpu
        return Slice(
            num_sequences=len(sequences),
            num_tokens=sum(sequence.num_tokens for sequence in sequences),
            seconds=seconds,
            cpu_seconds=cpu,
            load_cpu_seconds=load_cpu,
            batches=batches_between(before, scrape(address)),
            latencies=tuple(latencies),
        )


def scrape(address: Address) -> dict[str, float]:
    """The sums and counts of a server's batch histograms. It serves one model, so names are enough."""
    return {
        sample.name: sample.value
        for sample in scrape_samples(address, "mhsa_batch_")
        if sample.name.endswith(("_sum", "_count"))
    }


def scrape_samples(address: Address, prefix: str) -> Iterator[Sample]:
    """A server's samples of the families whose names begin with `prefix`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{address.metrics_port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    yield from (sample for family in families if family.name.startswith(prefix) for sample in family.samples)


def batches_between(before: dict[str, float], after: dict[str, float]) -> Batches:
    """Means over the batches that ran between two scrapes."""

    def mean(name: str) -> float:
        total, count = (after[f"{name}_{part}"] - before[f"{name}_{part}"] for part in ("sum", "count"))
        return total / count

    return Batches(mean("mhsa_batch_fill_ratio"), mean("mhsa_batch_sequences"), mean("mhsa_batch_tokens"))


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def serialise(shape: Shape, sequences: Batch) -> list[list[bytes]]:
    """The messages of each request."""
    groups = by_count(sequences, shape.request_sequences)
    return [[_message(shape, part) for part in (by_count(group, 1) if shape.is_split else [group])] for group in groups]


def encode(sequences: Batch, priority: Priority = Priority.NORMAL) -> bytes:
    """An `EncodeRequest`."""
    return _request(sequences, priority).SerializeToString()


def _request(sequences: Batch, priority: Priority = Priority.NORMAL) -> EncodeRequest:
    ids = np.concatenate([sequence.token_ids for sequence in sequences]).astype("<i4")
    lengths = [sequence.num_tokens for sequence in sequences]
    return EncodeRequest(token_ids=ids.tobytes(), lengths=lengths, priority=_PRIORITIES[priority])


def _message(shape: Shape, sequences: Batch) -> bytes:
    request = _request(sequences)
    if shape.is_stream:  # one request of each stream is in flight at a time, so one id serves
        return EncodeStreamRequest(id="0", request=request).SerializeToString()
    return request.SerializeToString()


async def run_callers(exchanges: Iterable[Exchange], requests: Iterable[Sequence[bytes]]) -> list[float]:
    """Every request's latency, in the order of the answers. Raises the first error of an exchange."""
    latencies: list[float] = []
    remaining = iter(requests)
    try:
        async with asyncio.TaskGroup() as callers:
            for exchange in exchanges:
                callers.create_task(_call_in_turn(exchange, remaining, latencies))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return latencies


async def _call_in_turn(exchange: Exchange, remaining: Iterator[Sequence[bytes]], latencies: list[float]) -> None:
    for messages in remaining:
        started = time.perf_counter()
        await exchange(messages)
        latencies.append(time.perf_counter() - started)


async def open_channel(stack: AsyncExitStack, address: Address) -> grpc.aio.Channel:
    """A connection of its own, open until the stack is left."""
    target = f"127.0.0.1:{address.grpc_port}"
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, options=_OPTIONS))
    await asyncio.wait_for(channel.channel_ready(), _CONNECT_SECONDS)
    return channel


async def _connect(stack: AsyncExitStack, address: Address, shape: Shape) -> Exchange:
    channel = await open_channel(stack, address)
    if shape.is_stream:
        return await _stream_exchange(stack, channel)
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{SERVICE}/Encode")

    async def exchange(messages: Sequence[bytes]) -> None:
        if len(messages) == 1:
            await call(messages[0])
        else:
            await asyncio.gather(*(call(message) for message in messages))

    return exchange


async def _stream_exchange(stack: AsyncExitStack, channel: grpc.aio.Channel) -> Exchange:
    stream: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"{SERVICE}/EncodeStream")()
    stack.callback(stream.cancel)

    async def exchange(messages: Sequence[bytes]) -> None:
        for message in messages:
            await stream.write(message)
            answer = await stream.read()
            if not isinstance(answer, bytes):
                raise LoadError("a stream ended early")
            if (error := EncodeStreamResponse.FromString(answer).error).code:
                raise LoadError(f"a stream was answered {error.message}")

    return exchange
