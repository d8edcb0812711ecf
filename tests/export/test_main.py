"""The command from end to end: the bundle it leaves, the lines it prints, and the nothing it leaves when refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from export.__main__ import export_checkpoint, main
from service.bundle import read_bundle
from service.engine import Engine, largest_difference
from service.packing import pack
from service.request import TokenSequence


def _export(checkpoint: Path, output: Path, *more: str) -> int:
    return main([str(checkpoint), "--output", str(output), *more])


def _contents(directory: Path) -> list[Path]:
    return list(directory.rglob("*")) if directory.exists() else []


def test_the_bundle_says_what_it_is(minilm_bundle: Path) -> None:
    manifest = read_bundle(minilm_bundle).manifest

    assert minilm_bundle.parts[-3:] == ("models", "all-MiniLM-L6-v2", "1")
    assert (manifest.name, manifest.family, manifest.precision) == ("all-MiniLM-L6-v2", "bert", "fp32")
    assert (manifest.hidden_size, manifest.num_layers, manifest.num_heads) == (384, 6, 12)
    assert (manifest.vocab_size, manifest.type_vocab_size, manifest.pad_token_id) == (30522, 2, 0)
    assert (manifest.max_sequence_tokens, manifest.pooling, manifest.normalize) == (256, "mean", True)
    assert manifest.graph.fused_attention_nodes == manifest.graph.optimized_attention_nodes == 6
    assert manifest.versions.keys() == {"torch", "transformers", "onnx", "onnxscript", "onnxruntime"}


def test_every_file_is_there_with_its_digest(minilm_bundle: Path) -> None:
    files = read_bundle(minilm_bundle).manifest.files

    assert {"model.onnx", "model.onnx.data", "golden.npz", "parity.json", "tokenizer/tokenizer.json"} <= files.keys()
    assert {path.relative_to(minilm_bundle).as_posix() for path in minilm_bundle.rglob("*") if path.is_file()} == {
        "model.json",
        *files,
    }


def test_the_golden_sequences_are_ragged_and_answered(minilm_bundle: Path) -> None:
    bundle = read_bundle(minilm_bundle)
    golden = bundle.golden

    lengths = [sequence.num_tokens for sequence in golden.sequences]
    assert len(lengths) == 8
    assert (min(lengths), max(lengths)) == (1, 256)
    # The gate's limit: this is the machine that exported it.
    batch = pack(golden.sequences)
    assert (
        largest_difference(Engine(bundle.graph_path), batch, golden.sentence_embedding, golden.token_embeddings) < 1e-5
    )


def test_the_tokenizer_travels_with_the_model(minilm_bundle: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_bundle / "tokenizer" / "tokenizer.json"))

    # Source: the published vocab.txt, lines counted from 0.
    assert [token for token in tokenizer.encode("hello world").ids if token] == [101, 7592, 2088, 102]


def test_the_real_model_equals_sentence_transformers(minilm_bundle: Path, minilm_checkpoint: Path) -> None:
    """The snippet of the model's card: transformers, mean pooling over the mask, normalisation."""
    from transformers import AutoModel, AutoTokenizer

    sentences = ["A man is eating food.", "The quick brown fox jumps over the lazy dog.", "Yes", "eat " * 60]
    tokenizer = AutoTokenizer.from_pretrained(minilm_checkpoint)
    model = AutoModel.from_pretrained(minilm_checkpoint)
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        embeddings = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1).expand(embeddings.size()).float()
    mean = torch.sum(embeddings * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
    expected = torch.nn.functional.normalize(mean, p=2, dim=1).numpy()

    ids = [np.array(tokenizer.encode(sentence), np.int64) for sentence in sentences]
    sequences = [TokenSequence(row, np.arange(len(row)), np.zeros(len(row), np.int64)) for row in ids]
    found = Engine(minilm_bundle / "model.onnx").run(pack(sequences)).sentence_embedding

    # What the issue asks for; unit vectors, so this is also the error of a cosine.
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_export_can_be_repeated_to_the_bit(tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    again, _ = export_checkpoint(tiny_checkpoint, tmp_path, pooling="mean")

    assert read_bundle(again).digest == read_bundle(tiny_bundle).digest


def test_a_vector_per_pooling_is_different(tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    path, _ = export_checkpoint(tiny_checkpoint, tmp_path, pooling="last", version="7")

    assert path == tmp_path / "tiny" / "7"
    assert read_bundle(path).manifest.pooling == "last"
    golden = read_bundle(path).golden
    ends = np.cumsum([sequence.num_tokens for sequence in golden.sequences]) - 1
    assert np.array_equal(golden.sentence_embedding, golden.token_embeddings[ends])


def test_the_command_shows_its_steps_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "export",
        str(checkpoint),
        "--output",
        str(tmp_path / "models"),
        "--pooling",
        "max",
    ]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for line, step in zip(
        lines, ("read checkpoint", "export graph", "verify against PyTorch", "write bundle"), strict=False
    ):
        assert f" s  {step}: " in line
    assert "left aside: pooler.dense.bias, pooler.dense.weight" in lines[0]
    assert any("masks with holes" in line for line in lines)
    assert lines[-1] == f"bundle: {tmp_path / 'models' / 'tiny' / '1'}"


def _remove_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def _remove_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()


def _claim_another_type(checkpoint: Path) -> None:
    content = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(content | {"model_type": "mpnet"}))


def _leave_alone(checkpoint: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        (_remove_weights, ["--pooling", "mean"], "neither model.safetensors"),
        (_remove_config, ["--pooling", "mean"], "config.json: No such file"),
        (_claim_another_type, ["--pooling", "mean"], "model_type 'mpnet' is not supported"),
        (_leave_alone, [], "give --pooling mean|cls|last|max"),
        (_leave_alone, ["--pooling", "mean", "--name", "../escape"], "name '../escape' is not letters"),
        (_leave_alone, ["--pooling", "mean", "--name", ""], "name '' is not letters"),
        (_leave_alone, ["--pooling", "mean", "--version", "v2"], "version 'v2' is not a whole number"),
        (_leave_alone, ["--pooling", "mean", "--version", "0"], "version '0' is not a whole number"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    arguments: list[str],
    message: str,
) -> None:
    spoil(checkpoint)

    assert _export(checkpoint, tmp_path / "models", *arguments) == 2

    error = capsys.readouterr().err
    assert error.startswith("mhsa-export: ")
    assert message in error
    assert error.count("\n") == 1
    assert _contents(tmp_path / "models") == []


def test_an_output_that_cannot_be_written_is_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").write_text("a file")

    assert _export(checkpoint, tmp_path / "models", "--pooling", "mean") == 2

    error = capsys.readouterr().err
    assert str(tmp_path / "models") in error
    assert error.count("\n") == 1


def test_a_failed_gate_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.verify.MAX_COMPANY_ERROR", 1e-12)

    assert _export(checkpoint, tmp_path / "models", "--pooling", "mean") == 2

    assert "a sequence alone and in company" in capsys.readouterr().err
    assert _contents(tmp_path / "models") == []


def test_an_interrupt_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("export.__main__.export_graph", interrupt)

    assert _export(checkpoint, tmp_path / "models", "--pooling", "mean") == 130

    assert capsys.readouterr().err == "mhsa-export: interrupted; nothing was written\n"
    assert _contents(tmp_path / "models") == []


def test_an_existing_bundle_is_replaced_only_by_force(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--name", "model", "--pooling", "mean")
    assert _export(checkpoint, tmp_path, *arguments) == 0
    first = read_bundle(tmp_path / "model" / "1").digest

    assert _export(checkpoint, tmp_path, "--name", "model", "--pooling", "cls") == 2
    assert "exists; give --force to replace it" in capsys.readouterr().err
    assert read_bundle(tmp_path / "model" / "1").digest == first

    assert _export(checkpoint, tmp_path, "--name", "model", "--pooling", "cls", "--force") == 0
    assert read_bundle(tmp_path / "model" / "1").manifest.pooling == "cls"
