"""Virtual time, in numbers that are easy to add: a token takes a second. The scheduler in it is the real one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.arrivals import Arrival
from benchmarks.balancing import BALANCERS
from benchmarks.cases import Case, capacity, default_bounds, draw, lengths_of
from benchmarks.devices import CPU, GPU, Device
from benchmarks.fifo import Fifo
from benchmarks.outcomes import Outcome, Tally, Window
from benchmarks.simulator import MakeQueue, Replica, replay, saturate
from benchmarks.terms import OURS, RIVALS
from service.bounds import Bounds
from service.cost_model import CostModel
from service.request import Priority
from service.scheduler import Scheduler

SECOND_A_TOKEN = CostModel(0.0, 1.0, 0.0)
DEVICE = Device("slow", SECOND_A_TOKEN, SECOND_A_TOKEN, num_runners=1, max_batch_tokens=4)
BOUNDS = Bounds(1000, 1000, 1000, 1000)
WINDOW = Window(0.0, 100.0)


def run(
    arrivals: Sequence[Arrival], device: Device = DEVICE, queue: MakeQueue = Scheduler, bounds: Bounds = BOUNDS
) -> Tally:
    replica = Replica(device, queue, bounds)
    return replay(arrivals, [replica], lambda replicas: replicas[0], WINDOW)


def ends(tally: Tally) -> list[tuple[float, float, bool]]:
    return [(outcome.at, outcome.at + outcome.seconds, outcome.is_ok) for outcome in tally.outcomes]


@pytest.mark.parametrize("queue", [Scheduler, Fifo])
def test_one_runner_serves_one_batch_after_the_other(queue: MakeQueue) -> None:
    found = run([Arrival(0.0, (3,)), Arrival(1.0, (2, 2)), Arrival(1.5, (4,))], queue=queue)
    assert ends(found) == [(0.0, 3.0, True), (1.0, 7.0, True), (1.5, 11.0, True)]


def test_two_runners_run_side_by_side() -> None:
    found = run([Arrival(0.0, (3,)), Arrival(1.0, (4,))], replace(DEVICE, num_runners=2))
    assert ends(found) == [(0.0, 3.0, True), (1.0, 5.0, True)]


def test_a_runner_pauses_between_two_runs() -> None:
    found = run([Arrival(0.0, (3,)), Arrival(1.0, (4,))], replace(DEVICE, pause_seconds=0.5))
    assert ends(found) == [(0.0, 3.0, True), (1.0, 7.5, True)]


def test_a_run_that_has_the_machine_to_itself_has_a_cost_of_its_own() -> None:
    device = replace(DEVICE, num_runners=2, alone=CostModel(0.0, 0.5, 0.0))
    assert ends(run([Arrival(0.0, (4,)), Arrival(1.0, (4,))], device)) == [(0.0, 2.0, True), (1.0, 5.0, True)]


def test_what_cannot_be_in_time_is_refused_at_once_and_by_a_plain_queue_answered_late() -> None:
    arrivals = [Arrival(0.0, (4,)), Arrival(1.0, (2,), timeout_seconds=3.0)]
    assert ends(run(arrivals)) == [(1.0, 1.0, False), (0.0, 4.0, True)]
    plain = run(arrivals, queue=Fifo)
    assert ends(plain) == [(0.0, 4.0, True), (1.0, 4.0, False)]
    assert [outcome.is_late for outcome in plain.outcomes] == [False, True]


def test_who_gives_way_is_refused_then() -> None:
    arrivals = [Arrival(0.0, (4,)), Arrival(1.0, (4,), priority=Priority.LOW), Arrival(2.0, (4,))]
    found = run(arrivals, bounds=BOUNDS._replace(tokens=4))
    assert ends(found) == [(1.0, 2.0, False), (0.0, 4.0, True), (2.0, 8.0, True)]


def test_callers_who_wait_keep_one_runner_busy() -> None:
    tally = saturate([(4,)] * 100, Replica(DEVICE, Scheduler, BOUNDS), 3, Window(8.0, 40.0))
    assert tally.goodput() == 1.0


def mixed_bag(count: int = 400) -> list[Arrival]:
    """Everything that a request can be, at twice what the replicas can do."""
    rng = np.random.default_rng(5)
    times = np.cumsum(rng.exponential(2.5 / 3 / 2, count))
    return [
        Arrival(
            float(at),
            tuple(int(length) for length in rng.integers(1, 5, rng.integers(1, 4))),
            timeout_seconds=None if rng.random() < 0.2 else float(rng.uniform(1.0, 60.0)),
            priority=Priority(int(rng.integers(1, 4))),
            caller=f"caller-{rng.integers(3)}",
        )
        for at in times
    ]


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("queue", [Scheduler, Fifo])
def test_each_request_ends_exactly_once_and_leaves_nothing_behind(queue: MakeQueue, balancer: str) -> None:
    device, arrivals = replace(DEVICE, spread=0.3), mixed_bag()
    replicas = [Replica(device, queue, BOUNDS._replace(tokens=60), seed) for seed in range(3)]
    found = replay(arrivals, replicas, BALANCERS[balancer](np.random.default_rng(0)), WINDOW)
    assert sorted(outcome.at for outcome in found.outcomes) == [arrival.at for arrival in arrivals]
    assert {True, False} == {outcome.is_ok for outcome in found.outcomes}
    for replica in replicas:
        assert (replica.num_tokens, replica.num_idle) == (0, 1)
        assert isinstance(replica.queue, (Scheduler, Fifo))
        assert (replica.queue.used.tokens, replica.queue.used.requests) == (0, 0)


def test_the_same_seeds_give_the_same_to_the_last_bit() -> None:
    def once(seed: int) -> tuple[Outcome, ...]:
        replica = Replica(replace(DEVICE, spread=0.3), Scheduler, BOUNDS, seed)
        return replay(mixed_bag(), [replica], lambda replicas: replicas[0], WINDOW).outcomes

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_balancers_choose_as_they_are_called() -> None:
    replicas = [Replica(DEVICE, Scheduler, BOUNDS) for _ in range(3)]
    for replica, num_tokens in zip(replicas, (5, 2, 9), strict=True):
        replica.num_tokens = num_tokens
    chosen = {
        name: [replicas.index(balance(replicas)) for _ in range(60)]
        for name, balance in ((name, make(np.random.default_rng(0))) for name, make in BALANCERS.items())
    }
    assert chosen["round-robin"] == [0, 1, 2] * 20
    assert set(chosen["at random"]) == {0, 1, 2}
    assert set(chosen["least loaded"]) == {1}
    # Replica 2 is chosen only where both choices fell on it: in one of nine.
    assert chosen["two choices"].count(1) > chosen["two choices"].count(0) > chosen["two choices"].count(2) > 0


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("load", [2.0, 4.0])
def test_overload_costs_no_goodput_and_makes_nobody_late(device: Device, load: float) -> None:
    """What `bench-overload` wants of a real server, without its noise; a second of a GPU is a thousand requests."""
    seconds = 16.0 if device is CPU else 8.0
    requests = lengths_of(None)
    rate = capacity(device, requests)
    trace = draw(rate, seconds, requests, seed=1)
    point = Case(OURS, device, trace, load, rate).run()
    assert point.goodput >= 0.95
    assert point.late == point.given_up == 0.0
    assert point.p99 <= 1.0


def test_a_plain_queue_that_holds_more_than_the_deadline_answers_nobody_in_time() -> None:
    requests = lengths_of(None)
    rate = capacity(CPU, requests)
    careless, careful = (
        Case(queue, CPU, draw(rate, 16.0, requests, seed=1), 2.0, rate, queue=queue).run() for queue in RIVALS
    )
    assert careless.goodput < 0.3
    assert careful.goodput > 0.9


def test_bounds_are_those_of_a_server_without_flags() -> None:
    assert default_bounds() == Bounds(131072, 16384, 4096, 512 * 1024 * 1024)


def test_a_drawn_trace_has_the_rate_that_was_asked_for() -> None:
    requests = lengths_of(None)
    trace = draw(10_000.0, 300.0, requests, seed=0, is_bursty=True)
    assert sum(arrival.num_tokens for arrival in trace) / 300.0 == pytest.approx(10_000.0, rel=0.15)
    assert [arrival.lengths for arrival in trace[:3]] == [tuple(lengths) for lengths in requests[:3]]
