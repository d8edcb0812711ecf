"""What transformers itself saves for a family is read whole: the bare model, and those with a head."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export.checkpoint import read_checkpoint
from tests.checkpoints import FAMILIES, write_checkpoint

SAVED = [(family, head) for family, maker in FAMILIES.items() for head in ("Model", *maker.heads)]


def _assert_same_weights(found: torch.nn.Module, saved: torch.nn.Module) -> None:
    expected = saved.state_dict()
    for key, weight in found.state_dict().items():
        assert torch.equal(weight, expected[key]), key


@pytest.mark.parametrize(("family", "head"), SAVED)
def test_what_transformers_saves_is_read(family: str, head: str, tmp_path: Path) -> None:
    saved = write_checkpoint(family, tmp_path, head=head)

    found = read_checkpoint(tmp_path, "embedding")

    _assert_same_weights(found.encoder.get_submodule("model"), saved.base_model)
    known = {name for name, _ in saved.named_parameters()}
    assert all(any(part in name for name in known) for part in found.unused_keys)


def _rewrite(directory: Path, weights: dict[str, Tensor]) -> None:
    save_file({key: weight.contiguous() for key, weight in weights.items()}, directory / "model.safetensors")


def test_masks_that_older_gpt2s_saved_are_left_aside(tmp_path: Path) -> None:
    saved = write_checkpoint("gpt2", tmp_path)
    masks = {f"h.{layer}.attn.{name}": torch.ones(1) for layer in range(2) for name in ("bias", "masked_bias")}
    _rewrite(tmp_path, load_file(tmp_path / "model.safetensors") | masks)

    found = read_checkpoint(tmp_path)

    _assert_same_weights(found.encoder.get_submodule("model"), saved)
    assert set(found.unused_keys) == set(masks)


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "layers.1.self_attn.rotary_emb.inv_freq"])
def test_frequencies_that_older_versions_saved_are_left_aside(name: str, tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    _rewrite(tmp_path, load_file(tmp_path / "model.safetensors") | {name: torch.ones(6)})

    assert read_checkpoint(tmp_path).unused_keys == (name,)


def _old_names(key: str) -> str:
    return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "electra", "albert"])
def test_names_of_the_oldest_checkpoints_are_read(family: str, tmp_path: Path) -> None:
    saved = write_checkpoint(family, tmp_path)
    weights = {_old_names(key): weight for key, weight in load_file(tmp_path / "model.safetensors").items()}
    _rewrite(tmp_path, weights | {"embeddings.position_ids": torch.arange(64)})

    found = read_checkpoint(tmp_path)

    _assert_same_weights(found.encoder.get_submodule("model"), saved)
    assert "embeddings.position_ids" in found.unused_keys
