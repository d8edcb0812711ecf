"""State dicts under the keys that torch and the textbook give them; and everything about one that is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from export.checkpoint import Checkpoint
from export.encoder import Encoder, EncoderConfig, MultiHeadSelfAttention
from export.errors import ExportError
from export.plain import AttentionStack, TorchAttention, TorchEncoder
from export.state_dicts import read_state_dict
from export.steps import export_checkpoint
from service.bundle import read_bundle
from tests.checkpoints import write_tokenizer

WIDTH, HEADS = 16, 4
_PLAIN = {"num_heads": HEADS, "is_causal": False, "max_sequence_tokens": 24}
MHSA = {"model_type": "mhsa", **_PLAIN}
ATTENTION = {"model_type": "torch.nn.MultiheadAttention", "add_zero_attn": False, **_PLAIN}
TORCH = {
    "model_type": "torch.nn.TransformerEncoder",
    "activation": "gelu",
    "norm_first": True,
    "layer_norm_eps": 1e-6,
    **_PLAIN,
}
CONFIG = EncoderConfig(120, d_model=WIDTH, n_heads=HEADS, n_layers=2, d_ff=24, max_positions=20, norm="pre")
VASWANI = {
    "model_type": "mhsa_encoder",
    "vocab_size": 120,
    "d_model": WIDTH,
    "n_heads": HEADS,
    "n_layers": 2,
    "d_ff": 24,
    "max_positions": 20,
    "positions": "sinusoidal",
    "norm": "pre",
    "activation": "relu",
    "is_causal": False,
    "pad_token_id": 1,
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _torch_encoder(*, bias: bool = True, has_norm: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, bias=bias, batch_first=True, norm_first=True)
    norm = nn.LayerNorm(WIDTH, bias=bias) if has_norm else None
    return nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)


def _save(directory: Path, weights: dict[str, Tensor], prefix: str = "") -> Path:
    path = directory / "weights.safetensors"
    save_file({prefix + key: tensor.clone().contiguous() for key, tensor in weights.items()}, path)
    return path


def _read(directory: Path, weights: dict[str, Tensor], config: dict[str, Any], prefix: str = "") -> Checkpoint:
    return read_state_dict(_save(directory, weights, prefix), config)


def _refusal(directory: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> str:
    with pytest.raises(ExportError) as refusal:
        _read(directory, weights, config)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def _assert_same(found: nn.Module, expected: nn.Module) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key


@pytest.mark.parametrize("prefix", ["", "attention.", "model.layer.attention."])
def test_one_attention_is_read_under_any_prefix(prefix: str, tmp_path: Path) -> None:
    attention = MultiHeadSelfAttention(WIDTH, HEADS)

    found = _read(tmp_path, attention.state_dict(), MHSA, prefix)

    assert isinstance(found.encoder, AttentionStack)
    _assert_same(found.encoder.layers[0], attention)
    assert (found.family, found.num_layers, found.num_heads, found.hidden_size) == ("mhsa", 1, HEADS, WIDTH)
    assert (found.input_size, found.vocab_size, found.max_sequence_tokens) == (WIDTH, 0, 24)


@pytest.mark.parametrize("prefix", ["", "layers.", "model.blocks."])
@pytest.mark.parametrize("num_layers", [1, 12])
def test_a_stack_is_read_in_the_order_of_its_numbers(num_layers: int, prefix: str, tmp_path: Path) -> None:
    layers = nn.ModuleList(MultiHeadSelfAttention(WIDTH, HEADS) for _ in range(num_layers))

    found = _read(tmp_path, layers.state_dict(), MHSA, prefix)

    assert isinstance(found.encoder, AttentionStack)
    _assert_same(found.encoder.layers, layers)
    assert found.num_layers == num_layers


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "module.encoder."])
def test_torchs_encoder_is_read_with_what_it_was_built_with(
    prefix: str, bias: bool, has_norm: bool, tmp_path: Path
) -> None:
    encoder = _torch_encoder(bias=bias, has_norm=has_norm)

    found = _read(tmp_path, encoder.state_dict(), TORCH, prefix)

    assert isinstance(found.encoder, TorchEncoder)
    _assert_same(found.encoder.encoder, encoder)
    layer = found.encoder.encoder.layers[0]
    assert isinstance(layer, nn.TransformerEncoderLayer)
    assert (layer.norm_first, layer.norm1.eps, found.encoder.is_causal) == (True, 1e-6, False)
    assert layer.activation is nn.functional.gelu
    assert getattr(found.encoder.encoder.norm, "eps", None) == (1e-6 if has_norm else None)
    assert (found.num_layers, found.input_size) == (3, WIDTH)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "self_attn."])
def test_torchs_attention_is_read(prefix: str, bias: bool, tmp_path: Path) -> None:
    attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias)

    found = _read(tmp_path, attention.state_dict(), ATTENTION, prefix)

    assert isinstance(found.encoder, TorchAttention)
    _assert_same(found.encoder.attention, attention)


def test_vaswanis_encoder_is_read_from_a_directory_with_its_tokenizer(tmp_path: Path) -> None:
    encoder = Encoder(CONFIG)
    save_file(encoder.state_dict(), tmp_path / "model.safetensors")
    write_tokenizer(tmp_path, 120)

    found = read_state_dict(tmp_path, VASWANI)

    assert isinstance(found.encoder, Encoder)
    assert found.encoder.config == CONFIG
    _assert_same(found.encoder, encoder)
    assert (found.input_size, found.vocab_size, found.pad_token_id, found.max_sequence_tokens) == (0, 120, 1, 20)
    assert found.tokenize is not None
    assert all(0 <= token < 120 for token in found.tokenize("some text"))
    assert "tokenizer.json" in {file.name for file in found.tokenizer_files}


def test_vaswanis_encoder_needs_no_tokenizer(tmp_path: Path) -> None:
    found = _read(tmp_path, Encoder(CONFIG).state_dict(), VASWANI)

    assert (found.tokenize, found.tokenizer_files) == (None, ())


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    save_file(Encoder(CONFIG).state_dict(), tmp_path / "model.safetensors")
    write_tokenizer(tmp_path, 130)

    with pytest.raises(ExportError, match="the tokenizer's largest id is 129, the embedding has 120 rows"):
        read_state_dict(tmp_path, VASWANI)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    save_file(Encoder(CONFIG).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ExportError, match="its tokenizer cannot be read"):
        read_state_dict(tmp_path, VASWANI)


def test_half_precision_is_read_as_float32(tmp_path: Path) -> None:
    weights = {key: tensor.bfloat16() for key, tensor in MultiHeadSelfAttention(WIDTH, HEADS).state_dict().items()}

    found = _read(tmp_path, weights, MHSA)

    assert all(tensor.dtype == torch.float32 for tensor in found.encoder.state_dict().values())


@pytest.mark.parametrize("config", [{}, {"model_type": "mhs"}, {"model_type": 5}])
def test_weights_of_nobody_knows_what_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    message = _refusal(tmp_path, MultiHeadSelfAttention(WIDTH, HEADS).state_dict(), config)

    assert "--set model_type=NAME with one of mhsa, mhsa_encoder, torch.nn.TransformerEncoder" in message


@pytest.mark.parametrize("config", [MHSA, ATTENTION, TORCH, VASWANI], ids=lambda config: config["model_type"])
def test_every_fact_is_asked_for(config: dict[str, Any], tmp_path: Path) -> None:
    message = _refusal(tmp_path, {"x": torch.zeros(1)}, {"model_type": config["model_type"]})

    assert config.keys() - {"model_type"} == set(re.findall(r"(\w+) \(", message))


WEIGHTS: dict[str, tuple[dict[str, Any], Any]] = {
    "mhsa": (MHSA, lambda: MultiHeadSelfAttention(WIDTH, HEADS)),
    "stack": (MHSA, lambda: nn.ModuleList(MultiHeadSelfAttention(WIDTH, HEADS) for _ in range(3))),
    "torch attention": (ATTENTION, lambda: nn.MultiheadAttention(WIDTH, HEADS)),
    "torch encoder": (TORCH, _torch_encoder),
    "Vaswani": (VASWANI, lambda: Encoder(CONFIG)),
}


@pytest.fixture(params=WEIGHTS)
def right(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A configuration and weights that fit."""
    config, build = WEIGHTS[request.param]
    return config, dict(build().state_dict())


