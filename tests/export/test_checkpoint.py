"""Reading checkpoint directories: what is understood, and what is refused before any work is done."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from export.checkpoint import read_checkpoint
from export.errors import ExportError
from tests.checkpoints import write_checkpoint


def _edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def _add_modules(checkpoint: Path, *modules: tuple[str, str]) -> None:
    content = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    (checkpoint / "modules.json").write_text(json.dumps(content))


def _refusal(checkpoint: Path) -> str:
    with pytest.raises(ExportError) as refusal:
        read_checkpoint(checkpoint)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_plain_checkpoint_is_read(tiny_checkpoint: Path) -> None:
    found = read_checkpoint(tiny_checkpoint)

    assert (found.family, found.num_layers, found.num_heads, found.hidden_size) == ("bert", 2, 4, 32)
    assert (found.vocab_size, found.type_vocab_size, found.pad_token_id, found.max_sequence_tokens) == (200, 2, 0, 64)
    assert found.modules == ()
    assert found.unused_keys == ("pooler.dense.bias", "pooler.dense.weight")
    assert {file.name for file in found.tokenizer_files} == {"tokenizer.json", "tokenizer_config.json"}


def test_the_real_checkpoint_is_read(minilm_checkpoint: Path) -> None:
    found = read_checkpoint(minilm_checkpoint)

    assert (found.num_layers, found.num_heads, found.hidden_size, found.vocab_size) == (6, 12, 384, 30522)
    assert [module.kind for module in found.modules] == ["Transformer", "Pooling", "Normalize"]
    assert found.max_sequence_tokens == 256  # of 512 positions: sentence_bert_config.json
    assert found.unused_keys == ("embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight")


def test_the_tokenizer_makes_the_models_ids(minilm_checkpoint: Path) -> None:
    # Source: the published vocab.txt, lines counted from 0.
    tokenize = read_checkpoint(minilm_checkpoint).tokenize
    assert tokenize is not None
    assert tokenize("hello world") == [101, 7592, 2088, 102]


@pytest.mark.parametrize(("max_seq_length", "expected"), [(16, 16), (1000, 64), (None, 64)])
def test_the_limit_is_the_smaller_of_positions_and_max_seq_length(
    checkpoint: Path, max_seq_length: int | None, expected: int
) -> None:
    _edit(checkpoint / "sentence_bert_config.json", max_seq_length=max_seq_length)

    assert read_checkpoint(checkpoint).max_sequence_tokens == expected


def test_a_transformer_in_a_subdirectory_is_found(checkpoint: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    shutil.copytree(checkpoint, outer / "0_Transformer")
    _add_modules(outer, ("sentence_transformers.models.Transformer", "0_Transformer"))

    assert read_checkpoint(outer).num_layers == 2


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "nowhere is not a directory" in _refusal(tmp_path / "nowhere")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    assert "config.json: No such file or directory; give a checkpoint directory" in _refusal(tmp_path)


def test_a_broken_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")

    assert "config.json: not JSON" in _refusal(checkpoint)


def test_a_config_that_is_no_object_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[]")

    assert "config.json: not a JSON object" in _refusal(checkpoint)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(checkpoint: Path, file: str) -> None:
    _edit(checkpoint / file, auto_map={"AutoModel": "modeling.Evil"})

    assert "auto_map, which names Python files to run (modeling)" in _refusal(checkpoint)


NAMED = {
    "AutoConfig": "configuration_eurobert.EuroBertConfig",
    "AutoModel": "EuroBERT/EuroBERT-210m--modeling_eurobert.EuroBertModel",
}


def test_code_that_transformers_has_ported_is_not_needed_and_not_run(tmp_path: Path) -> None:
    write_checkpoint("eurobert", tmp_path)
    _edit(tmp_path / "config.json", auto_map=NAMED)
    (tmp_path / "modeling_eurobert.py").write_text("raise AssertionError('it was run')")

    assert type(read_checkpoint(tmp_path).encoder.model).__module__.startswith("transformers.models.eurobert")


@pytest.mark.parametrize("other", ["modeling_bidirectional.EuroBertModel", "modeling_eurobert_v2.EuroBertModel"])
def test_code_of_another_name_is_refused_though_every_key_fits(tmp_path: Path, other: str) -> None:
    write_checkpoint("eurobert", tmp_path)
    _edit(tmp_path / "config.json", auto_map=NAMED | {"AutoModel": other})

    assert f"names Python files to run ({other.partition('.')[0]})" in _refusal(tmp_path)


@pytest.mark.parametrize("named", [["tokenization_own.Own", None], "tokenization_own.Own"])
def test_code_of_a_tokenizer_is_refused_in_every_family(tmp_path: Path, named: object) -> None:
    write_checkpoint("eurobert", tmp_path)
    _edit(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": named})

    assert "names Python files to run (tokenization_own)" in _refusal(tmp_path)


def test_weights_of_another_size_are_refused_with_their_names(checkpoint: Path) -> None:
    _edit(checkpoint / "config.json", num_hidden_layers=1)

    refusal = _refusal(checkpoint)
    assert "16 problems with its weights" in refusal
    assert "encoder.layer.1.attention.self.query.weight is unknown" in refusal


def test_a_missing_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()

    assert "no tokenizer (tokenizer.json or vocab.txt or vocab.json or" in _refusal(checkpoint)


@pytest.mark.parametrize(("family", "expected"), [("gpt2", [3, 4, 5, 6]), ("roberta", [0, 3, 4, 5, 6, 2])])
def test_a_tokenizer_of_merges_is_read_and_kept(family: str, expected: list[int], tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    for file in tmp_path.glob("*token*.json"):
        file.unlink()
    pieces = ["<s>", "<pad>", "</s>", "he", "ll", "o", "\u0120a", "h", "e", "l", "\u0120", "a", "<unk>", "<mask>"]
    pieces.append("<|endoftext|>")
    (tmp_path / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\n\u0120 a\n", encoding="utf-8")

    found = read_checkpoint(tmp_path)

    assert found.tokenize is not None
    assert found.tokenize("hello a") == expected
    assert {file.name for file in found.tokenizer_files} == {"vocab.json", "merges.txt"}


def test_a_broken_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{}")

    assert "its tokenizer cannot be read" in _refusal(checkpoint)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(checkpoint: Path) -> None:
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["model"]["vocab"]["surplus"] = 200
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))

    assert "the tokenizer's largest id is 200, the embedding has 200 rows" in _refusal(checkpoint)


@pytest.mark.parametrize("limit", [0, -1, "many", 12.5])
def test_a_senseless_max_seq_length_is_refused(checkpoint: Path, limit: object) -> None:
    _edit(checkpoint / "sentence_bert_config.json", max_seq_length=limit)

    assert f"max_seq_length is {limit!r}" in _refusal(checkpoint)


def test_a_module_with_code_of_its_own_is_refused(checkpoint: Path) -> None:
    _add_modules(checkpoint, ("my_code.Transformer", ""))

    assert "module 'my_code.Transformer' is Python code of the checkpoint's own" in _refusal(checkpoint)


def test_a_module_path_that_leaves_the_checkpoint_is_refused(checkpoint: Path) -> None:
    _add_modules(checkpoint, ("sentence_transformers.models.Transformer", "../.."))

    assert "module path '../..' leaves the checkpoint" in _refusal(checkpoint)


@pytest.mark.parametrize(
    "content", ["3", "{}", '["Transformer"]', '[{"type": "sentence_transformers.models.Pooling"}]']
)
def test_modules_that_are_no_list_of_modules_are_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / "modules.json").write_text(content)

    assert "modules.json: not a list of modules with type and path" in _refusal(checkpoint)


def test_a_config_nested_without_end_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[" * 200_000)

    assert "config.json: not JSON" in _refusal(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_directory_in_place_of_a_file_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()

    assert name in _refusal(checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("part", [0, 0.5])
def test_a_file_that_is_cut_short_is_refused(checkpoint: Path, name: str, part: float) -> None:
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[: int(len(content) * part)])

    assert "fetch" in _refusal(checkpoint)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "modules.json", "sentence_bert_config.json"])
def test_a_link_to_a_file_that_is_gone_is_refused(checkpoint: Path, name: str) -> None:
    """As in a cache whose blobs were removed; without it, it would be another model."""
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to("../blobs/gone")

    assert f"{name} is a link to a file that is not there" in _refusal(checkpoint)


def test_a_broken_link_in_a_modules_directory_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    shutil.copytree(checkpoint, outer / "0_Transformer")
    (outer / "0_Transformer" / "sentence_bert_config.json").symlink_to("gone")
    _add_modules(outer, ("sentence_transformers.models.Transformer", "0_Transformer"))

    assert "sentence_bert_config.json is a link to a file that is not there" in _refusal(outer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("hidden_size", -32),
    ],
)
def test_a_size_that_no_model_has_is_refused_before_one_is_built(checkpoint: Path, name: str, value: int) -> None:
    _edit(checkpoint / "config.json", **{name: value})

    assert f"config.json: {name} is {value}; it takes 1 to " in _refusal(checkpoint)


@pytest.mark.parametrize("value", [-1, 200])
def test_a_pad_token_outside_the_vocabulary_is_refused(checkpoint: Path, value: int) -> None:
    _edit(checkpoint / "config.json", pad_token_id=value)

    assert f"config.json: pad_token_id is {value}; it takes 0 to 199, or null" in _refusal(checkpoint)
