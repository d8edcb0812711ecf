"""Decides which sequences run next, and does nothing: synchronous, no clock of its own, no threads, no I/O.

The unit is one sequence. Each gets a key when it is put, and of those whose turn it is (`fair_queue.py`) the smallest
key is the most urgent:

- without a deadline, arrival + PATIENCE, and for what a request has beyond a full batch, SPREAD times the seconds of
  that work;
- with a deadline, the latest moment at which it can start so that the rest of its request still makes it, if that is
  sooner. Keys less the present are slack; since the present is the same for all, they need no updating.

So requests of up to a full batch leave in the order of arrival, and end one after the other instead of all late. One of
10,000 sequences is spread over more than the time that it would take alone: a single sequence that comes meanwhile
waits for a batch of it at most. Nobody starves within a lane: keys never change, and whatever is put after a key's
moment has passed has a larger one, unless its deadline cannot be met, and then it is refused.

`take` starts a batch from the most urgent sequence and fills it from the next few: in the order of turns, within a turn
closest in length first, or most urgent first where that would make somebody late (`punctuality.py`); up to the token
budget; with each that costs no more in company than in a run of its own, and makes nobody late.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from service.admission import Admission, Bounds
from service.cost_tracker import CostTracker
from service.errors import DeadlineError, QueueFullError
from service.fair_queue import FairQueue
from service.lane import Entry
from service.memory_budget import MemoryBudget
from service.punctuality import MARGIN, are_hurried, deadline_of, reserve_tokens
from service.request import Request

# How long a request without a deadline lets those with one pass.
PATIENCE_SECONDS = 1.0
# Above 1, so that a large request yields to those who come later even if it runs at half the predicted rate.
SPREAD = 2.0
# How many sequences `take` looks at: enough to find like lengths, few enough to stay under 0.1 ms; where a batch is
# larger than that many short sequences, as many as fill it.
LOOKAHEAD = 64
SHORT_TOKENS = 4
# Below this many tokens a batch is not split between idle runners: a run of few tokens is no faster than of these.
MIN_SPLIT_TOKENS = 16
# A prediction that lets nothing run is never corrected. So when requests are refused for predictions and nothing has
# run for this long, one is let in.
TRUST_SECONDS = 10.0


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
        max_batch_tokens: int,
        num_runners: int,
        max_wait_seconds: float = 0.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.costs = costs
        self._max_batch_tokens = max_batch_tokens
        self._num_runners = num_runners
        self._reserve = reserve_tokens(max_batch_tokens, num_runners)
        self._max_wait_seconds = max_wait_seconds
        lookahead = max(LOOKAHEAD, max_batch_tokens // SHORT_TOKENS)
        self._queue = FairQueue(max_batch_tokens, lookahead, weights or {})
        self._admission = Admission(self._queue, costs, bounds, num_runners)
        self._memory = MemoryBudget()
        self._order = count()
        # Predicted ends of what runs.
        self._running: dict[Taken, float] = {}
        self._distrusted_since: float | None = None

    @property
    def num_queued_sequences(self) -> int:
        return self._queue.num_sequences

    @property
    def num_queued_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_requests_in_flight(self) -> int:
        return self._admission.num_requests

    @property
    def num_bytes_in_flight(self) -> int:
        return self._admission.num_bytes

    def fullness(self, bound: str) -> float:
        """The part of one of the bounds, by its name, that is used."""
        return self._admission.fullness(bound)

    @property
    def _token_seconds(self) -> float:
        """Of the whole machine at load."""
        return self.costs.token_seconds / self._num_runners

    def put(self, request: Request, now: float) -> list[Displaced]:
        """Queue every sequence of a request; returns those who had to give way to it.

        Raises `QueueFullError` or `DeadlineError`, and then has changed nothing.
        """
        victims = self._admission.displaced(request, now)
        cost, is_idle = self.costs.cost, not (self._queue.num_sequences or self._running)
        shares = [cost.share(sequence.num_tokens) for sequence in request.sequences]
        work = [share / self._num_runners for share in shares]
        entries = list(self._entries(request, work))
        # A sequence runs on one runner, unless it has the machine to itself.
        own = cost.per_run + (sum(work) if is_idle else max(sum(work), max(shares)))
        self._check_deadline(request, entries[-1], own, now)
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
        if are_hurried(groups, now, self._token_seconds, self._reserve):
            groups = [[entry] for group in groups for entry in group]
        batch, seconds, is_full = self._compose(groups, self._budget(num_idle), now)
        if not is_full and (wake_at := self._wake_at(batch, seconds)) > now:
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

    def _check_deadline(self, request: Request, last: Entry, own: float, now: float) -> None:
        if request.deadline is None:
            return
        if now >= request.deadline:
            raise DeadlineError("the deadline has passed")
        seconds = self._seconds_before(last, now) + own
        if now + seconds > request.deadline and self._is_trusted(now):
            raise DeadlineError(
                f"the deadline is {request.deadline - now:.3f} s away; the request would be done in {seconds:.3f} s, "
                "what is more urgent and a margin included"
            )

    def _is_trusted(self, now: float) -> bool:
        if self._distrusted_since is None:
            self._distrusted_since = now
        return now - self._distrusted_since < TRUST_SECONDS

    def _seconds_before(self, entry: Entry, now: float) -> float:
        """Predicted time until what runs and everything before an entry is done."""
        is_busy = len(self._running) >= self._num_runners
        busy = max(0.0, min(self._running.values()) - now) if is_busy else 0.0
        return busy + MARGIN * self._queue.tokens_before(entry) * self._token_seconds

    def _entries(self, request: Request, work: list[float]) -> Iterator[Entry]:
        before, after = 0.0, sum(work)
        per_run = self.costs.cost.per_run
        at_once = max(self.costs.cost.per_token * self._max_batch_tokens, work[0])
        for place, seconds in enumerate(work):
            beyond = max(0.0, before + seconds - at_once)
            key = request.arrival + PATIENCE_SECONDS + SPREAD * beyond
            if request.deadline is not None:
                # One sequence runs on one runner, however many there are.
                key = min(key, request.deadline - max(after, seconds * self._num_runners) - per_run)
            yield Entry(key, next(self._order), request, place)
            before += seconds
            after -= seconds

    def _candidates(self, now: float) -> tuple[list[list[Entry]], list[Request]]:
        """The next few in the order of their turns, and those found among them whom nothing can help any more."""
        expired: list[Request] = []
        while True:
            groups = self._queue.upcoming()
            late = {id(e.request): e.request for group in groups for e in group if self._is_late(e, now)}
            if not late:
                return groups, expired
            for request in late.values():
                self._queue.drop(request)
                expired.append(request)

    def _is_late(self, entry: Entry, now: float) -> bool:
        """Whether its request cannot be done in time any more. Where nobody else waits, it does no harm to try."""
        request, cost = entry.request, self.costs.cost
        if request.deadline is None or request.deadline <= now:
            return request.deadline is not None
        rest = cost.per_run + self._token_seconds * request.num_queued_tokens
        is_hopeless = request.deadline < now + max(self._seconds_alone(entry), rest)
        return is_hopeless and request.num_queued_sequences < self._queue.num_sequences

    def _seconds_alone(self, entry: Entry) -> float:
        length = entry.sequence.num_tokens
        return self.costs.cost.seconds(1, length, length)

    def _compose(self, groups: list[list[Entry]], budget: int, now: float) -> tuple[list[Entry], float, bool]:
        """The batch, its predicted seconds, and whether there is no more room in it."""
        cost = self.costs.cost
        head = groups[0][0]
        length = longest = num_tokens = head.sequence.num_tokens
        seconds, is_full = self._seconds_alone(head), False
        # The first deadline that can be met; nobody joins who would spoil that.
        limit = deadline_of(head) if now + seconds <= deadline_of(head) else math.inf
        batch = [head]
        for group in groups:
            for entry in sorted(group, key=lambda entry: abs(entry.sequence.num_tokens - length)):
                if entry is head:
                    continue
                if num_tokens >= budget:
                    return batch, seconds, True
                added = entry.sequence.num_tokens
                total, reach = num_tokens + added, max(longest, added)
                if total > budget or not self._memory.allows(total, reach, now):
                    is_full = True
                    continue
                after = cost.seconds(len(batch) + 1, total, reach)
                latest = min(limit, deadline_of(entry))
                if after - seconds > cost.seconds(1, added, added) or now + after > latest:
                    continue
                batch.append(entry)
                num_tokens, longest, seconds, limit = total, reach, after, latest
        return batch, seconds, is_full or num_tokens >= budget

    def _budget(self, num_idle: int) -> int:
        share = -(-self._queue.num_tokens // num_idle)
        return min(self._max_batch_tokens, max(share, MIN_SPLIT_TOKENS))

    def _wake_at(self, batch: list[Entry], seconds: float) -> float:
        """Until when a batch may wait for company."""
        if not self._max_wait_seconds:
            return -math.inf
        oldest = min(entry.request.arrival for entry in batch)
        return min(oldest + self._max_wait_seconds, *(deadline_of(entry) - 2 * seconds for entry in batch))
