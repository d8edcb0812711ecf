"""What about a configuration is refused, in one line that names the field and its value."""

import json
from pathlib import Path
from typing import Any

import pytest

from export.checkpoint import read_checkpoint
from export.errors import ExportError
from tests.checkpoints import write_checkpoint


def _refusal(family: str, directory: Path, **changes: Any) -> str:
    """Of a checkpoint whose config.json was changed after the model was saved."""
    write_checkpoint(family, directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ExportError) as refusal:
        read_checkpoint(directory)
    assert "\n" not in str(refusal.value)
    assert str(directory) in str(refusal.value)
    return str(refusal.value)


def test_relative_positions(tmp_path: Path) -> None:
    assert "position_embedding_type is 'relative_key'" in _refusal(
        "bert", tmp_path, position_embedding_type="relative_key"
    )


def test_a_decoder(tmp_path: Path) -> None:
    assert "it is a decoder of an encoder's family" in _refusal("bert", tmp_path, is_decoder=True)


def test_cross_attention(tmp_path: Path) -> None:
    refusal = _refusal("bert", tmp_path, is_decoder=True, add_cross_attention=True)

    assert "it has cross attention (add_cross_attention)" in refusal


def test_quantized_weights(tmp_path: Path) -> None:
    refusal = _refusal("bert", tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})

    assert "it is quantized (quantization_config, method 'gptq')" in refusal


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "albert"])
def test_heads_that_do_not_divide_the_width(family: str, tmp_path: Path) -> None:
    refusal = _refusal(family, tmp_path, num_attention_heads=5)

    assert "hidden_size 32 is not a multiple of num_attention_heads 5" in refusal


@pytest.mark.parametrize("field", ["attn_logit_softcapping", "attention_logit_cap"])
def test_a_cap_on_scores(field: str, tmp_path: Path) -> None:
    assert f"{field} is 50.0: a cap on attention's scores" in _refusal("bert", tmp_path, **{field: 50.0})


def test_positions_behind_a_pad_token_that_is_not_there(tmp_path: Path) -> None:
    assert "pad_token_id is null" in _refusal("roberta", tmp_path, pad_token_id=None)


def test_several_attentions_in_a_layer(tmp_path: Path) -> None:
    assert "inner_group_num is 2" in _refusal("albert", tmp_path, inner_group_num=2)


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    refusal = _refusal("distilbert", tmp_path, vocab_size=201)

    assert "embeddings.word_embeddings.weight has shape (200, 32), expected (201, 32)" in refusal
