"""What about a configuration is not supported, each with its reason. To ignore such a field gives wrong numbers."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig


def refuse_quantized(config: PreTrainedConfig) -> str | None:
    """Weights that were quantized need the code that reads them back."""
    kind = getattr(config, "quantization_config", None)
    if kind is None:
        return None
    method = kind.get("quant_method", "unknown") if isinstance(kind, Mapping) else "unknown"
    return f"it is quantized (quantization_config, method {method!r}); export the checkpoint that it was made from"


def refuse_decoder(config: PreTrainedConfig) -> str | None:
    """Cross attention needs a second model's output."""
    if getattr(config, "add_cross_attention", False):
        return "it has cross attention (add_cross_attention), which needs an encoder's output beside the tokens"
    if getattr(config, "is_decoder", False):
        return "it is a decoder of an encoder's family (is_decoder); set is_decoder to false if it is to see both ways"
    return None


def refuse_uneven_heads(config: PreTrainedConfig) -> str | None:
    """Some of transformers' models round the head size down and go on."""
    num_heads, width = config.num_attention_heads, config.hidden_size
    if getattr(config, "head_dim", None) is None and width % num_heads:
        return f"hidden_size {width} is not a multiple of num_attention_heads {num_heads}; correct config.json"
    num_key_heads = getattr(config, "num_key_value_heads", None)
    if num_key_heads and num_heads % num_key_heads:
        return f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_key_heads}; correct them"
    return None


def refuse_softcap(config: PreTrainedConfig) -> str | None:
    """Gemma's soft cap on scores, which the fused operator lacks."""
    for name in ("attn_logit_softcapping", "attention_logit_cap"):
        if getattr(config, name, None) is not None:
            return f"{name} is {getattr(config, name)}: a cap on attention's scores, which fused attention lacks"
    return None


_LAYER_TYPES = ("full_attention", "sliding_attention")


def refuse_layer_types(config: PreTrainedConfig) -> str | None:
    """Newer configurations name the attention of each layer."""
    kinds = getattr(config, "layer_types", None) or []
    if unknown := sorted(set(kinds) - set(_LAYER_TYPES)):
        return f"layer_types has {', '.join(unknown)}; supported: {', '.join(_LAYER_TYPES)}"
    if "sliding_attention" in kinds and getattr(config, "sliding_window", None) is None:
        return "layer_types has sliding_attention and there is no sliding_window; set how many columns it has"
    return None


def refuse_relative_positions(config: PreTrainedConfig) -> str | None:
    """Older BERTs could add relative positions to their scores."""
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind != "absolute":
        return f"position_embedding_type is {kind!r}, which transformers now ignores; supported: absolute"
    return None


def refuse_missing_pad(config: PreTrainedConfig) -> str | None:
    """Positions that start behind the pad token need one."""
    if config.pad_token_id is None:
        return "pad_token_id is null, and positions start at pad_token_id + 1; set it as the tokenizer has it"
    if config.max_position_embeddings <= config.pad_token_id + 1:
        return (
            f"max_position_embeddings {config.max_position_embeddings} leaves no position behind pad_token_id "
            f"{config.pad_token_id}; correct one of them"
        )
    return None


# These frequencies depend on the configuration alone. The others depend on how long the batch is.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


def refuse_rotary(config: PreTrainedConfig) -> str | None:
    """Rotary frequencies that change with the length would make an answer depend on its batch mates."""
    parameters: dict[str, Any] = config.rope_parameters or {}
    by_layer_type = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    for part in by_layer_type:
        kind = part.get("rope_type", "default")
        if kind not in _FIXED_ROTARY:
            known = ", ".join(_FIXED_ROTARY)
            return f"rope_type is {kind!r}, whose rotation depends on the length of the batch; supported: {known}"
    return None


EVERYWHERE = (refuse_quantized, refuse_decoder, refuse_uneven_heads, refuse_softcap, refuse_layer_types)
