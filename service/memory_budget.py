"""How many tokens a run may have where the device once had no memory for more.

Memory goes with tokens and with the longest sequence, so each size class, by powers of two of the longest, has a budget
of its own. It is what was found possible when a run failed for want of memory, half of it or less, and doubles for each
`RECOVERY_SECONDS` without: others on the device may have taken the memory, and give it back.
"""

import math

RECOVERY_SECONDS = 60.0


class MemoryBudget:
    """No limits at first."""

    def __init__(self) -> None:
        self._limits: dict[int, tuple[int, float]] = {}

    def limit(self, max_tokens: int, longest: int, now: float) -> None:
        """Runs whose longest sequence is about so long had no memory for more than `max_tokens`."""
        self._limits[longest.bit_length()] = (max_tokens, now)

    def allows(self, num_tokens: int, longest: int, now: float) -> bool:
        """Whether a run of several sequences may have so many tokens."""
        if not self._limits or (found := self._limits.get(longest.bit_length())) is None:
            return True
        max_tokens, since = found
        return num_tokens <= math.ldexp(max_tokens, min(64, int((now - since) / RECOVERY_SECONDS)))
