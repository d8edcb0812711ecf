"""The cost model and its fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.cost_model import CostModel, Sample, fit

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
