"""All families by the model_type of config.json, and how one becomes a model."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

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
_REFUSED = {
    "deberta": "its attention ignores transformers' registry, and it has not been rewritten for the seam",
    "t5": "it makes its position bias for padded rows, and it has not been rewritten for the seam",
}


def find_family(directory: Path, content: dict[str, Any]) -> Family:
    """The family that config.json names. Raises `ExportError` where it is not supported."""
    model_type = str(content.get("model_type"))
    if model_type not in FAMILIES:
        reason = _REFUSED.get(model_type, "no packed form of it has been verified")
        known = ", ".join(sorted(FAMILIES))
        raise ExportError(f"{directory}: model_type {model_type!r} is not supported: {reason}; supported: {known}")
    return FAMILIES[model_type]


def build_encoder(
    directory: Path, family: Family, content: dict[str, Any]
) -> tuple[TransformersEncoder, PreTrainedConfig]:
    """The model that config.json describes, its weights still random. Raises `ExportError`."""
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
    try:
        model = family.model_class(config, **({"add_pooling_layer": False} if family.has_pooler else {}))
    except Exception as error:  # as above
        raise _broken(directory, error) from error
    if not getattr(config, "is_causal", True):
        _let_see_both_ways(model)
    packed = None if family.packed is None else family.packed(model)
    return TransformersEncoder(model, family.positions, packed), config


def _let_see_both_ways(model: PreTrainedModel) -> None:
    """What transformers' mask does for `is_causal` false; the seam makes no mask and asks the attention modules."""
    for module in model.modules():
        if getattr(module, "is_causal", False):
            setattr(module, "is_causal", False)  # noqa: B010  # nn.Module is typed to hold tensors and modules alone


def _broken(directory: Path, error: Exception) -> ExportError:
    return ExportError(f"{directory / 'config.json'}: transformers builds no model from it: {error}")
