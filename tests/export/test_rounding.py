import numpy as np
import pytest

from export.rounding import Migration, choose_migration, round_weight
from service.request import Float32Array

PLAIN = Migration(np.ones(64, np.float32), None, 0.0, 0.0)
BEHIND_GELU = Migration(np.ones(64, np.float32), -0.1701, 0.0, 0.0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random_weight(num_inputs: int) -> Float32Array:
    """A weight with rows and single numbers that stand out."""
    weight = np.random.default_rng(1).normal(size=(num_inputs, 12)).astype(np.float32)
    weight[1::7] *= 8
    weight[3, 4] = weight[2, 4] = 90  # neighbours: 127 each would be twice what 16 bits hold
    return weight


@pytest.mark.parametrize("num_inputs", [64, 63, 2, 1])
def test_two_neighbouring_products_fit_in_16_bits(num_inputs: int, rng: np.random.Generator) -> None:
    weight = random_weight(max(num_inputs, 4))[:num_inputs]
    factors = rng.uniform(0.01, 30, num_inputs).astype(np.float32)

    integers = round_weight(weight, Migration(factors, None, 0.5, 0.0)).integers.astype(int)

    padded = np.concatenate([integers, np.zeros((num_inputs % 2, 12), int)])
    assert 255 * (np.abs(padded[0::2]) + np.abs(padded[1::2])).max() <= 2**15 - 1
    assert np.abs(integers).max() > 60  # and the range is used


def test_a_rounded_weight_is_within_half_a_step() -> None:
    weight = random_weight(64)

    rounded = round_weight(weight, PLAIN)

    # Half a step, and what float32 adds to 127 steps.
    assert (np.abs(rounded.values - weight) <= 0.50002 * rounded.scales).all()


def test_a_column_of_zeros_stays_zero() -> None:
    weight = random_weight(64)
    weight[:, 5] = 0

    assert not round_weight(weight, PLAIN).values[:, 5].any()


def test_behind_a_gelu_rows_are_counted_from_its_lowest_value() -> None:
    rows = np.linspace(-0.17, 20, 128, dtype=np.float32).reshape(2, 64)

    assert BEHIND_GELU.prepare(rows).min() == pytest.approx(0.0001, abs=1e-6)
    assert (BEHIND_GELU.zero, BEHIND_GELU.steps) == (0, 255)
    assert (PLAIN.zero, PLAIN.steps) == (128, 127)


def test_what_was_counted_from_the_lowest_value_is_put_back(rng: np.random.Generator) -> None:
    weight, rows = random_weight(64), rng.uniform(-0.17, 5, (8, 64)).astype(np.float32)

    rounded = round_weight(weight, BEHIND_GELU)
    assert rounded.offset is not None
    found = BEHIND_GELU.prepare(rows) @ rounded.values + rounded.offset

    # The rows are not rounded here, so it is the rounded weight's product, but for float32's own rounding.
    np.testing.assert_allclose(found, rows @ rounded.values, atol=2e-3)


def test_migration_takes_the_difficulty_out_of_a_channel_that_stands_out(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(256, 64)).astype(np.float32)
    rows[:, 9] *= 50
    weight = rng.normal(size=(64, 12)).astype(np.float32)
    weight[9] *= 0.02  # as in real models: what is large is not trusted much

    chosen = choose_migration([rows], [(0, weight)], None)

    assert chosen.strength > 0
    assert chosen.factors[9] < 0.2 * np.median(chosen.factors)
    assert chosen.error < 5e-4  # without migration, 127 steps for 50 times the others' range: 2e-2


def test_one_migration_serves_all_activations_and_weights_of_a_group(rng: np.random.Generator) -> None:
    activations = [rng.normal(size=(64, 64)).astype(np.float32) for _ in range(2)]
    activations[1][:, 9] *= 40
    weights = [rng.normal(size=(64, 12)).astype(np.float32) for _ in range(2)]

    chosen = choose_migration(activations, [(0, weights[0]), (1, weights[1])], None)

    assert chosen.strength > 0
    assert chosen.factors[9] == chosen.factors.min()  # what only the second knows counts for both


def test_a_channel_that_is_always_zero_harms_nothing(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(64, 64)).astype(np.float32)
    rows[:, 7] = 0

    chosen = choose_migration([rows], [(0, random_weight(64))], None)

    assert np.isfinite(chosen.factors).all()
    assert np.isfinite(chosen.error)