Right = tuple[dict[str, Any], dict[str, Tensor]]


def test_any_missing_key_is_named(right: Right, tmp_path: Path) -> None:
    config, weights = right
    for key in weights:
        message = _refusal(tmp_path, {name: w for name, w in weights.items() if name != key}, config)
        # A bias that is absent may be one that was never there; then it is the others that are too many.
        assert (
            key.split(".", 2)[-1] in message
            or "bias is unknown" in message
            or "one prefix and layers from 0" in message
        )


def test_an_extra_key_is_named(right: Right, tmp_path: Path) -> None:
    config, weights = right

    assert "dropout.rate is unknown" in _refusal(tmp_path, weights | {"dropout.rate": torch.ones(1)}, config)


def test_a_key_of_another_shape_is_named(right: Right, tmp_path: Path) -> None:
    config, weights = right
    key = next(name for name in reversed(weights) if name.endswith("weight"))

    assert key in _refusal(tmp_path, weights | {key: torch.zeros(3, 5, 7)}, config)


def test_a_value_that_is_nan_is_refused(right: Right, tmp_path: Path) -> None:
    config, weights = right
    key = list(weights)[-1]
    weights[key] = weights[key].clone()
    weights[key].view(-1)[2] = torch.nan

    assert f"{key} has 1 values that are NaN or infinite" in _refusal(tmp_path, weights, config)


