"""EncodeStream: one reader, a task per message, one writer at a time.

At most `max_requests` messages are in flight; more wait unread, and HTTP/2's flow control holds the client back.
Answers go out as they come, so they may overtake. The stream ends in one of these ways:

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

from google.protobuf.message import DecodeError
from grpc.aio import EOF, InternalError, ServicerContext

from protos.encoder_pb2 import EncodeRequest, EncodeResponse, EncodeStreamRequest, EncodeStreamResponse, Error
from service.errors import DrainingError, InvalidRequestError, RequestError
from service.servicers.meter import Meter
from service.servicers.status import Failure

# Part of the answer's size, which is checked before the request is run.
MAX_ID_BYTES = 256
_CANCELLATION_SECONDS = 1.0

StreamContext = ServicerContext[EncodeStreamRequest, EncodeStreamResponse]


class EncodeStreamCall:
    """One stream, from its first message to its status."""

    def __init__(
        self,
        context: StreamContext,
        encode: Callable[[EncodeRequest], Awaitable[EncodeResponse]],
        meter: Meter,
        max_requests: int,
        max_seconds: float | None,
    ) -> None:
        self._context = context
        self._encode = encode
        self._meter = meter
        self._permits = asyncio.Semaphore(max_requests)
        self._max_seconds = max_seconds
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
            await self._permits.acquire()
            try:
                message = await self._context.read()
            except DecodeError:
                return InvalidRequestError("a message of the stream is not an EncodeStreamRequest")
            if message is EOF:  # type: ignore[comparison-overlap]  # grpc-stubs forgets that read() may end
                return None
            answers.create_task(self._answer(message))

    async def _answer(self, message: EncodeStreamRequest) -> None:
        try:
            result = await self._meter.measure(self._run(message), self._context)
            await self._write(_response(message.id, result))
        finally:
            self._permits.release()

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
