"""How many tokens a run may have where the device once had no memory for more.

Memory goes with tokens and with the longest sequence, so each size class, by powers of two of the longest, has a budget
of its own. It is halved when a run fails for want of memory, and doubles for each `RECOVERY_SECONDS` without: others on
the device may have taken the memory, and give it back.
"""

import math

RECOVERY_SECONDS = 60.0


class MemoryBudget:
    """No limits at first."""

    def __init__(self) -> None:
        self._shrunk: dict[int, tuple[int, float]] = {}

    def shrink(self, num_tokens: int, longest: int, now: float) -> None:
        """A run of so many tokens failed for want of memory."""
        self._shrunk[longest.bit_length()] = (max(1, num_tokens // 2), now)

    def allows(self, num_tokens: int, longest: int, now: float) -> bool:
        """Whether a run of several sequences may have so many tokens."""
        if not self._shrunk or (found := self._shrunk.get(longest.bit_length())) is None:
            return True
        budget, since = found
        return num_tokens <= math.ldexp(budget, min(64, int((now - since) / RECOVERY_SECONDS)))
