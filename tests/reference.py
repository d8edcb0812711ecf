"""Slow, obvious numpy: what attention, pooling and positions are, written out from the formulas, in float64.

Loops over sequences, heads and positions on purpose. Nothing here is imported from the code under test.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
Rows = NDArray[np.float32] | Float64Array


def softmax(scores: Float64Array) -> Float64Array:
    """Of one row of scores."""
    exponentials = np.exp(scores - scores.max())
    normalized: Float64Array = exponentials / exponentials.sum()
    return normalized


def attention(
    query: Rows,
    key: Rows,
    value: Rows,
    num_heads: int,
    *,
    mask: Sequence[bool] | None = None,
    is_causal: bool = False,
    bias: Rows | None = None,
) -> Float64Array:
    """Concat(head_1..head_H), head = softmax(Q K^T / sqrt(d) + bias) V, of one sequence: (S, E) each -> (S, E).

    `mask` says which keys may be seen; causal attention sees no later key. `bias` is (H, S, S).
    """
    length, width = query.shape
    head_size = width // num_heads
    out = np.zeros((length, width))
    for head in range(num_heads):
        part = slice(head * head_size, (head + 1) * head_size)
        q, k, v = (np.asarray(x, np.float64)[:, part] for x in (query, key, value))
        for i in range(length):
            seen = [j for j in range(length) if (mask is None or mask[j]) and (j <= i or not is_causal)]
            added = np.zeros((length, length)) if bias is None else bias[head]
            scores = np.array([q[i] @ k[j] / math.sqrt(head_size) + added[i, j] for j in seen])
            out[i, part] = sum(weight * v[j] for weight, j in zip(softmax(scores), seen, strict=True))
    return out


def window_bias(columns: Sequence[int], window: int, num_heads: int) -> Float64Array:
    """(H, S, S): a token sees those less than `window` columns away from its own."""
    one_head = [[0.0 if abs(i - j) < window else -math.inf for j in columns] for i in columns]
    return np.array([one_head] * num_heads)


def self_attention(
    x: Rows,
    weights: Mapping[str, Rows],
    num_heads: int,
    *,
    mask: Sequence[bool] | None = None,
    is_causal: bool = False,
) -> Float64Array:
    """Multi-head self-attention of one sequence (S, E), with `q_lin.weight`, `q_lin.bias` and so on."""

    def project(name: str, rows: Rows) -> Float64Array:
        weight, bias = (np.asarray(weights[f"{name}.{part}"], np.float64) for part in ("weight", "bias"))
        projected: Float64Array = np.asarray(rows, np.float64) @ weight.T + bias
        return projected

    q, k, v = (project(name, x) for name in ("q_lin", "k_lin", "v_lin"))
    return project("out_lin", attention(q, k, v, num_heads, mask=mask, is_causal=is_causal))


def pool(rows: Rows, mode: str) -> Float64Array:
    """One vector (E,) from the rows (L, E) of one sequence's real tokens."""
    wide = np.asarray(rows, np.float64)
    if mode == "mean":
        return np.array([sum(column) / len(column) for column in wide.T])
    if mode == "max":
        return np.array([max(column) for column in wide.T])
    if mode == "mean_sqrt_len":
        return np.array([sum(column) / math.sqrt(len(column)) for column in wide.T])
    row: Float64Array = {"cls": wide[0], "last": wide[-1]}[mode]
    return row


def normalize(vector: Rows) -> Float64Array:
    """Divide by the L2 norm; a zero vector stays zero."""
    wide = np.asarray(vector, np.float64)
    norm = math.sqrt(sum(component**2 for component in wide))
    normalized: Float64Array = wide / norm if norm > 0 else wide
    return normalized


def sinusoidal_positions(num_positions: int, width: int) -> Float64Array:
    """PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) = cos of the same. Source: Vaswani et al. 2017, 3.5."""
    table = np.zeros((num_positions, width))
    for position in range(num_positions):
        for column in range(width):
            angle = position / 10000 ** ((column - column % 2) / width)
            table[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table
