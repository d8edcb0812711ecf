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


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, HEADS), (2, 1), (2, HEADS)])
def test_a_bias_is_added_to_the_scaled_scores(shape: tuple[int, int], is_causal: bool) -> None:
    query, key, value = _qkv(2, 7)
    bias = torch.randn(*shape, 7, 7, generator=torch.Generator().manual_seed(1))

    attended = attend(query, key, value, num_heads=HEADS, is_causal=is_causal, bias=bias)

    for row, of_row in enumerate(bias.expand(2, HEADS, -1, -1).numpy()):
        q, k, v = (x[row].numpy() for x in (query, key, value))
        expected = reference.attention(q, k, v, HEADS, is_causal=is_causal, bias=of_row)
        np.testing.assert_allclose(attended[row], expected, atol=TOLERANCE)


def test_a_bias_does_not_let_masked_keys_be_seen() -> None:
    query, key, value = _qkv(1, 7)
    seen = torch.tensor([[True, False, True, True, False, True, False]])

    attended = attend(query, key, value, num_heads=HEADS, mask=seen, bias=torch.full((1, 1, 7, 7), 1e4))

    expected = attend(query, key, value, num_heads=HEADS, mask=seen)
    # a bias of 1e4 leaves 1e-3 of a float32 score
    torch.testing.assert_close(attended, expected, atol=1e-2, rtol=0)


def test_unused_slots_stand_where_the_first_token_of_their_sequence_stands(packing: Packing) -> None:
    elsewhere = dataclasses.replace(packing, pad_index=packing.pad_index.masked_fill(~packing.is_real(), 7))

    assert elsewhere.columns().tolist() == [[*range(size), *[0] * (11 - size)] for size in (5, 1, 3, 11, 2)]


class TestLocalWindow:
    """A token sees those less than `window` columns away."""

    @staticmethod
    def _attend(packing: Packing, window: int, *, is_causal: bool = False) -> Tensor:
        rows = _qkv(int(packing.lengths.sum()))
        return attend(*rows, num_heads=HEADS, is_causal=is_causal, bias=packing.window_bias(window), packing=packing)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("window", [1, 3, 100])
    def test_it_is_the_formula(self, packing: Packing, window: int, is_causal: bool) -> None:
        attended = self._attend(packing, window, is_causal=is_causal)

        for rows in _sequences(packing):
            q, k, v = (x[rows].numpy() for x in _qkv(22))
            bias = reference.window_bias(range(len(q)), window, HEADS)
            expected = reference.attention(q, k, v, HEADS, is_causal=is_causal, bias=bias)
            np.testing.assert_allclose(attended[rows], expected, atol=TOLERANCE)

    def test_distances_are_those_of_the_columns_that_tokens_had(self, packing: Packing) -> None:
        columns = [*(9, 10, 11, 12, 13), 4, *(0, 3, 5), *(0, 1, 2, 3, 5, 8, 13, 14, 15, 16, 30), *(1, 2)]
        moved = dataclasses.replace(packing, position_ids=torch.tensor(columns))

        attended = self._attend(moved, 3)

        for rows in _sequences(packing):
            q, k, v = (x[rows].numpy() for x in _qkv(22))
            bias = reference.window_bias(columns[rows], 3, HEADS)
            np.testing.assert_allclose(attended[rows], reference.attention(q, k, v, HEADS, bias=bias), atol=TOLERANCE)

    def test_what_stands_in_unused_slots_does_not_matter(self, packing: Packing) -> None:
        poisoned = packing.pad_index.masked_fill(~packing.is_real(), 7)

        other = self._attend(dataclasses.replace(packing, pad_index=poisoned), 3)

        assert torch.equal(self._attend(packing, 3), other)

    def test_layers_of_one_window_share_one_bias(self, packing: Packing) -> None:
        assert packing.window_bias(3) is packing.window_bias(3)
        assert packing.window_bias(3) is not packing.window_bias(4)

    def test_it_needs_positions(self, packing: Packing) -> None:
        with pytest.raises(ValueError, match="needs position_ids"):
            dataclasses.replace(packing, position_ids=None).window_bias(3)


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

    @pytest.mark.parametrize("keyword", ["softcap", "s_aux", "position_bias"])
    def test_what_it_cannot_do_is_refused(self, packing: Packing, keyword: str) -> None:
        with pytest.raises(ValueError, match=f"Identity asks for {keyword}"):
            self._call(packing, None, **{keyword: 4})

    def test_heads_of_keys_and_values_serve_several_heads_of_the_query(self, packing: Packing) -> None:
        register_with_transformers()
        query, key, value = (
            rows.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for rows in _qkv(int(packing.lengths.sum()))
        )
        grouped = ALL_ATTENTION_FUNCTIONS["mhsa_packed"](
            nn.Identity(), query, key[:, :2], value[:, :2], None, packing=packing
        )[0]

        of_head = [0, 0, 1, 1]
        expected = ALL_ATTENTION_FUNCTIONS["mhsa_packed"](
            nn.Identity(), query, key[:, of_head], value[:, of_head], None, packing=packing
        )[0]
        assert torch.equal(grouped, expected)

    def test_a_sliding_window_is_a_local_window(self, packing: Packing) -> None:
        attended = self._call(packing, sliding_window=2)

        expected = attend(*_qkv(22), num_heads=HEADS, bias=packing.window_bias(2), packing=packing)
        assert torch.equal(attended.flatten(2)[0], expected)

    def test_a_call_without_packing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="takes `packing`, no mask and no dropout"):
            self._call(None)

    def test_a_mask_is_refused(self, packing: Packing) -> None:
        with pytest.raises(ValueError, match="takes `packing`, no mask and no dropout"):
            self._call(packing, mask=torch.zeros(1, 1, 22, 22))

    def test_dropout_is_refused(self, packing: Packing) -> None:
        with pytest.raises(ValueError, match="takes `packing`, no mask and no dropout"):
            self._call(packing, dropout=0.1)
