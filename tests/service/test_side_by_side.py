"""Runs at once, with a clock of each thread's own that moves only when it runs something."""

import threading

import pytest

from service.errors import EngineError
from service.packing import PackedBatch
from service.shapes import Shape
from service.side_by_side import Timed, time_shape

# A run that waits for another that never comes fails instead of hanging.
PATIENCE_SECONDS = 30.0
LONG = 1.0


class Clock(threading.local):
    """Each thread's own, as its CPU time is."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("num_runners", [1, 2, 5])
def test_so_many_runs_go_on_at_once(num_runners: int) -> None:
    clock = Clock()
    all_there = threading.Barrier(num_runners)

    def run(batch: PackedBatch) -> None:
        all_there.wait(PATIENCE_SECONDS)
        clock.now += LONG

    assert time_shape(run, Shape(1, 16), num_runners, clock=clock) == Timed(LONG, num_runners)


def test_the_slowest_runner_counts() -> None:
    clock = Clock()
    taken = iter((LONG, 3 * LONG, 2 * LONG))

    def run(batch: PackedBatch) -> None:
        clock.now += next(taken)

    assert time_shape(run, Shape(1, 16), 3, clock=clock).seconds == 3 * LONG


def test_short_runs_are_repeated_and_their_mean_taken() -> None:
    clock = Clock()
    taken = [0.001, 0.002] * 100

    def run(batch: PackedBatch) -> None:
        clock.now += taken.pop()

    timed = time_shape(run, Shape(1, 16), 1, clock=clock)
    assert timed.num_runs == 200 - len(taken) == 3  # 2 + 1 + 2 ms: the first sum of 4 ms and more
    assert timed.seconds == pytest.approx(0.005 / 3)


def test_a_clock_that_does_not_move_ends_it() -> None:
    assert time_shape(lambda batch: None, Shape(1, 16), 2, clock=lambda: 5.0) == Timed(0.0, 2)


def test_what_is_run_has_the_shape_and_the_models_input() -> None:
    clock = Clock()
    seen: list[PackedBatch] = []

    def run(batch: PackedBatch) -> None:
        seen.append(batch)
        clock.now += LONG

    time_shape(run, Shape(3, 4), 1, clock=clock, input_size=2)
    [batch] = seen
    assert batch.lengths.tolist() == [4, 4, 4]
    assert batch.embeddings is not None
    assert batch.embeddings.shape == (12, 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_run_raises_is_raised_when_all_have_ended(failing: int) -> None:
    clock = Clock()
    ended: list[int] = []
    turns = iter((0, 1))

    def run(batch: PackedBatch) -> None:
        number = next(turns)
        clock.now += LONG
        ended.append(number)
        if number == failing:
            raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        time_shape(run, Shape(1, 16), 2, clock=clock)
    assert sorted(ended) == [0, 1]
