"""What the steps leave: a bundle that says what it is, with every file and with the right numbers."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

from export.steps import export_checkpoint
from export.verify import MAX_ERROR
from service.bundle import read_bundle
from service.engine import Engine, differences
from service.packing import pack
from service.request import TokenSequence


def test_the_bundle_says_what_it_is(minilm_bundle: Path) -> None:
    manifest = read_bundle(minilm_bundle).manifest

    assert minilm_bundle.parts[-3:] == ("models", "all-MiniLM-L6-v2", "1")
    assert (manifest.name, manifest.family, list(manifest.graphs)) == ("all-MiniLM-L6-v2", "bert", ["fp32"])
    assert (manifest.hidden_size, manifest.num_layers, manifest.num_heads) == (384, 6, 12)
    assert (manifest.vocab_size, manifest.type_vocab_size, manifest.pad_token_id) == (30522, 2, 0)
    assert (manifest.max_sequence_tokens, manifest.pooling, manifest.normalize) == (256, "mean", True)
    assert manifest.graphs["fp32"].fused_attention_nodes == manifest.graphs["fp32"].optimized_attention_nodes == 6
    assert manifest.versions.keys() == {"torch", "transformers", "onnx", "onnxscript", "onnxruntime"}
    assert manifest.versions["onnxruntime"] == onnxruntime.__version__


def test_every_file_is_there_with_its_digest(minilm_bundle: Path) -> None:
    files = read_bundle(minilm_bundle).manifest.files

    assert {
        "model.fp32.onnx",
        "model.onnx.data",
        "golden.npz",
        "parity.json",
        "tokenizer/tokenizer.json",
    } <= files.keys()
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
    engine, batch = Engine(bundle.graph_path("fp32")), pack(golden.sequences)
    found = differences(engine, batch, golden.sentence_embedding, golden.token_embeddings)
    # This is the machine that exported it, so the gate's limit holds; the manifest's leaves room for others.
    assert max(found) < MAX_ERROR


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
    found = Engine(minilm_bundle / "model.fp32.onnx").run(pack(sequences)).sentence_embedding

    # The gate measures 1e-7 for vectors of length 1, from rounding in six layers. Another pooling is off by 1e-2.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_an_export_can_be_repeated_to_the_bit(tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    again, _ = export_checkpoint(tiny_checkpoint, tmp_path, pooling="mean", normalize=False)

    assert read_bundle(again).digest == read_bundle(tiny_bundle).digest


def test_a_vector_per_pooling_is_different(tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    path, _ = export_checkpoint(tiny_checkpoint, tmp_path, pooling="last", normalize=False, version="7")

    assert path == tmp_path / "tiny" / "7"
    assert read_bundle(path).manifest.pooling == "last"
    golden = read_bundle(path).golden
    ends = np.cumsum([sequence.num_tokens for sequence in golden.sequences]) - 1
    assert np.array_equal(golden.sentence_embedding, golden.token_embeddings[ends])


def test_onnx_runtimes_version_is_found_under_whatever_name_it_was_installed(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> Distribution:  # onnxruntime-gpu has no metadata called onnxruntime
        if name == "onnxruntime":
            raise PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr("importlib.metadata.distribution", find)
    path, _ = export_checkpoint(tiny_checkpoint, tmp_path, pooling="mean", normalize=True)

    assert read_bundle(path).manifest.versions["onnxruntime"] == onnxruntime.__version__
