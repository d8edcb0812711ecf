"""A way to stop what is running on another thread, once, for good."""

import threading
from collections.abc import Callable


class Cancellation:
    """Set from any thread. Whoever runs attaches what stops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: list[Callable[[], None]] = []
        self.is_set = False

    def set(self) -> None:
        """Stop what is attached, and at once whatever will be."""
        with self._lock:
            self.is_set = True
            stops, self._stops = self._stops, []
        for stop in stops:
            stop()

    def attach(self, stop: Callable[[], None]) -> None:
        """Have `stop` called when this is set; at once if it is."""
        with self._lock:
            if not self.is_set:
                self._stops.append(stop)
                return
        stop()
