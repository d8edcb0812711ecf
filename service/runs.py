"""What the runner threads are at, one run for each. The batcher's lock guards it."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from service.cancellation import Cancellation
from service.errors import EngineError, OutOfMemoryError
from service.scheduler import Taken
from service.supervisor import Supervisor

# How often it is looked for runs that do not end.
WATCH_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Run:
    """One batch on its way, and the most tokens of it that one run of the engine was able to do."""

    taken: Taken
    started: float
    cancellation: Cancellation
    most_tokens: int = 0
    lacked_memory: bool = False

    def note(self, num_tokens: int, error: EngineError | None) -> None:
        """A run of the engine for this batch, or for a part of it, is over."""
        if error is None:
            self.most_tokens = max(self.most_tokens, num_tokens)
        elif isinstance(error, OutOfMemoryError):
            self.lacked_memory = True


class Runs:
    """By thread."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._watched = time.monotonic()

    def begin(self, taken: Taken) -> None:
        """This thread is about to run a batch."""
        self._runs[threading.get_ident()] = Run(taken, time.monotonic(), Cancellation())

    @property
    def mine(self) -> Run:
        """This thread's run."""
        return self._runs[threading.get_ident()]

    def end(self) -> None:
        """This thread's run is over."""
        del self._runs[threading.get_ident()]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def stop_deserted(self) -> int:
        """Stop the runs whose callers have all left; how many. A test, which has no batch, is nobody's."""
        deserted = [
            run
            for run in self
            if run.taken.batch
            and not run.cancellation.is_set
            and all(entry.request.is_settled for entry in run.taken.batch)
        ]
        for run in deserted:
            run.cancellation.set()
        return len(deserted)

    def watch(self, supervisor: Supervisor, now: float) -> None:
        """Stop what should have ended long ago. While the whole process is frozen nothing runs, and nothing hangs."""
        pause = now - self._watched - WATCH_SECONDS
        self._watched = now
        if pause > WATCH_SECONDS:
            supervisor.forgive(pause)
            for run in self:
                run.started += pause
        for run in self:
            if supervisor.is_hung(run.started, run.taken.seconds, now):
                run.cancellation.set()
                supervisor.note_hang(now)
