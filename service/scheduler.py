"""Decides which sequences run next, and does nothing: synchronous, no clock of its own, no threads, no I/O.

The unit is one sequence. Each gets a key when it is put, and the smallest key is the most urgent:

- without a deadline, arrival + PATIENCE, and for what a request has beyond a full batch, SPREAD times the seconds of
  that work;
- with a deadline, the latest moment at which it can start so that the rest of its request still makes it, if that is
  sooner.

So requests of up to a full batch leave in the order of arrival, and end one after the other instead of all late. One of
10,000 sequences is spread over more than the time that it would take alone: a single sequence that comes meanwhile
waits for a batch of it at most. Nobody starves: keys never change, and whatever is put after a key's moment has passed
has a larger one, unless its deadline cannot be met, and then it is refused.

`take` starts a batch from the most urgent sequence and fills it from the next few, closest in length first, up to the
token budget, with each that costs no more in company than in a run of its own.
"""

from bisect import bisect, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from service.cost_model import CostModel
from service.errors import DeadlineError, QueueFullError
from service.request import Request, TokenSequence

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


class Entry(NamedTuple):
    """One waiting sequence; sorts by urgency. `order` is unique, so requests are never compared."""

    key: float
    order: int
    request: Request
    place: int

    @property
    def sequence(self) -> TokenSequence:
        return self.request.sequences[self.place]


@dataclass(frozen=True, slots=True)
class Taken:
    """What `take` decided: the next batch, and the requests whose deadline has passed while they waited."""

    batch: list[Entry]
    expired: list[Request]


