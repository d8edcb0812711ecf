"""Decoders that embed: every token sees itself and what stands before it, and the last one is usually the embedding.

Unless `is_causal` is false in config.json: then transformers lets every token see all of them, and so does the seam.
"""

from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2Model,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from export.families.family import Classifier, Family, by_last_row
from export.families.refusals import refuse_rotary
from export.weights import KeyRules


def _refuse_other_sight(config: PreTrainedConfig) -> str | None:
    """Transformers ignores the one, and its windows that see both ways include a column more than the causal ones."""
    if getattr(config, "use_bidirectional_attention", None):
        return (
            "use_bidirectional_attention is true, which transformers ignores in this family; is_causal false is known"
        )
    if getattr(config, "use_sliding_window", False) and not getattr(config, "is_causal", True):
        return "use_sliding_window is true and is_causal false; windows are known for causal attention only"
    return None


CAUSAL = {
    "gpt2": Family(
        model_class=GPT2Model,
        config_class=GPT2Config,
        keys=KeyRules(
            prefix="transformer.",
            unused_prefixes=("lm_head.", "score.", "classifier.", "qa_outputs.", "multiple_choice_head."),
            # Older versions saved the causal mask of every layer.
            buffers=("h.*.attn.bias", "h.*.attn.masked_bias"),
        ),
        refusals=(_refuse_other_sight,),
        classifier=Classifier(GPT2ForSequenceClassification, by_last_row),
    ),
    "qwen3": Family(
        model_class=Qwen3Model,
        config_class=Qwen3Config,
        keys=KeyRules(
            prefix="model.", unused_prefixes=("lm_head.", "score.", "qa_outputs."), buffers=("*rotary_emb.inv_freq",)
        ),
        refusals=(refuse_rotary, _refuse_other_sight),
        classifier=Classifier(Qwen3ForSequenceClassification, by_last_row),
    ),
}
