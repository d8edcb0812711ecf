"""Nomic-BERT as Nomic released it: its field names, its key names, and the numbers that its formulas give."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from export.checkpoint import read_checkpoint
from export.errors import ExportError
from tests.checkpoints import VOCABULARY, write_checkpoint

# The fields of nomic-embed-text-v1.5's first config.json, with the sizes of a tiny one and another base.
RELEASED: dict[str, Any] = {
    "model_type": "nomic_bert",
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-3,
    "max_trained_positions": 48,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 64,
    "n_layer": 2,
    "n_positions": 64,
    "pad_token_id": 1,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 50,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": 2,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": VOCABULARY,
}
TRANSFORMERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-3,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
}


def _release(directory: Path, **changes: Any) -> dict[str, Tensor]:
    """Write a checkpoint as Nomic released it; returns its weights."""
    write_checkpoint("nomic_bert", directory)
    (directory / "config.json").write_text(json.dumps(RELEASED | changes))
    return load_file(directory / "model.safetensors")


def _norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return functional.layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-3)


def _rotate(x: Tensor) -> Tensor:
    """Halves, not pairs. (H, S, 8)"""
    angles = torch.arange(x.shape[1]).unsqueeze(1) / 50 ** (torch.arange(4) / 4)  # (S, 4)
    first, second = x[..., :4], x[..., 4:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _formula(weights: dict[str, Tensor], ids: Tensor, types: Tensor) -> Tensor:
    """One sequence, (S,) -> (S, E). Source: modeling_hf_nomic_bert.py in nomic-ai/contrastors."""
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][types]
    x = _norm(x, weights, "emb_ln")
    for name in ("encoder.layers.0", "encoder.layers.1"):
        qkv = x @ weights[f"{name}.attn.Wqkv.weight"].T  # (S, 3E)
        q, k, v = qkv.view(-1, 3, 4, 8).permute(1, 2, 0, 3)  # (H, S, D) each
        scores = _rotate(q) @ _rotate(k).transpose(1, 2) / 8**0.5
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)  # (S, E)
        x = _norm(x + attended @ weights[f"{name}.attn.out_proj.weight"].T, weights, f"{name}.norm1")
        gate = functional.silu(x @ weights[f"{name}.mlp.fc12.weight"].T)
        fed = (x @ weights[f"{name}.mlp.fc11.weight"].T * gate) @ weights[f"{name}.mlp.fc2.weight"].T
        x = _norm(x + fed, weights, f"{name}.norm2")
    return x


@pytest.mark.parametrize("also", [{}, TRANSFORMERS], ids=["alone", "beside transformers' fields"])
def test_a_released_checkpoint_gives_what_the_formulas_give(also: dict[str, Any], tmp_path: Path) -> None:
    weights = _release(tmp_path, **also)
    rng = np.random.default_rng(0)
    ids, types = (torch.from_numpy(rng.integers(0, limit, 11)) for limit in (VOCABULARY, 2))

    checkpoint = read_checkpoint(tmp_path)
    with torch.no_grad():
        found = checkpoint.encoder(ids.unsqueeze(0), token_type_ids=types.unsqueeze(0))[0]

    # Another order of the same sums; outputs are of order 3, and a wrong base or gate is off by 0.1.
    torch.testing.assert_close(found, _formula(weights, ids, types), atol=1e-5, rtol=0)
    assert checkpoint.max_sequence_tokens == 48  # of 64 positions: rotation is another past those it was trained on


def test_what_was_trained_on_is_2048_unless_said(tmp_path: Path) -> None:
    _release(tmp_path)
    del (content := dict(RELEASED))["max_trained_positions"]
    (tmp_path / "config.json").write_text(json.dumps(content))

    assert read_checkpoint(tmp_path).max_sequence_tokens == 2048


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_function", "gelu"),
        ("causal", True),
        ("moe_every_n_layers", 2),
        ("num_experts", 8),
        ("parallel_block", True),
        ("prenorm", True),
        ("qkv_proj_bias", True),
        ("rotary_emb_fraction", 0.5),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_scale_base", 512),
        ("scale_attn_weights", False),
        ("use_rms_norm", True),
    ],
)
def test_what_transformers_class_cannot_do_is_refused(field: str, value: object, tmp_path: Path) -> None:
    _release(tmp_path, **{field: value})

    with pytest.raises(ExportError, match=f"{field} is {value!r}, which transformers' NomicBert cannot do"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(("field", "other"), [("n_head", "num_attention_heads"), ("rotary_emb_base", "rope_theta")])
def test_fields_that_disagree_are_refused(field: str, other: str, tmp_path: Path) -> None:
    _release(tmp_path, **TRANSFORMERS, **{field: 2})

    with pytest.raises(ExportError, match=f"{field} is 2 and {other} (4|50.0); correct one of them"):
        read_checkpoint(tmp_path)
