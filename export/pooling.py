"""Pooling on the packed form: (T, E) rows -> (B, E), one vector per sequence.

Slots are selected, not multiplied by zero: a row that is not finite stays its own sequence's trouble. And it must stay
visible: the server tells a failed sequence by numbers that are not finite. ONNX Runtime's maximum passes over a NaN on
a CPU, and on CUDA, where no gate of the export runs, ReLU is max(x, 0) (Source: its activations_impl.cu). `keep_nan`
puts back what an operator may have swallowed.
"""

import typing

import torch
from torch import Tensor

from export.attention import Packing
from service.bundle import Pooling

POOLINGS: tuple[Pooling, ...] = typing.get_args(Pooling)

# The smallest norm that is divided by, as in torch.nn.functional.normalize: a zero vector stays zero, not NaN.
_SMALLEST_NORM = 1e-12


def pool(rows: Tensor, packing: Packing, mode: Pooling) -> Tensor:
    """(T, E) -> (B, E)."""
    return _POOL[mode](rows, packing)


def normalize(vectors: Tensor) -> Tensor:
    """(B, E), each divided by its L2 norm."""
    norms = vectors.square().sum(-1, keepdim=True).sqrt()  # (B, 1)
    return vectors / norms.clamp_min(_SMALLEST_NORM)


def keep_nan(found: Tensor, source: Tensor) -> Tensor:
    """`found` (B, N), NaN where its row of `source` (B, M) holds a number that is not finite: 0 x NaN is NaN."""
    return found + 0.0 * source.sum(-1, keepdim=True)


def _pool_mean(rows: Tensor, packing: Packing) -> Tensor:
    return _sum(rows, packing) / packing.lengths.unsqueeze(1)


def _pool_mean_sqrt_len(rows: Tensor, packing: Packing) -> Tensor:
    return _sum(rows, packing) / packing.lengths.unsqueeze(1).to(rows.dtype).sqrt()


def _sum(rows: Tensor, packing: Packing) -> Tensor:
    return packing.pad(rows).masked_fill(~packing.is_real().unsqueeze(-1), 0.0).sum(1)  # (B, S, E) -> (B, E)


def _pool_max(rows: Tensor, packing: Packing) -> Tensor:
    is_unused = ~packing.is_real().unsqueeze(-1)  # (B, S, 1)
    slots = packing.pad(rows)  # (B, S, E)
    largest = slots.masked_fill(is_unused, torch.finfo(rows.dtype).min).amax(1)
    # As in keep_nan, component by component.
    return largest + 0.0 * slots.masked_fill(is_unused, 0.0).sum(1)


def _pool_cls(rows: Tensor, packing: Packing) -> Tensor:
    return rows.index_select(0, packing.pad_index[:, 0])


def _pool_last(rows: Tensor, packing: Packing) -> Tensor:
    return rows.index_select(0, packing.pad_index[:, 0] + packing.lengths - 1)


_POOL = {
    "mean": _pool_mean,
    "cls": _pool_cls,
    "last": _pool_last,
    "max": _pool_max,
    "mean_sqrt_len": _pool_mean_sqrt_len,
}
