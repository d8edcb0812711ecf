"""The command on models of one's own, as people type it: a bare file with facts, and a module in this directory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from service.bundle import read_bundle
from tests.export.test_modules import MODEL

ROOT = Path(__file__).parents[2]
ENCODER = ["model_type=torch.nn.TransformerEncoder", "num_heads=2", "activation=relu", "norm_first=false"]
LIMITS = ["layer_norm_eps=1e-5", "is_causal=true", "max_sequence_tokens=16"]


def _run(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """As the installed script runs it, for which the current directory is not on sys.path."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from export.__main__ import main; sys.exit(main())"
    options = ["--output", "models", "--pooling", "last", "--no-normalize"]
    command = [sys.executable, "-P", "-c", script, *arguments, *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """torch's encoder of one layer."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    save_file(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).state_dict(), tmp_path / "encoder.safetensors"
    )
    return tmp_path


def test_a_bare_file_is_exported_with_what_is_set(weights: Path) -> None:
    settings = [part for fact in ENCODER + LIMITS for part in ("--set", fact)]

    done = _run(weights, "encoder.safetensors", *settings)

    assert (done.returncode, done.stderr) == (0, "")
    manifest = read_bundle(weights / "models" / "encoder" / "1").manifest
    assert (manifest.family, manifest.input_size, manifest.max_sequence_tokens) == (
        "torch.nn.TransformerEncoder",
        8,
        16,
    )


def test_what_is_not_set_is_listed_in_one_line(weights: Path) -> None:
    settings = [part for fact in ENCODER for part in ("--set", fact)]

    done = _run(weights, "encoder.safetensors", *settings)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "missing: layer_norm_eps (a number from 1e-12 to 1), is_causal (true or false), max_seq" in done.stderr
    assert not (weights / "models").exists()


def test_a_module_in_the_current_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)

    done = _run(tmp_path, "--module", "mine:build", "--name", "mine")

    assert (done.returncode, done.stderr) == (0, "")
    assert read_bundle(tmp_path / "models" / "mine" / "1").manifest.family == "module"
