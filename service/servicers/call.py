"""What a call says besides its message: its deadline, whether its caller is still there, and its ids in the log."""

import asyncio
import random
import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from service.request import Request

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from service.tracing import RequestSpan

REQUEST_ID_KEY = "x-request-id"
TRACE_KEY = "traceparent"

# Where requests are traced: what the caller says of its own trace and the method's full name, set by the interceptor;
# the span of a request, set by the meter.
remote: "ContextVar[tuple[Context, str] | None]" = ContextVar("remote", default=None)
span: "ContextVar[RequestSpan | None]" = ContextVar("span", default=None)

# What may stand in a log line and in a status message as it is.
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Source: W3C Trace Context, 3.2: version, trace id, parent id, flags; later versions may add to it.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Call(Protocol):
    """The part of a gRPC servicer context that knows the deadline."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None where it set none."""


def choose_request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's own id if it sent a sane one, else a new one."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and _SANE_ID.fullmatch(value):
            return value
    # Not secrets: reading the system's randomness costs 20 us of a call's 200, and an id need not be hard to guess.
    return f"{random.getrandbits(64):016x}"


def trace_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The id of the trace that the caller's request is part of; empty if it is part of none."""
    for key, value in metadata:
        if key == TRACE_KEY and isinstance(value, str) and (match := _TRACEPARENT.fullmatch(value)):
            return match[1]
    return ""


def arrival_and_deadline(call: Call) -> tuple[float, float | None]:
    """Now and the caller's deadline, both in monotonic seconds."""
    arrival = time.monotonic()
    remaining = call.time_remaining()
    return arrival, None if remaining is None else arrival + remaining


def trace(request: Request) -> None:
    """If this call is traced, have the request's way through queue and runs traced too."""
    if (current := span.get()) is not None:
        num_sequences = len(request.sequences)
        current.describe(arrival=request.arrival, num_sequences=num_sequences, num_tokens=request.num_tokens)
        request.span = current


def has_caller_left() -> bool:
    """Whether a CancelledError that is being handled was meant for this task.

    gRPC cancels the task of a call whose caller has left. A CancelledError without that comes from inside, out of a
    future that somebody cancelled, and must be answered: gRPC's asyncio server says nothing to the caller then, who
    waits for ever. Source: grpc/grpc#29248.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
