"""Pooling against numpy, sequence by sequence; and where the choice of it comes from."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.attention import Packing
from export.checkpoint import Checkpoint, read_checkpoint
from export.errors import ExportError
from export.pooling import POOLINGS, PoolingChoice, choose_pooling, pool
from service.bundle import Pooling
from tests import reference

_KIND = "sentence_transformers.models."


def _rows(packing: Packing) -> torch.Tensor:
    return torch.randn(int(packing.lengths.sum()), 32, generator=torch.Generator().manual_seed(0))


def _parts(packing: Packing, rows: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(rows, packing.lengths.tolist()))


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_is_the_formula(packing: Packing, mode: Pooling, normalize: bool) -> None:
    rows = _rows(packing)

    pooled = pool(rows, packing, PoolingChoice(mode, normalize))

    expected = [reference.pool(part.numpy(), mode) for part in _parts(packing, rows)]
    if normalize:
        expected = [reference.normalize(vector) for vector in expected]
    # A sum of 11 float32 numbers of order 1 is off by a few roundings of 6e-8 each; another row is off by 0.1.
    np.testing.assert_allclose(pooled, np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_zero_vector_stays_zero_when_normalized(packing: Packing, mode: Pooling) -> None:
    rows = torch.zeros(22, 32)

    assert torch.equal(pool(rows, packing, PoolingChoice(mode, normalize=True)), torch.zeros(5, 32))


@pytest.mark.parametrize("mode", POOLINGS)
def test_what_stands_in_unused_slots_does_not_matter(packing: Packing, mode: Pooling) -> None:
    rows, choice = _rows(packing), PoolingChoice(mode, normalize=False)
    poisoned = dataclasses.replace(packing, pad_index=packing.pad_index.masked_fill(~packing.is_real(), 7))

    assert torch.equal(pool(rows, packing, choice), pool(rows, poisoned, choice))


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_sequence_that_is_not_finite_harms_no_other(packing: Packing, mode: Pooling) -> None:
    rows = _rows(packing)
    rows[0:5] = float("nan")  # the first sequence
    worst = dataclasses.replace(packing, pad_index=packing.pad_index.masked_fill(~packing.is_real(), 0))

    pooled = pool(rows, worst, PoolingChoice(mode, normalize=True))

    assert torch.isnan(pooled[0]).all()
    assert torch.isfinite(pooled[1:]).all()


class TestTheChoice:
    """modules.json, 1_Pooling/config.json and --pooling."""

    @staticmethod
    def _read(path: Path, *kinds: str, **config: Any) -> Checkpoint:
        if kinds:
            modules = [{"path": "" if kind == "Transformer" else f"1_{kind}", "type": _KIND + kind} for kind in kinds]
            (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | config))
        return read_checkpoint(path)

    def _refusal(self, checkpoint: Checkpoint, mode: Pooling | None = None, normalize: bool | None = None) -> str:
        with pytest.raises(ExportError) as refusal:
            choose_pooling(checkpoint, mode, normalize)
        return str(refusal.value)

    @pytest.mark.parametrize(
        ("key", "mode"),
        [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last"), ("max_tokens", "max")],
    )
    def test_the_flags_are_read(self, checkpoint: Path, key: str, mode: Pooling) -> None:
        flags = {
            f"pooling_mode_{name}": name == key for name in ("mean_tokens", "cls_token", "lasttoken", "max_tokens")
        }
        found = self._read(checkpoint, "Transformer", "Pooling", **flags)

        assert choose_pooling(found, None) == PoolingChoice(mode, normalize=False)

    @pytest.mark.parametrize(("name", "mode"), [("mean", "mean"), ("lasttoken", "last"), (["cls"], "cls")])
    def test_the_newer_name_is_read(self, checkpoint: Path, name: object, mode: Pooling) -> None:
        found = self._read(checkpoint, "Transformer", "Pooling", pooling_mode=name)

        assert choose_pooling(found, None).mode == mode

    def test_a_normalize_module_normalizes(self, checkpoint: Path) -> None:
        found = self._read(checkpoint, "Transformer", "Pooling", "Normalize", pooling_mode_cls_token=True)

        assert choose_pooling(found, None) == PoolingChoice("cls", normalize=True)

    def test_the_real_checkpoint_has_mean_and_normalization(self, minilm_checkpoint: Path) -> None:
        assert choose_pooling(read_checkpoint(minilm_checkpoint), None) == PoolingChoice("mean", normalize=True)

    def test_asking_for_what_is_declared_is_fine(self, checkpoint: Path) -> None:
        found = self._read(checkpoint, "Transformer", "Pooling", pooling_mode_cls_token=True)

        assert choose_pooling(found, "cls", False) == PoolingChoice("cls", normalize=False)

    def test_asking_for_something_else_is_refused(self, checkpoint: Path) -> None:
        found = self._read(checkpoint, "Transformer", "Pooling", pooling_mode_cls_token=True)

        assert "--pooling mean contradicts the checkpoint, which pools by cls" in self._refusal(found, "mean")

    def test_asking_for_another_normalization_is_refused(self, checkpoint: Path) -> None:
        found = self._read(checkpoint, "Transformer", "Pooling", pooling_mode_cls_token=True)

        assert "--normalize contradicts the checkpoint, which does not normalize" in self._refusal(found, None, True)

    def test_asking_not_to_normalize_what_is_normalized_is_refused(self, minilm_checkpoint: Path) -> None:
        found = read_checkpoint(minilm_checkpoint)

        assert "--no-normalize contradicts the checkpoint, which normalizes" in self._refusal(found, "mean", False)

    @pytest.mark.parametrize(("mode", "normalize"), [(None, None), ("mean", None), (None, True)])
    def test_silence_is_refused_not_guessed(
        self, tiny_checkpoint: Path, mode: Pooling | None, normalize: bool | None
    ) -> None:
        refusal = self._refusal(read_checkpoint(tiny_checkpoint), mode, normalize)

        assert refusal.endswith("give --pooling mean|cls|last|max and --normalize or --no-normalize")

    @pytest.mark.parametrize("normalize", [False, True])
    def test_where_the_checkpoint_is_silent_the_user_decides(self, tiny_checkpoint: Path, normalize: bool) -> None:
        found = read_checkpoint(tiny_checkpoint)

        assert choose_pooling(found, "last", normalize) == PoolingChoice("last", normalize)

    def test_modules_without_pooling_say_only_whether_to_normalize(self, checkpoint: Path) -> None:
        found = self._read(checkpoint, "Transformer", "Normalize")

        assert choose_pooling(found, "mean") == PoolingChoice("mean", normalize=True)
        assert "--no-normalize contradicts" in self._refusal(found, "mean", False)

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls_token + pooling_mode_max_tokens"),
            ({"pooling_mode_mean_sqrt_len_tokens": True}, "pooling_mode_mean_sqrt_len_tokens"),
            ({"pooling_mode": "weightedmean"}, "weightedmean"),
            ({}, "none"),
        ],
    )
    def test_combined_unknown_and_no_poolings_are_refused(
        self, checkpoint: Path, flags: dict[str, Any], named: str
    ) -> None:
        refusal = self._refusal(self._read(checkpoint, "Transformer", "Pooling", **flags))

        assert f"{named}; supported: one of mean, cls, last, max" in refusal

    def test_a_pipeline_with_another_module_is_refused(self, checkpoint: Path) -> None:
        refusal = self._refusal(self._read(checkpoint, "Transformer", "Pooling", "Dense", pooling_mode="mean"))

        assert "its modules are Transformer > Pooling > Dense" in refusal

    def test_a_width_that_is_not_the_models_is_refused(self, checkpoint: Path) -> None:
        found = self._read(checkpoint, "Transformer", "Pooling", pooling_mode="mean", word_embedding_dimension=48)

        assert "it pools 48 components, the model has 32" in self._refusal(found)

    def test_pooling_without_the_prompt_is_refused(self, checkpoint: Path) -> None:
        found = self._read(checkpoint, "Transformer", "Pooling", pooling_mode="mean", include_prompt=False)

        assert "include_prompt is false" in self._refusal(found)
