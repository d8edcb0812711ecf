"""The plain encoder this project started from: multi-head self-attention, and Vaswani's encoder on top of it.

A state dict of the textbook module (`q_lin`, `k_lin`, `v_lin`, `out_lin`; (B, S, E) -> (B, S, E), no mask) loads
unchanged and gives the same numbers. Added are padding masks, causal attention and the packed form, (T, E) with a
`Packing`, in which everything but attention runs on real tokens only. Attention itself is the seam's.

For inference: there is no dropout here. Source: Vaswani et al. 2017, "Attention Is All You Need"; for pre-norm, Xiong
et al. 2020, "On Layer Normalization in the Transformer Architecture".
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from export.attention import Packing, attend

Positions = Literal["sinusoidal", "learned"]
Norm = Literal["post", "pre"]
Activation = Literal["relu", "gelu"]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Vaswani's encoder; the defaults are the paper's base model. Raises `ValueError` for what cannot be built."""

    vocab_size: int
    d_model: int = 512
    n_heads: int = 8
    n_layers: int = 6
    d_ff: int = 2048
    max_positions: int = 512
    positions: Positions = "sinusoidal"
    norm: Norm = "post"
    activation: Activation = "relu"
    is_causal: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_heads", "n_layers", "d_ff", "max_positions"):
            _require_positive(name, getattr(self, name))
        for name, choices in (("positions", Positions), ("norm", Norm), ("activation", Activation)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(choices))}")


class MultiHeadSelfAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1..head_H) W^O, head = softmax(Q K^T / sqrt(d_k)) V, on projections of x."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        _require_positive("d_model", d_model)
        _require_positive("n_heads", n_heads)
        if d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        self.d_model = d_model
        self.n_heads = n_heads
        self.q_lin = nn.Linear(d_model, d_model)
        self.k_lin = nn.Linear(d_model, d_model)
        self.v_lin = nn.Linear(d_model, d_model)
        self.out_lin = nn.Linear(d_model, d_model)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, is_causal: bool = False, packing: Packing | None = None
    ) -> Tensor:
        """(B, S, E) -> (B, S, E), `mask` (B, S) bool, True where a token is real; with `packing` (T, E) -> (T, E)."""
        self._require_shape(x, mask, is_packed=packing is not None)
        attended = attend(
            self.q_lin(x),
            self.k_lin(x),
            self.v_lin(x),
            num_heads=self.n_heads,
            mask=mask,
            is_causal=is_causal,
            packing=packing,
        )
        projected: Tensor = self.out_lin(attended)
        return projected

    def _require_shape(self, x: Tensor, mask: Tensor | None, *, is_packed: bool) -> None:
        if x.ndim != (2 if is_packed else 3) or x.shape[-1] != self.d_model:
            expected = f"(T, {self.d_model}) with packing" if is_packed else f"(B, S, {self.d_model})"
            raise ValueError(f"x has shape {tuple(x.shape)}, expected {expected}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
            raise ValueError(f"mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool {tuple(x.shape[:-1])}")


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network; each is norm(x + f(x)) in post-norm, x + f(norm(x)) in pre-norm."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, *, norm: Norm = "post", activation: Activation = "relu"
    ) -> None:
        super().__init__()
        self.is_pre_norm = norm == "pre"
        self.attention = MultiHeadSelfAttention(d_model, n_heads)
        self.attention_norm = nn.LayerNorm(d_model)
        self.ff_in = nn.Linear(d_model, d_ff)
        self.ff_out = nn.Linear(d_ff, d_model)
        self.ff_norm = nn.LayerNorm(d_model)
        self.activation = nn.ReLU() if activation == "relu" else nn.GELU()

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, is_causal: bool = False, packing: Packing | None = None
    ) -> Tensor:
        """Shapes as in `MultiHeadSelfAttention`."""
        attended = self.attention(self._before(self.attention_norm, x), mask=mask, is_causal=is_causal, packing=packing)
        x = self._after(self.attention_norm, x + attended)
        fed = self.ff_out(self.activation(self.ff_in(self._before(self.ff_norm, x))))
        return self._after(self.ff_norm, x + fed)

    def _before(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        normed: Tensor = norm(x) if self.is_pre_norm else x
        return normed

    def _after(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        normed: Tensor = x if self.is_pre_norm else norm(x)
        return normed


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) = cos of the same. Source: Vaswani et al. 2017, 3.5."""

    table: Tensor

    def __init__(self, num_positions: int, d_model: int) -> None:
        super().__init__()
        columns = torch.arange(d_model)
        exponents = (columns - columns % 2).double() / d_model  # (E,)
        # float64 until the end: float32 angles of a thousand radians have lost four digits
        angles = torch.arange(num_positions).double().unsqueeze(1) / 10000.0**exponents  # (P, E)
        table = torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float()
        self.register_buffer("table", table, persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """(...) -> (..., E)."""
        return nn.functional.embedding(position_ids, self.table)


class Encoder(nn.Module):
    """Embedding x sqrt(d_model) + positions, then the layers; pre-norm ends with one more LayerNorm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        positions = nn.Embedding if config.positions == "learned" else SinusoidalPositions
        self.positions = positions(config.max_positions, config.d_model)
        self.layers = nn.ModuleList(
            EncoderLayer(config.d_model, config.n_heads, config.d_ff, norm=config.norm, activation=config.activation)
            for _ in range(config.n_layers)
        )
        self.last_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Padded, (B, S) -> (B, S, E), positions from 0 unless given; or packed, (T,) -> (T, E), positions given."""
        if position_ids is None:
            position_ids = self._count_positions(token_ids, is_packed=packing is not None)
        x = self.embedding(token_ids) * math.sqrt(self.config.d_model) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, mask=mask, is_causal=self.config.is_causal, packing=packing)
        encoded: Tensor = self.last_norm(x)
        return encoded

    def _count_positions(self, token_ids: Tensor, *, is_packed: bool) -> Tensor:
        if is_packed:
            raise ValueError("a packed batch needs position_ids: sequences stand back to back")
        if token_ids.shape[-1] > self.config.max_positions:
            raise ValueError(f"sequences have {token_ids.shape[-1]} tokens; the limit is {self.config.max_positions}")
        return torch.arange(token_ids.shape[-1], device=token_ids.device)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
