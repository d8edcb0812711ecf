"""Classification heads of every family, held against transformers' own model, padded and with a mask."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from export.attention import Packing
from export.checkpoint import read_checkpoint
from export.errors import ExportError
from export.steps import export_checkpoint
from service.bundle import read_bundle
from service.packing import PackedBatch
from tests.checkpoints import FAMILIES, PAD, write_checkpoint

CLASSIFIERS = [name for name, maker in FAMILIES.items() if "ForSequenceClassification" in maker.heads]
VARIANTS = [
    *((family, {}) for family in CLASSIFIERS),
    ("modernbert", {"classifier_pooling": "mean"}),
    ("eurobert", {"classifier_pooling": "bos"}),
    ("eurobert", {"classifier_pooling": "mean"}),
]
# float32 in two orders, logits of order 1 to 10 behind two layers; another row of the sequence is off by 0.1.
TOLERANCE = 1e-5
LABELS = {0: "no", 1: "perhaps", 2: "yes"}


def _write(directory: Path, family: str, **changes: Any) -> Any:
    return write_checkpoint(family, directory, head="ForSequenceClassification", id2label=LABELS, **changes)


def _padded(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The ids on a rectangle, padded on the right, and the mask."""
    is_real = np.arange(batch.longest) < batch.lengths[:, None]
    ids = np.full(is_real.shape, PAD)
    ids[is_real] = batch.token_ids
    return torch.from_numpy(ids), torch.from_numpy(is_real.astype(np.int64))


