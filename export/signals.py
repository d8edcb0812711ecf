"""Signals that end an export: Ctrl-C, SIGTERM, and the SIGHUP of a terminal that closes.

They interrupt work and never its cleaning up: a second signal would leave half a bundle behind, and it often comes
with the first, from a terminal and from the `make` that runs in it. A signal that the process was started to ignore,
as `nohup` has it, stays ignored.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# How long an interrupt may take on its way out of the work. Later ones count again: a library may have swallowed it.
_ECHO_SECONDS = 1.0

_Handler = Callable[[int, FrameType | None], object]


class Interrupted(KeyboardInterrupt):
    """One of `SIGNALS`. Whatever cleans up after Ctrl-C cleans up after it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block each of `SIGNALS` raises `Interrupted`; what follows within a second is taken for its echo.

    After an interrupt they are ignored: the process is about to end, and an echo would take its exit code from it.
    """
    interrupted_at = float("-inf")

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted_at
        now = time.monotonic()
        if now - interrupted_at > _ECHO_SECONDS:
            interrupted_at = now
            raise Interrupted(number)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    _set({number: interrupt for number in before if before[number] is not signal.SIG_IGN})
    try:
        yield
    finally:
        # Python gives up its own handlers while it ends; what is ignored stays ignored.
        _set(before if interrupted_at == float("-inf") else dict.fromkeys(SIGNALS, signal.SIG_IGN))


class Shield:
    """Keeps signals from their handlers. A signal that comes while it is up is handled when it is lowered."""

    def __init__(self, handlers: dict[int, _Handler]) -> None:
        self._handlers = handlers
        self._is_up = True
        self._waiting: int | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of every signal."""
        self._waiting = number
        if not self._is_up:
            self._handle(frame)

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """In the block, signals are handled as they come."""
        try:
            self._is_up = False
            self._handle(None)
            yield
        finally:
            self._is_up = True

    def _handle(self, frame: FrameType | None) -> None:
        if self._waiting is not None:
            number, self._waiting = self._waiting, None
            self._handlers[number](number, frame)


@contextmanager
def shielded() -> Iterator[Shield]:
    """In the block a shield is up before the handlers of `SIGNALS`. One that still waits at the end is dropped."""
    before: dict[int, _Handler] = {n: handler for n in SIGNALS if callable(handler := signal.getsignal(n))}
    shield = Shield(before)
    _set(dict.fromkeys(before, shield.receive))
    try:
        yield shield
    finally:
        _set(before)


def _set(handlers: Mapping[int, Any]) -> None:
    """Python runs handlers in the main thread alone, and lets no other thread set them."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)
