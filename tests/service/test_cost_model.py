"""The cost model's fit, and a calibration whose clock moves only when something runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.cost_model import Calibration, CostModel, Sample, calibrate, fit, plateau
from service.packing import PackedBatch

TRUE_COST = CostModel(per_run=2e-3, per_token=1e-4, per_pair=3e-8)
SHAPES = [(1, 16), (2, 16), (8, 16), (32, 16), (4, 64), (2, 128), (1, 256), (1, 512)]


def sample(num_sequences: int, length: int, seconds: float) -> Sample:
    return Sample(num_sequences, num_sequences * length, length, seconds)


def samples_of(cost: CostModel, shapes: list[tuple[int, int]]) -> list[Sample]:
    return [sample(count, length, seconds(cost, count, length)) for count, length in shapes]


def seconds(cost: CostModel, num_sequences: int, length: int) -> float:
    return cost.per_run + cost.per_token * num_sequences * length + cost.per_pair * num_sequences * length * length


def coefficients(cost: CostModel) -> tuple[float, float, float]:
    return cost.per_run, cost.per_token, cost.per_pair


class Machine:
    """A clock, and an engine that takes the time that a formula says: nothing else moves the clock."""

    def __init__(self, cost: CostModel, peak_tokens: int = 10**9) -> None:
        self._cost = cost
        self._peak_tokens = peak_tokens
        self.now = 1000.0
        self.batches: list[PackedBatch] = []

    def clock(self) -> float:
        return self.now

    def run(self, batch: PackedBatch) -> None:
        """Past the peak, each further token takes four times as long."""
        self.batches.append(batch)
        excess = max(0, batch.num_tokens - self._peak_tokens)
        self.now += seconds(self._cost, batch.num_sequences, batch.longest) + 3 * self._cost.per_token * excess


def calibrated(machine: Machine, max_sequence_tokens: int = 512, limit_seconds: float = 1e9) -> Calibration:
    return calibrate(machine.run, machine.clock, max_sequence_tokens, limit_seconds)


def test_a_run_is_predicted_from_its_shape() -> None:
    cost = CostModel(per_run=1.0, per_token=0.1, per_pair=0.01)
    assert cost.seconds(num_sequences=2, num_tokens=15, longest=10) == pytest.approx(1.0 + 1.5 + 2.0)


def test_a_share_has_no_part_of_the_fixed_cost() -> None:
    assert CostModel(per_run=1.0, per_token=0.1, per_pair=0.01).share(10) == pytest.approx(1.0 + 1.0)


def test_the_fit_recovers_the_numbers_that_made_the_samples() -> None:
    assert coefficients(fit(samples_of(TRUE_COST, SHAPES))) == pytest.approx(coefficients(TRUE_COST), rel=1e-6)


def test_the_fit_weighs_short_runs_as_much_as_long_ones() -> None:
    """By absolute errors the last would outweigh all others; by relative ones it is 10% of one in nine."""
    spoilt = [*samples_of(TRUE_COST, SHAPES), sample(512, 16, 1.1 * seconds(TRUE_COST, 512, 16))]
    fitted = fit(spoilt)
    assert fitted.seconds(1, 16, 16) == pytest.approx(seconds(TRUE_COST, 1, 16), rel=0.05)


@given(st.lists(st.floats(1e-5, 10.0), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_no_coefficient_is_negative_whatever_was_measured(measured: list[float]) -> None:
    fitted = fit([sample(*shape, value) for shape, value in zip(SHAPES, measured, strict=True)])
    assert min(coefficients(fitted)) >= 0
    assert max(coefficients(fitted)) > 0
    assert np.isfinite(coefficients(fitted)).all()


def test_where_larger_runs_were_faster_only_a_fixed_cost_is_left() -> None:
    fitted = fit([sample(1, 16, 2.0), sample(2, 16, 1.9), sample(4, 16, 1.8), sample(1, 64, 1.7), sample(1, 128, 1.6)])
    assert (fitted.per_token, fitted.per_pair) == (0.0, 0.0)
    assert fitted.per_run == pytest.approx(1.8, rel=0.05)


def test_sequences_of_one_length_tell_nothing_of_the_quadratic_term() -> None:
    """Least squares alone would explain all by S^2, and a sequence 32 times as long would seem 1000 times as slow."""
    linear = CostModel(per_run=1e-3, per_token=1e-4, per_pair=0.0)
    fitted = fit(samples_of(linear, [(1, 16), (2, 16), (4, 16), (8, 16)]))
    assert coefficients(fitted) == pytest.approx(coefficients(linear), rel=1e-6)
    assert fitted.seconds(1, 512, 512) == pytest.approx(seconds(linear, 1, 512), rel=1e-6)


def test_a_fixed_cost_is_believed_before_a_quadratic_one() -> None:
    """Two samples cannot tell three numbers; a sequence of 512 is then predicted in line, not as hopeless."""
    fitted = fit([sample(1, 16, 2.0), sample(1, 64, 5.0)])
    assert coefficients(fitted) == pytest.approx((1.0, 0.0625, 0.0))


def test_one_sample_is_taken_for_a_rate() -> None:
    assert coefficients(fit([sample(1, 16, 0.8)])) == pytest.approx((0.0, 0.05, 0.0))


def test_repeating_one_shape_is_still_one_sample() -> None:
    assert coefficients(fit([sample(1, 16, 0.8)] * 5)) == pytest.approx((0.0, 0.05, 0.0))


def test_the_plateau_is_the_fewest_tokens_within_3_percent_of_the_best_rate() -> None:
    rates = {16: 500.0, 32: 900.0, 64: 969.0, 128: 971.0, 256: 1000.0, 512: 980.0}
    assert plateau([sample(tokens // 16, 16, tokens / rate) for tokens, rate in rates.items()]) == 128


def test_a_calibration_finds_the_machines_cost() -> None:
    found = calibrated(Machine(TRUE_COST))
    assert coefficients(found.cost) == pytest.approx(coefficients(TRUE_COST), rel=1e-6)
    assert found.worst_error < 1e-6


def test_a_calibration_says_how_far_off_the_model_is() -> None:
    """The machine has a bend that the formula has not, so some sample must be off, and the worst one is told."""
    machine = Machine(CostModel(per_run=0.0, per_token=1e-4, per_pair=0.0), peak_tokens=128)
    found = calibrated(machine, max_sequence_tokens=16)
    worst = 0.0
    for batch in machine.batches:
        true = 1e-4 * batch.num_tokens + 3e-4 * max(0, batch.num_tokens - 128)
        worst = max(worst, abs(found.cost.seconds(batch.num_sequences, batch.num_tokens, 16) / true - 1))
    assert found.worst_error == pytest.approx(worst)
    assert worst > 0.05


def test_a_calibration_takes_the_fastest_run_of_each_shape() -> None:
    machine = Machine(TRUE_COST)

    def disturbed(batch: PackedBatch) -> None:
        machine.run(batch)
        machine.now += (0.5, 0.0, 0.2)[len(machine.batches) % 3]

    found = calibrate(disturbed, machine.clock, 512, 1e9)
    assert coefficients(found.cost) == pytest.approx(coefficients(TRUE_COST), rel=1e-6)


def test_the_budget_is_the_plateau_of_short_runs() -> None:
    # Rates of 16, 32, 64, 128, 256 tokens: 5000, 6667, 8000, 8889, 5714 a second.
    machine = Machine(CostModel(per_run=16e-4, per_token=1e-4, per_pair=0.0), peak_tokens=128)
    assert calibrated(machine).max_batch_tokens == 128


def largest_run(machine: Machine) -> int:
    return max(batch.num_tokens for batch in machine.batches if batch.longest == 16)


def test_larger_runs_are_tried_only_while_the_rate_rises() -> None:
    peaked = Machine(CostModel(per_run=16e-4, per_token=1e-4, per_pair=0.0), peak_tokens=128)
    late = Machine(CostModel(per_run=16e-4, per_token=1e-4, per_pair=0.0), peak_tokens=2048)
    endless = Machine(CostModel(per_run=1.0, per_token=0.0, per_pair=0.0))
    for machine in (peaked, late, endless):
        calibrated(machine)
    assert [largest_run(machine) for machine in (peaked, late, endless)] == [512, 4096, 16384]


def test_a_disturbance_that_lasts_for_a_round_changes_nothing() -> None:
    machine = Machine(TRUE_COST)

    def disturbed(batch: PackedBatch) -> None:
        started = machine.now
        machine.run(batch)
        if len(machine.batches) <= 10:
            machine.now += 3 * (machine.now - started)

    found = calibrate(disturbed, machine.clock, 512, 1e9)
    assert coefficients(found.cost) == pytest.approx(coefficients(TRUE_COST), rel=1e-6)


@pytest.mark.parametrize("longest", [1, 2, 8, 15, 16, 17, 63, 64, 100, 512, 8192])
def test_no_sequence_is_longer_than_the_model_takes(longest: int) -> None:
    machine = Machine(TRUE_COST)
    found = calibrated(machine, max_sequence_tokens=longest)
    assert max(batch.longest for batch in machine.batches) <= longest
    assert max(int(batch.position_ids.max()) for batch in machine.batches) < longest
    assert found.max_batch_tokens >= 1
    assert found.cost.seconds(1, 1, 1) > 0


def test_only_ids_that_every_vocabulary_has_are_run() -> None:
    machine = Machine(TRUE_COST)
    calibrated(machine)
    assert not any(batch.token_ids.any() or batch.token_type_ids.any() for batch in machine.batches)


def test_a_model_of_vectors_is_measured_with_vectors() -> None:
    machine = Machine(CostModel(1e-3, 1e-5, 0))

    calibrate(machine.run, machine.clock, 512, 1e9, input_size=7)

    assert {batch.embeddings.shape[1] for batch in machine.batches if batch.embeddings is not None} == {7}
    assert all(batch.embeddings is not None and len(batch.embeddings) == batch.num_tokens for batch in machine.batches)


def test_the_time_limit_is_passed_by_one_run_at_most() -> None:
    machine = Machine(CostModel(per_run=0.0, per_token=0.01, per_pair=0.0))
    calibrated(machine, limit_seconds=5.0)
    longest_run = max(0.01 * batch.num_tokens for batch in machine.batches)
    assert 1000.0 < machine.now <= 1005.0 + longest_run


def test_on_a_slow_machine_long_sequences_are_measured_all_the_same() -> None:
    slow = CostModel(per_run=0.01, per_token=3e-3, per_pair=1e-6)
    machine = Machine(slow)
    found = calibrated(machine, limit_seconds=5.0)
    assert max(batch.longest for batch in machine.batches) >= 64
    assert coefficients(found.cost) == pytest.approx(coefficients(slow), rel=1e-6)


def test_a_first_run_that_outlasts_the_limit_is_the_only_one_and_is_enough() -> None:
    machine = Machine(CostModel(per_run=0.0, per_token=1.0, per_pair=0.0))
    found = calibrated(machine, limit_seconds=5.0)
    assert len(machine.batches) == 1
    assert found.max_batch_tokens == 16
    assert found.cost.seconds(1, 512, 512) == pytest.approx(512.0)


def test_a_clock_that_sees_no_time_pass_does_no_harm() -> None:
    found = calibrate(lambda batch: None, lambda: 0.0, 512)
    assert np.isfinite([*coefficients(found.cost), found.worst_error]).all()
    assert found.cost.seconds(1, 1, 1) > 0
    assert found.max_batch_tokens >= 1


def test_a_coarse_clock_does_no_harm() -> None:
    """Windows' clock moves in steps of 16 ms: small runs seem to take none or one."""
    machine = Machine(TRUE_COST)
    found = calibrate(machine.run, lambda: machine.now // 0.016 * 0.016, 512, 1e9)
    assert np.isfinite([*coefficients(found.cost), found.worst_error]).all()
    assert min(coefficients(found.cost)) >= 0
