"""One line in the log for each request that did not end well; of a flood, the first lines and a count.

Of each reason, 5 lines a second are written, and at the end of the second how many more there were: enough to see who
and what, and at most some 2 kB a second and reason on a disk that a client in a loop could otherwise fill. What is left
out costs a dictionary's update. Our own faults are no refusals: they are always written, where they are turned into a
status, the engine's in one line and any other with its traceback.

The text of some refusals quotes what the caller sent. It is for the caller; the log has the reason, and the request id
under which the caller can be asked.
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

# Whose texts quote nothing of the caller's.
_OWN_WORDS = {
    QueueFullError.reason,
    DeadlineError.reason,
    UnavailableError.reason,
    DrainingError.reason,
    UnauthenticatedError.reason,
    CANCELLED,
}
# What an operator may have to act on. The rest is between the caller and its program.
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
