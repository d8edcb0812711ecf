"""Bytes that are no message. gRPC itself answers UNKNOWN and logs a traceback for each; the mistake is the caller's."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Never, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext

from service.errors import InvalidRequestError

# Any: messages of whatever service.
_Context = ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def parse(raw: bytes, handler: _Handler) -> Any:
    """The request message of a handler's method. Raises `InvalidRequestError`."""
    deserialize = cast("Callable[[bytes], Any]", handler.request_deserializer)
    try:
        return deserialize(raw)
    except DecodeError:
        raise InvalidRequestError(f"{len(raw)} bytes that are not the method's request message") from None


def forgiving(handler: _Handler) -> _Handler:
    """A handler of gRPC's own services, health and reflection, that answers such bytes with INVALID_ARGUMENT."""
    if handler.unary_unary:
        answer = cast("Callable[[Any, _Context], Awaitable[Any]]", handler.unary_unary)

        async def serve_unary(raw: bytes, context: _Context) -> Any:
            return await answer(await _parse_or_abort(raw, handler, context), context)

        return grpc.unary_unary_rpc_method_handler(serve_unary, None, handler.response_serializer)
    if handler.unary_stream:
        watch = cast("Callable[[Any, _Context], Awaitable[None]]", handler.unary_stream)

        async def serve_stream(raw: bytes, context: _Context) -> None:
            await watch(await _parse_or_abort(raw, handler, context), context)

        return grpc.unary_stream_rpc_method_handler(serve_stream, None, handler.response_serializer)
    converse = cast("Callable[[AsyncIterator[Any], _Context], AsyncIterator[Any]]", handler.stream_stream)

    async def serve(messages: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
        try:
            async for answer in converse(messages, context):
                yield answer
        except DecodeError:
            await _refuse(context, "a message that is not the method's request message")

    return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)


async def _parse_or_abort(raw: bytes, handler: _Handler, context: _Context) -> Any:
    try:
        return parse(raw, handler)
    except InvalidRequestError as error:
        await _refuse(context, str(error))


async def _refuse(context: _Context, message: str) -> Never:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
