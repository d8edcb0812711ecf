"""The choice of runners and threads, on machines that are formulas."""

import logging
import math
import weakref
from collections.abc import Callable

import pytest

from service.layouts import Choice, Cost, Layout, candidates, choose
from service.shapes import Shape

MIB = 2**20
NARROW, WIDE = Layout(2, 1), Layout(1, 2)


class Engine:
    """An opened candidate; the machine looks at its layout alone."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout


class Machine:
    """A token takes 0.1 ms of CPU.

    `beside`: so many times as long for each run beside a run. `split`: what part of a run its threads share; the rest
    is one thread's, and the others wait. `disturbed` is by how much the clock says more, by engine and count of runs.
    """

    def __init__(self, *, beside: float = 1.0, split: float = 0.8, token_seconds: float = 1e-4) -> None:
        self._beside = beside
        self._split = split
        self._token_seconds = token_seconds
        self.disturbed: Callable[[Layout, int], float] = lambda layout, count: 1.0
        self.session_bytes = 100 * MIB
        self.free_bytes = math.inf
        self.now = 1000.0
        self.opened: list[Layout] = []
        self.ran: list[tuple[Layout, Shape, int]] = []
        self._open: list[weakref.ref[Engine]] = []

    def open(self, layout: Layout) -> Engine:
        engine = Engine(layout)
        self.opened.append(layout)
        self._open.append(weakref.ref(engine))
        self.free_bytes -= self.session_bytes
        return engine

    def run(self, engine: Engine, shape: Shape, num_runners: int) -> Cost:
        self.ran.append((engine.layout, shape, num_runners))
        work = shape.num_tokens * self._token_seconds * self._beside ** (num_runners - 1)
        seconds = work * (1 - self._split + self._split / engine.layout.num_threads)
        seconds *= self.disturbed(engine.layout, len(self.ran))
        self.now += seconds
        return Cost(seconds, work)

    def clock(self) -> float:
        return self.now

    def resident_bytes(self) -> float:
        return len(self.opened) * self.session_bytes

    def available_bytes(self) -> float:
        return self.free_bytes

    @property
    def still_open(self) -> list[Layout]:
        return [engine.layout for ref in self._open if (engine := ref()) is not None]


def chosen(
    machine: Machine, num_cpus: int = 2, num_runners: int = 0, *, seconds: float = math.inf, longest: int = 512
) -> Choice[Engine]:
    return choose(machine, *candidates(num_cpus, num_runners), machine.now + seconds, longest)


def layouts(choice: Choice[Engine]) -> tuple[Layout, Layout]:
    return choice.busy.layout, choice.alone.layout


@pytest.mark.parametrize(
    ("num_cpus", "num_runners", "for_busy", "for_lone"),
    [
        (1, 0, [(1, 1)], []),
        (2, 0, [(2, 1), (1, 2)], []),
        (4, 0, [(4, 1), (1, 4)], []),
        (8, 0, [(8, 1), (2, 4), (1, 8)], []),
        (10, 0, [(10, 1), (2, 4), (1, 10)], []),
        (2, 2, [(2, 1)], [(1, 2)]),
        (8, 2, [(2, 4)], [(1, 8)]),
        (8, 1, [(1, 8)], []),
        (2, 3, [(3, 1)], [(1, 2)]),
        (1, 2, [(2, 1)], []),
    ],
)
def test_the_candidates_of_so_many_cpus(
    num_cpus: int, num_runners: int, for_busy: list[Layout], for_lone: list[Layout]
) -> None:
    assert candidates(num_cpus, num_runners) == (for_busy, for_lone)


def test_runs_side_by_side_are_for_a_busy_machine_and_a_wide_one_is_for_lone_runs() -> None:
    machine = Machine()
    choice = chosen(machine)
    assert layouts(choice) == (NARROW, WIDE)
    assert machine.still_open == [NARROW, WIDE]


def test_where_runs_slow_each_other_a_wide_one_is_for_both_and_the_rest_is_closed() -> None:
    machine = Machine(beside=2.0)
    choice = chosen(machine)
    assert layouts(choice) == (WIDE, WIDE)
    assert choice.busy is choice.alone
    assert machine.still_open == [WIDE]


def test_where_threads_do_not_help_a_lone_run_no_second_session_is_kept() -> None:
    machine = Machine(split=0.0)
    choice = chosen(machine)
    assert layouts(choice) == (NARROW, NARROW)
    assert machine.still_open == [NARROW]


def test_between_one_thread_and_all_there_is_a_third_way() -> None:
    """Of 16 runs at once each takes 1.1 ** 15 = 4.2 times as long; of 4, 1.33 times on threads that share 95%."""
    choice = chosen(Machine(beside=1.1, split=0.95), num_cpus=16)
    assert layouts(choice) == (Layout(4, 4), Layout(1, 16))


@pytest.mark.parametrize(("beside", "busy"), [(1.04, NARROW), (1.06, WIDE)])
def test_a_wide_run_has_to_be_better_by_more_than_5_percent(beside: float, busy: Layout) -> None:
    assert layouts(chosen(Machine(beside=beside, split=1.0)))[0] == busy


@pytest.mark.parametrize(("split", "alone"), [(0.09, NARROW), (0.11, WIDE)])
def test_a_second_session_has_to_make_lone_runs_5_percent_faster(split: float, alone: Layout) -> None:
    assert layouts(chosen(Machine(split=split)))[1] == alone


@pytest.mark.parametrize("beside", [1.0, 2.0])
def test_a_clock_that_neighbours_disturb_is_not_believed_and_both_sessions_are_kept(
    beside: float, caplog: pytest.LogCaptureFixture
) -> None:
    """By the clock a wide run is better for everything, since it was only the other's turns that they disturbed."""
    machine = Machine(beside=beside)
    machine.disturbed = lambda layout, count: 3.0 if layout == NARROW else 1.0
    with caplog.at_level(logging.WARNING):
        assert layouts(chosen(machine)) == (NARROW, WIDE)
    assert caplog.messages == ["the CPUs are not free, so layouts cannot be compared; taking 2 x 1 (runners x threads)"]


