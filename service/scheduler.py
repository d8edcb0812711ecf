"""Decides which sequences run next, and does nothing: synchronous, no clock of its own, no threads, no I/O.

The unit is one sequence. `put` refuses what cannot be met or held (`admission.py`). `take` starts a batch from the most
urgent sequence (`urgency.py`) of those whose turn it is (`fair_queue.py`) and fills it from the next few
(`company.py`); in the order of urgency alone where company of like length would make somebody late (`punctuality.py`).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median
from typing import NamedTuple

from service.admission import Admission
from service.bounds import Bounds
from service.company import compose
from service.cost_model import Sample
from service.cost_tracker import CostTracker
from service.errors import DeadlineError, QueueFullError
from service.fair_queue import FairQueue
from service.lane import Entry
from service.memory_budget import MemoryBudget
from service.punctuality import MARGIN, are_hurried, deadline_of, reserve_tokens
from service.request import Request
from service.urgency import keys

# How many sequences `take` looks at: enough to find like lengths, few enough to stay near 0.1 ms; where a batch is
# larger than that many short sequences, as many as fill it.
LOOKAHEAD = 64
SHORT_TOKENS = 4
# Below this many tokens a batch is not split between idle runners: a run of few tokens is no faster than of these.
MIN_SPLIT_TOKENS = 16
# A prediction that lets nothing run is never corrected. So when requests are refused for predictions and nothing has
# run for this long, one is let in.
TRUST_SECONDS = 10.0
# The middle one of so many counts.
_ALONE_RUNS = 5


class Displaced(NamedTuple):
    """A request that had to give way to another, and its answer."""

    request: Request
    error: QueueFullError


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What `take` decided: the next batch; who expired, or would be late for certain, while waiting.

    `seconds`: what the run is predicted to take. `is_alone`: it has the machine to itself. `wake_at`: with an empty
    batch, when to ask again although nothing has happened.
    """

    batch: list[Entry]
    expired: list[Request]
    seconds: float = 0.0
    is_alone: bool = False
    wake_at: float | None = None


