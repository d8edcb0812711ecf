"""Heads: the packed form, which is exported, and the reference, which it is held against, both against numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.attention import Packing
from export.heads import Dense, EmbeddingHead
from export.pooling import POOLINGS
from service.bundle import Pooling
from tests import reference

# Sums of at most 32 products of order 1 in float32, against float64; another row or weight is off by 0.1.
TOLERANCE = 2e-6


def _rows(packing: Packing) -> list[Tensor]:
    rows = torch.randn(int(packing.lengths.sum()), 32, generator=torch.Generator().manual_seed(0))
    return list(torch.split(rows, packing.lengths.tolist()))


def _ids(packing: Packing) -> list[Tensor]:
    return [torch.zeros(length, dtype=torch.int64) for length in packing.lengths.tolist()]


def _two_layers() -> list[Dense]:
    torch.manual_seed(0)
    return [Dense(32, 16, bias=True, activation=nn.Tanh()), Dense(16, 8, bias=False, activation=nn.ReLU())]


def _expected(rows: Tensor, layers: list[Dense]) -> np.ndarray:
    """Mean, tanh(W x + b), relu(W x), division by the norm: written out."""
    first, second = (layer.linear.weight.detach().numpy().astype(np.float64) for layer in layers)
    vector = reference.pool(rows.numpy(), "mean")
    vector = np.tanh(first @ vector + layers[0].linear.bias.detach().numpy())
    return reference.normalize(np.maximum(second @ vector, 0))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [False, True])
def test_an_embedding_is_pooled_and_normalized(packing: Packing, pooling: Pooling, normalize: bool) -> None:
    head, rows, ids = EmbeddingHead(pooling, normalize), _rows(packing), _ids(packing)

    packed = head(torch.cat(rows), packing, torch.cat(ids))
    alone = torch.stack([head.reference(*pair) for pair in zip(rows, ids, strict=True)])

    expected = [reference.pool(part.numpy(), pooling) for part in rows]
    if normalize:
        expected = [reference.normalize(vector) for vector in expected]
    np.testing.assert_allclose(packed, np.stack(expected), atol=TOLERANCE)
    np.testing.assert_allclose(alone, np.stack(expected), atol=TOLERANCE)
    assert head.output_size(32) == 32


def test_dense_layers_stand_between_pooling_and_normalization(packing: Packing) -> None:
    layers, rows, ids = _two_layers(), _rows(packing), _ids(packing)
    head = EmbeddingHead("mean", normalize=True, dense=layers)

    with torch.no_grad():
        packed = head(torch.cat(rows), packing, torch.cat(ids))
        alone = torch.stack([head.reference(*pair) for pair in zip(rows, ids, strict=True)])

    expected = np.stack([_expected(part, layers) for part in rows])
    np.testing.assert_allclose(packed, expected, atol=TOLERANCE)
    np.testing.assert_allclose(alone, expected, atol=TOLERANCE)
    assert head.output_size(32) == 8