def _packed_logits(directory: Path, batch: PackedBatch) -> Tensor:
    found = read_checkpoint(directory)
    assert found.classifier is not None
    packing = Packing(
        *(torch.from_numpy(array) for array in (batch.pad_index, batch.unpad_index, batch.lengths, batch.position_ids))
    )
    token_ids, columns = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.position_ids)
    with torch.no_grad():
        logits: Tensor = found.classifier(found.encoder(token_ids, columns, packing=packing), packing, token_ids)
    return logits


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_packed_logits_are_transformers_own(
    family: str, changes: dict[str, Any], batch: PackedBatch, tmp_path: Path
) -> None:
    theirs = _write(tmp_path, family, **changes)
    ids, mask = _padded(batch)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask).logits

    found = _packed_logits(tmp_path, batch)

    assert found.shape == (5, 3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_the_reference_is_transformers_own(family: str, tmp_path: Path) -> None:
    theirs = _write(tmp_path, family)
    ids = torch.tensor([[7, 9, 11, 13, PAD]])  # a decoder looks for its row by the token's id
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits[0]
        found = read_checkpoint(tmp_path)
        assert found.classifier is not None
        rows = found.encoder(ids, mask=torch.ones_like(ids, dtype=torch.bool))[0]
        reference = found.classifier.reference(rows, ids[0])

    np.testing.assert_allclose(reference, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_decoder_without_a_pad_token_is_classified_by_its_last_row(
    family: str, batch: PackedBatch, tmp_path: Path
) -> None:
    theirs = _write(tmp_path, family, pad_token_id=None)
    sequences = torch.split(torch.from_numpy(batch.token_ids), batch.lengths.tolist())
    with torch.no_grad():
        expected = torch.cat([theirs(input_ids=ids.unsqueeze(0)).logits for ids in sequences])

    np.testing.assert_allclose(_packed_logits(tmp_path, batch), expected, rtol=0, atol=TOLERANCE)


def test_a_row_that_is_not_finite_shows_in_its_logits_and_in_no_others(batch: PackedBatch, tmp_path: Path) -> None:
    _write(tmp_path, "distilbert")  # its head has a ReLU, which may take NaN for 0
    head = read_checkpoint(tmp_path).classifier
    assert head is not None
    packing = Packing(*(torch.from_numpy(array) for array in (batch.pad_index, batch.unpad_index, batch.lengths)))
    rows = torch.randn(batch.num_tokens, 32, generator=torch.Generator().manual_seed(0))
    rows[0:5] = float("nan")  # the first sequence

    with torch.no_grad():
        logits = head(rows, packing, torch.from_numpy(batch.token_ids))

    assert torch.isnan(logits[0]).all()
    assert torch.isfinite(logits[1:]).all()


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_a_classifier_becomes_a_verified_bundle(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    _write(
        tmp_path / "tiny", family, initializer_range=0.2, **changes
    )  # with 0.3 rounding alone can reach the gate's 1e-5

    path, report = export_checkpoint(tmp_path / "tiny", tmp_path / "models")

    manifest = read_bundle(path).manifest
    assert (manifest.task, manifest.labels) == ("classification", ["no", "perhaps", "yes"])
    assert (manifest.output_size, manifest.hidden_size, manifest.normalize) == (3, 32, False)
    assert report.fusion.fused_attention_nodes == manifest.num_layers


def test_a_reranker_has_one_logit(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "tiny", head="ForSequenceClassification", num_labels=1)

    path, _ = export_checkpoint(tmp_path / "tiny", tmp_path / "models")

    bundle = read_bundle(path)
    assert bundle.manifest.labels == ["LABEL_0"]
    assert bundle.golden.sentence_embedding.shape == (8, 1)


def test_a_classifier_cannot_be_told_how_to_pool(tmp_path: Path) -> None:
    _write(tmp_path / "tiny", "bert")

    with pytest.raises(ExportError, match=r"it is a classifier, .* leave --pooling and --normalize out"):
        export_checkpoint(tmp_path / "tiny", tmp_path / "models", pooling="mean")
    with pytest.raises(ExportError, match="or give --task embedding"):
        export_checkpoint(tmp_path / "tiny", tmp_path / "models", normalize=False)


def _add_modules(checkpoint: Path, *kinds: str) -> None:
    modules = [
        {"path": "" if kind == "Transformer" else kind, "type": f"sentence_transformers.{kind}"} for kind in kinds
    ]
    (checkpoint / "modules.json").write_text(json.dumps(modules))


def test_a_cross_encoders_modules_are_its_transformer_alone(tmp_path: Path) -> None:
    _write(tmp_path / "tiny", "bert", initializer_range=0.2)
    _add_modules(tmp_path / "tiny", "Transformer")

    path, _ = export_checkpoint(tmp_path / "tiny", tmp_path / "models")

    assert read_bundle(path).manifest.task == "classification"


@pytest.mark.parametrize("kinds", [("Transformer", "LogitScore"), ("Transformer", "Normalize")])
def test_modules_behind_a_classifier_are_refused_by_name(kinds: tuple[str, ...], tmp_path: Path) -> None:
    _write(tmp_path / "tiny", "bert")
    _add_modules(tmp_path / "tiny", *kinds)

    with pytest.raises(ExportError, match=f"it is a classifier, and its modules are {' > '.join(kinds)}; supported"):
        export_checkpoint(tmp_path / "tiny", tmp_path / "models")


class TestTheTask:
    """A classifier is one unless something says otherwise."""

    def test_a_classifier_keeps_its_head_and_labels(self, tmp_path: Path) -> None:
        _write(tmp_path, "bert")

        found = read_checkpoint(tmp_path)

        assert found.classifier is not None
        assert found.classifier.labels == ["no", "perhaps", "yes"]
        assert found.classifier.output_size(32) == 3
        assert found.unused_keys == ()

    def test_its_encoder_can_be_had_alone(self, tmp_path: Path) -> None:
        _write(tmp_path, "bert")

        found = read_checkpoint(tmp_path, "embedding")

        assert found.classifier is None
        assert "classifier.weight" in found.unused_keys

    def test_a_sentence_transformers_pooling_says_that_it_is_an_embedding(self, tmp_path: Path) -> None:
        _write(tmp_path, "bert")
        _add_modules(tmp_path, "Transformer", "Pooling")

        assert read_checkpoint(tmp_path).classifier is None
        assert read_checkpoint(tmp_path, "classification").classifier is not None

    def test_an_encoder_is_no_classifier(self, tiny_checkpoint: Path) -> None:
        assert read_checkpoint(tiny_checkpoint).classifier is None
        with pytest.raises(ExportError, match=r"needs a \.\.\.ForSequenceClassification, .* is BertModel"):
            read_checkpoint(tiny_checkpoint, "classification")

    def test_a_head_that_lacks_a_weight_is_refused(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        _write(tmp_path, "bert")
        weights = load_file(tmp_path / "model.safetensors")
        del weights["classifier.bias"]
        save_file(weights, tmp_path / "model.safetensors")

        with pytest.raises(ExportError, match=r"classifier\.bias is missing"):
            read_checkpoint(tmp_path)

    def test_labels_that_are_not_as_many_as_the_heads_are_refused(self, tmp_path: Path) -> None:
        _write(tmp_path, "bert")
        config = json.loads((tmp_path / "config.json").read_text())
        config["id2label"] = {"0": "no", "1": "yes"}
        (tmp_path / "config.json").write_text(json.dumps(config))

        with pytest.raises(ExportError, match=r"classifier\.weight has shape \(3, 32\), expected \(2, 32\)"):
            read_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        "id2label",
        [{"-1": "n", "0": "z", "1": "p"}, {"1": "x", "2": "y", "3": "z"}, {"0": None, "1": "b", "2": "c"}],
        ids=["from -1", "from 1", "no text"],
    )
    def test_labels_that_are_not_a_text_for_each_logit_are_refused(
        self, tmp_path: Path, id2label: dict[str, str | None]
    ) -> None:
        _write(tmp_path, "bert")
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": id2label}))

        with pytest.raises(ExportError, match=r"id2label is .*; it must have a text for each of 0 to 2"):
            read_checkpoint(tmp_path)
