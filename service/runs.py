"""What the runner threads are at, one run for each. The batcher's lock guards it."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from service.cancellation import Cancellation
from service.errors import OutOfMemoryError
from service.executor import Ran
from service.scheduler import Taken
from service.supervisor import Supervisor


@dataclass(slots=True, eq=False)
class Run:
    """One batch on its way, and the most tokens of it that one run of the engine was able to do."""

    taken: Taken
    started: float
    cancellation: Cancellation
    most_tokens: int = 0
    lacked_memory: bool = False

    def note(self, ran: Ran) -> None:
        """A run of the engine for this batch, or for a part of it, is over."""
        if ran.error is None:
            self.most_tokens = max(self.most_tokens, ran.num_tokens)
        elif isinstance(ran.error, OutOfMemoryError):
            self.lacked_memory = True


class Runs:
    """By thread."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}

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
        """Stop the runs whose callers have all left; how many."""
        deserted = [
            run
            for run in self
            if not run.cancellation.is_set and all(entry.request.is_settled for entry in run.taken.batch)
        ]
        for run in deserted:
            run.cancellation.set()
        return len(deserted)

    def stop_hung(self, supervisor: Supervisor, now: float) -> bool:
        """Stop the runs that should have ended long ago; whether there is one."""
        hung = [run for run in self if supervisor.is_hung(run.started, run.taken.seconds, now)]
        for run in hung:
            run.cancellation.set()
        return bool(hung)
