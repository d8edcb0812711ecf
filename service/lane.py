"""One caller's waiting sequences of one priority, the most urgent first.

Who leaves the queue early, leaves dead entries behind: they cost nothing until they are met or there are many.
"""

from bisect import bisect, bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from service.request import Request, TokenSequence

# Dead entries that a lane may keep before it is cleaned: cleaning costs a pass over it.
_MAX_DEAD = 64


class Entry(NamedTuple):
    """One waiting sequence; sorts by urgency. `order` is unique, so requests are never compared."""

    key: float
    order: int
    request: Request
    place: int

    @property
    def sequence(self) -> TokenSequence:
        return self.request.sequences[self.place]


@dataclass(slots=True, eq=False)
class Lane:
    """The queue of one caller and one priority. `served` is in tokens over weight."""

    weight: float
    served: float
    entries: list[Entry] = field(default_factory=list)
    num_dead: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_requests: int = 0
    num_bytes: int = 0

    def add(self, request: Request, entries: Sequence[Entry]) -> None:
        """Let all of a request wait."""
        request.is_queued = True
        request.num_queued_sequences = len(entries)
        request.num_queued_tokens = request.num_tokens
        self.num_sequences += len(entries)
        self.num_tokens += request.num_tokens
        self.num_requests += 1
        self.num_bytes += request.num_bytes
        if len(entries) == 1:
            insort(self.entries, entries[0])
        else:
            self.entries.extend(entries)
            self.entries.sort()

    def living(self) -> Iterator[Entry]:
        """The living entries, the most urgent first; the dead that stand before them are cleared away."""
        num_dead = next((n for n, entry in enumerate(self.entries) if entry.request.is_queued), len(self.entries))
        del self.entries[:num_dead]
        self.num_dead -= num_dead
        return (entry for entry in self.entries if entry.request.is_queued)

    def take(self, entry: Entry) -> None:
        """One of them runs; it stays among the entries until `remove`."""
        num_tokens = entry.sequence.num_tokens
        self.served += num_tokens / self.weight
        self._release(entry.request, 1, num_tokens)

    def remove(self, taken: set[Entry]) -> None:
        """Remove entries that `take` was told of."""
        first, last = bisect_left(self.entries, min(taken)), bisect(self.entries, max(taken))
        self.entries[first:last] = [entry for entry in self.entries[first:last] if entry not in taken]

    def drop(self, request: Request) -> None:
        """Leave a request's entries where they are, dead: finding them would cost more than meeting them later."""
        self.num_dead += request.num_queued_sequences
        self._release(request, request.num_queued_sequences, request.num_queued_tokens)
        if self.num_dead > max(_MAX_DEAD, len(self.entries) // 2):
            self.entries = [entry for entry in self.entries if entry.request.is_queued]
            self.num_dead = 0

    def requests(self) -> Iterator[Request]:
        """Its waiting requests, the least urgent first."""
        seen: set[int] = set()
        for entry in reversed(self.entries):
            if entry.request.is_queued and id(entry.request) not in seen:
                seen.add(id(entry.request))
                yield entry.request

    def tokens_before(self, entry: Entry) -> float:
        """About how many tokens are more urgent than an entry that is not here; they are taken to be average ones."""
        if not self.entries:
            return 0.0
        return self.num_tokens * bisect(self.entries, entry) / len(self.entries)

    def _release(self, request: Request, num_sequences: int, num_tokens: int) -> None:
        request.num_queued_sequences -= num_sequences
        request.num_queued_tokens -= num_tokens
        self.num_sequences -= num_sequences
        self.num_tokens -= num_tokens
        if not request.num_queued_sequences:
            request.is_queued = False
            self.num_requests -= 1
            self.num_bytes -= request.num_bytes
