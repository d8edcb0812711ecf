"""Every key accounted for, and nothing unpickled. Each refusal lists what it found."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from export.errors import ExportError
from export.weights import KeyRules, load_weights

WHOLE = "model.safetensors"
RULES = KeyRules(prefix="model.", unused_prefixes=("head.",), buffers=("position_ids",), renames=(("gamma", "weight"),))


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"weight": torch.randn(3, 2, generator=generator), "bias": torch.randn(3, generator=generator)}


def _load(directory: Path, weights: dict[str, Tensor]) -> tuple[nn.Linear, tuple[str, ...]]:
    save_file(weights, directory / "model.safetensors")
    model = nn.Linear(2, 3)
    return model, load_weights(directory, model, RULES)


def _refusal(directory: Path, weights: dict[str, Tensor]) -> str:
    with pytest.raises(ExportError) as refusal:
        _load(directory, weights)
    return str(refusal.value)


def test_weights_are_loaded(tmp_path: Path) -> None:
    model, unused = _load(tmp_path, _weights())

    assert torch.equal(model.weight, _weights()["weight"])
    assert torch.equal(model.bias, _weights()["bias"])
    assert unused == ()


def test_a_prefix_and_old_names_are_understood(tmp_path: Path) -> None:
    rules = KeyRules(prefix="bert.", unused_prefixes=(), buffers=(), renames=(("gamma", "weight"), ("beta", "bias")))
    save_file(
        {"bert.0.gamma": torch.full((3,), 2.0), "bert.0.beta": torch.full((3,), 5.0)}, tmp_path / "model.safetensors"
    )
    model = nn.Sequential(nn.LayerNorm(3))

    load_weights(tmp_path, model, rules)

    assert model.state_dict()["0.weight"].tolist() == [2, 2, 2]
    assert model.state_dict()["0.bias"].tolist() == [5, 5, 5]


def test_old_names_are_whole_parts_of_a_key() -> None:
    rules = KeyRules(prefix="", unused_prefixes=(), buffers=(), renames=(("norm1", "norm"), ("mlp.fc2", "mlp.down")))

    assert rules.current_keys("norm1.weight") == ["norm.weight"]
    assert rules.current_keys("layers.0.norm1.weight") == ["layers.0.norm.weight"]
    assert rules.current_keys("layers.0.mlp.fc2.bias") == ["layers.0.mlp.down.bias"]
    assert rules.current_keys("layers.0.mlp.fc22.bias") == ["layers.0.mlp.fc22.bias"]
    assert rules.current_keys("layers.0.norm11.weight") == ["layers.0.norm11.weight"]


class TestWeightsThatHoldSeveral:
    RULES = KeyRules(prefix="", unused_prefixes=(), buffers=(), splits=(("both", ("0", "1")),))

    def test_they_are_split_by_rows(self, tmp_path: Path) -> None:
        save_file({"both.weight": torch.arange(8.0).view(4, 2), "both.bias": torch.arange(4.0)}, tmp_path / WHOLE)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        load_weights(tmp_path, model, self.RULES)

        assert model.state_dict()["0.weight"].tolist() == [[0, 1], [2, 3]]
        assert model.state_dict()["1.weight"].tolist() == [[4, 5], [6, 7]]
        assert model.state_dict()["1.bias"].tolist() == [2, 3]

    def test_rows_that_cannot_be_split_evenly_are_refused(self, tmp_path: Path) -> None:
        save_file({"both.weight": torch.zeros(5, 2), "both.bias": torch.zeros(4)}, tmp_path / WHOLE)

        with pytest.raises(ExportError, match=r"0.weight is missing; 1.weight is missing; both.weight has 5 rows"):
            load_weights(tmp_path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), self.RULES)


def test_buffers_are_patterns(tmp_path: Path) -> None:
    rules = KeyRules(prefix="", unused_prefixes=(), buffers=("h.*.attn.mask",))
    save_file(_weights() | {"h.11.attn.mask": torch.zeros(1)}, tmp_path / WHOLE)

    assert load_weights(tmp_path, nn.Linear(2, 3), rules) == ("h.11.attn.mask",)


def test_heads_and_buffers_are_left_aside_by_name(tmp_path: Path) -> None:
    extra = {"head.weight": torch.zeros(1), "model.head.bias": torch.zeros(1), "position_ids": torch.arange(2)}

    assert _load(tmp_path, _weights() | extra)[1] == ("head.weight", "model.head.bias", "position_ids")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model, _ = _load(tmp_path, {name: tensor.to(dtype) for name, tensor in _weights().items()})

    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, _weights()["weight"].to(dtype).float())


def test_every_problem_is_listed(tmp_path: Path) -> None:
    refusal = _refusal(tmp_path, {"weight": torch.zeros(2, 2), "scale": torch.zeros(1), "gate": torch.zeros(1)})

    assert "4 problems with its weights" in refusal
    assert "bias is missing" in refusal
    assert "gate is unknown; scale is unknown; weight has shape (2, 2), expected (3, 2)" in refusal


def test_two_keys_for_one_weight_are_refused(tmp_path: Path) -> None:
    assert "repeats bias" in _refusal(tmp_path, _weights() | {"model.bias": torch.zeros(3)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    weights = _weights()
    weights["bias"][1:] = value

    assert "bias has 2 values that are NaN or infinite" in _refusal(tmp_path, weights)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    weights = _weights() | {"bias": torch.zeros(3, dtype=torch.int8)}

    assert "bias is torch.int8, expected floating point" in _refusal(tmp_path, weights)


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(_weights(), tmp_path / "pytorch_model.bin")

    with pytest.raises(ExportError, match=r"pytorch_model.bin is a pickle") as refusal:
        load_weights(tmp_path, nn.Linear(2, 3), RULES)

    command = str(refusal.value).split("export again: ")[1]
    monkeypatch.chdir(tmp_path)
    exec(command.removeprefix('python -c "').removesuffix('"'))
    assert torch.equal(load_file("model.safetensors")["weight"], _weights()["weight"])


def test_no_weights_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_weights(tmp_path, nn.Linear(2, 3), RULES)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")

    with pytest.raises(ExportError, match=r"model.safetensors: not a readable safetensors file"):
        load_weights(tmp_path, nn.Linear(2, 3), RULES)


class TestShards:
    """model.safetensors.index.json and the files that it names."""

    @staticmethod
    def _write(directory: Path, weight_map: object) -> None:
        for name, tensor in _weights().items():
            save_file({name: tensor}, directory / f"{name}.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def test_they_are_read_together(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"weight": "weight.safetensors", "bias": "bias.safetensors"})
        model = nn.Linear(2, 3)

        load_weights(tmp_path, model, RULES)

        assert torch.equal(model.weight, _weights()["weight"])
        assert torch.equal(model.bias, _weights()["bias"])

    def test_a_missing_one_is_refused(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"weight": "weight.safetensors", "bias": "lost.safetensors"})

        with pytest.raises(ExportError, match=r"lost.safetensors: not a readable safetensors file"):
            load_weights(tmp_path, nn.Linear(2, 3), RULES)

    def test_one_outside_the_checkpoint_is_refused(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"weight": "../weight.safetensors"})

        with pytest.raises(ExportError, match=r"shard '../weight.safetensors' is not a plain file name"):
            load_weights(tmp_path, nn.Linear(2, 3), RULES)

    def test_an_index_without_a_map_is_refused(self, tmp_path: Path) -> None:
        self._write(tmp_path, None)

        with pytest.raises(ExportError, match="no weight_map"):
            load_weights(tmp_path, nn.Linear(2, 3), RULES)

    def test_a_file_name_that_is_no_text_is_refused(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"weight": "weight.safetensors", "bias": 5})

        with pytest.raises(ExportError, match="shard 5 is not a plain file name"):
            load_weights(tmp_path, nn.Linear(2, 3), RULES)

    def test_a_key_in_two_of_them_is_refused(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"weight": "weight.safetensors", "bias": "bias.safetensors"})
        save_file(_weights(), tmp_path / "bias.safetensors")

        with pytest.raises(ExportError, match=r"weight is in weight.safetensors and in another file"):
            load_weights(tmp_path, nn.Linear(2, 3), RULES)

    def test_a_key_that_is_not_where_the_index_has_it_is_refused(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"weight": "bias.safetensors", "bias": "weight.safetensors"})

        with pytest.raises(ExportError, match="4 problems with its weights") as refusal:
            load_weights(tmp_path, nn.Linear(2, 3), RULES)

        assert "bias is not in weight.safetensors, where model.safetensors.index.json has it" in str(refusal.value)
        assert "bias is in bias.safetensors, where model.safetensors.index.json does not have it" in str(refusal.value)

    def test_a_key_that_the_index_does_not_name_is_refused(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"weight": "weight.safetensors", "bias": "bias.safetensors"})
        save_file({"bias": torch.zeros(3), "head.bias": torch.zeros(1)}, tmp_path / "bias.safetensors")

        with pytest.raises(
            ExportError, match=r"1 problems.* head.bias is in bias.safetensors, where .* does not have it"
        ):
            load_weights(tmp_path, nn.Linear(2, 3), RULES)
