"""Packed rows against transformers' own eager model on a padded batch, before anything is exported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from export.attention import Packing
from export.checkpoint import read_checkpoint
from service.packing import pack
from service.request import TokenSequence
from tests.checkpoints import FAMILIES, PAD, VOCABULARY, write_checkpoint

# Rounding of two orders of summation; outputs are of order 1 to 5.
TOLERANCE = 1e-5
WIDTH = 13

_RAGGED = [[1] * size + [0] * (WIDTH - size) for size in (13, 1, 5, 12)]
MASKS = {
    "right": _RAGGED,
    "left": [row[::-1] for row in _RAGGED],
    "holes": [
        [1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1],
        [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
        [1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1],
    ],
}


def _batch(mask: Tensor, num_types: int) -> tuple[Tensor, Tensor]:
    """Token ids, among them the pad token's where a token is real, and token types."""
    rng = np.random.default_rng(3)
    ids = torch.from_numpy(rng.integers(0, VOCABULARY, tuple(mask.shape)))
    ids[0, 6] = PAD
    types = torch.from_numpy(rng.integers(0, max(num_types, 1), tuple(mask.shape)))
    return torch.where(mask, ids, PAD), types


def _packed(encoder: torch.nn.Module, ids: Tensor, types: Tensor, mask: Tensor, *, has_types: bool) -> Tensor:
    rows = zip(ids.numpy(), types.numpy(), mask.numpy(), strict=True)
    batch = pack([TokenSequence(row[real], np.flatnonzero(real), kinds[real]) for row, kinds, real in rows])
    token_ids, columns, token_types, pad_index, unpad_index, lengths = (
        torch.from_numpy(array)
        for array in (
            batch.token_ids,
            batch.position_ids,
            batch.token_type_ids,
            batch.pad_index,
            batch.unpad_index,
            batch.lengths,
        )
    )
    packing = Packing(pad_index, unpad_index, lengths, columns)
    keywords = {"token_type_ids": token_types} if has_types else {}
    found: Tensor = encoder(token_ids, columns, packing=packing, **keywords)
    return found


def _rope(**kind: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0} | kind}


# What a configuration may change about attention or positions.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"hidden_size": 48, "num_attention_heads": 12}),
    ("albert", {"num_hidden_groups": 2}),
    ("electra", {"embedding_size": 32}),
    ("deberta-v2", {"pos_att_type": ["c2p"]}),
    ("deberta-v2", {"pos_att_type": ["p2c"]}),
    ("deberta-v2", {"pos_att_type": None}),
    ("deberta-v2", {"relative_attention": False}),
    ("deberta-v2", {"position_buckets": -1}),
    ("deberta-v2", {"position_buckets": -1, "max_relative_positions": 5}),
    ("deberta-v2", {"share_att_key": False}),
    ("deberta-v2", {"norm_rel_ebd": "none"}),
    ("deberta-v2", {"position_biased_input": True}),
    ("deberta-v2", {"embedding_size": 16}),
    ("deberta-v2", {"type_vocab_size": 2}),
    ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu"}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("gpt2", {"is_causal": False}),
    ("nomic_bert", {"hidden_act": "gelu"}),
    ("nomic_bert", _rope(rope_type="linear", factor=2.0)),
    ("jina_embeddings_v3", {"num_attention_heads": 2}),
    ("eurobert", {"num_key_value_heads": 4}),
    ("eurobert", {"attention_bias": True, "mlp_bias": True}),
    ("modernbert", {"layer_types": None, "global_attn_every_n_layers": 2}),
    ("modernbert", {"local_attention": 1}),
    ("modernbert", {"local_attention": 5}),
    ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    ("qwen3", {"num_key_value_heads": 1}),
    ("qwen3", {"num_key_value_heads": 4}),
    ("qwen3", {"is_causal": False}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", _rope(rope_type="linear", factor=4.0)),
    ("qwen3", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    (
        "qwen3",
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
]


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_what_transformers_gives_padded(family: str, padding: str, tmp_path: Path) -> None:
    _assert_parity(family, MASKS[padding], tmp_path)


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_so_they_are_in_every_variant(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    _assert_parity(family, MASKS["holes"], tmp_path, **changes)


def test_distances_past_mpnets_last_bucket(tmp_path: Path) -> None:
    seen = [[int(column in (0, 5, 60, 100, 127, 128, 129, 159)) for column in range(160)]]

    _assert_parity("mpnet", seen, tmp_path, max_position_embeddings=162)


def test_a_convolution_stops_where_a_sequence_stops_even_if_the_next_has_the_next_column(tmp_path: Path) -> None:
    seen = [[1] * 5 + [0] * 8, [0] * 5 + [1] * 8, [1] * 13]

    _assert_parity("deberta-v2", seen, tmp_path, conv_kernel_size=3, conv_act="gelu")


def _assert_parity(family: str, seen: list[list[int]], directory: Path, **changes: Any) -> None:
    theirs = write_checkpoint(family, directory, **changes)
    theirs.set_attn_implementation("eager")
    found = read_checkpoint(directory)
    mask = torch.tensor(seen, dtype=torch.bool)
    ids, types = _batch(mask, found.type_vocab_size)
    has_types = found.type_vocab_size > 0

    with torch.no_grad():
        keywords = {"token_type_ids": types} if has_types else {}
        expected = theirs(input_ids=ids, attention_mask=mask.long(), **keywords).last_hidden_state[mask]
        packed = _packed(found.encoder, ids, types, mask, has_types=has_types)

    torch.testing.assert_close(packed, expected, atol=TOLERANCE, rtol=0)


def test_a_packed_batch_without_positions_is_refused(tmp_path: Path, packing: Packing) -> None:
    write_checkpoint("bert", tmp_path)

    with pytest.raises(ValueError, match="a packed batch needs position_ids"):
        read_checkpoint(tmp_path).encoder(torch.zeros(22, dtype=torch.long), packing=packing)
