"""What waits, and in which order it would run: by priority, then by fair share between callers, then by urgency.

- **Priority.** A lower class waits for a higher one, but not for ever: passed over `AGEING_BATCHES` times in a row, it
  starts the next batch. So of two classes below a busy one, each starts a batch at least once in `AGEING_BATCHES` + 2.
- **Fair share.** Each caller of a class has a lane with a count of the tokens that it was served, over its weight. The
  lanes that were served least go first; lanes within one `quantum` (a batch) of each other count as equal. So of two
  that always have work waiting, the counts never lie further apart than two batches. A caller who comes new starts one
  quantum behind the lane that is being served, and so waits for no flood; one who comes back keeps its count, but is
  made up for at most `CREDIT_QUANTA`: what it left unused longer ago is lost.
- **Urgency.** Within a lane, and between equal lanes, the smallest key goes first; `scheduler.py` says what a key is.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996), whose virtual time is the count of the lane in service. Ranks
of a quantum are ours: they leave deadlines their say among callers who are about even.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice

from service.lane import Entry, Lane
from service.request import Priority, Request

AGEING_BATCHES = 16
CREDIT_QUANTA = 4
# Lanes with work waiting, beyond which further callers share one, those with a weight excepted: `take` looks at each.
MAX_CALLERS = 256
# No caller is called so: names from the wire are printable.
OTHERS = "\n"


class FairQueue:
    """The waiting sequences of one model. `quantum`: tokens within which callers count as even.

    `lookahead`: how many of the next it shows.
    """

    def __init__(self, quantum: int, lookahead: int, weights: Mapping[str, float]) -> None:
        self._quantum = quantum
        self._lookahead = lookahead
        self._weights = weights
        self._lanes: dict[Priority, dict[str, Lane]] = {priority: {} for priority in Priority}
        self._virtual = dict.fromkeys(Priority, 0.0)
        self._num_passed = dict.fromkeys(Priority, 0)
        self.num_sequences = 0
        self.num_tokens = 0

    def add(self, request: Request, entries: Sequence[Entry]) -> None:
        """Queue a request's entries."""
        self._lane(request).add(request, entries)
        self.num_sequences += len(entries)
        self.num_tokens += request.num_tokens

    def upcoming(self) -> list[list[Entry]]:
        """The next few entries in the order of their turn, those whose turns are equal together, by urgency."""
        groups: list[list[Entry]] = []
        missing = self._lookahead
        for priority in self._classes():
            for lanes in self._ranked(priority):
                group = list(islice(merge(*(lane.living() for lane in lanes)), missing))
                groups.append(group)
                missing -= len(group)
                if not missing:
                    return groups
        return groups

    def take(self, batch: Sequence[Entry]) -> None:
        """Remove entries that `upcoming` has just shown, the first of them at its turn, and charge for them."""
        head = batch[0].request
        self._age(head.priority)
        self._virtual[head.priority] = max(self._virtual[head.priority], self._lanes[head.priority][head.caller].served)
        taken: defaultdict[tuple[Priority, str], set[Entry]] = defaultdict(set)
        for entry in batch:
            request = entry.request
            self._lanes[request.priority][request.caller].take(entry)
            taken[request.priority, request.caller].add(entry)
            self.num_sequences -= 1
            self.num_tokens -= entry.sequence.num_tokens
        for (priority, caller), entries in taken.items():
            self._lanes[priority][caller].remove(entries)
        for priority, _ in taken:
            self._forget(priority)

    def drop(self, request: Request) -> None:
        """Take what still waits of a request out of the queue."""
        if request.is_queued:
            self.num_sequences -= request.num_queued_sequences
            self.num_tokens -= request.num_queued_tokens
            self._lanes[request.priority][request.caller].drop(request)
            self._forget(request.priority)

    def lanes(self, priority: Priority) -> dict[str, Lane]:
        """The lane of each caller with work waiting in a class."""
        return {caller: lane for caller, lane in self._lanes[priority].items() if lane.num_sequences}

    def requests(self) -> list[Request]:
        """Every request of which something waits."""
        entries = (e for lanes in self._lanes.values() for lane in lanes.values() for e in lane.entries)
        return list({id(entry.request): entry.request for entry in entries if entry.request.is_queued}.values())

    def weight(self, caller: str) -> float:
        """A caller's part in the fair share."""
        return self._weights.get(caller, 1.0)

    def tokens_before(self, entry: Entry) -> float:
        """About how many tokens run before an entry that is not queued yet; a lane's are taken to be average ones.

        All of the higher classes; of its own lane what is more urgent; of each other lane what is more urgent, but no
        more than that caller's fair share of the time until then, and a quantum.
        """
        request = entry.request
        higher = sum(
            lane.num_tokens for priority in Priority if priority < request.priority for lane in self._busy(priority)
        )
        lanes = self._lanes[request.priority]
        own = lanes.get(request.caller)
        before = own.tokens_before(entry) if own else 0.0
        share = (before + request.num_tokens) / self.weight(request.caller)
        others = sum(
            min(lane.tokens_before(entry), lane.weight * (share + self._quantum))
            for lane in self._busy(request.priority)
            if lane is not own
        )
        return higher + before + others

    def _classes(self) -> list[Priority]:
        """The classes with work waiting, in the order of their turns."""
        waiting = [priority for priority in Priority if self._has_work(priority)]
        aged = [priority for priority in reversed(waiting) if self._num_passed[priority] >= AGEING_BATCHES]
        return sorted(waiting, key=lambda priority: priority not in aged[:1])

    def _ranked(self, priority: Priority) -> Iterator[list[Lane]]:
        """The lanes of a class with work waiting, those that are even together, those served least first."""
        lanes = self._busy(priority)
        if len(lanes) == 1:
            yield lanes
            return
        least = min(lane.served for lane in lanes)
        ranks: defaultdict[int, list[Lane]] = defaultdict(list)
        for lane in lanes:
            ranks[int((lane.served - least) / self._quantum)].append(lane)
        for rank in sorted(ranks):
            yield ranks[rank]

    def _age(self, started: Priority) -> None:
        """Company in a batch that another class starts does not count: what is unlike that class would never run."""
        for priority in Priority:
            is_passed = priority != started and self._has_work(priority)
            self._num_passed[priority] = self._num_passed[priority] + 1 if is_passed else 0

    def _lane(self, request: Request) -> Lane:
        """The lane of a request's caller, made if need be. Notes on the request where that is the one of the others."""
        lanes, virtual = self._lanes[request.priority], self._virtual[request.priority]
        is_named = request.caller in lanes or request.caller in self._weights
        if not is_named and len(lanes) >= MAX_CALLERS:
            for caller in [caller for caller, lane in lanes.items() if not lane.num_sequences]:
                del lanes[caller]
            if len(lanes) >= MAX_CALLERS:
                request.caller = OTHERS
        if (lane := lanes.get(request.caller)) is None:
            lanes[request.caller] = lane = Lane(self.weight(request.caller), virtual - self._quantum)
        elif not lane.num_sequences:
            lane.served = max(lane.served, virtual - CREDIT_QUANTA * self._quantum)
        return lane

    def _busy(self, priority: Priority) -> list[Lane]:
        return [lane for lane in self._lanes[priority].values() if lane.num_sequences]

    def _has_work(self, priority: Priority) -> bool:
        return any(lane.num_sequences for lane in self._lanes[priority].values())

    def _forget(self, priority: Priority) -> None:
        """With nothing waiting, nobody is owed anything."""
        if not self._has_work(priority):
            self._lanes[priority].clear()
            self._virtual[priority] = 0.0
            self._num_passed[priority] = 0
