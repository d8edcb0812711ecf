"""What the command line names: one kind of model, and a word about what was given in vain."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from export.encoder import MultiHeadSelfAttention
from export.errors import ExportError
from export.sources import Source, open_source

SETTINGS = ("model_type=mhsa", "num_heads=2", "is_causal=false", "max_sequence_tokens=9")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """One attention of width 8, bare."""
    torch.manual_seed(0)
    save_file(MultiHeadSelfAttention(8, 2).state_dict(), tmp_path / "attention.v2.safetensors")
    return tmp_path / "attention.v2.safetensors"


def test_a_bare_file_is_what_is_set(weights: Path) -> None:
    found = open_source(Source(weights, SETTINGS))

    assert (found.family, found.num_heads, found.max_sequence_tokens) == ("mhsa", 2, 9)


def test_a_directory_is_what_its_config_says(weights: Path, tmp_path: Path) -> None:
    weights.rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mhsa", "num_heads": 4, "is_causal": True, "max_sequence_tokens": 7})
    )

    found = open_source(Source(tmp_path))

    assert (found.family, found.num_heads, found.max_sequence_tokens) == ("mhsa", 4, 7)


def test_a_hugging_face_checkpoint_is_still_one(tiny_checkpoint: Path) -> None:
    assert open_source(Source(tiny_checkpoint)).family == "bert"


def test_the_name_is_the_files_or_the_directorys(weights: Path, tiny_checkpoint: Path) -> None:
    assert Source(weights).name == "attention.v2"
    assert Source(tiny_checkpoint).name == "tiny"


def test_a_module_needs_a_name() -> None:
    with pytest.raises(ExportError, match="give --name"):
        _ = Source(None, module="mine:build").name


def test_nothing_at_all_is_not_asked_for_a_name() -> None:
    with pytest.raises(ExportError, match="nothing to export; give a CHECKPOINT or --module"):
        _ = Source(None).name


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source(None), "nothing to export; give a CHECKPOINT or --module"),
        (Source(Path("x"), module="mine:build"), "--module stands in place of CHECKPOINT and --set"),
        (Source(None, ("a=1",), module="mine:build"), "--module stands in place of CHECKPOINT and --set"),
        (Source(Path("x"), weights=Path("w.safetensors")), "--weights is for --module"),
        (Source(Path("nowhere")), "nowhere is not a directory"),
        (Source(Path("nowhere.safetensors"), SETTINGS), "nowhere.safetensors: there is no such file"),
    ],
)
def test_what_is_given_in_vain_is_refused(source: Source, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        open_source(source)


def test_a_directory_takes_no_settings(tiny_checkpoint: Path) -> None:
    with pytest.raises(ExportError, match="--set is for a bare file of weights"):
        open_source(Source(tiny_checkpoint, ("num_heads=2",)))
