"""Around every call of the two APIs: who may call, what is counted, and how an error leaves the server.

Health and reflection pass, and only what is no message is refused there: probes have no credentials and would drown
the counts. A stream's messages are counted as its requests, by its servicer; the stream itself only holds a drain, and
is counted where it was refused.

Handlers are wrapped once per method. A caller without credentials, or with a name that is none, gets a streaming
handler whatever it called, since only that can refuse before the message, up to 64 MiB of it, has been received.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never, TypeAlias, cast

import grpc
from grpc.aio import InternalError

from protos import encoder_pb2, open_inference_pb2
from service.callers import Callers
from service.errors import RequestError
from service.logs import caller, method, request_id, trace_id
from service.servicers.call import REQUEST_ID_KEY, choose_request_id, has_caller_left, remote, trace_id_of
from service.servicers.meter import Instruments, Meter
from service.servicers.parsing import forgiving, parse
from service.servicers.status import CODES, REASONS, Failure, failure_of

# Any: what a wrapper passes on without looking at it.
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]"

_SERVICES = (
    encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)
METHODS = {f"/{service.full_name}/{method.name}": method.name for service in _SERVICES for method in service.methods}


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A method's handler, wrapped, and the counts of who is not let through to it."""

    serve: _Handler
    meter: Meter


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates, names, counts and answers for the calls of both APIs."""

    def __init__(self, instruments: Instruments, callers: Callers) -> None:
        instruments.metrics.declare_requests(METHODS.values(), (code.name for code in CODES), REASONS)
        self._instruments = instruments
        self._callers = callers
        self._guarded: dict[str, _Guarded] = {}
        self._others: dict[str, _Handler] = {}
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        """Calls, unary and streaming, that have come and are not answered."""
        return self._num_in_flight

    async def wait_until_idle(self) -> None:
        """Until no call is in flight."""
        await self._idle.wait()

    async def intercept_service(
        self, continuation: _Continuation, details: grpc.HandlerCallDetails
    ) -> "_Handler | None":
        handler = await continuation(details)
        if handler is None:
            return None
        if details.method not in METHODS:
            if details.method not in self._others:
                self._others[details.method] = forgiving(handler)
            return self._others[details.method]
        guarded = self._guarded.get(details.method) or self._guard(details.method, handler)
        # This runs in the task that goes on to serve the call, so these are set for all of it.
        method.set(METHODS[details.method])
        request_id.set(choose_request_id(details.invocation_metadata))
        trace_id.set(trace_id_of(details.invocation_metadata))
        if (tracing := self._instruments.tracing) is not None:
            remote.set((tracing.extract(details.invocation_metadata), details.method.removeprefix("/")))
        try:
            caller.set(self._callers.name(details.invocation_metadata))
        except RequestError as error:
            return _refusal(guarded.meter, error)
        return guarded.serve

    def _guard(self, path: str, handler: _Handler) -> _Guarded:
        meter = Meter(self._instruments, METHODS[path])
        serve = self._guard_stream(handler) if handler.request_streaming else self._guard_unary(handler, meter)
        self._guarded[path] = _Guarded(serve, meter)
        return self._guarded[path]

    def _guard_unary(self, handler: _Handler, meter: Meter) -> _Handler:
        answer_to = cast("Callable[[Any, _Context], Awaitable[Any]]", handler.unary_unary)

        async def run(raw: list[bytes], context: _Context) -> Any:
            return await answer_to(parse(raw.pop(), handler), context)

        async def serve(raw: bytes, context: _Context) -> Any:
            # An abort's traceback holds this frame until the garbage collector runs; it must not hold the message too.
            handed_over = [raw]
            del raw
            with self._counted():
                answer = await meter.measure(run(handed_over, context), context)
                if isinstance(answer, Failure):
                    await _abort(context, answer)
                context.set_trailing_metadata(_trailing_id())
                return answer

        # gRPC's own parsing would answer a broken message with UNKNOWN and count nothing, so it is done in `run`.
        return grpc.unary_unary_rpc_method_handler(serve, None, handler.response_serializer)

    def _guard_stream(self, handler: _Handler) -> _Handler:
        answer_to = cast("Callable[[AsyncIterator[Any], _Context], Awaitable[None]]", handler.stream_stream)

        async def serve(messages: AsyncIterator[Any], context: _Context) -> None:
            with self._counted():
                started = time.monotonic()
                try:
                    await answer_to(messages, context)
                except asyncio.CancelledError as error:
                    if has_caller_left():
                        raise
                    failure = failure_of(error, request_id.get())
                except Exception as error:
                    failure = failure_of(error, request_id.get())
                else:
                    context.set_trailing_metadata(_trailing_id())
                    return
                self._instruments.failures.write(failure, time.monotonic() - started)
                await _abort(context, failure)

        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()


def _refusal(meter: Meter, error: RequestError) -> _Handler:
    # The raised error's traceback holds these frames, and must not meet the error in them.
    raised = [error]

    async def fail() -> Never:
        raise raised.pop()

    async def refuse(_messages: AsyncIterator[Any], context: _Context) -> None:
        await _abort(context, await meter.measure(fail(), context))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _trailing_id() -> tuple[tuple[str, str], ...]:
    """What a caller can quote to have its call found in the log."""
    return ((REQUEST_ID_KEY, request_id.get()),)


async def _abort(context: _Context, failure: Failure) -> Never:
    try:
        await context.abort(failure.code, failure.message, (*failure.trailing_metadata, *_trailing_id()))
    except InternalError:
        # The caller left just now, and there is nobody to tell. gRPC would log it as an error of ours.
        raise asyncio.CancelledError from None
