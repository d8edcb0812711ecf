"""Pooling on the packed form against numpy, sequence by sequence."""

import dataclasses

import numpy as np
import pytest
import torch

from export.attention import Packing
from export.pooling import POOLINGS, keep_nan, normalize, pool
from service.bundle import Pooling
from tests import reference


def _rows(packing: Packing) -> torch.Tensor:
    return torch.randn(int(packing.lengths.sum()), 32, generator=torch.Generator().manual_seed(0))


def _parts(packing: Packing, rows: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(rows, packing.lengths.tolist()))


@pytest.mark.parametrize("mode", POOLINGS)
def test_pooling_is_the_formula(packing: Packing, mode: Pooling) -> None:
    rows = _rows(packing)

    pooled = pool(rows, packing, mode)

    expected = [reference.pool(part.numpy(), mode) for part in _parts(packing, rows)]
    # A sum of 11 float32 numbers of order 1 is off by a few roundings of 6e-8 each; another row is off by 0.1.
    np.testing.assert_allclose(pooled, np.stack(expected), atol=1e-6)


def test_a_normalized_vector_is_the_formula(packing: Packing) -> None:
    vectors = _rows(packing)

    expected = [reference.normalize(vector.numpy()) for vector in vectors]
    # As above, and no component is larger than 1.
    np.testing.assert_allclose(normalize(vectors), np.stack(expected), atol=1e-6)


def test_a_zero_vector_stays_zero_when_normalized() -> None:
    assert torch.equal(normalize(torch.zeros(5, 32)), torch.zeros(5, 32))


@pytest.mark.parametrize("mode", POOLINGS)
def test_what_stands_in_unused_slots_does_not_matter(packing: Packing, mode: Pooling) -> None:
    rows = _rows(packing)
    poisoned = dataclasses.replace(packing, pad_index=packing.pad_index.masked_fill(~packing.is_real(), 7))

    assert torch.equal(pool(rows, packing, mode), pool(rows, poisoned, mode))


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_sequence_that_is_not_finite_harms_no_other(packing: Packing, mode: Pooling) -> None:
    rows = _rows(packing)
    rows[0:5] = float("nan")  # the first sequence
    worst = dataclasses.replace(packing, pad_index=packing.pad_index.masked_fill(~packing.is_real(), 0))

    pooled = normalize(pool(rows, worst, mode))

    assert torch.isnan(pooled[0]).all()
    assert torch.isfinite(pooled[1:]).all()


def test_what_an_operator_swallowed_is_put_back() -> None:
    source = torch.tensor([[1.0, float("nan")], [1.0, 2.0], [float("inf"), 1.0]])

    found = keep_nan(torch.tensor([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]), source)

    assert torch.isnan(found[0]).all()
    assert torch.equal(found[1], torch.tensor([5.0, 6.0]))
    assert torch.isnan(found[2]).all()
