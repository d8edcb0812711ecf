"""The cost model in force, on a machine whose speed is set by the test."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from service.cost_model import CostModel, Sample
from service.cost_tracker import MAX_DRIFT, WINDOW_RUNS, CostTracker

COST = CostModel(per_run=2e-3, per_token=1e-4, per_pair=3e-8)
BUDGET = 128
# (sequences, tokens, longest), as a scheduler makes them: like lengths, up to the budget.
SHAPES = [(1, 8, 8), (4, 60, 16), (8, 128, 17), (2, 120, 64), (1, 256, 256)]


def seconds(cost: CostModel, num_sequences: int, num_tokens: int, longest: int) -> float:
    return cost.per_run + cost.per_token * num_tokens + cost.per_pair * num_sequences * longest**2


def observe(tracker: CostTracker, factors: Sequence[float], shapes: Sequence[tuple[int, int, int]] = SHAPES) -> None:
    """One run for each factor, the shapes in turn; each takes so many times what the machine took at first."""
    for number, factor in enumerate(factors):
        shape = shapes[number % len(shapes)]
        tracker.observe(Sample(*shape, factor * seconds(COST, *shape)))


def of_a_window(seed: int, low: float, high: float) -> list[float]:
    return list(np.random.default_rng(seed).uniform(low, high, WINDOW_RUNS))


def predicted(tracker: CostTracker, shape: tuple[int, int, int]) -> float:
    """As a multiple of what the machine took at first."""
    return tracker.cost.seconds(*shape) / seconds(COST, *shape)


def test_before_a_window_is_full_the_calibration_is_in_force() -> None:
    tracker = CostTracker(COST, BUDGET, 1, worst_error=0.07)
    observe(tracker, [5.0] * (WINDOW_RUNS - 1))
    assert (tracker.cost, tracker.drift, tracker.worst_error, tracker.num_refits) == (COST, 1.0, 0.07, 0)


def test_a_token_takes_its_part_of_a_full_batch_until_runs_are_seen() -> None:
    # 8 sequences of 16: 2 ms + 12.8 ms + 8 * 256 * 3e-8 s = 14.86144 ms, for 128 tokens.
    assert CostTracker(COST, BUDGET, 1).token_seconds == pytest.approx(14.86144e-3 / 128)


def test_a_budget_below_a_short_sequence_does_no_harm() -> None:
    assert CostTracker(COST, 1, 1).token_seconds == pytest.approx(2e-3 + 1e-4 + 3e-8)


@given(st.floats(0.2, 10.0), st.integers(0, 99), st.lists(st.sampled_from(SHAPES), min_size=1, unique=True))
def test_a_machine_of_another_speed_is_followed_within_a_window(
    factor: float, seed: int, seen: list[tuple[int, int, int]]
) -> None:
    """Also for the shapes that were not in the window: what slows one slows all."""
    assume(abs(factor - 1) > 0.25)
    tracker = CostTracker(COST, BUDGET, 1)
    observe(tracker, of_a_window(seed, 0.95 * factor, 1.05 * factor), seen)
    assert tracker.num_refits == 1
    for shape in SHAPES:
        assert predicted(tracker, shape) == pytest.approx(factor, rel=0.15)


@given(st.integers(0, 10**6), st.lists(st.sampled_from(SHAPES), min_size=1, unique=True))
def test_noise_of_15_percent_never_refits(seed: int, seen: list[tuple[int, int, int]]) -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    for window in range(5):
        observe(tracker, of_a_window(seed + window, 0.85, 1.15), seen)
    assert (tracker.cost, tracker.num_refits) == (COST, 0)
    assert tracker.drift != 1.0


def test_a_machine_as_noisy_as_it_gets_is_refitted_once_and_then_mostly_left_alone() -> None:
    """Runs of 1 to 6 times their usual time, as beside neighbours that come and go.

    The middle of 64 such runs is off by 8% as a rule (0.5 * 1.25 / 8), so that once in a while it is by 20%.
    """
    refits = []
    for seed in range(20):
        tracker, random = CostTracker(COST, BUDGET, 1), np.random.default_rng(seed)
        for _ in range(10):
            observe(tracker, list(random.lognormal(0.8, 0.5, WINDOW_RUNS)))
        refits.append(tracker.num_refits)
    assert min(refits) == 1
    assert np.mean(refits) < 2


@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.floats(1e-3, 1e3)), min_size=WINDOW_RUNS, max_size=WINDOW_RUNS),
    st.integers(1, 5),
)
def test_whatever_is_observed_the_model_stays_finite_and_positive(
    runs: list[tuple[tuple[int, int, int], float]], num_windows: int
) -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    for _ in range(num_windows):
        for shape, factor in runs:
            tracker.observe(Sample(*shape, factor * seconds(COST, *shape)))
    cost = tracker.cost
    assert np.isfinite([cost.per_run, cost.per_token, cost.per_pair, tracker.token_seconds, tracker.worst_error]).all()
    assert min(cost.per_run, cost.per_token, cost.per_pair) >= 0
    assert cost.seconds(1, 1, 1) > 0
    assert tracker.token_seconds > 0


@pytest.mark.parametrize("outlier", [1e-3, 100.0])
def test_a_few_runs_that_were_disturbed_change_nothing(outlier: float) -> None:
    """Neither without a re-fit nor in one."""
    steady, slower = CostTracker(COST, BUDGET, 1), CostTracker(COST, BUDGET, 1)
    few = [outlier] * (WINDOW_RUNS // 5)
    observe(steady, few + [1.0] * (WINDOW_RUNS - len(few)))
    observe(slower, few + [2.0] * (WINDOW_RUNS - len(few)))
    assert steady.num_refits == 0
    assert [predicted(slower, shape) for shape in SHAPES] == pytest.approx([2.0] * len(SHAPES))


@pytest.mark.parametrize(("factor", "num_refits"), [(1.19, 0), (1.21, 1), (0.81, 0), (0.79, 1)])
def test_a_drift_of_more_than_20_percent_refits(factor: float, num_refits: int) -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    observe(tracker, [factor] * WINDOW_RUNS)
    assert tracker.drift == pytest.approx(factor)
    assert tracker.num_refits == num_refits
    assert MAX_DRIFT == 0.2


def test_what_was_followed_is_no_drift_any_more() -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    observe(tracker, [3.0] * 2 * WINDOW_RUNS)
    assert tracker.num_refits == 1
    assert tracker.drift == pytest.approx(1.0)


def test_a_machine_that_recovers_is_followed_back() -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    observe(tracker, [4.0] * WINDOW_RUNS + [1.0] * WINDOW_RUNS)
    assert tracker.num_refits == 2
    assert [predicted(tracker, shape) for shape in SHAPES] == pytest.approx([1.0] * len(SHAPES))


def test_where_only_attention_slows_down_only_long_runs_are_predicted_slower() -> None:
    slower = CostModel(COST.per_run, COST.per_token, 20 * COST.per_pair)
    tracker = CostTracker(COST, BUDGET, 1)
    # As many short runs as needed to tell, few enough that the middle run is a long one.
    shapes = [(1, 256, 256), (1, 512, 512), (8, 128, 16), (1, 384, 384)]
    for number in range(WINDOW_RUNS):
        shape = shapes[number % 4]
        tracker.observe(Sample(*shape, seconds(slower, *shape)))
    assert tracker.num_refits == 1
    for shape in shapes:
        assert tracker.cost.seconds(*shape) == pytest.approx(seconds(slower, *shape), rel=0.2)


def test_a_loaded_window_says_what_a_token_takes() -> None:
    """Without a re-fit: 10% are no drift, but they are the rate."""
    tracker = CostTracker(COST, BUDGET, 1)
    observe(tracker, [1.1] * WINDOW_RUNS, [(8, 128, 17)])
    assert tracker.token_seconds == pytest.approx(1.1 * seconds(COST, 8, 128, 17) / 128)
    assert tracker.num_refits == 0


def test_small_runs_do_not_make_a_token_dear() -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    before = tracker.token_seconds
    observe(tracker, [1.1] * WINDOW_RUNS, [(1, 8, 8), (1, 63, 63)])
    assert tracker.token_seconds == before


def test_small_runs_that_take_twice_as_long_make_a_token_twice_as_dear() -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    before = tracker.token_seconds
    observe(tracker, [2.0] * WINDOW_RUNS, [(1, 8, 8)])
    assert tracker.token_seconds == pytest.approx(2.0 * before)


def test_the_error_is_that_of_nine_runs_in_ten() -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    observe(tracker, [1.05, 0.9] * (WINDOW_RUNS // 2 - 2) + [40.0] * 4)
    assert tracker.worst_error == pytest.approx(1 / 0.9 - 1)  # of the prediction, as in a calibration


def test_a_clock_that_sees_no_time_pass_does_no_harm() -> None:
    tracker = CostTracker(COST, BUDGET, 1)
    for _ in range(2 * WINDOW_RUNS):
        tracker.observe(Sample(1, 16, 16, 0.0))
    assert tracker.cost.seconds(1, 16, 16) >= 0
    assert np.isfinite(tracker.drift)


def test_who_wants_to_know_is_told_of_each_refit_when_the_new_model_is_in_force() -> None:
    told: list[tuple[CostModel, float]] = []
    tracker = CostTracker(COST, BUDGET, 1, on_refit=lambda it: told.append((it.cost, it.token_seconds)))
    observe(tracker, [1.0] * WINDOW_RUNS)
    assert told == []
    observe(tracker, [2.0] * WINDOW_RUNS + [1.0] * WINDOW_RUNS)
    assert len(told) == 2
    assert told[-1] == (tracker.cost, tracker.token_seconds)
