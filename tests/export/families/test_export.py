"""Every family from a directory to a bundle that passed the gate: fused nodes, parity, isolation, unused slots."""

from pathlib import Path

import pytest

from export.steps import export_checkpoint
from service.bundle import read_bundle
from tests.checkpoints import FAMILIES, write_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_becomes_a_verified_bundle(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path / "tiny")

    path, report = export_checkpoint(tmp_path / "tiny", tmp_path / "models", pooling="mean", normalize=False)

    assert read_bundle(path).manifest.family == family
    assert report.graph.fused_attention_nodes == 2
    assert {"left padded", "masks with holes", "longest"} <= {case.name for case in report.cases}
