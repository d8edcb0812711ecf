"""Which models are supported, with which configurations, and how a configuration becomes a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.checkpoint import read_checkpoint
from export.errors import ExportError
from tests.checkpoints import write_checkpoint


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
        ("deberta", "its attention ignores transformers' registry"),
        ("t5", "it makes its position bias for padded rows"),
        ("llama", "no packed form of it has been verified"),
    ],
)
def test_other_model_types_are_refused_by_name(checkpoint: Path, model_type: str, reason: str) -> None:
    _edit(checkpoint, model_type=model_type)

    assert f"model_type '{model_type}' is not supported: {reason}" in _refusal(checkpoint)
    assert "supported: albert, bert, camembert" in _refusal(checkpoint)


def test_a_configuration_that_builds_no_model_is_refused(checkpoint: Path) -> None:
    _edit(checkpoint, hidden_act="softsign!")

    refusal = _refusal(checkpoint)
    assert "transformers builds no model from it" in refusal
    assert "softsign!" in refusal


def test_feed_forward_chunks_are_put_together(checkpoint: Path) -> None:
    _edit(checkpoint, chunk_size_feed_forward=16)

    found = read_checkpoint(checkpoint).encoder(torch.zeros(1, 9, dtype=torch.long))

    assert found.shape == (1, 9, 32)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_positions_behind_the_pad_token_leave_fewer_tokens(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)

    assert read_checkpoint(tmp_path).max_sequence_tokens == 64 - 1 - 1  # 514 - 1 - 1 = 512 for the released ones


def test_the_longest_sequence_takes_the_last_position(tmp_path: Path) -> None:
    write_checkpoint("roberta", tmp_path)
    found = read_checkpoint(tmp_path)
    ids = torch.full((1, found.max_sequence_tokens), 7)

    with torch.no_grad():
        found.encoder(ids)
        with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|out of range"):
            found.encoder(torch.cat([ids, ids], 1)[:, : found.max_sequence_tokens + 1])


def test_names_of_other_families_configurations_are_understood(tmp_path: Path) -> None:
    write_checkpoint("distilbert", tmp_path)
    found = read_checkpoint(tmp_path)

    assert (found.num_layers, found.num_heads, found.hidden_size) == (2, 4, 32)
    assert (found.type_vocab_size, found.max_sequence_tokens) == (0, 64)
