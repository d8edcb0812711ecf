"""Bundles of several precisions: what is in them, what is shared, what is refused."""

import json
from pathlib import Path

import pytest

from export.errors import ExportError
from export.steps import export_checkpoint
from service.bundle import Precision, read_bundle
from service.engine import Engine, differences
from service.errors import BundleError
from service.packing import pack
from tests.checkpoints import write_checkpoint
from tests.own_models import write_own

ALL: tuple[Precision, ...] = ("fp32", "int8", "fp16")


def export(checkpoint: Path, output: Path, *precisions: Precision, tolerance: float | None = None) -> Path:
    return export_checkpoint(
        checkpoint, output, pooling="mean", normalize=False, precisions=precisions, tolerance=tolerance
    )[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that its table of embeddings is worth sharing."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_checkpoint("bert", path, hidden_size=64, initializer_range=0.1)
    return path


@pytest.fixture(scope="module")
def bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny, tmp_path_factory.mktemp("models"), *ALL)


@pytest.mark.parametrize("precision", ALL)
def test_each_precision_answers_the_golden_inputs_within_its_tolerances(bundle: Path, precision: Precision) -> None:
    read = read_bundle(bundle)
    facts, golden = read.manifest.graphs[precision], read.golden
    assert (facts.fused_attention_nodes, facts.optimized_attention_nodes) == (2, 2)
    expected = golden.sentence_embedding, golden.token_embeddings
    pooled, tokens = differences(Engine(read.graph_path(precision)), pack(golden.sequences), *expected)
    assert pooled <= facts.pooled_tolerance
    assert tokens <= facts.token_tolerance


def test_int8_and_fp16_are_not_fp32_under_another_name(bundle: Path) -> None:
    golden, paths = read_bundle(bundle).golden, read_bundle(bundle).graph_path
    expected = golden.sentence_embedding, golden.token_embeddings
    found = {name: differences(Engine(paths(name)), pack(golden.sequences), *expected)[1] for name in ALL}
    # Roundings of 24, 11 and 8 bits.
    assert found["fp32"] * 10 < found["fp16"] < found["int8"]


def test_what_precisions_have_in_common_is_stored_once(bundle: Path, tiny: Path, tmp_path: Path) -> None:
    alone = [export(tiny, tmp_path / name, name) / "model.onnx.data" for name in ("fp32", "int8")]
    both = export(tiny, tmp_path / "both", "fp32", "int8") / "model.onnx.data"
    table = 200 * 64 * 4
    assert both.stat().st_size <= sum(file.stat().st_size for file in alone) - table


def test_a_bundle_of_int8_alone_has_nothing_of_fp32_but_the_report(tiny: Path, tmp_path: Path) -> None:
    path = export(tiny, tmp_path, "int8")
    assert sorted(file.name for file in path.glob("model*")) == ["model.int8.onnx", "model.json", "model.onnx.data"]
    assert read_bundle(path).manifest.graphs.keys() == {"int8"}
    report = json.loads((path / "parity.json").read_text())
    assert len(report["cases"]) > 5
    assert [quality["precision"] for quality in report["quality"]] == ["int8"]


def test_what_loses_too_much_is_refused_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"int8 loses too much: the cosine with fp32 is 0\.\d+ on the text '.*limit is"
    ):
        export(tiny, tmp_path, "int8", tolerance=1e-6)
    assert list(tmp_path.iterdir()) == []


def test_an_explicit_tolerance_is_recorded(tiny: Path, tmp_path: Path) -> None:
    path = export(tiny, tmp_path, "int8", tolerance=0.25)
    (quality,) = json.loads((path / "parity.json").read_text())["quality"]
    assert (quality["cosine_limit"], quality["spearman_limit"]) == (0.75, 0.5)


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1.0, float("nan")])
def test_a_tolerance_out_of_range_is_refused(tiny: Path, tmp_path: Path, tolerance: float) -> None:
    with pytest.raises(ExportError, match="it takes more than 0 and less than 1"):
        export(tiny, tmp_path, "int8", tolerance=tolerance)


def test_a_tolerance_that_nothing_uses_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--tolerance is what int8 or fp16 may lose"):
        export(tiny, tmp_path, "fp32", tolerance=0.1)


def test_without_a_tokenizer_only_fp32_is_made_and_it_is_said_first(tmp_path: Path) -> None:
    source = tmp_path / "mhsa"
    source.mkdir()
    write_own("mhsa", source)
    with pytest.raises(ExportError, match="int8 is judged on texts, and this model has no tokenizer"):
        export(source, tmp_path / "models", "fp32", "int8")
    assert not (tmp_path / "models").exists()


def test_a_bundle_that_the_server_would_refuse_is_not_left_behind(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.steps.GOLDEN_TOLERANCE", 1e6)
    with pytest.raises(BundleError, match="fp32 has a token_tolerance of 1000000"):
        export(tiny, tmp_path / "models", "fp32")
    assert not (tmp_path / "models").exists()
