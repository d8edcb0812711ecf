"""Who runs together: like lengths, as long as that costs nobody anything.

Whoever joins adds no more to the run than a run of its own would cost, and makes neither itself nor anybody in the
batch late who would have been in time.
"""

import math
from collections.abc import Sequence

from service.cost_model import CostModel
from service.lane import Entry
from service.memory_budget import MemoryBudget
from service.punctuality import deadline_of


def compose(
    groups: Sequence[Sequence[Entry]], cost: CostModel, memory: MemoryBudget, budget: int, now: float
) -> tuple[list[Entry], float]:
    """A batch of up to `budget` tokens and its predicted seconds.

    It starts with the first entry, whatever its length; then come those of the same turn, closest in length first, and
    those of the next.
    """
    head = groups[0][0]
    length = longest = num_tokens = head.sequence.num_tokens
    seconds = cost.seconds(1, length, length)
    # The first deadline that can be met; nobody joins who would spoil that.
    limit = deadline_of(head) if now + seconds <= deadline_of(head) else math.inf
    batch = [head]
    for group in groups:
        for entry in sorted(group, key=lambda entry: abs(entry.sequence.num_tokens - length)):
            added = entry.sequence.num_tokens
            total, reach = num_tokens + added, max(longest, added)
            if entry is head or total > budget or not memory.allows(total, reach, now):
                continue
            after = cost.seconds(len(batch) + 1, total, reach)
            latest = min(limit, deadline_of(entry))
            if after - seconds > cost.seconds(1, added, added) or now + after > latest:
                continue
            batch.append(entry)
            num_tokens, longest, seconds, limit = total, reach, after, latest
        if num_tokens >= budget:
            break
    return batch, seconds
