"""The plain encoder: against the textbook, against the formula, against torch.nn, packed against padded, exported."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.attention import Packing
from export.checkpoint import Subject
from export.encoder import (
    Activation,
    Encoder,
    EncoderConfig,
    EncoderLayer,
    MultiHeadSelfAttention,
    Norm,
    SinusoidalPositions,
)
from export.graph import PackedModel, export_graph
from export.heads import EmbeddingHead
from export.verify import verify
from service.packing import PackedBatch
from tests import reference

# float32, outputs of order 1; the same sums, in an order of their own.
TOLERANCE = 1e-6


class TextbookAttention(nn.Module):
    """The module as it is written in every tutorial: (B, T, D) -> (B, T, D), no mask."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_k = d_model // n_heads
        self.q_lin = nn.Linear(d_model, d_model)
        self.k_lin = nn.Linear(d_model, d_model)
        self.v_lin = nn.Linear(d_model, d_model)
        self.out_lin = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.n_heads, self.d_k).transpose(1, 2)

        q, k, v = split(self.q_lin(x)), split(self.k_lin(x)), split(self.v_lin(x))
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        joined: Tensor = self.out_lin((weights @ v).transpose(1, 2).contiguous().view(batch, length, width))
        return joined


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attention(d_model: int, n_heads: int) -> MultiHeadSelfAttention:
    torch.manual_seed(0)
    return MultiHeadSelfAttention(d_model, n_heads).eval()


@pytest.mark.parametrize(
    ("d_model", "n_heads", "length"),
    [(1, 1, 1), (8, 2, 5), (12, 12, 7), (30, 5, 2), (48, 3, 31), (64, 1, 17), (96, 8, 13), (384, 12, 64)],
)
def test_a_textbook_state_dict_loads_unchanged_and_gives_the_same_numbers(
    d_model: int, n_heads: int, length: int
) -> None:
    torch.manual_seed(d_model)
    textbook, ours = TextbookAttention(d_model, n_heads), MultiHeadSelfAttention(d_model, n_heads)
    ours.load_state_dict(textbook.state_dict(), strict=True)
    x = _random(3, length, d_model)

    with torch.no_grad():
        torch.testing.assert_close(ours(x), textbook(x), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_the_formula(is_causal: bool) -> None:
    attention, x = _attention(32, 4), _random(1, 9, 32)

    with torch.no_grad():
        attended = attention(x, is_causal=is_causal)

    weights = {name: weight.numpy() for name, weight in attention.state_dict().items()}
    expected = reference.self_attention(x[0].numpy(), weights, 4, is_causal=is_causal)
    np.testing.assert_allclose(attended[0], expected, atol=TOLERANCE)


def test_padding_does_not_change_the_answer_to_real_tokens() -> None:
    attention, x = _attention(32, 4), _random(2, 9, 32)
    mask = torch.arange(9) < torch.tensor([[4], [9]])

    with torch.no_grad():
        padded, alone = attention(x, mask=mask), attention(x[:1, :4])

    torch.testing.assert_close(padded[:1, :4], alone, atol=TOLERANCE, rtol=0)


def test_causal_attention_does_not_look_ahead() -> None:
    attention, x = _attention(32, 4), _random(1, 9, 32)
    changed = torch.cat([x[:, :5], _random(1, 4, 32, seed=1)], dim=1)

    with torch.no_grad():
        before, after = attention(x, is_causal=True), attention(changed, is_causal=True)

    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_attention_gives_each_sequence_what_it_gets_alone(packing: Packing, is_causal: bool) -> None:
    attention, rows = _attention(32, 4), _random(22, 32)

    with torch.no_grad():
        packed = attention(rows, is_causal=is_causal, packing=packing)
        parts = torch.split(rows, packing.lengths.tolist())
        alone = torch.cat([attention(part.unsqueeze(0), is_causal=is_causal)[0] for part in parts])

    torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=0)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="d_model 32 is not a multiple of n_heads 5"):
        MultiHeadSelfAttention(32, 5)


@pytest.mark.parametrize(("d_model", "n_heads", "message"), [(32, 0, "n_heads is 0"), (0, 1, "d_model is 0")])
def test_no_heads_and_no_width_are_refused(d_model: int, n_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}; it must be at least 1"):
        MultiHeadSelfAttention(d_model, n_heads)


def test_an_input_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 16\), expected \(B, S, 32\)"):
        MultiHeadSelfAttention(32, 4)(torch.zeros(2, 3, 16))


def test_a_padded_input_beside_packing_is_refused(packing: Packing) -> None:
    with pytest.raises(ValueError, match=r"expected \(T, 32\) with packing"):
        MultiHeadSelfAttention(32, 4)(torch.zeros(1, 22, 32), packing=packing)


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool)])
def test_a_mask_of_another_type_or_shape_is_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected torch.bool \(2, 3\)"):
        MultiHeadSelfAttention(32, 4)(torch.zeros(2, 3, 32), mask=mask)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_is_torchs_transformer_encoder_layer(norm: Norm, activation: Activation) -> None:
    torch.manual_seed(0)
    ours = EncoderLayer(32, 4, 64, norm=norm, activation=activation).eval()
    theirs = nn.TransformerEncoderLayer(
        32, 4, 64, activation=activation, norm_first=norm == "pre", batch_first=True, dropout=0.0
    )
    _copy_into_torch(ours, theirs)
    x = _random(2, 9, 32)

    with torch.no_grad():
        # Outputs of order 3 instead of 1.
        torch.testing.assert_close(ours(x), theirs.eval()(x), atol=3 * TOLERANCE, rtol=0)


