"""Models that are no Hugging Face checkpoints, each as small as its kind allows: written, named, and the module itself.

`write_own("torch.nn.TransformerEncoder", directory)` gives what `mhsa-export` is told; OWN_MODELS names all kinds. The
Vaswani encoder has the paper's base shape. The user's module is `build` in this file.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from export.attention import Packing, attend
from export.encoder import Encoder, EncoderConfig, MultiHeadSelfAttention
from export.modules import ServedModule
from export.sources import Source

WIDTH, HEADS, INPUT_SIZE, VOCABULARY = 32, 4, 12, 1000
_BASE = EncoderConfig(VOCABULARY)
_PLAIN = {"num_heads": HEADS, "is_causal": False, "max_sequence_tokens": 64}


@dataclass(frozen=True, slots=True, eq=False)
class OwnModel:
    """How to build it, config.json, and one sequence alone: (L,) or (L, width) -> (L, E), by nobody's packed form."""

    build: Callable[[], nn.Module]
    config: dict[str, Any]
    alone: Callable[[nn.Module, Tensor], Tensor]
    num_layers: int


class UsersModule(nn.Module):
    """Vectors of 12, two layers of attention between residuals, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(INPUT_SIZE, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(
        self,
        inputs: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Both forms."""
        if position_ids is None:
            position_ids = torch.arange(inputs.shape[1])
        x: Tensor = self.into(inputs) + self.positions(position_ids)
        for projection in self.projections:
            query, key, value = projection(x).chunk(3, -1)
            x = x + self.dropout(attend(query, key, value, num_heads=HEADS, mask=mask, packing=packing))
        return x


def build() -> ServedModule:
    """What `--module tests.own_models:build` calls."""
    torch.manual_seed(0)
    return ServedModule(
        UsersModule(), hidden_size=WIDTH, num_layers=2, num_heads=HEADS, max_sequence_tokens=64, input_size=INPUT_SIZE
    )


def write_own(kind: str, directory: Path) -> Source:
    """Write it, if there is something to write."""
    if kind == "module":
        return Source(None, module="tests.own_models:build")
    model = OWN_MODELS[kind]
    weights = module_of(kind).state_dict()
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(model.config))
    return Source(directory)


def module_of(kind: str) -> nn.Module:
    """With random weights, the same every time."""
    if kind == "module":
        return build().module.eval()
    torch.manual_seed(0)
    module = OWN_MODELS[kind].build()
    with torch.no_grad():  # norms and biases start as ones and zeros, behind which a mistake could hide
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    return module.eval()


def alone(kind: str, sequence: Tensor) -> Tensor:
    """What the model makes of one sequence by itself."""
    with torch.no_grad():
        return OWN_MODELS[kind].alone(module_of(kind), sequence)


def _torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, activation="gelu", norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def _vaswani() -> nn.Module:
    """Base shape. Embeddings of order 1 / sqrt(d_model), as it scales them up by sqrt(d_model).

    torch's own, of order 1, make logits so large that PyTorch's float32 is off by 1e-4 from float64.
    """
    encoder = Encoder(_BASE)
    with torch.no_grad():
        encoder.embedding.weight.mul_(_BASE.d_model**-0.5)
    return encoder


def _through_all(layers: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layers, nn.ModuleList)
    x = x.unsqueeze(0)
    for layer in layers:
        x = layer(x)
    return x[0]


def _by_itself(module: nn.Module, x: Tensor) -> Tensor:
    encoded: Tensor = module(x.unsqueeze(0))[0]
    return encoded


OWN_MODELS: dict[str, OwnModel] = {
    "mhsa": OwnModel(
        lambda: MultiHeadSelfAttention(WIDTH, HEADS), {"model_type": "mhsa", **_PLAIN}, _by_itself, num_layers=1
    ),
    "mhsa, stacked": OwnModel(
        lambda: nn.ModuleList(MultiHeadSelfAttention(WIDTH, HEADS) for _ in range(3)),
        {"model_type": "mhsa", **_PLAIN},
        _through_all,
        num_layers=3,
    ),
    "mhsa_encoder": OwnModel(
        _vaswani,
        {"model_type": "mhsa_encoder", "pad_token_id": 0, **asdict(_BASE)},
        _by_itself,
        num_layers=6,
    ),
    "torch.nn.MultiheadAttention": OwnModel(
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        {"model_type": "torch.nn.MultiheadAttention", "add_zero_attn": False, **_PLAIN},
        lambda module, x: module(*[x.unsqueeze(0)] * 3)[0][0],
        num_layers=1,
    ),
    "torch.nn.TransformerEncoder": OwnModel(
        _torch_encoder,
        {
            "model_type": "torch.nn.TransformerEncoder",
            "activation": "gelu",
            "norm_first": True,
            "layer_norm_eps": 1e-5,
            **_PLAIN,
        },
        _by_itself,
        num_layers=2,
    ),
    "module": OwnModel(lambda: build().module, {}, _by_itself, num_layers=2),
}
