"""Which models are supported, with which configurations, and that they answer as transformers' own do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.checkpoint import read_checkpoint
from export.errors import ExportError


def _edit(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _refusal(checkpoint: Path) -> str:
    with pytest.raises(ExportError) as refusal:
        read_checkpoint(checkpoint)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_it_answers_as_transformers_own_loader_does(tiny_checkpoint: Path) -> None:
    from transformers import BertModel

    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 200, (2, 9)))
    theirs = BertModel.from_pretrained(tiny_checkpoint, attn_implementation="eager")
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state
        found = read_checkpoint(tiny_checkpoint).encoder(ids, mask=torch.ones(2, 9, dtype=torch.bool))

    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mpnet", "its relative position bias is added inside attention"),
        ("llama", "no packed form of it has been verified"),
    ],
)
def test_other_model_types_are_refused_by_name(checkpoint: Path, model_type: str, reason: str) -> None:
    _edit(checkpoint, model_type=model_type)

    assert f"model_type '{model_type}' is not supported: {reason}" in _refusal(checkpoint)
    assert "supported: bert" in _refusal(checkpoint)


def test_relative_positions_are_refused(checkpoint: Path) -> None:
    _edit(checkpoint, position_embedding_type="relative_key")

    assert "position_embedding_type is 'relative_key'" in _refusal(checkpoint)


def test_a_decoder_is_refused(checkpoint: Path) -> None:
    _edit(checkpoint, is_decoder=True)

    assert "it is a decoder" in _refusal(checkpoint)


def test_a_configuration_that_builds_no_model_is_refused(checkpoint: Path) -> None:
    _edit(checkpoint, num_attention_heads=5)

    refusal = _refusal(checkpoint)
    assert "transformers builds no model from it" in refusal
    assert "32" in refusal


def test_feed_forward_chunks_are_put_together(checkpoint: Path) -> None:
    _edit(checkpoint, chunk_size_feed_forward=16)

    found = read_checkpoint(checkpoint).encoder(torch.zeros(1, 9, dtype=torch.long))

    assert found.shape == (1, 9, 32)
