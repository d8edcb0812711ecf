"""Calibrations on a machine whose clock moves only when something runs."""

import numpy as np
import pytest

from service.calibration import Calibration, calibrate, plateau
from service.cost_model import CostModel, Sample
from service.shapes import Shape

TRUE_COST = CostModel(per_run=2e-3, per_token=1e-4, per_pair=3e-8)


def seconds(cost: CostModel, shape: Shape) -> float:
    return cost.per_run + cost.per_token * shape.num_tokens + cost.per_pair * shape.num_tokens * shape.length


def coefficients(cost: CostModel) -> tuple[float, float, float]:
    return cost.per_run, cost.per_token, cost.per_pair


class Machine:
    """A run takes the time that a formula says, and nothing else moves the clock."""

    def __init__(self, cost: CostModel, peak_tokens: int = 10**9) -> None:
        self._cost = cost
        self._peak_tokens = peak_tokens
        self.now = 1000.0
        self.shapes: list[Shape] = []

    def clock(self) -> float:
        return self.now

    def time_run(self, shape: Shape) -> float:
        """Past the peak, each further token takes four times as long."""
        self.shapes.append(shape)
        excess = max(0, shape.num_tokens - self._peak_tokens)
        taken = seconds(self._cost, shape) + 3 * self._cost.per_token * excess
        self.now += taken
        return taken


def calibrated(machine: Machine, max_sequence_tokens: int = 512, limit_seconds: float = 1e9) -> Calibration:
    return calibrate(machine.time_run, machine.clock, max_sequence_tokens, machine.now + limit_seconds)


