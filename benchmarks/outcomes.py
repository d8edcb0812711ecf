"""What became of requests that were offered on a schedule, and the figures that are made of it.

Time runs from the moment at which a request was to be sent, not from when it was: a generator that falls behind its
schedule, because the server holds it up, would else leave out the very waits that it caused ("coordinated omission").

A request is one of three. *In time*: answered, within its deadline. *Refused*: an error before its deadline, so that
its caller has time left to go elsewhere. *Late*: anything else; it was accepted, and its caller has waited for nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

EVERYBODY = ""
# A refusal that took longer was none at first: the request was let in, and given up while it waited.
DOOR_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `at` is when it was to be sent, in seconds from the start of the slice; `seconds` runs from then."""

    at: float
    seconds: float
    is_ok: bool
    num_tokens: int
    timeout_seconds: float | None
    group: str = EVERYBODY

    @property
    def is_in_time(self) -> bool:
        return self.is_ok and (self.timeout_seconds is None or self.seconds <= self.timeout_seconds)

    @property
    def is_refused(self) -> bool:
        return not self.is_ok and (self.timeout_seconds is None or self.seconds < self.timeout_seconds)

    @property
    def is_late(self) -> bool:
        return not self.is_in_time and not self.is_refused


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a slice that counts: what comes before is the filling of an empty queue."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def has(self, moment: float) -> bool:
        return self.start <= moment < self.end


@dataclass(frozen=True, slots=True)
class Tally:
    """All outcomes of a slice. Rates are of what was asked or answered within the window; the rest of what was asked.

    Each method takes the group of callers that it is to look at; None is all of them.
    """

    outcomes: tuple[Outcome, ...]
    window: Window

    def goodput(self, group: str | None = None) -> float:
        """Tokens a second that were answered in time."""
        answered = (o for o in self.outcomes if o.is_in_time and self.window.has(o.at + o.seconds))
        return sum(o.num_tokens for o in answered if group in (None, o.group)) / self.window.seconds

    def accepted_seconds(self, group: str | None = None) -> list[float]:
        """How long those waited that were not refused, the late ones too."""
        return [o.seconds for o in self._asked(group) if not o.is_refused]

    def refusal_seconds(self, group: str | None = None) -> list[float]:
        """How long those waited that were refused."""
        return [o.seconds for o in self._asked(group) if o.is_refused]

    def portion(self, is_one: Callable[[Outcome], bool], group: str | None = None) -> float:
        """Which part of the requests is one of those, from 0 to 1; NaN of none."""
        found = [is_one(o) for o in self._asked(group)]
        return sum(found) / len(found) if found else float("nan")

    def share(self, group: str) -> float:
        """A group's part of the goodput; NaN of none."""
        whole = self.goodput()
        return self.goodput(group) / whole if whole else float("nan")

    def _asked(self, group: str | None) -> Iterator[Outcome]:
        return (o for o in self.outcomes if self.window.has(o.at) and group in (None, o.group))


def is_given_up(outcome: Outcome) -> bool:
    """Refused, but not at the door."""
    return outcome.is_refused and outcome.seconds > DOOR_SECONDS


def percentile_or_nan(values: Sequence[float], percent: float) -> float:
    """NaN where there is nothing to count."""
    return float(np.percentile(values, percent)) if values else float("nan")
