"""What `python -m benchmarks.simulate` runs: one trace at one load, through one kind of queue and of balancer.

A load above 1 is the same trace in less time: the same requests in the same order, closer together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.arrivals import Arrival, bursty_times, faster, poisson_times
from benchmarks.balancing import BALANCERS
from benchmarks.devices import Device
from benchmarks.fifo import Fifo
from benchmarks.outcomes import Tally, Window, is_given_up, percentile_or_nan
from benchmarks.simulator import Replica, replay, saturate
from benchmarks.terms import FILL_SECONDS, OURS, RIVALS, TIMEOUT_SECONDS
from benchmarks.traces import by_count, mixed_trace
from service.bounds import Bounds
from service.config import Settings
from service.scheduler import Scheduler

Lengths = Sequence[Sequence[int]]

REQUEST_SEQUENCES = 8
_NUM_REQUESTS = 512
_BURST = 10.0
# Callers who wait hold so many full batches for each runner: enough to choose companions from.
_BATCHES_WAITING = 4
_SATURATED = Window(1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Point:
    """What a case came to. Goodput is over capacity; the waits are of the accepted, in seconds."""

    line: str
    load: float
    goodput: float
    in_time: float
    refused: float
    given_up: float
    late: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Case:
    """`trace` is load 1; `capacity` of all replicas is in tokens a second. `line`: what it is called in a picture."""

    line: str
    device: Device
    trace: Sequence[Arrival]
    load: float
    capacity: float
    num_replicas: int = 1
    queue: str = OURS
    balancer: str = "round-robin"
    seed: int = 0

    def run(self) -> Point:
        """Simulate it."""
        tally = self.replay()
        accepted = tally.accepted_seconds()
        return Point(
            self.line,
            self.load,
            goodput=tally.goodput() / self.capacity,
            in_time=tally.portion(lambda outcome: outcome.is_in_time),
            refused=tally.portion(lambda outcome: outcome.is_refused),
            given_up=tally.portion(is_given_up),
            late=tally.portion(lambda outcome: outcome.is_late),
            p50=percentile_or_nan(accepted, 50),
            p99=percentile_or_nan(accepted, 99),
        )

    def replay(self) -> Tally:
        """Every outcome of it."""
        arrivals = faster(self.trace, self.load)
        end = arrivals[-1].at
        window = Window(min(FILL_SECONDS, end / 2), end)
        bounds = self._bounds()
        make_queue = Scheduler if self.queue == OURS else Fifo
        replicas = [Replica(self.device, make_queue, bounds, self.seed + n) for n in range(self.num_replicas)]
        return replay(arrivals, replicas, BALANCERS[self.balancer](np.random.default_rng(self.seed)), window)

    def _bounds(self) -> Bounds:
        """Ours has the server's own; a plain queue's is chosen for the deadline, as if one knew."""
        bounds = default_bounds()
        if self.queue == OURS:
            return bounds
        return bounds._replace(tokens=round(RIVALS[self.queue] * self.capacity / self.num_replicas))


def default_bounds() -> Bounds:
    """Of a server without flags."""
    settings = Settings(models=Path())
    return Bounds(
        settings.max_queued_tokens,
        settings.max_queued_sequences,
        settings.max_requests_in_flight,
        settings.max_bytes_in_flight,
    )


def lengths_of(recorded: Sequence[Arrival] | None) -> Lengths:
    """Of the requests of a trace; without one, of the mixed trace that the other benchmarks encode."""
    if recorded is not None:
        return [arrival.lengths for arrival in recorded]
    sequences = mixed_trace(_NUM_REQUESTS * REQUEST_SEQUENCES, 0).part(0)
    return [[one.num_tokens for one in group] for group in by_count(sequences, REQUEST_SEQUENCES)]


def capacity(device: Device, requests: Lengths) -> float:
    """Tokens a second of one replica under callers who wait."""
    waiting = _BATCHES_WAITING * device.num_runners * device.max_batch_tokens
    num_callers = max(2, round(waiting / fmean(map(sum, requests))))
    return saturate(cycle(requests), Replica(device, Scheduler, default_bounds()), num_callers, _SATURATED).goodput()


def draw(rate: float, seconds: float, requests: Lengths, *, seed: int, is_bursty: bool = False) -> list[Arrival]:
    """Requests, again from the first after the last, at `rate` tokens a second in the mean."""
    times = partial(bursty_times, burst=_BURST) if is_bursty else poisson_times
    found = times(np.random.default_rng(seed), rate / fmean(map(sum, requests)), seconds)
    return [
        Arrival(float(at), tuple(lengths), TIMEOUT_SECONDS) for at, lengths in zip(found, cycle(requests), strict=False)
    ]
