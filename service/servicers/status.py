"""The one table that turns what went wrong into a gRPC status, its metadata, and its labels in the metrics.

An internal failure's text stays in the server: it may quote a path, a shape of the graph or another caller's data. The
wire gets the request id, under which the log has the rest.
"""

import logging
import math
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from service.errors import (
    DeadlineError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    StoppedError,
    UnauthenticatedError,
    UnavailableError,
)
from service.logs import fields
from service.metrics import CANCELLED


@dataclass(frozen=True, slots=True)
class Row:
    """What a class of errors is on the wire. With `instead`, the caller reads that, and the error's text stays here."""

    code: grpc.StatusCode
    instead: str | None = None


_OUR_FAULT = Row(grpc.StatusCode.INTERNAL, instead="internal error")
TABLE: dict[type[RequestError], Row] = {
    InvalidRequestError: Row(grpc.StatusCode.INVALID_ARGUMENT),
    NotFoundError: Row(grpc.StatusCode.NOT_FOUND),
    UnavailableError: Row(grpc.StatusCode.UNAVAILABLE),
    DrainingError: Row(grpc.StatusCode.UNAVAILABLE),
    UnauthenticatedError: Row(grpc.StatusCode.UNAUTHENTICATED),
    QueueFullError: Row(grpc.StatusCode.RESOURCE_EXHAUSTED),
    DeadlineError: Row(grpc.StatusCode.DEADLINE_EXCEEDED),
    OutOfMemoryError: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, instead="the device is out of memory"),
    EngineError: _OUR_FAULT,
    StoppedError: Row(grpc.StatusCode.INTERNAL, instead="the run took too long and was stopped"),
    RequestError: _OUR_FAULT,
}
CODES = tuple(dict.fromkeys([grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, *(row.code for row in TABLE.values())]))
REASONS = tuple(dict.fromkeys([*(error.reason for error in TABLE), CANCELLED]))

# The client's timer starts a network trip before ours and its timeout is rounded up on the wire, so a call that the
# client ends for its deadline may reach us with a little time left.
_DEADLINE_SLACK_SECONDS = 0.05
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one request failed, in the terms of the wire and of the metrics. `is_fault`: by us, and it is in the log.

    `log_text`: what the log says of it in place of `message`, which may quote the caller; empty: the reason alone.
    """

    code: grpc.StatusCode
    message: str
    reason: str
    retry_seconds: float = 0.0
    is_fault: bool = False
    log_text: str = ""

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """When to come back, once for people's libraries (RetryInfo) and once for gRPC's own retries (pushback)."""
        if not self.retry_seconds:
            return ()
        delay = Duration()
        delay.FromNanoseconds(int(self.retry_seconds * 1e9))
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=delay))
        status = Status(code=self.code.value[0], message=self.message, details=[detail])
        return (
            ("grpc-retry-pushback-ms", str(math.ceil(self.retry_seconds * 1000))),
            ("grpc-status-details-bin", status.SerializeToString()),
        )


def failure_of(error: BaseException, request_id: str) -> Failure:
    """What to answer for an error; one that is our own fault is logged here, and only here."""
    row = next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), _OUR_FAULT)
    known = error if isinstance(error, RequestError) else RequestError(str(error))
    if row.instead is None:
        return Failure(row.code, str(known), known.reason, known.retry_seconds, log_text=known.log_text)
    facts = fields(code=row.code.name, reason=known.reason)
    if isinstance(error, EngineError):
        # Where in our code it was raised tells nothing, and a client who has found what makes a model fail could fill
        # a disk with it.
        _logger.error("request %s failed: %s", request_id, _with_cause(error), extra=facts)
    else:
        _logger.error("request %s failed", request_id, exc_info=error, extra=facts)
    message = f"{row.instead}; the server's log has it as request {request_id}"
    return Failure(row.code, message, known.reason, is_fault=True)


def _with_cause(error: EngineError) -> str:
    """In one line."""
    reasons = [str(reason).partition("\n")[0] for reason in (error, error.__cause__) if reason is not None]
    return "; ".join(reasons)


def failure_of_departure(time_remaining: float | None) -> Failure:
    """What became of a call whose caller has left: its deadline passed, or it was cancelled. Nobody reads this."""
    if time_remaining is not None and time_remaining <= _DEADLINE_SLACK_SECONDS:
        return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed", DeadlineError.reason)
    return Failure(grpc.StatusCode.CANCELLED, "cancelled by the caller", CANCELLED)