def test_heads_that_do_not_divide_the_width_are_refused(right: Right, tmp_path: Path) -> None:
    config, weights = right
    name = "n_heads" if "n_heads" in config else "num_heads"

    assert "5 heads do not divide the width of 16" in _refusal(tmp_path, weights, config | {name: 5})


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    message = _refusal(tmp_path, {"fc.weight": torch.zeros(2, 2)}, MHSA)

    assert "no q_lin.weight in it; its keys are fc.weight" in message


def test_layers_with_a_gap_are_refused(tmp_path: Path) -> None:
    weights = nn.ModuleList(MultiHeadSelfAttention(WIDTH, HEADS) for _ in range(3)).state_dict()
    gap = {key: tensor for key, tensor in weights.items() if not key.startswith("1.")}

    assert "q_lin.weight is under 0., 2.; one prefix and layers from 0 are wanted" in _refusal(tmp_path, gap, MHSA)


def test_attentions_under_two_prefixes_are_refused(tmp_path: Path) -> None:
    weights = MultiHeadSelfAttention(WIDTH, HEADS).state_dict()
    two = {f"{prefix}.{key}": tensor.clone() for prefix in ("a.0", "b.1") for key, tensor in weights.items()}

    assert "q_lin.weight is under a.0., b.1." in _refusal(tmp_path, two, MHSA)


def test_a_projection_to_another_width_is_refused(tmp_path: Path) -> None:
    assert "q_lin.weight has shape (8, 16)" in _refusal(tmp_path, {"q_lin.weight": torch.zeros(8, 16)}, MHSA)


def test_a_layers_number_with_a_leading_zero_is_a_name(tmp_path: Path) -> None:
    found = _read(tmp_path, MultiHeadSelfAttention(WIDTH, HEADS).state_dict(), MHSA, "00.")

    assert found.num_layers == 1


