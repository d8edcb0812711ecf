"""EncodeStream: one reader, a task per message, one writer at a time.

What is in flight, read and not yet answered, is bounded by number and by bytes; more waits unread, and HTTP/2's flow
control holds the client back. An answer is in flight until the client has taken it, so one who sends and never reads
gets no further. Answers go out as they come, so they may overtake. The stream ends in one of these ways:

- the client half-closes: everything outstanding is answered, then OK;
- the client leaves: gRPC cancels the call's task and the task group cancels every message's;
- the server drains, or a message is not protobuf: reading stops, what was accepted is answered, then UNAVAILABLE or
  INVALID_ARGUMENT. An idle stream ends at once, so it never holds a drain;
- the stream has been open for `max_seconds`: the same. gRPC cuts what is left of a connection that has reached its age
  and its grace, in the middle of anything; a stream that ends itself in half that grace is never there to be cut.

A request's own error is its answer and ends nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from grpc.aio import EOF, InternalError, ServicerContext

from protos.encoder_pb2 import EncodeRequest, EncodeResponse, EncodeStreamRequest, EncodeStreamResponse, Error
from service.errors import DrainingError, InvalidRequestError, RequestError
from service.servicers.meter import Meter
from service.servicers.status import Failure

# Part of the answer's size, which is checked before the request is run.
MAX_ID_BYTES = 256
_CANCELLATION_SECONDS = 1.0

Encode = Callable[[EncodeRequest], Awaitable[EncodeResponse]]
StreamContext = ServicerContext[EncodeStreamRequest, EncodeStreamResponse]


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """What one stream may have in flight, and for how long it may read; None is for ever.

    The last message read may go past `max_bytes`, by what one request holds.
    """

    max_requests: int
    max_bytes: int
    max_seconds: float | None = None


class _Window:
    """What one stream has in flight; the one reader waits while it is full."""

    def __init__(self, bounds: StreamBounds) -> None:
        self._bounds = bounds
        self._num_requests = 0
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        await self._has_room.wait()

    def add(self, num_requests: int, num_bytes: int) -> None:
        """Count in what was read, or with negative numbers out what was answered."""
        self._num_requests += num_requests
        self._num_bytes += num_bytes
        if self._num_requests < self._bounds.max_requests and self._num_bytes < self._bounds.max_bytes:
            self._has_room.set()
        else:
            self._has_room.clear()


class EncodeStreamCall:
    """One stream, from its first message to its status. `size_of` tells what a request will hold, before it is run."""

    def __init__(
        self,
        context: StreamContext,
        encode: Encode,
        size_of: Callable[[EncodeRequest], int],
        meter: Meter,
        bounds: StreamBounds,
    ) -> None:
        self._context = context
        self._encode = encode
        self._size_of = size_of
        self._meter = meter
        self._window = _Window(bounds)
        self._max_seconds = bounds.max_seconds
        self._writing = asyncio.Lock()
        self._ids: set[str] = set()

    async def serve(self, draining: asyncio.Event) -> None:
        """Answer until the client half-closes. Raises `RequestError` where the stream had to end before that."""
        async with asyncio.TaskGroup() as answers:
            error = await self._read_until(draining, answers)
        if error is not None:
            raise error

    async def _read_until(self, draining: asyncio.Event, answers: asyncio.TaskGroup) -> RequestError | None:
        reader = asyncio.create_task(self._read(answers))
        drain = asyncio.create_task(draining.wait())
        try:
            await asyncio.wait({reader, drain}, timeout=self._max_seconds, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                return reader.result()
            if drain.done():
                return DrainingError("the server is draining")
            return DrainingError(f"the stream has been open for {self._max_seconds:g} s; go on with another")
        finally:
            reader.cancel()
            drain.cancel()

    async def _read(self, answers: asyncio.TaskGroup) -> RequestError | None:
        while True:
            await self._window.wait_for_room()
            try:
                message = await self._context.read()
            except DecodeError:
                return InvalidRequestError("a message of the stream is not an EncodeStreamRequest")
            if message is EOF:  # type: ignore[comparison-overlap]  # grpc-stubs forgets that read() may end
                return None
            num_bytes = self._size_of(message.request)
            self._window.add(1, num_bytes)
            answers.create_task(self._answer(message, num_bytes))

    async def _answer(self, message: EncodeStreamRequest, num_bytes: int) -> None:
        try:
            result = await self._meter.measure(self._run(message), self._context)
            await self._write(_response(message.id, result))
        finally:
            self._window.add(-1, -num_bytes)

    async def _run(self, message: EncodeStreamRequest) -> EncodeResponse:
        if message.id in self._ids:
            raise InvalidRequestError(f"the id {message.id[:64]!r} is in flight on this stream already")
        if (num_bytes := len(message.id.encode())) > MAX_ID_BYTES:
            raise InvalidRequestError(f"the id has {num_bytes} bytes; the limit is {MAX_ID_BYTES}")
        if not message.HasField("request"):
            raise InvalidRequestError("the message has no request")
        self._ids.add(message.id)
        try:
            return await self._encode(message.request)
        finally:
            self._ids.remove(message.id)

    async def _write(self, response: EncodeStreamResponse) -> None:
        async with self._writing:
            try:
                await self._context.write(response)
            except InternalError:
                # If the client left during the write, gRPC cancels this task in a moment; else the fault is ours.
                await asyncio.sleep(_CANCELLATION_SECONDS)
                raise


def _response(message_id: str, result: EncodeResponse | Failure) -> EncodeStreamResponse:
    if isinstance(result, Failure):
        code, _ = result.code.value
        error = Error(code=code, message=result.message, retry_seconds=result.retry_seconds)
        return EncodeStreamResponse(id=message_id, error=error)
    return EncodeStreamResponse(id=message_id, response=result)
