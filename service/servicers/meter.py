"""Runs and counts requests: calls of a unary method, messages of a stream."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from service.logs import request_id
from service.metrics import Metrics
from service.servicers.call import Call, has_caller_left
from service.servicers.failure_log import FailureLog
from service.servicers.status import CODES, REASONS, Failure, failure_of, failure_of_departure

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a server shows of its requests; one for all its methods."""

    metrics: Metrics
    failures: FailureLog = field(default_factory=FailureLog)


class Meter:
    """The series of one method, looked up once: a lookup by label costs as much as the count itself."""

    def __init__(self, instruments: Instruments, method: str) -> None:
        metrics = instruments.metrics
        self._in_flight = metrics.in_flight.labels(method)
        self._seconds = metrics.request_seconds.labels(method)
        self._requests = {code: metrics.requests.labels(method, code.name) for code in CODES}
        self._errors = {reason: metrics.errors.labels(method, reason) for reason in REASONS}
        self._failures = instruments.failures

    async def measure(self, request: Awaitable[T], call: Call) -> T | Failure:
        """Await one request of `call`, count it, and give back its answer or why there is none.

        Raises `CancelledError` where the caller has left, after counting that too.
        """
        started = time.monotonic()
        self._in_flight.inc()
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
            self._finish(failure, time.monotonic() - started)
        return failure

    def _finish(self, failure: Failure | None, seconds: float) -> None:
        self._in_flight.dec()
        self._seconds.observe(seconds)
        self._requests[grpc.StatusCode.OK if failure is None else failure.code].inc()
        if failure is not None:
            self._errors[failure.reason].inc()
            self._failures.write(failure, seconds)
