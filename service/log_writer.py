"""Writes the lines of the log in a thread of its own, so that nobody who reads stderr can hold up the server.

A pipe holds 64 KiB. When its reader stands still, as a container's log driver may, the next write waits for ever: in
the event loop, so every call waits, the probes and the drain too. Lines beyond `MAX_LINES` are dropped instead, and
counted.
"""

import contextlib
import logging
import queue
import threading
from typing import TextIO

MAX_LINES = 1000
# At the end, for what is still to be written.
_FLUSH_SECONDS = 1.0


class LogWriter(logging.Handler):
    """A line is formatted where it is logged, since it says in which call that is, and written a moment later."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._num_lost = 0
        self._counting = threading.Lock()
        threading.Thread(target=self._write_on, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            with self._counting:
                self._num_lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything is written, but not for a reader who has stopped."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: self._lines.unfinished_tasks == 0, _FLUSH_SECONDS)

    def _write_on(self) -> None:
        while True:
            self._write(self._lines.get())
            with self._counting:
                num_lost, self._num_lost = self._num_lost, 0
            if num_lost:
                text = f"{num_lost} lines of the log are missing here: stderr was not read"
                self._write(self.format(logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": text})))
            self._lines.task_done()

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or its disk is full
            self._stream.write(line + "\n")
            self._stream.flush()
