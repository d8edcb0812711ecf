"""Callers of every kind at once, so that every panel and every rule has data.

Most are served well. Others send invalid requests, allow too little time, leave, or come all at once. Start the server
with a low bound of requests in flight, so that some of a crowd are refused. How many fail depends on the machine's
speed; that some do does not, if `much` is more than any server can do in the time allowed.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress

import grpc
import numpy as np

from protos.encoder_pb2 import EncodeStreamRequest, GetModelRequest
from protos.encoder_pb2_grpc import EncoderServiceStub
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from tests.wire import encode_request, infer_request

MAX_IN_FLIGHT = 12
MAX_STEADY = MAX_IN_FLIGHT - 4
_CROWD = 3 * MAX_IN_FLIGHT


class _Callers:
    """What comes to one server. `busy(seconds)` is how many steady callers there are, `seconds` after the start.

    `pause` is how long each of those waits after an answer, in seconds; the others wait longer in proportion.
    `much` is the number of sequences of a request that is in a hurry, is left, or comes in a crowd.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        max_tokens: int,
        busy: Callable[[float], int],
        pause: float,
        much: int,
        seed: int,
    ) -> None:
        self._encoder = EncoderServiceStub(channel)
        self._inference = GRPCInferenceServiceStub(channel)
        self._max_tokens = max_tokens
        self._busy = busy
        self._pause = pause
        self._much = much
        self._rng = np.random.default_rng(seed)

    async def run(self) -> None:
        """Go on until cancelled."""
        self._started = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for number in range(MAX_STEADY):
                group.create_task(self._again(1, self._steady, number))
            for times, caller in (
                (20, self._bulk),
                (10, self._infer),
                (30, self._stream),
                (50, self._ask),
                (30, self._wrong),
                (60, self._hurried),
                (20, self._leaving),
                (100, self._crowd),
            ):
                group.create_task(self._again(times, caller))

    async def _again(self, times: int, call: Callable[..., Awaitable[object]], *arguments: int) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await call(*arguments)
            await asyncio.sleep(times * self._pause)

    async def _steady(self, number: int) -> None:
        if number < self._busy(asyncio.get_running_loop().time() - self._started):
            await self._encoder.Encode(encode_request(self._sequences(1)))
        else:
            await asyncio.sleep(0.1)

    async def _bulk(self) -> None:
        await self._encoder.Encode(encode_request(self._sequences(16), priority=3))

    async def _infer(self) -> None:
        await self._inference.ModelInfer(infer_request(self._sequences(1)))

    async def _stream(self) -> None:
        async def messages() -> AsyncIterator[EncodeStreamRequest]:
            for number in range(3):
                yield EncodeStreamRequest(id=str(number), request=encode_request(self._sequences(2)))

        async for _ in self._encoder.EncodeStream(messages()):
            pass

    async def _ask(self) -> None:
        await self._encoder.GetModel(GetModelRequest())

    async def _wrong(self) -> None:
        await self._encoder.Encode(encode_request([[-1]]))

    async def _hurried(self) -> None:
        await self._encoder.Encode(encode_request(self._sequences(self._much)), timeout=0.002)

    async def _leaving(self) -> None:
        call = self._encoder.Encode(encode_request(self._sequences(self._much)))
        await asyncio.sleep(0.002)
        call.cancel()

    async def _crowd(self) -> None:
        request = encode_request(self._sequences(self._much))
        calls = [self._encoder.Encode(request) for _ in range(_CROWD)]
        await asyncio.gather(*calls, return_exceptions=True)

    def _sequences(self, count: int) -> list[list[int]]:
        lengths = np.minimum(4 + self._rng.lognormal(2.5, 0.8, count), self._max_tokens).astype(int)
        return [[7] * int(length) for length in lengths]


async def drive(
    targets: Sequence[str],
    credentials: grpc.ChannelCredentials | None = None,
    *,
    max_tokens: int = 60,
    busy: Callable[[float], int] = lambda _seconds: MAX_STEADY,
    pause: float = 0.01,
    much: int = 4,
) -> None:
    """Send to each server until cancelled."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for seed, target in enumerate(targets):
            open_channel = (
                grpc.aio.insecure_channel(target)
                if credentials is None
                else grpc.aio.secure_channel(target, credentials)
            )
            channel = await stack.enter_async_context(open_channel)
            callers = _Callers(channel, max_tokens=max_tokens, busy=busy, pause=pause, much=much, seed=seed)
            group.create_task(callers.run())


@contextmanager
def in_background(work: Coroutine[None, None, None]) -> Iterator[None]:
    """Run it on an event loop of its own, until the block ends."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, name="traffic")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