class Scheduler:
    """The queue of one model. All methods must be called under one lock."""

    def __init__(
        self,
        costs: CostTracker,
        bounds: Bounds,
        *,
        max_wait_seconds: float = 0.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.costs = costs
        self._max_batch_tokens = costs.max_batch_tokens
        self._num_runners = costs.num_runners
        self._reserve = reserve_tokens(costs.max_batch_tokens, costs.num_runners)
        self._max_wait_seconds = max_wait_seconds
        lookahead = max(LOOKAHEAD, costs.max_batch_tokens // SHORT_TOKENS)
        self._queue = FairQueue(costs.max_batch_tokens, lookahead, weights or {})
        self._admission = Admission(self._queue, costs, bounds)
        self._memory = MemoryBudget()
        self._order = count()
        # Predicted ends of what runs.
        self._running: dict[Taken, float] = {}
        self._distrusted_since: float | None = None
        self._is_probe = False
        # Of runs that had the machine to themselves: what they took, over the model's, which is of a busy machine.
        self._alone_ratios: deque[float] = deque([1.0 / costs.num_runners], maxlen=_ALONE_RUNS)

    @property
    def bounds(self) -> Bounds:
        """The most that may wait and be in flight."""
        return self._admission.bounds

    @property
    def used(self) -> Bounds:
        """How much waits and is in flight."""
        return self._admission.used

    def put(self, request: Request, now: float) -> list[Displaced]:
        """Queue every sequence of a request; returns those who had to give way to it.

        Raises `QueueFullError` or `DeadlineError`, and then has changed nothing.
        """
        # What waits for company holds its place for so long, at most.
        victims = self._admission.displaced(request, self._busy_seconds(now) + self._max_wait_seconds, now)
        cost = self.costs.cost
        shares = [cost.share(sequence.num_tokens) for sequence in request.sequences]
        entries = [
            Entry(key, next(self._order), request, place)
            for place, key in enumerate(
                keys(
                    request,
                    [
                        max(share, self.costs.token_seconds * s.num_tokens)
                        for share, s in zip(shares, request.sequences, strict=True)
                    ],
                    per_run=cost.per_run,
                    at_once=self.costs.machine_token_seconds * self._max_batch_tokens,
                    num_runners=self._num_runners,
                )
            )
        ]
        self._check_deadline(request, entries[-1], shares, now)
        for victim in victims:
            self.end(victim)
        self._queue.add(request, entries)
        self._admission.enter(request)
        return [self._displaced(victim, now) for victim in victims]

    def take(self, now: float, num_idle: int = 1) -> Taken:
        """The next batch for one of `num_idle` idle runners; empty if nothing waits, or if it pays to wait."""
        groups, expired = self._candidates(now)
        if not groups:
            return Taken([], expired)
        if are_hurried(groups, now, self.costs.machine_token_seconds, self._reserve):
            groups = [[entry] for group in groups for entry in group]
        batch, seconds = compose(groups, self.costs.cost, self._memory, self._budget(num_idle), now)
        if (wake_at := self._wake_at(batch, seconds)) > now:
            return Taken([], expired, wake_at=wake_at)
        self._queue.take(batch)
        is_alone = num_idle == self._num_runners and not self._queue.num_sequences
        taken = Taken(batch, expired, seconds, is_alone)
        self._running[taken] = now + seconds
        return taken

    def finish(self, taken: Taken) -> None:
        """The run of a batch is over, whatever came of it."""
        del self._running[taken]
        self._distrusted_since = None
        self._is_probe = False

    def observe(self, run: Sample, *, is_alone: bool) -> None:
        """What a run really took. The model is of a busy machine: one that had it to itself says only so much."""
        if is_alone and self._num_runners > 1:
            ratio = self.costs.cost.drift(run)
            self._alone_ratios.append(ratio)
            # With all of the machine it is at best so many times as fast: a model that says more is wrong.
            if ratio * self._num_runners >= 1:
                return
            run = replace(run, seconds=run.seconds * self._num_runners)
        self.costs.observe(run, is_urgent=self._is_probe)

    def stop_waiting(self) -> None:
        """From now on start what there is: nobody comes any more."""
        self._max_wait_seconds = 0.0

    def note_out_of_memory(self, taken: Taken, most_tokens: int, now: float) -> None:
        """There was no memory for a batch in one run, though for `most_tokens` of it (0: for none).

        Runs of such lengths get no more than that for a while. One sequence alone says nothing of others.
        """
        lengths = [entry.sequence.num_tokens for entry in taken.batch]
        if len(lengths) > 1:
            self._memory.limit(most_tokens or sum(lengths) // 2, max(lengths), now)

    def drop(self, request: Request) -> None:
        """Take what still waits of a request out of the queue; its share of what may wait is free at once."""
        self._queue.drop(request)

    def end(self, request: Request) -> None:
        """A request is answered, or its caller gone: its share of every bound is free."""
        self._queue.drop(request)
        self._admission.leave(request)

    def clear(self) -> list[Request]:
        """Take everything out; the requests that waited."""
        requests = self._queue.requests()
        for request in requests:
            self._queue.drop(request)
        return requests

    def _displaced(self, victim: Request, now: float) -> Displaced:
        seconds = self._admission.retry_seconds(victim.num_tokens, victim.num_tokens, now)
        return Displaced(
            victim,
            QueueFullError(
                "the queue is full, and the request has given way to one of a higher priority or of a caller with less "
                f"in it; room in about {seconds:.3f} s",
                seconds,
            ),
        )

    def _check_deadline(self, request: Request, last: Entry, shares: Sequence[float], now: float) -> None:
        if request.deadline is None:
            return
        if now >= request.deadline:
            raise DeadlineError("the deadline had passed when the request came to the queue")
        seconds = self._predicted_seconds(last, shares, now)
        if now + seconds > request.deadline and self._is_trusted(now):
            # Rounded apart, or a narrow miss would read as if there were none.
            left_ms, needed_ms = math.floor(1000 * (request.deadline - now)), math.ceil(1000 * seconds)
            raise DeadlineError(
                f"the deadline is {left_ms} ms away, and the request would be done in {needed_ms} ms, what is more "
                "urgent and a margin included; allow more time, or send less at once"
            )

    def _is_trusted(self, now: float) -> bool:
        if self._distrusted_since is None:
            self._distrusted_since = now
        self._is_probe = now - self._distrusted_since >= TRUST_SECONDS
        return not self._is_probe

    def _predicted_seconds(self, last: Entry, shares: Sequence[float], now: float) -> float:
        """Until what runs, everything before a request's last entry, and the request itself are done."""
        per_run, work = self.costs.cost.per_run, sum(shares)
        if not (self._queue.num_sequences or self._running):
            return median(self._alone_ratios) * (per_run + work)
        # A sequence runs on one runner, unless it has the machine to itself.
        own = per_run + max(work / self._num_runners, *shares)
        return (
            self._busy_seconds(now) + MARGIN * self._queue.tokens_before(last) * self.costs.machine_token_seconds + own
        )

    def _busy_seconds(self, now: float) -> float:
        """Predicted time until a runner is free."""
        if len(self._running) < self._num_runners:
            return 0.0
        return max(0.0, min(self._running.values()) - now)

    def _candidates(self, now: float) -> tuple[list[list[Entry]], list[Request]]:
        """The next few in the order of their turns, and those found among them whom nothing can help any more."""
        expired: list[Request] = []
        while True:
            groups = self._queue.upcoming()
            late = {id(e.request): e for group in groups for e in group if self._is_late(e, now)}
            if not late:
                return groups, expired
            for entry in late.values():
                # One by one: the last who waits is tried, or a prediction that is wrong would never be corrected.
                if self._is_late(entry, now):
                    self._queue.drop(entry.request)
                    expired.append(entry.request)

    def _is_late(self, entry: Entry, now: float) -> bool:
        """Whether its request cannot be done in time any more. Where nobody else waits, it does no harm to try."""
        request, cost = entry.request, self.costs.cost
        if request.deadline is None or request.deadline <= now:
            return request.deadline is not None
        rest = cost.per_run + self.costs.machine_token_seconds * request.num_queued_tokens
        is_hopeless = request.deadline < now + max(self._seconds_alone(entry), rest)
        return is_hopeless and request.num_queued_sequences < self._queue.num_sequences

    def _seconds_alone(self, entry: Entry) -> float:
        length = entry.sequence.num_tokens
        return self.costs.cost.seconds(1, length, length)

    def _budget(self, num_idle: int) -> int:
        share = -(-self._queue.num_tokens // num_idle)
        return min(self._max_batch_tokens, max(share, MIN_SPLIT_TOKENS))

    def _wake_at(self, batch: list[Entry], seconds: float) -> float:
        """Until when a batch may wait for company; not where as much waits as a run may have."""
        if not self._max_wait_seconds or self._queue.num_tokens >= self._max_batch_tokens:
            return -math.inf
        oldest = min(entry.request.arrival for entry in batch)
        return min(oldest + self._max_wait_seconds, *(deadline_of(entry) - 2 * seconds for entry in batch))
