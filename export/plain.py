"""Models that take vectors and are no language models: the plain attention module, stacked, and torch's own encoder.

Each has the two forms of `export.encoder.Encoder`. Padded, torch's modules run as torch runs them: they are the
reference. Packed, their parameters go through the seam, in the order of operations of torch's own forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from export.attention import Packing, attend
from export.encoder import MultiHeadSelfAttention


class AttentionStack(nn.Module):
    """y = mhsa_n(... mhsa_1(x)), nothing between: what a state dict of attentions alone can prove."""

    def __init__(self, d_model: int, n_heads: int, n_layers: int, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.layers = nn.ModuleList(MultiHeadSelfAttention(d_model, n_heads) for _ in range(n_layers))

    def forward(
        self,
        embeddings: Tensor,
        _position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Padded, (B, S, E), or packed, (T, E)."""
        for layer in self.layers:
            embeddings = layer(embeddings, mask=mask, is_causal=self.is_causal, packing=packing)
        return embeddings


class TorchAttention(nn.Module):
    """torch.nn.MultiheadAttention of x with itself."""

    def __init__(self, attention: nn.MultiheadAttention, *, is_causal: bool) -> None:
        super().__init__()
        self.attention = attention
        self.is_causal = is_causal

    def forward(
        self,
        embeddings: Tensor,
        _position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Padded, (B, S, E), by torch; or packed, (T, E), through the seam."""
        if packing is not None:
            return _attend_packed(self.attention, embeddings, self.is_causal, packing)
        with _slow_path():
            attended: Tensor = self.attention(
                *[embeddings] * 3,
                key_padding_mask=None if mask is None else ~mask,
                attn_mask=_later(embeddings) if self.is_causal else None,
                need_weights=False,
            )[0]
        return attended


class TorchEncoder(nn.Module):
    """torch.nn.TransformerEncoder."""

    def __init__(self, encoder: nn.TransformerEncoder, *, is_causal: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.is_causal = is_causal

    def forward(
        self,
        embeddings: Tensor,
        _position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Padded, (B, S, E), by torch; or packed, (T, E), through the seam."""
        if packing is not None:
            return self._run_packed(embeddings, packing)
        with _slow_path():
            encoded: Tensor = self.encoder(
                embeddings,
                mask=_later(embeddings) if self.is_causal else None,
                src_key_padding_mask=None if mask is None else ~mask,
                is_causal=self.is_causal,
            )
        return encoded

    def _run_packed(self, rows: Tensor, packing: Packing) -> Tensor:
        for layer in self.encoder.layers:
            assert isinstance(layer, nn.TransformerEncoderLayer)
            rows = _run_layer(layer, rows, self.is_causal, packing)
        normed: Tensor = rows if self.encoder.norm is None else self.encoder.norm(rows)
        return normed


def _run_layer(layer: nn.TransformerEncoderLayer, x: Tensor, is_causal: bool, packing: Packing) -> Tensor:
    """Source: torch.nn.TransformerEncoderLayer.forward, without dropout."""

    def attended(rows: Tensor) -> Tensor:
        return _attend_packed(layer.self_attn, rows, is_causal, packing)

    def fed(rows: Tensor) -> Tensor:
        out: Tensor = layer.linear2(layer.activation(layer.linear1(rows)))
        return out

    if layer.norm_first:
        x = x + attended(layer.norm1(x))
        return x + fed(layer.norm2(x))
    x = layer.norm1(x + attended(x))
    normed: Tensor = layer.norm2(x + fed(x))
    return normed


def _attend_packed(attention: nn.MultiheadAttention, rows: Tensor, is_causal: bool, packing: Packing) -> Tensor:
    projected = nn.functional.linear(rows, attention.in_proj_weight, attention.in_proj_bias)  # (T, 3E)
    query, key, value = projected.chunk(3, dim=-1)
    attended = attend(query, key, value, num_heads=attention.num_heads, is_causal=is_causal, packing=packing)
    out: Tensor = attention.out_proj(attended)
    return out


def _later(x: Tensor) -> Tensor:
    """(S, S) bool, True where a key is later than its query."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


@contextmanager
def _slow_path() -> Iterator[None]:
    """Without torch's fused kernels for encoders in eval.

    They make NaN of a query that sees no key, which padding on the left has under causal attention; the next layer
    then has it everywhere.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