@pytest.mark.parametrize("shape", [(), (7,), (24, 5), (10**12, 0)])
def test_a_feed_forward_network_of_no_shape_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    weights = _torch_encoder().state_dict() | {"layers.0.linear1.weight": torch.zeros(shape)}

    assert f"layers.0.linear1.weight has shape {shape}, expected (1, 16)" in _refusal(tmp_path, weights, TORCH)


def test_a_layer_that_is_not_there_is_named_before_it_is_built(tmp_path: Path) -> None:
    weights = {key: tensor for key, tensor in Encoder(CONFIG).state_dict().items() if not key.startswith("layers.0.")}

    assert "layers.0.ff_in.weight is missing, by config.json it is (24, 16)" in _refusal(tmp_path, weights, VASWANI)


def test_cross_attention_is_refused(tmp_path: Path) -> None:
    weights = nn.MultiheadAttention(WIDTH, HEADS, kdim=8, vdim=12).state_dict()

    assert "q_proj_weight: keys or values of another width (kdim, vdim)" in _refusal(tmp_path, weights, ATTENTION)


def test_an_extra_key_and_value_are_refused(tmp_path: Path) -> None:
    weights = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True).state_dict()

    assert "bias_k: an extra key and value (add_bias_kv)" in _refusal(tmp_path, weights, ATTENTION)


def test_a_zero_attention_is_refused(tmp_path: Path) -> None:
    weights = nn.MultiheadAttention(WIDTH, HEADS).state_dict()

    assert "wrong: add_zero_attn (false) is true" in _refusal(tmp_path, weights, ATTENTION | {"add_zero_attn": True})


def test_a_decoder_is_refused(tmp_path: Path) -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 24), 1)

    message = _refusal(tmp_path, decoder.state_dict(), TORCH)

    assert "layers.0.multihead_attn.in_proj_weight is unknown" in message


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 121), ("d_model", 32), ("d_ff", 25), ("n_layers", 3)])
def test_sizes_that_the_file_does_not_have_are_refused(name: str, value: int, tmp_path: Path) -> None:
    message = _refusal(tmp_path, Encoder(CONFIG).state_dict(), VASWANI | {name: value})

    assert re.search(r"(has shape \(.*\)|is missing), by config.json it is \(.*\); correct one of them", message)


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.bin"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(name: str, tmp_path: Path) -> None:
    torch.save(MultiHeadSelfAttention(WIDTH, HEADS).state_dict(), tmp_path / name)

    with pytest.raises(ExportError, match=r"is a pickle.*convert it.*torch.load\('" + re.escape(name)):
        read_state_dict(tmp_path / name, {})


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_text("nothing")

    with pytest.raises(ExportError, match="not a readable safetensors file"):
        read_state_dict(tmp_path / "weights.safetensors", MHSA)


@pytest.mark.parametrize("kind", ["stack", "torch attention", "torch encoder", "Vaswani"])
def test_a_state_dict_becomes_a_verified_bundle(kind: str, tmp_path: Path) -> None:
    config, build = WEIGHTS[kind]
    checkpoint = tmp_path / "own"
    checkpoint.mkdir()
    module = build()
    save_file(module.state_dict(), checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(config))

    path, report = export_checkpoint(checkpoint, tmp_path / "models", pooling="mean", normalize=False)

    manifest = read_bundle(path).manifest
    num_layers = {"stack": 3, "torch attention": 1, "torch encoder": 3, "Vaswani": 2}[kind]
    assert manifest.family == config["model_type"]
    assert report.fusion.optimized_attention_nodes == manifest.num_layers == num_layers
    expected = ("token_ids", 0, 120) if kind == "Vaswani" else ("embeddings", WIDTH, 0)
    assert (manifest.input, manifest.input_size, manifest.vocab_size) == expected
    assert (manifest.hidden_size, manifest.output_size) == (WIDTH, WIDTH)
    vectors = [sequence.embeddings for sequence in read_bundle(path).golden.sequences]
    assert [vector is not None for vector in vectors] == [kind != "Vaswani"] * 8