def of_rate(num_tokens: int, tokens_per_second: float) -> Sample:
    return Sample(num_tokens // 16, num_tokens, 16, num_tokens / tokens_per_second)


def test_the_plateau_is_the_fewest_tokens_within_3_percent_of_the_best_rate() -> None:
    rates = {16: 500.0, 32: 900.0, 64: 969.0, 128: 971.0, 256: 1000.0, 512: 980.0}
    assert plateau([of_rate(tokens, rate) for tokens, rate in rates.items()]).num_tokens == 128


def test_a_calibration_finds_the_machines_cost() -> None:
    found = calibrated(Machine(TRUE_COST))
    assert coefficients(found.cost) == pytest.approx(coefficients(TRUE_COST), rel=1e-6)
    assert found.worst_error < 1e-6


def test_a_calibration_says_how_far_off_the_model_is() -> None:
    """The machine has a bend that the formula has not, so some sample must be off, and the worst one is told."""
    machine = Machine(CostModel(per_run=0.0, per_token=1e-4, per_pair=0.0), peak_tokens=128)
    found = calibrated(machine, max_sequence_tokens=16)
    worst = 0.0
    for shape in machine.shapes:
        true = 1e-4 * shape.num_tokens + 3e-4 * max(0, shape.num_tokens - 128)
        worst = max(worst, abs(found.cost.seconds(shape.num_sequences, shape.num_tokens, 16) / true - 1))
    assert found.worst_error == pytest.approx(worst)
    assert worst > 0.05


def test_a_calibration_takes_the_fastest_run_of_each_shape() -> None:
    machine = Machine(TRUE_COST)

    def disturbed(shape: Shape) -> float:
        return machine.time_run(shape) + (0.5, 0.0, 0.2)[len(machine.shapes) % 3]

    found = calibrate(disturbed, machine.clock, 512, 1e9)
    assert coefficients(found.cost) == pytest.approx(coefficients(TRUE_COST), rel=1e-6)


def test_the_budget_is_the_plateau_of_short_runs_and_the_rate_is_its() -> None:
    # Rates of 16, 32, 64, 128, 256 tokens: 5000, 6667, 8000, 8889, 5714 a second.
    machine = Machine(CostModel(per_run=16e-4, per_token=1e-4, per_pair=0.0), peak_tokens=128)
    found = calibrated(machine)
    assert found.max_batch_tokens == 128
    assert found.tokens_per_second == pytest.approx(8888.9, rel=1e-4)


def test_the_grid_is_kept_with_the_fit() -> None:
    machine = Machine(TRUE_COST)
    found = calibrated(machine)
    assert {Shape(s.num_sequences, s.longest) for s in found.samples} == set(machine.shapes)
    for sample in found.samples:
        assert sample.seconds == pytest.approx(seconds(TRUE_COST, Shape(sample.num_sequences, sample.longest)))


def largest_run(machine: Machine) -> int:
    return max(shape.num_tokens for shape in machine.shapes if shape.length == 16)


def test_larger_runs_are_tried_only_while_the_rate_rises() -> None:
    peaked = Machine(CostModel(per_run=16e-4, per_token=1e-4, per_pair=0.0), peak_tokens=128)
    late = Machine(CostModel(per_run=64e-4, per_token=1e-4, per_pair=0.0), peak_tokens=2048)
    endless = Machine(CostModel(per_run=1.0, per_token=0.0, per_pair=0.0))
    for machine in (peaked, late, endless):
        calibrated(machine)
    assert [largest_run(machine) for machine in (peaked, late, endless)] == [512, 4096, 16384]


def test_a_rate_that_rises_by_less_than_noise_is_at_its_plateau() -> None:
    machine = Machine(CostModel(per_run=2e-4, per_token=1e-4, per_pair=0.0))  # 512 tokens: 0.4% over 256
    calibrated(machine)
    assert largest_run(machine) == 512


def test_a_disturbance_that_lasts_for_a_round_changes_nothing() -> None:
    machine = Machine(TRUE_COST)

    def disturbed(shape: Shape) -> float:
        return machine.time_run(shape) * (4 if len(machine.shapes) <= 10 else 1)

    found = calibrate(disturbed, machine.clock, 512, 1e9)
    assert coefficients(found.cost) == pytest.approx(coefficients(TRUE_COST), rel=1e-6)


def test_on_a_quiet_machine_three_rounds_are_enough_and_one_that_still_gets_faster_has_a_fourth() -> None:
    def counts(faster_until: int) -> set[int]:
        """Of each shape; each of the runs so far has taken 5% less than the one before."""
        machine = Machine(CostModel(per_run=0.0, per_token=1e-4, per_pair=0.0))
        calibrate(
            lambda shape: machine.time_run(shape) * 0.95 ** min(machine.shapes.count(shape), faster_until),
            *(machine.clock, 512, 1e9),
        )
        return {machine.shapes.count(shape) for shape in machine.shapes}

    assert [counts(faster_until) for faster_until in (1, 2, 3, 9)] == [{3}, {3}, {4}, {4}]


@pytest.mark.parametrize("longest", [1, 2, 8, 15, 16, 17, 63, 64, 100, 512, 8192])
def test_no_sequence_is_longer_than_the_model_takes(longest: int) -> None:
    machine = Machine(TRUE_COST)
    found = calibrated(machine, max_sequence_tokens=longest)
    assert max(shape.length for shape in machine.shapes) <= longest
    assert found.max_batch_tokens >= 1
    assert found.cost.seconds(1, 1, 1) > 0


@pytest.mark.parametrize("limit_seconds", [0.5, 5.0, 20.0])
def test_no_run_that_would_end_too_late_is_begun(limit_seconds: float) -> None:
    machine = Machine(CostModel(per_run=0.0, per_token=0.01, per_pair=0.0))
    calibrated(machine, limit_seconds=limit_seconds)
    assert 1000.0 < machine.now <= 1000.0 + limit_seconds


def test_nor_where_runs_last_longer_than_they_take() -> None:
    """As in CPU time, beside neighbours."""
    machine = Machine(CostModel(per_run=0.0, per_token=0.01, per_pair=0.0))
    found = calibrate(lambda shape: machine.time_run(shape) / 5, machine.clock, 512, machine.now + 5.0)
    assert 1000.0 < machine.now <= 1005.0
    assert found.cost.per_token == pytest.approx(0.002)


def test_a_grid_cut_short_by_neighbours_leaves_the_usual_budget() -> None:
    """Each run lasts 100 times what it takes; those that there is time for have not reached the plateau."""
    machine = Machine(CostModel(per_run=1e-3, per_token=1e-4, per_pair=0.0))
    found = calibrate(lambda shape: machine.time_run(shape) / 100, machine.clock, 512, machine.now + 0.02)
    assert max(shape.num_tokens for shape in machine.shapes) < 128
    assert found.max_batch_tokens == 128


def test_a_grid_cut_short_by_a_slow_model_leaves_the_budget_that_was_measured() -> None:
    machine = Machine(CostModel(per_run=0.0, per_token=0.01, per_pair=0.0))
    found = calibrated(machine, limit_seconds=1.0)
    assert max(shape.num_tokens for shape in machine.shapes) < 128
    assert found.max_batch_tokens == 16


def test_on_a_slow_machine_long_sequences_are_measured_all_the_same() -> None:
    slow = CostModel(per_run=0.01, per_token=3e-3, per_pair=1e-6)
    machine = Machine(slow)
    found = calibrated(machine, limit_seconds=5.0)
    assert max(shape.length for shape in machine.shapes) >= 64
    assert coefficients(found.cost) == pytest.approx(coefficients(slow), rel=1e-6)


def test_a_first_run_that_outlasts_the_limit_is_the_only_one_and_is_enough() -> None:
    machine = Machine(CostModel(per_run=0.0, per_token=1.0, per_pair=0.0))
    found = calibrated(machine, limit_seconds=5.0)
    assert machine.shapes == [Shape(1, 16)]
    assert found.max_batch_tokens == 16
    assert found.cost.seconds(1, 512, 512) == pytest.approx(512.0)


def test_a_clock_that_sees_no_time_pass_does_no_harm() -> None:
    found = calibrate(lambda shape: 0.0, lambda: 0.0, 512, 4.0)
    assert np.isfinite([*coefficients(found.cost), found.worst_error]).all()
    assert found.cost.seconds(1, 1, 1) > 0
    assert found.max_batch_tokens >= 1


def test_a_coarse_clock_does_no_harm() -> None:
    """Windows' clock moves in steps of 16 ms: small runs seem to take none or one."""
    machine = Machine(TRUE_COST)

    def coarse(shape: Shape) -> float:
        started = machine.now
        machine.time_run(shape)
        return (machine.now // 0.016 - started // 0.016) * 0.016

    found = calibrate(coarse, machine.clock, 512, 1e9)
    assert np.isfinite([*coefficients(found.cost), found.worst_error]).all()
    assert min(coefficients(found.cost)) >= 0
