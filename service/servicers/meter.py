"""Runs and counts requests: calls of a unary method, messages of a stream."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import grpc

from service.logs import model, request_id, trace_id, version
from service.metrics import Metrics
from service.servicers.call import Call, has_caller_left, remote, span
from service.servicers.failure_log import FailureLog
from service.servicers.status import CODES, REASONS, Failure, failure_of, failure_of_departure

if TYPE_CHECKING:
    from service.tracing import RequestSpan, Tracing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a server shows of its requests; one for all its methods."""

    metrics: Metrics
    failures: FailureLog = field(default_factory=FailureLog)
    tracing: "Tracing | None" = None


class Meter:
    """The series of one method, looked up once: a lookup by label costs as much as the count itself."""

    def __init__(self, instruments: Instruments, method: str) -> None:
        metrics = instruments.metrics
        self._in_flight = metrics.in_flight.labels(method)
        self._seconds = metrics.request_seconds.labels(method)
        self._requests = {code: metrics.requests.labels(method, code.name) for code in CODES}
        self._errors = {reason: metrics.errors.labels(method, reason) for reason in REASONS}
        self._failures = instruments.failures
        self._tracing = instruments.tracing

    async def measure(self, request: Awaitable[T], call: Call) -> T | Failure:
        """Await one request of `call`, count it, and give back its answer or why there is none.

        Raises `CancelledError` where the caller has left, after counting that too.
        """
        started = time.monotonic()
        self._in_flight.inc()
        traced = self._begin_span()
        failure: Failure | None = None
        try:
            return await request
        except asyncio.CancelledError as error:
            if has_caller_left():
                failure = failure_of_departure(call.time_remaining())
                raise
            failure = failure_of(error, request_id.get())
        except Exception as error:
            failure = failure_of(error, request_id.get())
        finally:
            self._finish(failure, time.monotonic() - started, traced)
        return failure

    def _begin_span(self) -> "RequestSpan | None":
        if self._tracing is None or (caller := remote.get()) is None:
            return None
        traced = self._tracing.start_request(*caller, request_id.get())
        span.set(traced)
        if traced is not None:
            trace_id.set(traced.trace_id)
        return traced

    def _finish(self, failure: Failure | None, seconds: float, traced: "RequestSpan | None") -> None:
        code = grpc.StatusCode.OK if failure is None else failure.code
        if traced is not None:
            reason = None if failure is None else failure.reason
            traced.end(code.name, reason, model=model.get(), version=version.get())
        self._in_flight.dec()
        self._seconds.observe(seconds, None if traced is None else traced.exemplar)
        self._requests[code].inc()
        if failure is not None:
            self._errors[failure.reason].inc()
            self._failures.write(failure, seconds)
