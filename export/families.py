"""Families of models: which ones are supported, what differs between them, and why the others are refused.

A family is here when its attention has been proved to go through the seam. A model that does it elsewhere would be
exported with wrong numbers, after a warning at most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedConfig, PreTrainedModel

from export.attention import ATTENTION, Packing, register_with_transformers
from export.errors import ExportError
from export.weights import KeyRules


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families of models. `refuse` says what about a config.json is not supported."""

    model_class: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]
    keys: KeyRules
    refuse: Callable[[dict[str, Any]], str | None]


class TransformersEncoder(nn.Module):
    """A transformers model behind the calling convention of `export.encoder.Encoder`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        register_with_transformers()
        self.model = model

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Packed, (T,) -> (T, E), through the seam; or padded, (B, S) -> (B, S, E), in transformers' own attention."""
        inputs = {"input_ids": token_ids, "position_ids": position_ids, "token_type_ids": token_type_ids}
        if packing is None:
            self.model.set_attn_implementation("eager")
            padded = self.model(**inputs, attention_mask=None if mask is None else mask.long())
            return padded.last_hidden_state  # type: ignore[no-any-return]  # transformers returns untyped outputs
        self.model.set_attn_implementation(ATTENTION)
        batch_of_one = {name: ids if ids is None else ids.unsqueeze(0) for name, ids in inputs.items()}  # (1, T) each
        packed = self.model(**batch_of_one, packing=packing)
        return packed.last_hidden_state.squeeze(0)  # type: ignore[no-any-return]  # as above


def find_family(directory: Path, content: dict[str, Any]) -> Family:
    """The family that config.json names. Raises `ExportError` where it is not supported."""
    model_type = str(content.get("model_type"))
    if model_type not in FAMILIES:
        reason = _REFUSED.get(model_type, "no packed form of it has been verified")
        known = ", ".join(sorted(FAMILIES))
        raise ExportError(f"{directory}: model_type {model_type!r} is not supported: {reason}; supported: {known}")
    if problem := FAMILIES[model_type].refuse(content):
        raise ExportError(f"{directory}: {problem}")
    return FAMILIES[model_type]


def build_model(directory: Path, family: Family, content: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """The model that config.json describes, its weights still random. Raises `ExportError`."""
    try:
        # Chunks save memory in training, give the same numbers, and fail on lengths that they do not divide.
        config = family.config_class.from_dict(content | {"chunk_size_feed_forward": 0})
        return family.model_class(config, add_pooling_layer=False), config
    except Exception as error:  # transformers has no error of its own for a bad configuration
        raise ExportError(f"{directory / 'config.json'}: transformers builds no model from it: {error}") from error


def _refuse_bert(content: dict[str, Any]) -> str | None:
    kind = content.get("position_embedding_type", "absolute")
    if kind != "absolute":
        return f"position_embedding_type is {kind!r}, which transformers now ignores; supported: absolute"
    if content.get("is_decoder") or content.get("add_cross_attention"):
        return "it is a decoder (is_decoder or add_cross_attention); only encoders are served"
    return None


FAMILIES = {
    "bert": Family(
        model_class=BertModel,
        config_class=BertConfig,
        keys=KeyRules(
            prefix="bert.",
            unused_prefixes=("pooler.", "cls.", "classifier.", "qa_outputs."),
            buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
            renames=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
        ),
        refuse=_refuse_bert,
    ),
}
_RELATIVE = "its relative position bias is added inside attention, where the fused operator cannot see it"
_REFUSED = {"mpnet": _RELATIVE, "deberta": _RELATIVE, "deberta-v2": _RELATIVE, "t5": _RELATIVE}
