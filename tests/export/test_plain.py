"""Models of vectors: torch's own modules, each sequence alone and without a mask, are what both forms are held to."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.attention import Packing
from export.plain import AttentionStack, TorchAttention, TorchEncoder
from tests import reference
from tests.export.conftest import LENGTHS

WIDTH, HEADS = 32, 4
# float32, outputs of order 1 to 10; the same sums, in an order of their own.
TOLERANCE = 5e-6

ENCODERS = [
    {"norm_first": norm_first, "activation": activation, "bias": bias, "has_norm": has_norm, "is_causal": is_causal}
    for norm_first, activation, bias, has_norm, is_causal in itertools.product(
        (False, True), ("relu", "gelu"), (True, False), (False, True), (False, True)
    )
]


def _random(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _parts(rows: Tensor) -> list[Tensor]:
    """The rows of each sequence."""
    return list(torch.split(rows, list(LENGTHS)))


def _spread(module: nn.Module) -> nn.Module:
    """Norms and biases start as ones and zeros, behind which a mistake could hide."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module.eval()


def _torch_encoder(*, norm_first: bool, activation: str, bias: bool, has_norm: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 64, activation=activation, norm_first=norm_first, bias=bias, batch_first=True, layer_norm_eps=1e-3
    )
    norm = nn.LayerNorm(WIDTH, bias=bias) if has_norm else None
    encoder = _spread(nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False))
    assert isinstance(encoder, nn.TransformerEncoder)
    return encoder


def _later(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def _alone(encoder: nn.TransformerEncoder, rows: Tensor, *, is_causal: bool) -> Tensor:
    """(L, E) -> (L, E): nothing but torch's module."""
    encoded: Tensor = encoder(rows.unsqueeze(0), mask=_later(len(rows)) if is_causal else None, is_causal=is_causal)
    return encoded[0]


@pytest.mark.parametrize("style", ENCODERS, ids=lambda style: "-".join(map(str, style.values())))
@torch.no_grad()
def test_a_packed_encoder_is_torchs_own(style: dict[str, Any], packing: Packing) -> None:
    is_causal = style["is_causal"]
    encoder = _torch_encoder(**{name: value for name, value in style.items() if name != "is_causal"})
    rows = _random(sum(LENGTHS), WIDTH)

    found = TorchEncoder(encoder, is_causal=is_causal)(rows, packing=packing)

    expected = torch.cat([_alone(encoder, part, is_causal=is_causal) for part in _parts(rows)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
    "holes": [[0, 1, 0, 1, 1], [1, 0, 0, 1, 0], [0, 0, 1, 0, 0]],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_a_padded_encoder_is_each_sequence_alone(name: str, is_causal: bool) -> None:
    """Torch's fast path is NaN for padding on the left under causal attention."""
    encoder = _torch_encoder(norm_first=False, activation="relu", bias=True, has_norm=False)
    x, mask = _random(3, 5, WIDTH), torch.tensor(MASKS[name], dtype=torch.bool)

    found = TorchEncoder(encoder, is_causal=is_causal)(x, mask=mask)

    expected = [_alone(encoder, rows[is_real], is_causal=is_causal) for rows, is_real in zip(x, mask, strict=True)]
    torch.testing.assert_close(found[mask], torch.cat(expected), atol=TOLERANCE, rtol=0)


def test_the_fast_path_is_left_as_it_was() -> None:
    TorchEncoder(_torch_encoder(norm_first=False, activation="relu", bias=True, has_norm=False), is_causal=False)(
        _random(1, 2, WIDTH)
    )

    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_packed_attention_is_torchs_own(bias: bool, is_causal: bool, packing: Packing) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True)
    _spread(attention)
    rows = _random(sum(LENGTHS), WIDTH)

    found = TorchAttention(attention, is_causal=is_causal)(rows, packing=packing)

    def alone(part: Tensor) -> Tensor:
        x = part.unsqueeze(0)
        attended: Tensor = attention(x, x, x, attn_mask=_later(len(part)) if is_causal else None, is_causal=is_causal)[
            0
        ]
        return attended[0]

    expected = torch.cat([alone(part) for part in _parts(rows)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_a_padded_attention_is_each_sequence_alone(is_causal: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x, mask = _random(3, 5, WIDTH), torch.tensor(MASKS["left"], dtype=torch.bool)
    module = TorchAttention(attention, is_causal=is_causal)

    found = module(x, mask=mask)

    expected = [module(rows[is_real].unsqueeze(0))[0] for rows, is_real in zip(x, mask, strict=True)]
    torch.testing.assert_close(found[mask], torch.cat(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_a_stack_is_the_formula_once_a_layer(is_causal: bool, packing: Packing) -> None:
    torch.manual_seed(0)
    stack = AttentionStack(WIDTH, HEADS, 3, is_causal=is_causal).eval()
    rows = _random(sum(LENGTHS), WIDTH)

    found = stack(rows, packing=packing).numpy()

    expected = []
    for part in _parts(rows):
        y: reference.Rows = part.numpy()
        for layer in stack.layers:
            weights = {key: tensor.numpy() for key, tensor in layer.state_dict().items()}
            y = reference.self_attention(y, weights, HEADS, is_causal=is_causal)
        expected.append(y)
    np.testing.assert_allclose(found, np.concatenate(expected), atol=TOLERANCE)
