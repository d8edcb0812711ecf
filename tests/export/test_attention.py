"""The seam in PyTorch, against the formula in numpy. Its exported half is tested in test_graph.py."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from export.attention import Packing, attend, register_with_transformers
from tests import reference

HEADS, WIDTH = 4, 32
# float32 against float64, sums of at most 32 products of order 1.
TOLERANCE = 1e-6


def _qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, *shape, WIDTH, generator=torch.Generator().manual_seed(0))
    return query, key, value


def _sequences(packing: Packing) -> list[slice]:
    ends = packing.lengths.cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, packing.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_attention_is_the_formula(is_causal: bool) -> None:
    query, key, value = _qkv(2, 7)

    attended = attend(query, key, value, num_heads=HEADS, is_causal=is_causal)

    for row in range(2):
        q, k, v = (x[row].numpy() for x in (query, key, value))
        expected = reference.attention(q, k, v, HEADS, is_causal=is_causal)
        np.testing.assert_allclose(attended[row], expected, atol=TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_keys_are_not_seen(is_causal: bool) -> None:
    query, key, value = _qkv(1, 7)
    seen = [True, False, True, True, False, True, False]

    attended = attend(query, key, value, num_heads=HEADS, mask=torch.tensor([seen]), is_causal=is_causal)

    q, k, v = (x[0].numpy() for x in (query, key, value))
    expected = reference.attention(q, k, v, HEADS, mask=seen, is_causal=is_causal)
    np.testing.assert_allclose(attended[0], expected, atol=TOLERANCE)


def test_a_row_that_sees_no_key_is_finite() -> None:
    attended = attend(*_qkv(1, 3), num_heads=HEADS, mask=torch.zeros(1, 3, dtype=torch.bool))

    assert torch.isfinite(attended).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_attention_gives_each_sequence_what_it_gets_alone(packing: Packing, is_causal: bool) -> None:
    query, key, value = _qkv(int(packing.lengths.sum()))

    attended = attend(query, key, value, num_heads=HEADS, is_causal=is_causal, packing=packing)

    for rows in _sequences(packing):
        q, k, v = (x[rows].numpy() for x in (query, key, value))
        expected = reference.attention(q, k, v, HEADS, is_causal=is_causal)
        np.testing.assert_allclose(attended[rows], expected, atol=TOLERANCE)


def test_what_stands_in_unused_slots_does_not_matter(packing: Packing) -> None:
    query, key, value = _qkv(int(packing.lengths.sum()))
    poisoned = packing.pad_index.masked_fill(~packing.is_real(), 7)

    clean = attend(query, key, value, num_heads=HEADS, packing=packing)
    other = attend(query, key, value, num_heads=HEADS, packing=dataclasses.replace(packing, pad_index=poisoned))

    assert torch.equal(clean, other)


def test_scale_replaces_the_default() -> None:
    query, key, value = _qkv(1, 5)

    halved = attend(query / 2, key, value, num_heads=HEADS)
    scaled = attend(query, key, value, num_heads=HEADS, scale=0.5 / (WIDTH // HEADS) ** 0.5)

    torch.testing.assert_close(scaled, halved, atol=TOLERANCE, rtol=0)


def test_a_mask_beside_packing_is_refused(packing: Packing) -> None:
    with pytest.raises(ValueError, match="mask and packing are both given"):
        attend(*_qkv(22), num_heads=HEADS, mask=torch.ones(5, 11, dtype=torch.bool), packing=packing)


class TestAsTransformersCallsIt:
    """Through transformers' own registry, on (1, H, T, D)."""

    @staticmethod
    def _call(packing: Packing | None, mask: Tensor | None = None, **keywords: float) -> Tensor:
        register_with_transformers()
        heads = [rows.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for rows in _qkv(22)]
        attended: Tensor = ALL_ATTENTION_FUNCTIONS["mhsa_packed"](
            nn.Identity(), *heads, mask, packing=packing, **keywords
        )[0]
        return attended

    def test_it_is_packed_attention(self, packing: Packing) -> None:
        attended = self._call(packing)

        assert attended.shape == (1, 22, HEADS, WIDTH // HEADS)
        assert torch.equal(attended.flatten(2)[0], attend(*_qkv(22), num_heads=HEADS, packing=packing))

    @pytest.mark.parametrize("keyword", ["sliding_window", "softcap", "s_aux", "position_bias"])
    def test_what_it_cannot_do_is_refused(self, packing: Packing, keyword: str) -> None:
        with pytest.raises(ValueError, match=f"Identity asks for {keyword}"):
            self._call(packing, None, **{keyword: 4})

    def test_a_call_without_packing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="takes `packing`, no mask and no dropout"):
            self._call(None)

    def test_a_mask_is_refused(self, packing: Packing) -> None:
        with pytest.raises(ValueError, match="takes `packing`, no mask and no dropout"):
            self._call(packing, mask=torch.zeros(1, 1, 22, 22))

    def test_dropout_is_refused(self, packing: Packing) -> None:
        with pytest.raises(ValueError, match="takes `packing`, no mask and no dropout"):
            self._call(packing, dropout=0.1)
