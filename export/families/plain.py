"""Encoders with one embedding per position: BERT and those that share its attention.

MiniLM, E5, BGE and many others are `bert`.
"""

from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AlbertModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CamembertConfig,
    CamembertForSequenceClassification,
    CamembertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForSequenceClassification,
    ElectraModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from export.families.family import Classifier, Family, count_tokens, positions_after_pad
from export.families.refusals import refuse_missing_pad, refuse_relative_positions
from export.weights import KeyRules

# TensorFlow's names, in the oldest checkpoints.
_RENAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_HEADS = ("pooler.", "classifier.", "qa_outputs.")


def _keys(prefix: str, *heads: str) -> KeyRules:
    return KeyRules(prefix=prefix, unused_prefixes=_HEADS + heads, buffers=_BUFFERS, renames=_RENAMES)


def _roberta(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    classifier_class: type[PreTrainedModel],
) -> Family:
    return Family(
        model_class=model_class,
        config_class=config_class,
        keys=_keys("roberta.", "lm_head."),
        refusals=(refuse_relative_positions, refuse_missing_pad),
        positions=count_tokens,
        num_positions=positions_after_pad,
        has_pooler=True,
        classifier=Classifier(classifier_class),
    )


def _refuse_inner_groups(config: PreTrainedConfig) -> str | None:
    if config.inner_group_num != 1:
        return f"inner_group_num is {config.inner_group_num}; supported: 1, which every released ALBERT has"
    return None


PLAIN = {
    "bert": Family(
        model_class=BertModel,
        config_class=BertConfig,
        keys=_keys("bert.", "cls."),
        classifier=Classifier(BertForSequenceClassification),
        refusals=(refuse_relative_positions,),
        has_pooler=True,
    ),
    "roberta": _roberta(RobertaModel, RobertaConfig, RobertaForSequenceClassification),
    "xlm-roberta": _roberta(XLMRobertaModel, XLMRobertaConfig, XLMRobertaForSequenceClassification),
    "camembert": _roberta(CamembertModel, CamembertConfig, CamembertForSequenceClassification),
    "distilbert": Family(
        model_class=DistilBertModel,
        config_class=DistilBertConfig,
        keys=_keys("distilbert.", "pre_classifier.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
        classifier=Classifier(DistilBertForSequenceClassification),
    ),
    "electra": Family(
        model_class=ElectraModel,
        config_class=ElectraConfig,
        keys=_keys(
            "electra.",
            "discriminator_predictions.",
            "generator_predictions.",
            "generator_lm_head.",
            "sequence_summary.",
        ),
        classifier=Classifier(ElectraForSequenceClassification),
        refusals=(refuse_relative_positions,),
    ),
    "albert": Family(
        model_class=AlbertModel,
        config_class=AlbertConfig,
        keys=_keys("albert.", "predictions.", "sop_classifier."),
        classifier=Classifier(AlbertForSequenceClassification),
        refusals=(refuse_relative_positions, _refuse_inner_groups),
        has_pooler=True,
    ),
}
