"""The batcher with real threads and an engine whose runs the test opens and closes."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from service.batcher import Batcher
from service.bounds import Bounds
from service.cancellation import Cancellation
from service.cost_model import CostModel
from service.cost_tracker import CostTracker
from service.engine import Outputs
from service.errors import (
    DeadlineError,
    EngineError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    StoppedError,
    UnavailableError,
)
from service.metrics import Metrics
from service.packing import PackedBatch
from service.request import Priority, Request, TokenSequence
from service.scheduler import Scheduler
from service.supervisor import MAX_FAULTS

LABELS = {"model": "m", "version": "1"}
CULPRIT, POISON, GLUTTON, KILLER, ENDLESS = 666, 667, 668, 669, 670


class GatedEngine:
    """Answers each sequence with the sum of its ids; runs only while the gate is open; some ids misbehave."""

    def __init__(self, num_runners: int) -> None:
        self.num_runners = num_runners
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[int]] = []
        self.alone: list[bool] = []
        self.is_broken = False
        self.num_tests = 0

    def test(self) -> None:
        """Something known to be right."""
        self.num_tests += 1
        if self.is_broken:
            raise EngineError("the vectors are not those of the bundle")

    def run(self, batch: PackedBatch, *, wants_tokens: bool, alone: bool, cancellation: Cancellation | None) -> Outputs:
        starts = np.cumsum(batch.lengths) - batch.lengths
        self.batches.append(batch.token_ids[starts].tolist())
        self.alone.append(alone)
        self.entered.release()
        if ENDLESS in batch.token_ids:
            self.run_until(cancellation)
        assert self.gate.wait(30)
        if self.is_broken or CULPRIT in batch.token_ids:
            raise EngineError("the engine failed on this request")
        if GLUTTON in batch.token_ids:
            raise OutOfMemoryError("the device has no memory left")
        if KILLER in batch.token_ids:
            raise ZeroDivisionError
        rows = batch.token_ids[:, None].astype(np.float32)
        rows[batch.token_ids == POISON] = np.nan
        pooled = np.add.reduceat(rows, starts, axis=0)
        return Outputs(pooled, rows if wants_tokens else None)

    def run_until(self, cancellation: Cancellation | None) -> None:
        stopped = threading.Event()
        assert cancellation is not None
        cancellation.attach(stopped.set)
        assert stopped.wait(30)
        raise StoppedError("the run was stopped")


def request(
    *ids: int,
    length: int = 1,
    deadline: float | None = None,
    wants_tokens: bool = False,
    priority: Priority = Priority.NORMAL,
) -> Request:
    sequences = tuple(
        TokenSequence(np.full(length, first), np.arange(length), np.zeros(length, np.int64)) for first in ids
    )
    return Request(sequences, wants_tokens=wants_tokens, arrival=time.monotonic(), deadline=deadline, priority=priority)


HANGS_AND_DIES_SOON = {
    "batcher.WATCH_SECONDS": 0.01,
    "supervisor.HANG_SECONDS": 0.05,
    "supervisor.DEATH_SECONDS": 0.05,
}


def hasten(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> None:
    """Set the batcher's and the supervisor's times, by module and name."""
    for name, value in seconds.items():
        monkeypatch.setattr(f"service.{name}", value)


class Bench:
    """A running batcher and what is needed to look at it."""

    def __init__(self, num_runners: int, budget: int, bound: int) -> None:
        self.registry = CollectorRegistry()
        self.engine = GatedEngine(num_runners)
        # All but free, so that no deadline of a test is hopeless and everything likes company.
        cost = CostModel(per_run=1e-6, per_token=1e-6, per_pair=0.0)
        self.scheduler = Scheduler(CostTracker(cost, budget, num_runners), Bounds(bound, bound, bound, 1000))
        self.deaths = 0
        self.health: list[bool] = []
        metrics = Metrics(self.registry).of_model("m", "1")
        self.batcher = Batcher(
            self.scheduler,
            self.engine,
            metrics,
            test=self.engine.test,
            on_health=lambda: self.health.append(self.batcher.is_healthy),
            on_death=self.count_death,
        )

    def count_death(self) -> None:
        self.deaths += 1

    def value(self, name: str, **labels: str) -> float:
        found = self.registry.get_sample_value(name, LABELS | labels)
        assert found is not None
        return found

    async def block(self) -> "asyncio.Task[None]":
        """Occupy one runner with a request of id 1 until the gate opens."""
        self.engine.gate.clear()
        task = asyncio.create_task(self.batcher.submit(request(1)))
        assert await asyncio.to_thread(self.engine.entered.acquire, timeout=30)
        return task

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_true():
                await asyncio.sleep(0)


@asynccontextmanager
async def running(num_runners: int = 1, budget: int = 100, bound: int = 1000) -> AsyncIterator[Bench]:
    bench = Bench(num_runners, budget, bound)
    bench.batcher.start()
    try:
        yield bench
    finally:
        bench.engine.gate.set()
        await bench.batcher.stop()


def pooled(done: Request) -> list[float]:
    return [float(encoding.pooled[0]) for encoding in done.encodings if encoding is not None]


async def test_each_caller_gets_its_own_rows() -> None:
    async with running(num_runners=2, budget=16) as bench:
        requests = [request(*range(10 * k, 10 * k + k % 7 + 1), length=k % 5 + 1) for k in range(64)]
        await asyncio.gather(*map(bench.batcher.submit, requests))
        for k, done in enumerate(requests):
            assert pooled(done) == [(k % 5 + 1) * i for i in range(10 * k, 10 * k + k % 7 + 1)]


async def test_requests_of_one_turn_of_the_loop_meet_in_one_batch() -> None:
    async with running(num_runners=1) as bench:
        await asyncio.gather(*(bench.batcher.submit(request(k)) for k in range(20)))
        assert len(bench.engine.batches) == 1


async def test_a_request_larger_than_the_budget_is_spread_over_batches() -> None:
    async with running(budget=10) as bench:
        giant = request(*range(25))
        await bench.batcher.submit(giant)
        assert pooled(giant) == list(range(25))
        assert [len(batch) for batch in bench.engine.batches] == [10, 10, 5]


async def test_tokens_come_only_to_those_who_asked() -> None:
    async with running() as bench:
        with_tokens, without = request(5, length=3, wants_tokens=True), request(7)
        blocked = await bench.block()
        tasks = [asyncio.create_task(bench.batcher.submit(r)) for r in (with_tokens, without)]
        await bench.until(lambda: bench.scheduler.used.sequences == 2)
        bench.engine.gate.set()
        await asyncio.gather(blocked, *tasks)
        assert with_tokens.encodings[0] is not None
        assert with_tokens.encodings[0].tokens is not None
        assert with_tokens.encodings[0].tokens.ravel().tolist() == [5.0, 5.0, 5.0]
        assert without.encodings[0] is not None
        assert without.encodings[0].tokens is None


async def test_a_cancelled_caller_leaves_the_queue_at_once_and_never_runs() -> None:
    async with running() as bench:
        blocked = await bench.block()
        gone = asyncio.create_task(bench.batcher.submit(request(2)))
        await bench.until(lambda: bench.scheduler.used.sequences == 1)
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        assert bench.value("mhsa_queue_sequences") == 0
        bench.engine.gate.set()
        await blocked
        await bench.batcher.submit(request(3))
        assert bench.engine.batches == [[1], [3]]


async def test_a_caller_cancelled_while_it_runs_harms_nobody() -> None:
    async with running() as bench:
        blocked = await bench.block()
        stays, leaves = request(2), request(3)
        tasks = [asyncio.create_task(bench.batcher.submit(r)) for r in (stays, leaves)]
        await bench.until(lambda: bench.scheduler.used.sequences == 2)
        blocked.cancel()
        tasks[1].cancel()
        bench.engine.gate.set()
        await tasks[0]
        assert pooled(stays) == [2.0]


async def test_a_deadline_is_answered_while_the_engine_is_busy_and_its_work_never_runs() -> None:
    async with running() as bench:
        blocked = await bench.block()
        with pytest.raises(DeadlineError, match="deadline passed"):
            await bench.batcher.submit(request(2, deadline=time.monotonic() + 0.02))
        assert bench.scheduler.used.sequences == 0
        bench.engine.gate.set()
        await blocked
        assert bench.engine.batches == [[1]]


async def test_who_cannot_be_in_time_any_more_is_told_while_others_run() -> None:
    async with running() as bench:
        blocked = await bench.block()
        late = asyncio.create_task(bench.batcher.submit(request(2, deadline=time.monotonic() + 5.0)))
        other = asyncio.create_task(bench.batcher.submit(request(ENDLESS)))
        await bench.until(lambda: bench.scheduler.used.sequences == 2)
        bench.scheduler.costs.cost = CostModel(per_run=60.0, per_token=0.0, per_pair=0.0)
        bench.engine.gate.set()
        with pytest.raises(DeadlineError, match="could not be met any more"):
            await late
        assert not other.done()
        other.cancel()
        await asyncio.gather(blocked, other, return_exceptions=True)


async def test_only_the_culprit_of_a_failed_batch_fails() -> None:
    async with running() as bench:
        blocked = await bench.block()
        requests = [request(first) for first in (2, 3, CULPRIT, 5, 6)]
        tasks = [asyncio.create_task(bench.batcher.submit(r)) for r in requests]
        await bench.until(lambda: bench.scheduler.used.sequences == 5)
        bench.engine.gate.set()
        outcomes = await asyncio.gather(blocked, *tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [EngineError] + [type(None)] * 2
        assert [pooled(r) for r in requests] == [[2.0], [3.0], [], [5.0], [6.0]]
        assert bench.value("mhsa_engine_failures_total") >= 1
        await bench.batcher.submit(request(9))


async def test_numbers_that_are_not_finite_fail_their_sequence_only() -> None:
    async with running() as bench:
        good, bad = request(2), request(POISON)
        outcomes = await asyncio.gather(*map(bench.batcher.submit, (good, bad)), return_exceptions=True)
        assert outcomes[0] is None
        assert isinstance(outcomes[1], EngineError)
        assert pooled(good) == [2.0]
        assert bench.value("mhsa_engine_failures_total") == 1


async def test_out_of_memory_alone_is_said_to_be_that() -> None:
    async with running() as bench:
        good = request(2)
        outcomes = await asyncio.gather(*map(bench.batcher.submit, (good, request(GLUTTON))), return_exceptions=True)
        assert outcomes[0] is None
        assert isinstance(outcomes[1], OutOfMemoryError)


async def test_one_failed_sequence_takes_the_rest_of_its_request_out_of_the_queue() -> None:
    async with running(budget=1) as bench:
        with pytest.raises(EngineError):
            await bench.batcher.submit(request(CULPRIT, *range(50)))
        assert bench.scheduler.used.sequences == 0
        assert len(bench.engine.batches) < 50


async def test_a_full_queue_refuses_and_those_inside_are_served() -> None:
    async with running(bound=3) as bench:
        blocked = await bench.block()
        inside = request(2, 3, 4)
        task = asyncio.create_task(bench.batcher.submit(inside))
        await bench.until(lambda: bench.scheduler.used.sequences == 3)
        with pytest.raises(QueueFullError):
            await bench.batcher.submit(request(5))
        assert bench.value("mhsa_queue_fullness_ratio", bound="sequences") == 1.0
        bench.engine.gate.set()
        await asyncio.gather(blocked, task)
        assert pooled(inside) == [2.0, 3.0, 4.0]
        assert bench.value("mhsa_model_requests_total", outcome="queue_full") == 1
        assert bench.value("mhsa_model_requests_total", outcome="ok") == 2


async def test_a_run_knows_whether_it_has_the_machine_to_itself() -> None:
    async with running(num_runners=2) as bench:
        blocked = await bench.block()
        second = asyncio.create_task(bench.batcher.submit(request(2)))
        assert await asyncio.to_thread(bench.engine.entered.acquire, timeout=30)
        bench.engine.gate.set()
        await asyncio.gather(blocked, second)
        assert bench.engine.alone == [True, False]


@pytest.mark.filterwarnings("error")
async def test_a_dead_runner_fails_everyone_and_says_so() -> None:
    async with running() as bench:
        blocked = await bench.block()
        tasks = [asyncio.create_task(bench.batcher.submit(request(KILLER))) for _ in range(3)]
        await bench.until(lambda: bench.scheduler.used.sequences == 3)
        bench.engine.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await blocked
        assert all(isinstance(outcome, RequestError) for outcome in outcomes)
        assert not bench.batcher.is_alive
        assert bench.deaths == 1
        with pytest.raises(UnavailableError):
            await bench.batcher.submit(request(1))


async def test_a_run_that_every_caller_has_left_is_stopped() -> None:
    async with running() as bench:
        tasks = [asyncio.create_task(bench.batcher.submit(request(ENDLESS))) for _ in range(2)]
        assert await asyncio.to_thread(bench.engine.entered.acquire, timeout=30)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert bench.value("mhsa_stopped_runs_total") == 0, "one caller still waits for it"
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        assert bench.value("mhsa_stopped_runs_total") == 1
        await bench.batcher.submit(request(3))
        assert bench.value("mhsa_engine_failures_total") == 0


async def test_a_run_whose_callers_deadlines_have_passed_is_stopped() -> None:
    async with running() as bench:
        with pytest.raises(DeadlineError):
            await bench.batcher.submit(request(ENDLESS, deadline=time.monotonic() + 0.05))
        await bench.batcher.submit(request(3))
        assert bench.value("mhsa_stopped_runs_total") == 1


async def test_who_is_displaced_gets_the_refusal_of_a_full_queue() -> None:
    async with running(bound=3) as bench:
        blocked = await bench.block()
        low = asyncio.create_task(bench.batcher.submit(request(2, 3, priority=Priority.LOW)))
        await bench.until(lambda: bench.scheduler.used.sequences == 2)
        high = asyncio.create_task(bench.batcher.submit(request(4, 5, priority=Priority.HIGH)))
        with pytest.raises(QueueFullError, match="given way") as refused:
            await low
        assert refused.value.retry_seconds > 0
        bench.engine.gate.set()
        await asyncio.gather(blocked, high)
        assert bench.engine.batches == [[1], [4, 5]]


async def test_out_of_memory_makes_the_next_runs_smaller() -> None:
    async with running(budget=40) as bench:
        with pytest.raises(OutOfMemoryError):
            await bench.batcher.submit(request(GLUTTON, *range(7), length=5))
        bench.engine.batches.clear()
        await bench.batcher.submit(request(*range(8), length=5))
        assert max(map(len, bench.engine.batches)) == 4


async def test_repeated_faults_are_their_requests_own_if_the_engine_passes_its_test() -> None:
    async with running() as bench:
        for _ in range(2 * MAX_FAULTS):
            with pytest.raises(EngineError):
                await bench.batcher.submit(request(CULPRIT))
        await bench.batcher.submit(request(3))
        assert bench.engine.num_tests == 2
        assert (bench.health, bench.deaths, bench.batcher.is_healthy) == ([], 0, True)


async def test_runs_without_one_good_number_are_faults_as_well() -> None:
    async with running() as bench:
        for _ in range(MAX_FAULTS):
            with pytest.raises(EngineError):
                await bench.batcher.submit(request(POISON))
        await bench.batcher.submit(request(3))
        assert bench.engine.num_tests == 1


async def test_each_request_has_an_error_of_its_own() -> None:
    async with running() as bench:
        blocked = await bench.block()
        tasks = [asyncio.create_task(bench.batcher.submit(request(n))) for n in (2, 3)]
        await bench.until(lambda: bench.scheduler.used.sequences == 2)
        stopping = asyncio.create_task(bench.batcher.stop())
        one, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(one, UnavailableError)
        assert one is not other
        bench.engine.gate.set()
        await asyncio.gather(blocked, stopping)


async def test_an_engine_that_fails_its_test_gets_nothing_until_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.batcher.TEST_SECONDS", 0.01)
    async with running(num_runners=2) as bench:
        bench.engine.is_broken = True
        for _ in range(MAX_FAULTS):
            with pytest.raises(RequestError):
                await bench.batcher.submit(request(2))
        await bench.until(lambda: not bench.batcher.is_healthy)
        assert bench.value("mhsa_engine_healthy") == 0
        with pytest.raises(UnavailableError, match="does not work"):
            await bench.batcher.submit(request(2))
        bench.engine.is_broken = False
        await bench.until(lambda: bench.batcher.is_healthy)
        assert bench.health == [False, True]
        await bench.batcher.submit(request(2))
        assert bench.value("mhsa_engine_healthy") == 1


async def test_an_engine_that_never_passes_again_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(
        monkeypatch,
        {
            "batcher.TEST_SECONDS": 0.01,
            "batcher.WATCH_SECONDS": 0.01,
            "supervisor.DEATH_SECONDS": 0.05,
        },
    )
    async with running() as bench:
        bench.engine.is_broken = True
        for _ in range(MAX_FAULTS):
            with pytest.raises(RequestError):
                await bench.batcher.submit(request(2))
        await bench.until(lambda: bench.deaths > 0)
        assert not bench.batcher.is_alive
        with pytest.raises(UnavailableError):
            await bench.batcher.submit(request(2))
    assert bench.deaths == 1


async def test_a_run_that_does_not_end_is_stopped_and_the_engine_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.batcher.WATCH_SECONDS", 0.01)
    monkeypatch.setattr("service.supervisor.HANG_SECONDS", 0.1)
    async with running() as bench:
        with pytest.raises(StoppedError):
            await bench.batcher.submit(request(ENDLESS))
        await bench.until(lambda: bench.batcher.is_healthy)
        assert bench.engine.num_tests == 1
        await bench.batcher.submit(request(2))


async def test_runs_that_callers_leave_after_suspiciously_long_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.supervisor.OVERDUE_SECONDS", 0.01)
    async with running() as bench:
        for _ in range(MAX_FAULTS):
            with pytest.raises(DeadlineError):
                await bench.batcher.submit(request(ENDLESS, deadline=time.monotonic() + 0.05))
        await bench.batcher.submit(request(2))
        assert bench.engine.num_tests == 1


async def test_a_test_that_does_not_end_is_a_hang_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch, HANGS_AND_DIES_SOON)
    async with running() as bench:
        never = threading.Event()
        monkeypatch.setattr(bench.batcher, "_test_engine", lambda: never.wait(30))
        for _ in range(MAX_FAULTS):
            with pytest.raises(EngineError):
                await bench.batcher.submit(request(CULPRIT))
        with pytest.raises(RequestError):
            await bench.batcher.submit(request(2))
        await bench.until(lambda: bench.deaths > 0)
        never.set()


async def test_a_process_that_stood_still_is_not_taken_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.supervisor.HANG_SECONDS", 0.6)  # a little more than what lies between two watches
    async with running() as bench:
        blocked = await bench.block()
        time.sleep(1.5)  # nothing of this process' loop runs, as when it is frozen
        bench.batcher._watch()
        assert bench.batcher.is_healthy
        bench.engine.gate.set()
        await blocked


async def test_memory_that_is_missing_after_the_run_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as bench:
        with monkeypatch.context() as starved:
            starved.setattr("service.executor.unpack", _raise_memory_error)
            with pytest.raises(OutOfMemoryError):
                await bench.batcher.submit(request(2, wants_tokens=True))
        await bench.batcher.submit(request(3, wants_tokens=True))
        assert bench.batcher.is_alive


def _raise_memory_error(*_: object) -> None:
    raise MemoryError


async def test_a_run_that_only_the_displaced_waited_for_is_stopped() -> None:
    async with running(budget=2, bound=4) as bench:
        low = asyncio.create_task(bench.batcher.submit(request(ENDLESS, 2, priority=Priority.LOW, length=2)))
        assert await asyncio.to_thread(bench.engine.entered.acquire, timeout=30)
        await bench.batcher.submit(request(3, length=3, priority=Priority.HIGH))
        with pytest.raises(QueueFullError):
            await low
        assert bench.value("mhsa_stopped_runs_total") == 1


async def test_a_drain_starts_what_waits_for_company() -> None:
    async with running() as bench:
        bench.scheduler._max_wait_seconds = 1000.0
        waits = asyncio.create_task(bench.batcher.submit(request(2)))
        await bench.until(lambda: bench.scheduler.used.sequences == 1)
        bench.batcher.stop_waiting()
        await waits


async def test_a_run_that_cannot_even_be_stopped_ends_in_death(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch, HANGS_AND_DIES_SOON)
    async with running() as bench:
        blocked = await bench.block()
        with pytest.raises(RequestError, match="died"):
            await blocked
        assert (bench.health, bench.deaths) == ([False], 1)


async def test_stop_fails_what_waits_and_lets_what_runs_end() -> None:
    bench = Bench(num_runners=1, budget=100, bound=1000)
    bench.batcher.start()
    blocked = await bench.block()
    waits = asyncio.create_task(bench.batcher.submit(request(2)))
    await bench.until(lambda: bench.scheduler.used.sequences == 1)
    stopping = asyncio.create_task(bench.batcher.stop())
    with pytest.raises(UnavailableError):
        await waits
    bench.engine.gate.set()
    await asyncio.gather(blocked, stopping)
    with pytest.raises(UnavailableError):
        await bench.batcher.submit(request(3))


async def test_what_ran_is_counted() -> None:
    async with running() as bench:
        await bench.batcher.submit(request(1, 2, length=4))
        assert bench.value("mhsa_sequences_total") == 2
        assert bench.value("mhsa_tokens_total") == 8
        assert bench.value("mhsa_batch_tokens_sum") == 8
        assert bench.value("mhsa_batch_fill_ratio_sum") == 1.0
        assert bench.value("mhsa_queue_wait_seconds_count") == 2
        assert bench.value("mhsa_compute_seconds_count") == 1


async def test_a_request_knows_when_it_started_and_ended() -> None:
    async with running() as bench:
        done = request(1)
        await bench.batcher.submit(done)
        assert done.first_started is not None
        assert done.last_finished is not None
        assert done.arrival <= done.first_started <= done.last_finished <= time.monotonic()
