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


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_frequencies_that_depend_on_the_length(kind: str, field: str, tmp_path: Path) -> None:
    rotation = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rotation |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}

    assert f"rope_type is '{kind}', whose rotation depends on the length" in _refusal(
        "qwen3", tmp_path, **{"rope_parameters": None, field: rotation}
    )


def test_frequencies_of_one_kind_of_layer_that_depend_on_the_length(tmp_path: Path) -> None:
    rotation = {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}

    assert "rope_type is 'dynamic'" in _refusal("modernbert", tmp_path, rope_parameters=rotation)


def test_key_heads_that_do_not_divide_the_heads(tmp_path: Path) -> None:
    assert "num_attention_heads 4 is no multiple of num_key_value_heads 3" in _refusal(
        "qwen3", tmp_path, num_key_value_heads=3
    )


@pytest.mark.parametrize("family", ["qwen3", "modernbert"])
def test_layers_of_an_unknown_kind(family: str, tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "chunked_attention"]
    refusal = _refusal(family, tmp_path, num_hidden_layers=3, layer_types=kinds)

    assert "layer_types has chunked_attention; supported: full_attention, sliding_attention" in refusal


def test_a_window_without_a_size(tmp_path: Path) -> None:
    refusal = _refusal("qwen3", tmp_path, layer_types=["full_attention", "sliding_attention"])

    assert "layer_types has sliding_attention and there is no sliding_window" in refusal


def test_positions_that_the_pad_token_leaves_none_of(tmp_path: Path) -> None:
    assert "max_position_embeddings 2 leaves no position behind pad_token_id 1" in _refusal(
        "roberta", tmp_path, max_position_embeddings=2
    )


def test_sight_both_ways_that_transformers_ignores(tmp_path: Path) -> None:
    assert "use_bidirectional_attention is true" in _refusal("qwen3", tmp_path, use_bidirectional_attention=True)


def test_a_window_that_sees_both_ways(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 4, "is_causal": False}

    assert "windows are known for causal attention only" in _refusal("qwen3", tmp_path, **changes)


def test_a_gpt2_that_reads_an_encoder(tmp_path: Path) -> None:
    assert "it has cross attention" in _refusal("gpt2", tmp_path, add_cross_attention=True)


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    refusal = _refusal("distilbert", tmp_path, vocab_size=201)

    assert "embeddings.word_embeddings.weight has shape (200, 32), expected (201, 32)" in refusal
