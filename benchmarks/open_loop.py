"""The load generator for overload: requests leave on a schedule, whether or not earlier ones have been answered.

It runs beside the server, on the same CPUs, so requests are bytes beforehand, answers stay bytes, and requests are of
several sequences: then what one costs the generator is a hundredth of what it costs the server. Whether it kept its
schedule is measured with everything else, and a slice in which it did not is void.

Capacity comes from the same generator, connections and messages, with callers who each wait for their answer.

Beside the load it makes a few calls that hold nothing and are answered by nobody but gRPC and the event loop (health
checks): what they take is what any answer takes on this machine just then, a refusal's too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeAlias

import grpc
import numpy as np
import psutil

from benchmarks.arrivals import poisson_times
from benchmarks.load import (
    SERVICE,
    Address,
    LoadError,
    cpu_seconds,
    failures_named,
    open_channel,
    scrape_samples,
)
from benchmarks.outcomes import EVERYBODY, Outcome, Tally, Window

_HEALTH = "/grpc.health.v1.Health/Check"
_NUM_CONNECTIONS = 16
_PROBES_PER_SECOND = 40.0
_PROBE_SEED = 1
_IDLE_SECONDS = 120.0
_POLL_SECONDS = 0.05
# What a server may say to a request that is right; anything else ends the run.
_REFUSALS = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED})

Call: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"


@dataclass(frozen=True, slots=True)
class Message:
    """One request as it goes over the wire."""

    data: bytes
    lengths: tuple[int, ...]
    group: str = EVERYBODY
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Messages and the moments at which they are to be sent, in seconds from the start, in order."""

    messages: tuple[Message, ...]
    times: tuple[float, ...]
    timeout_seconds: float
    window: Window


@dataclass(frozen=True, slots=True)
class Offered:
    """One slice. `lags`: how late each request was sent; `probes`: what the empty calls took.

    `handled`: how many requests the server's own histogram has up to each of its bounds, in seconds.
    """

    tally: Tally
    lags: tuple[float, ...]
    probes: tuple[float, ...]
    handled: Mapping[float, float]
    seconds: float
    cpu_seconds: float
    load_cpu_seconds: float


def offer(address: Address, schedule: Schedule) -> Offered:
    """Send every message at its time. Returns when the server is idle again. Raises `LoadError`."""
    with failures_named(address):
        return asyncio.run(_measure(address, schedule.window, lambda generator: generator.offer(schedule)))


def saturate(address: Address, messages: Sequence[Message], num_callers: int, window: Window) -> Offered:
    """Have callers send one message after the other, without deadlines, until the window ends. Raises `LoadError`."""
    with failures_named(address):
        return asyncio.run(
            _measure(address, window, lambda generator: generator.saturate(messages, num_callers, window.end))
        )


class Generator:
    """Sends messages over calls that take turns, and notes what became of each. Times are from its making."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = cycle(calls)
        self._start = time.perf_counter()
        self.outcomes: list[Outcome] = []
        self.lags: list[float] = []

    async def offer(self, schedule: Schedule) -> None:
        async with asyncio.TaskGroup() as tasks:
            for at, message in zip(schedule.times, schedule.messages, strict=True):
                if (early := at - self._now()) > 0:
                    await asyncio.sleep(early)
                tasks.create_task(self._send(next(self._calls), message, at, schedule.timeout_seconds))

    async def saturate(self, messages: Sequence[Message], num_callers: int, until: float) -> None:
        remaining = cycle(messages)
        async with asyncio.TaskGroup() as tasks:
            for call in islice(self._calls, num_callers):
                tasks.create_task(self._send_in_turn(call, remaining, until))

    async def _send_in_turn(self, call: Call, remaining: Iterator[Message], until: float) -> None:
        while self._now() < until:
            await self._send(call, next(remaining), self._now(), None)

    async def _send(self, call: Call, message: Message, at: float, timeout_seconds: float | None) -> None:
        lag = self._now() - at
        self.lags.append(lag)
        # A caller's deadline counts from when it wanted to ask.
        timeout = None if timeout_seconds is None else max(0.0, timeout_seconds - lag)
        is_ok = True
        try:
            await call(message.data, timeout=timeout, metadata=message.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                raise LoadError(f"a request was answered {error.code().name}: {error.details()}") from None
            is_ok = False
        seconds = self._now() - at
        self.outcomes.append(Outcome(at, seconds, is_ok, message.num_tokens, timeout_seconds, message.group))

    def _now(self) -> float:
        return time.perf_counter() - self._start


async def _measure(address: Address, window: Window, send: Callable[[Generator], Awaitable[None]]) -> Offered:
    server = psutil.Process(address.pid)
    async with AsyncExitStack() as stack:
        channels = [await open_channel(stack, address) for _ in range(_NUM_CONNECTIONS)]
        await _wait_until_idle(address)
        calls: list[Call] = [channel.unary_unary(f"{SERVICE}/Encode") for channel in channels]
        handled = _handled(address)
        cpu, load_cpu, started = cpu_seconds(server), time.process_time(), time.perf_counter()
        generator = Generator(calls)
        probes: list[float] = []
        try:
            async with _probing(channels[0].unary_unary(_HEALTH), window.end, probes):
                await send(generator)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        seconds = time.perf_counter() - started
        load_cpu, cpu = time.process_time() - load_cpu, cpu_seconds(server) - cpu
        after = _handled(address)
        await _wait_until_idle(address)
        return Offered(
            tally=Tally(tuple(generator.outcomes), window),
            lags=tuple(generator.lags),
            probes=tuple(probes),
            handled={bound: after[bound] - count for bound, count in handled.items()},
            seconds=seconds,
            cpu_seconds=cpu,
            load_cpu_seconds=load_cpu,
        )


@asynccontextmanager
async def _probing(call: Call, until: float, found: list[float]) -> AsyncIterator[None]:
    """Make empty calls meanwhile."""

    async def probe() -> None:
        start = time.perf_counter()
        for at in poisson_times(np.random.default_rng(_PROBE_SEED), _PROBES_PER_SECOND, until):
            if (early := at - (time.perf_counter() - start)) > 0:
                await asyncio.sleep(early)
            await call(b"")
            found.append(time.perf_counter() - start - at)

    task = asyncio.create_task(probe())
    try:
        yield
        await task
    finally:
        task.cancel()


async def _wait_until_idle(address: Address) -> None:
    """Until no request waits: the next slice must not find what this one left behind."""
    give_up_at = time.monotonic() + _IDLE_SECONDS
    while any(sample.value for sample in scrape_samples(address, "mhsa_queue_sequences")):
        if time.monotonic() > give_up_at:
            raise LoadError(f"the server on port {address.grpc_port} has not emptied its queue")
        await asyncio.sleep(_POLL_SECONDS)


def _handled(address: Address) -> dict[float, float]:
    return {
        float(sample.labels["le"]): sample.value
        for sample in scrape_samples(address, "mhsa_request_duration_seconds")
        if sample.name.endswith("_bucket") and sample.labels["method"] == "Encode"
    }
