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
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    UnauthenticatedError,
    UnavailableError,
)

STATUS_OF: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    OutOfMemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineError: grpc.StatusCode.INTERNAL,
    RequestError: grpc.StatusCode.INTERNAL,
}
CANCELLED = "cancelled"
CODES = tuple(dict.fromkeys([grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, *STATUS_OF.values()]))
REASONS = tuple(dict.fromkeys([*(error.reason for error in STATUS_OF), CANCELLED]))

# The client's timer starts a network trip before ours and its timeout is rounded up on the wire, so a call that the
# client ends for its deadline may reach us with a little time left.
_DEADLINE_SLACK_SECONDS = 0.05
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one request failed, in the terms of the wire and of the metrics."""

    code: grpc.StatusCode
    message: str
    reason: str
    retry_seconds: float = 0.0

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
    code = next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), grpc.StatusCode.INTERNAL)
    reason = error.reason if isinstance(error, RequestError) else RequestError.reason
    if code is grpc.StatusCode.INTERNAL or isinstance(error, EngineError):
        _logger.error("request %s failed", request_id, exc_info=error)
        what = "the device is out of memory" if isinstance(error, OutOfMemoryError) else "internal error"
        return Failure(code, f"{what}; the server's log has it as request {request_id}", reason)
    return Failure(code, str(error), reason, error.retry_seconds if isinstance(error, QueueFullError) else 0.0)


def failure_of_departure(time_remaining: float | None) -> Failure:
    """What became of a call whose caller has left: its deadline passed, or it was cancelled. Nobody reads this."""
    if time_remaining is not None and time_remaining <= _DEADLINE_SLACK_SECONDS:
        return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed", DeadlineError.reason)
    return Failure(grpc.StatusCode.CANCELLED, "cancelled by the caller", CANCELLED)
