"""Who may come in: the bounds, who gives way when one is reached, and when to come back.

Full means refused, with two exceptions. In both, whole requests are displaced, the least urgent first, and get the same
refusal as one at the door:

- Waiting work of a lower priority gives way.
- Among equals, a caller who has more of the bounds than its fair share gives way to one who stays within its own. So
  one caller cannot keep the others out, and nobody within its fair share ever gives way to an equal.

What a caller has of the bounds is the largest part that it has of any one. Source: dominant resource fairness (Ghodsi
et al. 2011).
"""

from collections.abc import Iterable, Iterator

from service.bounds import Bounds
from service.cost_tracker import CostTracker
from service.errors import InvalidRequestError, QueueFullError
from service.fair_queue import FairQueue
from service.lane import Lane
from service.request import Priority, Request

_LEAST_RETRY_SECONDS = 0.001


_NAMES = ("tokens wait", "sequences wait", "requests are in flight", "bytes are in flight")
# What an operator sets each by.
FLAGS = ("--max-queued-tokens", "--max-queued-sequences", "--max-requests-in-flight", "--max-bytes-in-flight")


class Admission:
    """The bounds of one model's queue. A request is in flight from `enter` to `leave`."""

    def __init__(self, queue: FairQueue, costs: CostTracker, bounds: Bounds) -> None:
        self._queue = queue
        self._costs = costs
        self.bounds = bounds
        self._next_turn = 0.0
        self.num_requests = 0
        self.num_bytes = 0

    def displaced(self, request: Request, busy_seconds: float, now: float) -> list[Request]:
        """Who must give way so that a request can come in; nothing is changed. `busy_seconds`: until a runner is free.

        Raises `QueueFullError`, or `InvalidRequestError` for a request that not even an empty queue could hold.
        """
        for name, flag, wanted, bound in zip(_NAMES, FLAGS, _load(request), self.bounds, strict=True):
            if wanted > bound:
                raise InvalidRequestError(
                    f"the request is too large: {wanted} {name} with it; the limit is {bound} ({flag})"
                )
        excess = [
            used + wanted - bound for used, wanted, bound in zip(self.used, _load(request), self.bounds, strict=True)
        ]
        if max(excess) <= 0:
            return []
        first_excess = list(excess)
        victims: list[Request] = []
        for victim in self._victims(request):
            victims.append(victim)
            excess = [left - freed for left, freed in zip(excess, _waiting(victim), strict=True)]
            if max(excess) <= 0:
                return victims
        raise self._refusal(request, first_excess, busy_seconds, now)

    def enter(self, request: Request) -> None:
        """A request has come in."""
        request.is_admitted = True
        self.num_requests += 1
        self.num_bytes += request.num_bytes

    def leave(self, request: Request) -> None:
        """It is answered, or gone; nothing if it had left before."""
        if request.is_admitted:
            request.is_admitted = False
            self.num_requests -= 1
            self.num_bytes -= request.num_bytes

    def retry_seconds(self, num_tokens: int, excess_tokens: float, now: float) -> float:
        """When there is room: after those who were told to come back before, or all would come at once.

        At most the time of a full queue, since not everybody does come back.
        """
        token_seconds = self._costs.machine_token_seconds
        self._next_turn = max(self._next_turn, now + excess_tokens * token_seconds)
        seconds = min(self._next_turn - now, self.bounds.tokens * token_seconds)
        self._next_turn = now + seconds + num_tokens * token_seconds
        return max(_LEAST_RETRY_SECONDS, seconds)

    @property
    def used(self) -> Bounds:
        """How much there is of what is bounded."""
        return Bounds(self._queue.num_tokens, self._queue.num_sequences, self.num_requests, self.num_bytes)

    def _refusal(self, request: Request, excess: list[int], busy_seconds: float, now: float) -> QueueFullError:
        """Of several bounds that are reached, the one that is furthest beyond counts."""
        parts = [over / bound for over, bound in zip(excess, self.bounds, strict=True)]
        which = parts.index(max(parts))
        used, wanted, bound = self.used[which], _load(request)[which], self.bounds[which]
        # What must run until so much is free, taking everything that waits to be alike.
        tokens = excess[0] if which == 0 else self._queue.num_tokens * min(1.0, excess[which] / max(used, 1))
        # Nothing that waits starts before a runner is free.
        seconds = busy_seconds + self.retry_seconds(request.num_tokens, tokens, now)
        return QueueFullError(
            f"the queue is full: {used} {_NAMES[which]}, the request has {wanted}, the limit is {bound} "
            f"({FLAGS[which]}); room in about {seconds:.3f} s",
            seconds,
        )

    def _victims(self, request: Request) -> Iterator[Request]:
        for priority in reversed(Priority):
            if priority <= request.priority:
                break
            for lane in self._greediest_first(self._queue.lanes(priority).values()):
                yield from lane.requests()
        yield from self._beyond_fair_share(request)

    def _beyond_fair_share(self, request: Request) -> Iterator[Request]:
        lanes = self._queue.lanes(request.priority)
        own = lanes.pop(request.caller, None)
        weight = self._queue.weight(request.caller)
        total = weight + sum(lane.weight for lane in lanes.values())
        load = _load(request) if own is None else _sum(_load(request), _lane_load(own))
        if self._part(load) > weight / total:
            return
        for lane in self._greediest_first(lanes.values()):
            load = _lane_load(lane)
            for victim in lane.requests():
                if self._part(load) <= lane.weight / total:
                    break
                yield victim
                load = Bounds(*(all_ - freed for all_, freed in zip(load, _waiting(victim), strict=True)))

    def _greediest_first(self, lanes: Iterable[Lane]) -> list[Lane]:
        return sorted(lanes, key=lambda lane: self._part(_lane_load(lane)) / lane.weight, reverse=True)

    def _part(self, load: Bounds) -> float:
        return max(used / bound for used, bound in zip(load, self.bounds, strict=True))


def _load(request: Request) -> Bounds:
    return Bounds(request.num_tokens, len(request.sequences), 1, request.num_bytes)


def _waiting(request: Request) -> Bounds:
    return Bounds(request.num_queued_tokens, request.num_queued_sequences, 1, request.num_bytes)


def _lane_load(lane: Lane) -> Bounds:
    return Bounds(lane.num_tokens, lane.num_sequences, lane.num_requests, lane.num_bytes)


def _sum(one: Bounds, other: Bounds) -> Bounds:
    return Bounds(*(a + b for a, b in zip(one, other, strict=True)))
