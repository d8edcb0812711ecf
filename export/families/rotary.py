"""Encoders that rotate queries and keys by position. They do so before the seam, which sees rotated rows only.

Nomic-BERT and Jina-v3 are saved by transformers under the names that their authors gave: one weight for query, key and
value. Source of the names: transformers' conversion_mapping.py.
"""

from transformers import (
    EuroBertConfig,
    EuroBertModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedConfig,
)

from export.families.family import Family
from export.families.refusals import refuse_rotary
from export.weights import KeyRules

_FREQUENCIES = "*rotary_emb.inv_freq"
_QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_AUTHORS_NAMES = (
    ("encoder.layers", "layers"),
    ("emb_ln", "embeddings.LayerNorm"),
    ("norm1", "post_attention_layernorm"),
    ("norm2", "post_mlp_layernorm"),
)


def _refuse_authors_fields(config: PreTrainedConfig) -> str | None:
    """The configuration of Nomic's own code: transformers would take defaults for what has another name there."""
    foreign = [name for name in ("n_embd", "n_layer", "n_head", "rotary_emb_base") if hasattr(config, name)]
    if foreign:
        return (
            f"config.json has {', '.join(foreign)}, which are fields of Nomic's own Python code, and transformers' "
            "NomicBert does not read them; use a checkpoint that transformers saved"
        )
    return None


ROTARY = {
    "nomic_bert": Family(
        model_class=NomicBertModel,
        config_class=NomicBertConfig,
        keys=KeyRules(
            prefix="nomic_bert.",
            unused_prefixes=("pooler.", "cls.", "classifier."),
            buffers=(_FREQUENCIES,),
            renames=(
                *_AUTHORS_NAMES,
                ("attn.out_proj", "self_attn.o_proj"),
                ("fc11", "up_proj"),
                ("fc12", "gate_proj"),
                ("fc2", "down_proj"),
            ),
            splits=(("attn.Wqkv", _QUERY_KEY_VALUE),),
        ),
        refusals=(_refuse_authors_fields, refuse_rotary),
        ported_from=frozenset({"configuration_hf_nomic_bert", "modeling_hf_nomic_bert"}),
    ),
    "jina_embeddings_v3": Family(
        model_class=JinaEmbeddingsV3Model,
        config_class=JinaEmbeddingsV3Config,
        keys=KeyRules(
            prefix="roberta.",
            unused_prefixes=("pooler.", "lm_head.", "classifier.", "qa_outputs."),
            buffers=(_FREQUENCIES,),
            renames=(*_AUTHORS_NAMES, ("mixer.out_proj", "self_attn.o_proj")),
            splits=(("mixer.Wqkv", _QUERY_KEY_VALUE),),
        ),
        refusals=(refuse_rotary,),
        has_pooler=True,
    ),
    "eurobert": Family(
        model_class=EuroBertModel,
        config_class=EuroBertConfig,
        keys=KeyRules(prefix="model.", unused_prefixes=("lm_head.", "dense.", "classifier."), buffers=(_FREQUENCIES,)),
        refusals=(refuse_rotary,),
        ported_from=frozenset({"configuration_eurobert", "modeling_eurobert"}),
    ),
    "modernbert": Family(
        model_class=ModernBertModel,
        config_class=ModernBertConfig,
        keys=KeyRules(prefix="model.", unused_prefixes=("head.", "decoder.", "classifier."), buffers=(_FREQUENCIES,)),
        refusals=(refuse_rotary,),
    ),
}