@pytest.mark.parametrize(("disturbed", "busy"), [(1.24, WIDE), (1.26, NARROW)])
def test_a_clock_is_believed_while_four_fifths_of_the_cpus_are_ours(disturbed: float, busy: Layout) -> None:
    machine = Machine(beside=2.0)
    machine.disturbed = lambda layout, count: disturbed
    assert layouts(chosen(machine))[0] == busy


def test_where_no_run_is_one_threaded_there_is_no_telling_and_the_clock_is_believed() -> None:
    machine = Machine()
    assert layouts(chosen(machine, num_cpus=8, num_runners=2)) == (Layout(2, 4), Layout(1, 8))


def test_a_disturbance_of_one_round_is_not_seen() -> None:
    machine = Machine()
    machine.disturbed = lambda layout, count: 5.0 if layout == WIDE and count <= 16 else 1.0
    assert layouts(chosen(machine)) == (NARROW, WIDE)


def test_on_a_quiet_machine_three_rounds_are_enough_and_one_that_still_gets_faster_has_more() -> None:
    def num_runs(faster_until: int) -> int:
        """Each of the runs so far has taken 1% less than the one before."""
        machine = Machine()
        machine.disturbed = lambda layout, count: 0.99 ** min(count, faster_until)
        chosen(machine)
        return len(machine.ran) - 2  # the first of each

    a_round = num_runs(0) // 3
    assert num_runs(10**6) == 6 * a_round
    assert num_runs(3 * a_round) == 5 * a_round


def test_what_was_measured_is_told() -> None:
    narrow, wide = chosen(Machine()).measured
    assert (narrow.layout, wide.layout) == (NARROW, WIDE)
    # A token takes 0.1 ms: 2 at once; on two threads 0.2 + 0.8 / 2 = 0.6 of it. Lone runs have 16 and 64 tokens.
    assert narrow.tokens_per_second == pytest.approx(2 / 1e-4)
    assert wide.tokens_per_second == pytest.approx(1 / 0.6e-4)
    assert narrow.lone_seconds == pytest.approx(80 * 1e-4)
    assert wide.lone_seconds == pytest.approx(80 * 0.6e-4)


