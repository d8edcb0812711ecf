"""One log line for each refused or failed request; if there are very many, the first ones and a count.

For each reason 5 lines are written per second, and at the end of the second how many more there were: enough to see who
and what, and at most 2 kB per second and reason, since a client in a loop could otherwise fill the disk. A line that is
left out costs the update of a dictionary. Faults of our own are not refusals and are always written, where they are
turned into a status: the engine's in one line, any other with its traceback.

Some texts of refusals quote what the caller sent. They are only for the caller; the log has the reason, and the request
id by which the caller can be asked.
"""

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context

from service.errors import DeadlineError, DrainingError, QueueFullError, UnauthenticatedError, UnavailableError
from service.logs import fields
from service.metrics import CANCELLED
from service.servicers.status import Failure

MAX_LINES = 5
WINDOW_SECONDS = 1.0

# Their texts never quote the caller.
_OWN_WORDS = {
    QueueFullError.reason,
    DeadlineError.reason,
    UnavailableError.reason,
    DrainingError.reason,
    UnauthenticatedError.reason,
    CANCELLED,
}
# An operator may have to act on these. The others are for the caller to fix.
_WARNINGS = {QueueFullError.reason, DeadlineError.reason, UnavailableError.reason, UnauthenticatedError.reason}

log = logging.getLogger(__name__)


def _call_later(seconds: float, function: Callable[[], None]) -> None:
    # In a context of its own: the count of a window is not about the request that opened it.
    asyncio.get_running_loop().call_later(seconds, function, context=Context())


class FailureLog:
    """Shared by all methods of a server. `call_later(seconds, function)` calls it once in the event loop."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], None] = _call_later) -> None:
        self._call_later = call_later
        self._counts: dict[str, int] = {}

    def write(self, failure: Failure, seconds: float) -> None:
        """Log a request that ended after so many seconds; a fault of our own has been logged, and is not again."""
        if failure.is_fault:
            return
        count = self._counts[failure.reason] = self._counts.get(failure.reason, 0) + 1
        if count == 1:
            self._call_later(WINDOW_SECONDS, lambda: self._close_window(failure.reason))
        if count <= MAX_LINES:
            log.log(
                _level(failure.reason),
                "not served: %s",
                failure.log_text or (failure.message if failure.reason in _OWN_WORDS else failure.reason),
                extra=fields(code=failure.code.name, reason=failure.reason, seconds=round(seconds, 6)),
            )

    def close(self) -> None:
        """Say now what has been left out and not been said."""
        for reason in list(self._counts):
            self._close_window(reason)

    def _close_window(self, reason: str) -> None:
        num_left_out = self._counts.pop(reason, 0) - MAX_LINES
        if num_left_out > 0:
            log.log(
                _level(reason),
                "%d more requests were not served: %s",
                *(num_left_out, reason),
                extra=fields(reason=reason, left_out=num_left_out),
            )


def _level(reason: str) -> int:
    return logging.WARNING if reason in _WARNINGS else logging.INFO
