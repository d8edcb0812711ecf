"""Encoders that rotate queries and keys by position. They do so before the seam, which sees rotated rows only.

Jina-v3 (and Nomic-BERT, nomic.py) are saved by transformers under the names that their authors gave: one weight for
query, key and value. Source of the names: transformers' conversion_mapping.py.
"""

from transformers import (
    EuroBertConfig,
    EuroBertForSequenceClassification,
    EuroBertModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForSequenceClassification,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
)

from export.families.family import Classifier, Family, by_classifier_pooling
from export.families.refusals import refuse_rotary
from export.weights import KeyRules

FREQUENCIES = "*rotary_emb.inv_freq"
QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
AUTHORS_NAMES = (
    ("encoder.layers", "layers"),
    ("emb_ln", "embeddings.LayerNorm"),
    ("norm1", "post_attention_layernorm"),
    ("norm2", "post_mlp_layernorm"),
)


ROTARY = {
    "jina_embeddings_v3": Family(
        model_class=JinaEmbeddingsV3Model,
        config_class=JinaEmbeddingsV3Config,
        classifier=Classifier(JinaEmbeddingsV3ForSequenceClassification),
        keys=KeyRules(
            prefix="roberta.",
            unused_prefixes=("pooler.", "lm_head.", "classifier.", "qa_outputs."),
            buffers=(FREQUENCIES,),
            renames=(*AUTHORS_NAMES, ("mixer.out_proj", "self_attn.o_proj")),
            splits=(("mixer.Wqkv", QUERY_KEY_VALUE),),
        ),
        refusals=(refuse_rotary,),
        has_pooler=True,
    ),
    "eurobert": Family(
        model_class=EuroBertModel,
        config_class=EuroBertConfig,
        classifier=Classifier(EuroBertForSequenceClassification, by_classifier_pooling),
        keys=KeyRules(prefix="model.", unused_prefixes=("lm_head.", "dense.", "classifier."), buffers=(FREQUENCIES,)),
        refusals=(refuse_rotary,),
        ported_from=frozenset({"configuration_eurobert", "modeling_eurobert"}),
    ),
    "modernbert": Family(
        model_class=ModernBertModel,
        config_class=ModernBertConfig,
        classifier=Classifier(ModernBertForSequenceClassification, by_classifier_pooling),
        keys=KeyRules(prefix="model.", unused_prefixes=("head.", "decoder.", "classifier."), buffers=(FREQUENCIES,)),
        refusals=(refuse_rotary,),
    ),
}
