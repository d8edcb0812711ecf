"""All families by the model_type of config.json, and how one becomes a model."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from export.classifier import ClassifierHead
from export.errors import ExportError
from export.families.causal import CAUSAL
from export.families.deberta import DEBERTA_V2
from export.families.encoder import TransformersEncoder
from export.families.family import Family
from export.families.mpnet import MPNET
from export.families.nomic import NOMIC_BERT
from export.families.plain import PLAIN
from export.families.refusals import EVERYWHERE
from export.families.rotary import ROTARY

FAMILIES: dict[str, Family] = (
    PLAIN | CAUSAL | ROTARY | {"nomic_bert": NOMIC_BERT, "mpnet": MPNET, "deberta-v2": DEBERTA_V2}
)
REFUSED = {
    "deberta": "its attention ignores transformers' registry, and it has not been rewritten for the seam",
    "t5": "it makes its position bias for padded rows, and it has not been rewritten for the seam",
}


def find_family(directory: Path, content: dict[str, Any]) -> Family:
    """The family that config.json names. Raises `ExportError` where it is not supported."""
    model_type = str(content.get("model_type"))
    if model_type not in FAMILIES:
        reason = REFUSED.get(model_type, "no packed form of it has been verified")
        known = ", ".join(sorted(FAMILIES))
        raise ExportError(f"{directory}: model_type {model_type!r} is not supported: {reason}; supported: {known}")
    return FAMILIES[model_type]


def build_encoder(
    directory: Path, family: Family, content: dict[str, Any]
) -> tuple[TransformersEncoder, PreTrainedConfig]:
    """The encoder that config.json describes, its weights still random. Raises `ExportError`."""
    config = _configure(directory, family, content)
    options = {"add_pooling_layer": False} if family.has_pooler else {}
    model = _build(directory, family.model_class, config, **options)
    return _encoder(family, model), config


def build_classifier(
    directory: Path, family: Family, content: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """The whole `...ForSequenceClassification`, its weights still random. Raises `ExportError`."""
    if family.classifier is None:
        raise ExportError(
            f"{directory}: classification is not supported for model_type {content['model_type']!r}; "
            "--task embedding exports the encoder without its head"
        )
    config = _configure(directory, family, content)
    # Some of transformers' classes make their encoder in the type that config.json names.
    model = _build(directory, family.classifier.model_class, config)
    model.to(torch.float32)  # type: ignore[arg-type]  # typed for a device first
    return model, config


def split_classifier(family: Family, model: PreTrainedModel) -> tuple[TransformersEncoder, ClassifierHead]:
    """Encoder and head of what `build_classifier` made; the model falls apart."""
    assert family.classifier is not None
    encoder = _encoder(family, cast("PreTrainedModel", model.base_model))
    return encoder, ClassifierHead(model, family.classifier.classified_by(model.config))


def _encoder(family: Family, model: PreTrainedModel) -> TransformersEncoder:
    packed = None if family.packed is None else family.packed(model)
    return TransformersEncoder(model, family.positions, packed)


def _configure(directory: Path, family: Family, content: dict[str, Any]) -> PreTrainedConfig:
    # Chunks save memory in training, give the same numbers, and fail on lengths that they do not divide. A cache is for
    # models that write text.
    harmless = {"chunk_size_feed_forward": 0, "use_cache": False}
    try:
        config = family.config_class.from_dict(family.rewrite(content) | harmless)
    except Exception as error:  # transformers has no error of its own for a bad configuration
        raise _broken(directory, error) from error
    for refusal in EVERYWHERE + family.refusals:
        if problem := refusal(config):
            raise ExportError(f"{directory}: {problem}")
    return config


def _build(
    directory: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig, **options: bool
) -> PreTrainedModel:
    try:
        model = model_class(config, **options)
    except Exception as error:  # as above
        raise _broken(directory, error) from error
    if not getattr(config, "is_causal", True):
        _let_see_both_ways(model)
    return model


def _let_see_both_ways(model: PreTrainedModel) -> None:
    """What transformers' mask does for `is_causal` false; the seam makes no mask and asks the attention modules."""
    for module in model.modules():
        if getattr(module, "is_causal", False):
            setattr(module, "is_causal", False)  # noqa: B010  # nn.Module is typed to hold tensors and modules alone


def _broken(directory: Path, error: Exception) -> ExportError:
    return ExportError(f"{directory / 'config.json'}: transformers builds no model from it: {error}")