def test_without_memory_for_two_only_runs_side_by_side_are_kept_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Though a wide run would have been better for both."""
    machine = Machine(beside=2.0)
    machine.free_bytes = 299 * MIB
    with caplog.at_level(logging.WARNING):
        choice = chosen(machine)
    assert layouts(choice) == (NARROW, NARROW)
    assert (machine.opened, choice.measured) == ([NARROW], [])
    assert caplog.messages == [
        "no memory to try 1 x 2 (runners x threads): its session needs about 200 MiB, 199 MiB are free"
    ]


def test_with_as_much_memory_free_as_a_session_may_grow_to_the_second_is_tried() -> None:
    machine = Machine()
    machine.free_bytes = 300 * MIB
    assert layouts(chosen(machine)) == (NARROW, WIDE)


def test_memory_for_two_of_three_is_used() -> None:
    machine = Machine(beside=2.0)
    machine.free_bytes = 399 * MIB
    assert layouts(chosen(machine, num_cpus=8)) == (Layout(2, 4), Layout(2, 4))
    assert machine.opened == [Layout(8, 1), Layout(2, 4)]


def test_one_candidate_is_taken_unmeasured() -> None:
    choice = chosen(Machine(), num_cpus=1)
    assert (layouts(choice), choice.measured) == ((Layout(1, 1), Layout(1, 1)), [])


def test_what_the_operator_says_is_for_a_busy_machine_even_if_it_is_slower() -> None:
    choice = chosen(Machine(beside=2.0), num_runners=2)
    assert layouts(choice) == (NARROW, WIDE)


def test_every_candidate_is_given_the_same_work_for_a_busy_machine() -> None:
    machine = Machine()
    chosen(machine, num_cpus=8)
    work = dict.fromkeys(machine.opened, 0)
    for layout, shape, num_runners in machine.ran[3:]:  # after the first run of each
        if shape not in (Shape(1, 16), Shape(1, 64)):
            assert num_runners == layout.num_runners
            work[layout] += num_runners * shape.num_tokens
    assert len(set(work.values())) == 1


@pytest.mark.parametrize("longest", [1, 8, 40])
def test_no_sequence_is_longer_than_the_model_takes(longest: int) -> None:
    machine = Machine()
    chosen(machine, longest=longest)
    assert max(shape.length for _, shape, _ in machine.ran) == longest


@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.0])
def test_the_time_is_passed_by_one_run_at_most(seconds: float) -> None:
    machine = Machine(token_seconds=1e-3)
    chosen(machine, seconds=seconds)
    longest_run = max(shape.num_tokens for _, shape, _ in machine.ran) * 1e-3
    assert machine.now <= 1000.0 + seconds + longest_run


@pytest.mark.parametrize(("beside", "busy"), [(1.0, NARROW), (2.0, WIDE)])
def test_a_model_too_slow_for_the_time_is_chosen_for_by_its_shortest_runs(beside: float, busy: Layout) -> None:
    machine = Machine(beside=beside, token_seconds=1.0)
    assert layouts(chosen(machine, seconds=0.0)) == (busy, WIDE)
    assert max(shape.num_tokens for _, shape, _ in machine.ran) == 64


def test_what_only_some_candidates_had_time_for_does_not_count() -> None:
    """The time ends between the two at a probe that would make the first look bad."""
    machine = Machine(token_seconds=1e-3)
    machine.disturbed = lambda layout, count: 100.0 if count == 7 else 1.0
    choice = chosen(machine, seconds=1.0)
    assert [layout for layout, *_ in machine.ran[6:]] == [NARROW]
    assert layouts(choice) == (NARROW, WIDE)
    assert choice.measured[0].lone_seconds == pytest.approx(16e-3)
