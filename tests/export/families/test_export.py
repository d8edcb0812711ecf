"""Every family from a directory to a bundle that passed the gate: fused nodes, parity, isolation, unused slots."""

from pathlib import Path
from typing import Any

import pytest

from export.steps import export_checkpoint
from service.bundle import Pooling, read_bundle
from tests.checkpoints import FAMILIES, write_checkpoint

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), ("qwen3", WINDOW)], ids=str)
def test_a_checkpoint_becomes_a_verified_bundle(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path / "tiny", **changes)
    pooling: Pooling = "last" if family in ("gpt2", "qwen3") else "mean"

    path, report = export_checkpoint(tmp_path / "tiny", tmp_path / "models", pooling=pooling, normalize=False)

    assert read_bundle(path).manifest.family == family
    assert report.fusion.fused_attention_nodes == (3 if family == "modernbert" else 2)
    assert {"left padded", "masks with holes", "longest"} <= {case.name for case in report.cases}


def test_a_long_model_is_verified_within_memory(tmp_path: Path) -> None:
    # Smaller weights than elsewhere: with those PyTorch itself is 1.7e-5 off float64 at 2,048 tokens, past the limit.
    write_checkpoint("nomic_bert", tmp_path / "tiny", max_position_embeddings=4096, initializer_range=0.1)

    path, report = export_checkpoint(tmp_path / "tiny", tmp_path / "models", pooling="mean", normalize=False)

    bundle = read_bundle(path)
    assert bundle.manifest.max_sequence_tokens == 4096
    assert max(case.longest for case in report.cases) == 2048
    assert max(sequence.num_tokens for sequence in bundle.golden.sequences) == 512
    assert "last columns" in {case.name for case in report.cases}


def test_deberta_in_fp16_does_not_end_the_process(tmp_path: Path) -> None:
    """ONNX Runtime's MatmulTransposeFusion did, while it opened the graph."""
    write_checkpoint("deberta-v2", tmp_path / "tiny")

    path, _ = export_checkpoint(
        tmp_path / "tiny", tmp_path / "models", pooling="mean", normalize=False, precisions=("fp16",)
    )

    assert read_bundle(path).manifest.graphs.keys() == {"fp16"}