class Scheduler:
    """The queue of one model. All methods must be called under one lock."""

    def __init__(self, cost: CostModel, *, max_batch_tokens: int, max_queued_tokens: int, num_runners: int) -> None:
        self._cost = cost
        self._max_batch_tokens = max_batch_tokens
        self._max_queued_tokens = max_queued_tokens
        self._num_runners = num_runners
        self._lookahead = max(LOOKAHEAD, max_batch_tokens // SHORT_TOKENS)
        self._full_batch_seconds = cost.per_token * max_batch_tokens
        self._queue: list[Entry] = []
        self._order = count()
        self._num_dead = 0
        self._next_turn = 0.0
        self.num_queued_sequences = 0
        self.num_queued_tokens = 0

    def put(self, request: Request, now: float) -> None:
        """Queue every sequence of a request. Raises `QueueFullError` or `DeadlineError`, and then has queued none."""
        self._check_room(request, now)
        work = [self._cost.share(sequence.num_tokens) / self._num_runners for sequence in request.sequences]
        entries = list(self._entries(request, work))
        self._check_deadline(request, now, self._seconds_ahead(entries[-1]) + sum(work) + self._cost.per_run)
        if len(entries) == 1:
            insort(self._queue, entries[0])
        else:
            self._queue.extend(entries)
            self._queue.sort()
        request.is_queued = True
        request.num_queued_sequences = len(entries)
        request.num_queued_tokens = request.num_tokens
        self.num_queued_sequences += len(entries)
        self.num_queued_tokens += request.num_tokens

    def take(self, now: float, num_idle: int = 1) -> Taken:
        """The next batch for one of `num_idle` idle runners; empty if nothing waits."""
        candidates, expired = self._candidates(now)
        if not candidates:
            return Taken([], expired)
        budget = self._budget(num_idle)
        batch = [candidates[0]]
        length = longest = num_tokens = candidates[0].sequence.num_tokens
        for entry in sorted(candidates[1:], key=lambda entry: abs(entry.sequence.num_tokens - length)):
            added = entry.sequence.num_tokens
            if num_tokens + added <= budget and self._joins(len(batch), num_tokens, longest, added):
                batch.append(entry)
                num_tokens += added
                longest = max(longest, added)
        self._remove_taken(batch)
        return Taken(batch, expired)

    def remove(self, request: Request) -> None:
        """Take what still waits of a request out of the queue; its share of the bound is free at once."""
        if not request.is_queued:
            return
        self._bury(request)
        if self._num_dead > max(self._lookahead, len(self._queue) // 2):
            self._queue = [entry for entry in self._queue if entry.request.is_queued]
            self._num_dead = 0

    def clear(self) -> list[Request]:
        """Take everything out; the requests that waited."""
        requests = {id(entry.request): entry.request for entry in self._queue if entry.request.is_queued}
        for request in requests.values():
            self.remove(request)
        return list(requests.values())

    def _check_room(self, request: Request, now: float) -> None:
        excess = self.num_queued_tokens + request.num_tokens - self._max_queued_tokens
        if excess <= 0:
            return
        retry_seconds = self._retry_seconds(excess, request.num_tokens, now)
        raise QueueFullError(
            f"the queue is full: {self.num_queued_tokens} tokens wait, the request has {request.num_tokens}, "
            f"the limit is {self._max_queued_tokens}; room in about {retry_seconds:.3f} s",
            retry_seconds,
        )

    def _retry_seconds(self, excess: int, num_tokens: int, now: float) -> float:
        """When there is room: after those who were told to come back before, or all would come at once.

        At most the time of a full queue, since not everybody does come back.
        """
        token_seconds = self._cost.per_token / self._num_runners
        self._next_turn = max(self._next_turn, now + excess * token_seconds)
        seconds = min(self._next_turn - now, self._max_queued_tokens * token_seconds)
        self._next_turn = now + seconds + num_tokens * token_seconds
        return max(0.001, seconds)

    def _check_deadline(self, request: Request, now: float, seconds: float) -> None:
        if request.deadline is not None and now >= request.deadline:
            raise DeadlineError("the deadline has passed")
        if request.deadline is not None and now + seconds > request.deadline:
            raise DeadlineError(
                f"the deadline is {request.deadline - now:.3f} s away; the request would be done in {seconds:.3f} s, "
                "what is more urgent included"
            )

    def _seconds_ahead(self, entry: Entry) -> float:
        """Predicted time until everything more urgent has run. Its tokens are taken to be average ones of the queue."""
        if entry.request.deadline is None or not self._queue:
            return 0.0
        share = bisect(self._queue, entry) / len(self._queue)
        return share * self.num_queued_tokens * self._cost.per_token / self._num_runners

    def _entries(self, request: Request, work: list[float]) -> Iterator[Entry]:
        before, after = 0.0, sum(work)
        at_once = max(self._full_batch_seconds, work[0])
        for place, seconds in enumerate(work):
            beyond = max(0.0, before + seconds - at_once)
            key = request.arrival + PATIENCE_SECONDS + SPREAD * beyond
            if request.deadline is not None:
                key = min(key, request.deadline - after - self._cost.per_run)
            yield Entry(key, next(self._order), request, place)
            before += seconds
            after -= seconds

    def _candidates(self, now: float) -> tuple[list[Entry], list[Request]]:
        """The most urgent living entries, with the dead and the expired before them dropped from the queue."""
        living: list[Entry] = []
        expired: list[Request] = []
        num_seen = 0
        for entry in self._queue:
            if len(living) == self._lookahead:
                break
            num_seen += 1
            request = entry.request
            if request.is_queued and request.deadline is not None and request.deadline <= now:
                self._bury(request)
                expired.append(request)
            if request.is_queued:
                living.append(entry)
            else:
                self._num_dead -= 1
        self._queue[:num_seen] = living
        return living, expired

    def _budget(self, num_idle: int) -> int:
        share = -(-self.num_queued_tokens // num_idle)
        return min(self._max_batch_tokens, max(share, MIN_SPLIT_TOKENS))

    def _joins(self, num_sequences: int, num_tokens: int, longest: int, added: int) -> bool:
        """Whether one more sequence costs no more in this company than in a run of its own."""
        before = self._cost.seconds(num_sequences, num_tokens, longest)
        after = self._cost.seconds(num_sequences + 1, num_tokens + added, max(longest, added))
        return after - before <= self._cost.seconds(1, added, added)

    def _remove_taken(self, batch: list[Entry]) -> None:
        taken = {entry.order for entry in batch}
        head = self._queue[: self._lookahead]
        self._queue[: self._lookahead] = [entry for entry in head if entry.order not in taken]
        for entry in batch:
            self._release(entry.request, 1, entry.sequence.num_tokens)

    def _bury(self, request: Request) -> None:
        """Leave a request's entries in the queue, dead: finding them would cost more than meeting them later."""
        self._num_dead += request.num_queued_sequences
        self._release(request, request.num_queued_sequences, request.num_queued_tokens)

    def _release(self, request: Request, num_sequences: int, num_tokens: int) -> None:
        request.num_queued_sequences -= num_sequences
        request.num_queued_tokens -= num_tokens
        request.is_queued = request.num_queued_sequences > 0
        self.num_queued_sequences -= num_sequences
        self.num_queued_tokens -= num_tokens