def _copy_into_torch(ours: EncoderLayer, theirs: nn.TransformerEncoderLayer) -> None:
    own = ours.state_dict()
    names = {"self_attn.out_proj": "attention.out_lin", "linear1": "ff_in", "linear2": "ff_out"}
    names |= {"norm1": "attention_norm", "norm2": "ff_norm"}
    copied = {f"{name}.{part}": own[f"{names[name]}.{part}"] for name in names for part in ("weight", "bias")}
    for part in ("weight", "bias"):
        copied[f"self_attn.in_proj_{part}"] = torch.cat([own[f"attention.{name}_lin.{part}"] for name in "qkv"])
    theirs.load_state_dict(copied)


@pytest.mark.parametrize("width", [32, 7])
def test_sinusoidal_positions_are_the_formula(width: int) -> None:
    table = SinusoidalPositions(600, width)(torch.arange(600))

    # Computed in float64 on both sides; one rounding to float32.
    np.testing.assert_allclose(table, reference.sinusoidal_positions(600, width), atol=1e-7)


def test_sinusoidal_positions_are_no_weights() -> None:
    assert not [key for key in _encoder(positions="sinusoidal").state_dict() if "positions" in key]


def _encoder(**changes: Any) -> Encoder:
    torch.manual_seed(0)
    small = {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 64, "max_positions": 32}
    return Encoder(EncoderConfig(**(small | changes))).eval()


VARIANTS = [
    {"positions": "sinusoidal", "norm": "post", "activation": "relu"},
    {"positions": "learned", "norm": "pre", "activation": "gelu"},
    {"positions": "learned", "norm": "post", "activation": "gelu", "is_causal": True},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_encoder_gives_each_sequence_what_it_gets_alone(
    batch: PackedBatch, packing: Packing, variant: dict[str, Any]
) -> None:
    encoder = _encoder(**variant)
    ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.position_ids)

    with torch.no_grad():
        packed = encoder(ids, positions, packing=packing)
        parts = torch.split(ids, packing.lengths.tolist())
        alone = torch.cat([encoder(part.unsqueeze(0))[0] for part in parts])

    # Outputs of order 10: embeddings are multiplied by sqrt(d_model).
    torch.testing.assert_close(packed, alone, atol=10 * TOLERANCE, rtol=0)


def test_embeddings_are_scaled_by_the_root_of_the_width() -> None:
    encoder = _encoder(n_layers=1, norm="pre")
    with torch.no_grad():
        for name in ("attention.out_lin", "ff_out"):  # silence the layer: only its residuals are left
            for parameter in encoder.layers[0].get_submodule(name).parameters():
                parameter.zero_()
        encoded = encoder(torch.tensor([[3, 1]]))
        expected = encoder.embedding.weight[[3, 1]].numpy() * 32**0.5 + reference.sinusoidal_positions(2, 32)

    centered = expected - expected.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(encoded[0], expected, atol=3 * TOLERANCE)


def test_a_packed_batch_without_positions_is_refused(packing: Packing) -> None:
    with pytest.raises(ValueError, match="a packed batch needs position_ids"):
        _encoder()(torch.zeros(22, dtype=torch.long), packing=packing)


def test_a_sequence_past_the_last_position_is_refused() -> None:
    with pytest.raises(ValueError, match="sequences have 33 tokens; the limit is 32"):
        _encoder()(torch.zeros(1, 33, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 0}, "n_layers is 0; it must be at least 1"),
        ({"norm": "none"}, "norm is 'none'; it must be one of post, pre"),
        ({"positions": "rotary"}, "positions is 'rotary'; it must be one of sinusoidal, learned"),
        ({"activation": "silu"}, "activation is 'silu'; it must be one of relu, gelu"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig(vocab_size=50, **change)


class BareAttention(nn.Module):
    """One self-attention on embeddings: the smallest thing that can be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.attention = MultiHeadSelfAttention(32, 4)

    def forward(self, token_ids: Tensor, position_ids: Tensor | None = None, **form: Any) -> Tensor:
        attended: Tensor = self.attention(self.embedding(token_ids), **form)
        return attended


def _verify_exported(encoder: nn.Module, num_layers: int, graph: Path) -> None:
    pooling = EmbeddingHead("mean", normalize=True)
    export_graph(PackedModel(encoder, pooling, has_token_types=False), graph)
    report = verify(
        Subject(
            encoder=encoder,
            num_layers=num_layers,
            vocab_size=50,
            type_vocab_size=0,
            pad_token_id=0,
            max_sequence_tokens=32,
            tokenize=lambda text: [ord(character) % 50 for character in text],
        ),
        pooling,
        graph,
    )
    assert report.fusion.optimized_attention_nodes == num_layers


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_encoder_answers_as_pytorch_does(variant: dict[str, Any], tmp_path: Path) -> None:
    _verify_exported(_encoder(**variant), 2, tmp_path / "model.onnx")


def test_exported_self_attention_answers_as_pytorch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _verify_exported(BareAttention().eval(), 1, tmp_path / "model.onnx")
