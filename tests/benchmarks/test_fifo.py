import numpy as np
import pytest

from benchmarks.fifo import Fifo
from service.bounds import Bounds
from service.cost_model import CostModel
from service.cost_tracker import CostTracker
from service.errors import QueueFullError
from service.request import Request, TokenSequence
from service.scheduler import Scheduler


def make_fifo(max_queued_tokens: int = 100) -> Fifo:
    costs = CostTracker(CostModel(0.0, 0.002, 0.0), max_batch_tokens=10, num_runners=2)
    return Fifo(costs, Bounds(max_queued_tokens, 1, 1, 1))


def make_request(*lengths: int, deadline: float | None = None) -> Request:
    sequences = tuple(TokenSequence(*(np.zeros(length, np.int64),) * 3) for length in lengths)
    return Request(sequences, wants_tokens=False, arrival=0.0, deadline=deadline)


def lengths(fifo: Fifo) -> list[int]:
    return [entry.sequence.num_tokens for entry in fifo.take(0.0).batch]


def test_batches_are_what_comes_next_up_to_the_budget() -> None:
    fifo = make_fifo()
    fifo.put(make_request(3, 6), 0.0)
    fifo.put(make_request(2, 12, 1), 0.0)
    assert [lengths(fifo) for _ in range(5)] == [[3, 6], [2], [12], [1], []]
    assert (fifo.used.sequences, fifo.used.tokens) == (0, 0)


def test_it_sees_no_deadlines_and_nobody_leave() -> None:
    fifo = make_fifo()
    request = make_request(3, deadline=-1.0)
    fifo.put(request, 0.0)
    fifo.end(request)
    assert lengths(fifo) == [3]


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    fifo = make_fifo(max_queued_tokens=10)
    fifo.put(make_request(4, 4), 0.0)
    with pytest.raises(QueueFullError) as caught:
        fifo.put(make_request(3), 0.0)
    assert caught.value.retry_seconds == pytest.approx(0.001)  # 1 token too many, at 2 ms on each of two runners
    assert fifo.used.tokens == 8


def test_only_an_idle_machine_with_nothing_else_to_do_is_a_batch_s_alone() -> None:
    fifo = make_fifo()
    fifo.put(make_request(6, 6, 6), 0.0)
    assert [fifo.take(0.0, num_idle=2).is_alone, fifo.take(0.0, num_idle=1).is_alone] == [False, False]
    assert fifo.take(0.0, num_idle=2).is_alone


def test_it_has_all_that_the_server_asks_of_a_scheduler() -> None:
    """It is put in the scheduler's place at run time, where no type is checked."""
    asked = {name for name in vars(Scheduler) if not name.startswith("_")} | {"costs"}
    assert asked <= set(dir(make_fifo()))


def test_its_one_bound_is_full_in_part() -> None:
    fifo = make_fifo(max_queued_tokens=10)
    fifo.put(make_request(4, 4), 0.0)
    assert fifo.used.tokens / fifo.bounds.tokens == 0.8


def test_what_waits_can_be_cleared() -> None:
    fifo = make_fifo()
    request = make_request(4, 4)
    fifo.put(request, 0.0)
    assert fifo.clear() == [request]
    assert lengths(fifo) == []
