"""Replays a trace through the real scheduler, in virtual time: any number of replicas, in seconds of a real one.

Nothing of the decisions is modelled: `service.scheduler.Scheduler` takes them, or the plain queue of `benchmarks.fifo`.
What is modelled is the machine: a run takes what a cost model says, with a spread, and a runner pauses between two
runs. Left out are the wire, the event loop, and that a run is stopped when all of its callers have left.

Everything happens at a moment, in the order of time, and at one moment in the order in which it was foreseen; chance
comes from seeds. So a simulation gives the same, to the last bit, each time.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import count, islice
from typing import Protocol

import numpy as np

from benchmarks.arrivals import Arrival
from benchmarks.devices import Device
from benchmarks.outcomes import Outcome, Tally, Window
from service.bounds import Bounds
from service.cost_model import Sample
from service.cost_tracker import CostTracker
from service.errors import DeadlineError, QueueFullError
from service.request import Encoding, Request, TokenSequence
from service.scheduler import Displaced, Taken

_ENCODING = Encoding(np.zeros(1, np.float32), None)


class Queue(Protocol):
    """What is simulated of a scheduler."""

    costs: CostTracker

    def put(self, request: Request, now: float) -> list[Displaced]: ...
    def take(self, now: float, num_idle: int = 1) -> Taken: ...
    def finish(self, taken: Taken) -> None: ...
    def end(self, request: Request) -> None: ...


class MakeQueue(Protocol):
    """`Scheduler` or `Fifo`."""

    def __call__(self, costs: CostTracker, bounds: Bounds) -> Queue: ...


class Replica:
    """One server. `num_tokens`: of the requests that it has not answered."""

    def __init__(self, device: Device, make_queue: MakeQueue, bounds: Bounds, seed: int = 0) -> None:
        self.device = device
        self.queue = make_queue(CostTracker(device.cost, device.max_batch_tokens, device.num_runners), bounds)
        self.num_idle = device.num_runners
        self.num_tokens = 0
        self._rng = np.random.default_rng(seed)

    def run_seconds(self, taken: Taken) -> float:
        """What a run really takes."""
        cost = self.device.alone if taken.is_alone else self.device.cost
        spread = self.device.spread
        return cost.seconds(*_shape(taken)) * math.exp(self._rng.normal(-(spread**2) / 2, spread))


# Chooses a request's replica.
Balance = Callable[[Sequence[Replica]], Replica]


def replay(arrivals: Iterable[Arrival], replicas: Sequence[Replica], balance: Balance, window: Window) -> Tally:
    """What becomes of every request of a trace, in the order in which they end."""
    simulation = _Simulation(replicas, balance, lambda: None)
    for arrival in arrivals:
        simulation.ask_at(arrival.at, arrival)
    return Tally(tuple(simulation.run()), window)


def saturate(requests: Iterable[Sequence[int]], replica: Replica, num_callers: int, window: Window) -> Tally:
    """Callers who each ask for the next of the requests when they are answered, until the window ends."""
    remaining = iter(requests)

    def ask_next() -> None:
        if simulation.now < window.end:
            for lengths in islice(remaining, 1):
                simulation.ask_at(simulation.now, Arrival(simulation.now, tuple(lengths)))

    simulation = _Simulation([replica], lambda replicas: replicas[0], ask_next)
    for _ in range(num_callers):
        ask_next()
    return Tally(tuple(simulation.run()), window)


class _Asked:
    """A request in a replica."""

    __slots__ = ("arrival", "replica", "request")

    def __init__(self, arrival: Arrival, request: Request, replica: Replica) -> None:
        self.arrival = arrival
        self.request = request
        self.replica = replica


class _Simulation:
    """What is yet to happen. Made for one `run`."""

    def __init__(self, replicas: Sequence[Replica], balance: Balance, on_settled: Callable[[], None]) -> None:
        self.now = 0.0
        self._replicas = replicas
        self._balance = balance
        self._on_settled = on_settled
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._asked: dict[int, _Asked] = {}
        self._outcomes: list[Outcome] = []

    def run(self) -> list[Outcome]:
        while self._events:
            self.now, _, happen = heappop(self._events)
            happen()
        return self._outcomes

    def ask_at(self, moment: float, arrival: Arrival) -> None:
        self._at(moment, lambda: self._ask(arrival))

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (moment, next(self._order), happen))

    def _ask(self, arrival: Arrival) -> None:
        replica = self._balance(self._replicas)
        timeout = arrival.timeout_seconds
        request = Request(
            sequences=tuple(map(_sequence, arrival.lengths)),
            wants_tokens=False,
            arrival=self.now,
            deadline=None if timeout is None else self.now + timeout,
            priority=arrival.priority,
            caller=arrival.caller,
        )
        asked = self._asked[id(request)] = _Asked(arrival, request, replica)
        replica.num_tokens += request.num_tokens
        try:
            displaced = replica.queue.put(request, self.now)
        except (QueueFullError, DeadlineError):
            self._settle(asked, is_ok=False)
            return
        self._give_up(one.request for one in displaced)
        if request.deadline is not None:
            self._at(request.deadline, lambda: self._give_up([request] if not request.is_settled else []))
        self._serve(replica)

    def _give_up(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._settle(self._asked[id(request)], is_ok=False)

    def _settle(self, asked: _Asked, *, is_ok: bool) -> None:
        request, arrival = asked.request, asked.arrival
        del self._asked[id(request)]  # a second end of one request would fail here
        request.is_settled = True
        asked.replica.queue.end(request)
        asked.replica.num_tokens -= request.num_tokens
        seconds = self.now - arrival.at
        self._outcomes.append(
            Outcome(arrival.at, seconds, is_ok, request.num_tokens, arrival.timeout_seconds, arrival.caller)
        )
        self._on_settled()

    def _serve(self, replica: Replica) -> None:
        """Have every idle runner ask for work."""
        while replica.num_idle:
            taken = replica.queue.take(self.now, replica.num_idle)
            self._give_up(request for request in taken.expired if not request.is_settled)
            if not taken.batch:
                return
            self._start(replica, taken)

    def _start(self, replica: Replica, taken: Taken) -> None:
        replica.num_idle -= 1
        started = self.now
        self._at(started + replica.run_seconds(taken), lambda: self._finish(replica, taken, started))

    def _finish(self, replica: Replica, taken: Taken, started: float) -> None:
        if not taken.is_alone or replica.device.num_runners == 1:
            replica.queue.costs.observe(Sample(*_shape(taken), self.now - started))
        replica.queue.finish(taken)
        for entry in taken.batch:
            request = entry.request
            if not request.is_settled:
                request.complete(entry.place, _ENCODING, started, self.now)
                if request.is_settled:
                    self._settle(self._asked[id(request)], is_ok=True)
        self._at(self.now + replica.device.pause_seconds, lambda: self._be_idle(replica))

    def _be_idle(self, replica: Replica) -> None:
        replica.num_idle += 1
        self._serve(replica)


def _shape(taken: Taken) -> tuple[int, int, int]:
    lengths = [entry.sequence.num_tokens for entry in taken.batch]
    return len(lengths), sum(lengths), max(lengths)


@cache
def _sequence(length: int) -> TokenSequence:
    """Of a length; nobody reads what is in it."""
    zeros = np.zeros(length, np.int64)
    return TokenSequence(zeros, zeros, zeros)
