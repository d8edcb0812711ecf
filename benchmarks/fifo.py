"""The rival under overload: this server with its scheduling replaced by a plain queue, first in, first out.

Batches are whatever comes next, up to the token budget; the queue is bounded in tokens. It sees no deadlines, no
priorities and no callers, and what it has taken in it runs, whether or not anybody still waits for it: what most
servers do. Wire, checks, threads, engine and graph are ours, to the line; a caller's deadline is answered on time, too.
Started as `python -m benchmarks.fifo`, with the server's own flags.
"""

from collections import deque
from collections.abc import Mapping
from unittest.mock import patch

from service.__main__ import main
from service.bounds import Bounds
from service.cost_model import Sample
from service.cost_tracker import CostTracker
from service.errors import QueueFullError
from service.lane import Entry
from service.request import Request
from service.runs import Runs
from service.scheduler import Displaced, Taken


class Fifo:
    """What stands in for the scheduler. Of its arguments it uses those that a plain queue has."""

    def __init__(
        self,
        costs: CostTracker,
        bounds: Bounds,
        *,
        max_wait_seconds: float = 0.0,  # noqa: ARG002
        weights: Mapping[str, float] | None = None,  # noqa: ARG002
    ) -> None:
        self.costs = costs
        self.bounds = bounds
        self._queue: deque[Entry] = deque()
        self._num_put = 0
        self._num_tokens = 0

    @property
    def used(self) -> Bounds:
        """What waits; it has no other bound than that of tokens, and does not count what is in flight."""
        return Bounds(self._num_tokens, len(self._queue), 0, 0)

    def put(self, request: Request, now: float) -> list[Displaced]:
        """Queue every sequence of a request. Raises `QueueFullError`."""
        excess = self._num_tokens + request.num_tokens - self.bounds.tokens
        if excess > 0:
            raise QueueFullError("the queue is full", excess * self.costs.machine_token_seconds)
        for place in range(len(request.sequences)):
            self._queue.append(Entry(now, self._num_put, request, place))
            self._num_put += 1
        self._num_tokens += request.num_tokens
        return []

    def take(self, now: float, num_idle: int = 1) -> Taken:  # noqa: ARG002
        """The next sequences, as many as fit; at least one, if there is one."""
        batch: list[Entry] = []
        room = self.costs.max_batch_tokens
        while self._queue and (not batch or self._queue[0].sequence.num_tokens <= room):
            batch.append(self._queue.popleft())
            room -= batch[-1].sequence.num_tokens
            self._num_tokens -= batch[-1].sequence.num_tokens
        lengths = [entry.sequence.num_tokens for entry in batch]
        seconds = self.costs.cost.seconds(len(lengths), sum(lengths), max(lengths)) if lengths else 0.0
        is_alone = num_idle == self.costs.num_runners and not self._queue
        return Taken(batch, [], seconds, is_alone)

    def finish(self, taken: Taken) -> None:
        """Nothing: it keeps no count of what runs."""

    def observe(self, run: Sample, *, is_alone: bool) -> None:
        """Nothing: it predicts nothing."""

    def stop_waiting(self) -> None:
        """Nothing: it never waits."""

    def note_out_of_memory(self, taken: Taken, most_tokens: int, now: float) -> None:
        """Nothing: its batches keep their size."""

    def drop(self, request: Request) -> None:
        """Nothing: it does not look for those who have left."""

    def end(self, request: Request) -> None:
        """Nothing, for the same reason."""

    def clear(self) -> list[Request]:
        """Take everything out; the requests that waited."""
        requests = {id(entry.request): entry.request for entry in self._queue}
        self._queue.clear()
        self._num_tokens = 0
        return list(requests.values())


class PatientRuns(Runs):
    """Runs to the end also what nobody waits for any more."""

    def stop_deserted(self) -> int:
        return 0


if __name__ == "__main__":
    with patch("service.loading.Scheduler", Fifo), patch("service.batcher.Runs", PatientRuns):
        main()
