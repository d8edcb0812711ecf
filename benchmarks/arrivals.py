"""When requests come, whoever answers and however long that takes: an open loop.

A caller who waits for an answer before it sends the next request slows down with the server, and overload never shows.
So times are drawn beforehand, from a seed: the same in every run, for every contender.

A trace is kept as JSON lines, one request each, in order:
`{"at": 0.25, "lengths": [12, 40], "timeout_seconds": 1.0, "priority": 2, "caller": "a"}`; all but the first two may be
left out.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.request import Priority

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: when it comes, how long its sequences are, and what its caller says of it."""

    at: float
    lengths: tuple[int, ...]
    timeout_seconds: float | None = None
    priority: Priority = Priority.NORMAL
    caller: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class TraceError(Exception):
    """A file that is no trace; the text says which line and why."""


def poisson_times(rng: np.random.Generator, rate: float, seconds: float) -> Times:
    """Arrivals at `rate` a second until `seconds`: independent callers, each of whom comes when it likes."""
    # Gaps of a mean of 1, scaled: with one seed, another rate is the same trace played faster.
    count = int(rate * seconds + 10 * (rate * seconds) ** 0.5 + 10)
    times = np.cumsum(rng.exponential(size=count)) / rate
    return times[times < seconds]


def bursty_times(rng: np.random.Generator, rate: float, seconds: float, burst: float) -> Times:
    """Arrivals at `rate` in the mean, in bursts of `burst` requests in the mean that come at once."""
    starts = poisson_times(rng, rate / burst, seconds)
    return np.repeat(starts, rng.geometric(1 / burst, len(starts)))


def faster(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """The same requests in less time."""
    return [replace(arrival, at=arrival.at / factor) for arrival in arrivals]


def write_trace(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace as JSON lines."""
    with path.open("w") as file:
        for arrival in arrivals:
            fields = {name: getattr(arrival, name) for name in Arrival.__slots__}
            file.write(json.dumps(fields) + "\n")


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace. Raises `TraceError`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    arrivals = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    _check_order(path, arrivals)
    return arrivals


def _parse(path: Path, number: int, line: str) -> Arrival:
    try:
        fields = json.loads(line)
        lengths = tuple(int(length) for length in fields.pop("lengths"))
        priority = Priority(fields.pop("priority", Priority.NORMAL))
        arrival = Arrival(float(fields.pop("at")), lengths, priority=priority, **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(f"{path}, line {number}: not a request of a trace: {error}") from None
    if not lengths or min(lengths) < 1:
        raise TraceError(f"{path}, line {number}: lengths are {list(lengths)}; a request has sequences of 1 and more")
    return arrival


def _check_order(path: Path, arrivals: Sequence[Arrival]) -> None:
    if not arrivals:
        raise TraceError(f"{path} holds no requests")
    if any(one.at > other.at for one, other in pairwise(arrivals)):
        raise TraceError(f"{path}: requests are not in the order in which they come")
