"""What one family of transformers models is to the exporter: a record, and the few ways in which families differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from export.attention import Packing
from export.classifier import ClassifiedBy
from export.weights import KeyRules

# What about a configuration is not supported, or None.
Refusal = Callable[[PreTrainedConfig], str | None]
# (configuration, token_ids (T,), columns (T,), packing) -> the position ids (T,) that the model is to look up.
Positions = Callable[[PreTrainedConfig, Tensor, Tensor, Packing], Tensor]


def keep_columns(_config: PreTrainedConfig, _token_ids: Tensor, columns: Tensor, _packing: Packing) -> Tensor:
    """The position is the column that the token had when padded: most families."""
    return columns


def count_tokens(config: PreTrainedConfig, token_ids: Tensor, _columns: Tensor, packing: Packing) -> Tensor:
    """The n-th token that is not the pad token has position pad_token_id + n; the pad token itself has pad_token_id.

    Holes and left padding are not counted. Source: create_position_ids_from_input_ids of transformers' RoBERTa, which
    goes by the token's id and not by the mask.
    """
    is_counted = (token_ids != config.pad_token_id).long()  # (T,)
    ranks = packing.unpad(is_counted[packing.pad_index].cumsum(1).unsqueeze(-1)).squeeze(-1)  # (T,)
    positions: Tensor = ranks * is_counted + config.pad_token_id
    return positions


def all_positions(config: PreTrainedConfig) -> int:
    """Positions start at 0."""
    return int(config.max_position_embeddings)


def positions_after_pad(config: PreTrainedConfig) -> int:
    """Positions start at pad_token_id + 1."""
    return int(config.max_position_embeddings) - int(config.pad_token_id) - 1


def by_first_row(_config: PreTrainedConfig) -> ClassifiedBy:
    """The first token's row: most families."""
    return "cls"


def by_last_row(_config: PreTrainedConfig) -> ClassifiedBy:
    """The last row whose token is not the pad token: decoders."""
    return "last"


def by_classifier_pooling(config: PreTrainedConfig) -> ClassifiedBy:
    """As the configuration has it. EuroBERT calls the first row bos."""
    names: dict[str, ClassifiedBy] = {"cls": "cls", "bos": "cls", "mean": "mean", "late": "late"}
    return names[config.classifier_pooling]


@dataclass(frozen=True, slots=True)
class Classifier:
    """A family's `...ForSequenceClassification`, and which rows its head looks at."""

    model_class: type[PreTrainedModel]
    classified_by: Callable[[PreTrainedConfig], ClassifiedBy] = by_first_row


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families. `num_positions` is how many tokens the longest sequence may have.

    `packed` is for models that do their attention outside transformers' registry: of a model it makes the module that
    maps (token_ids, positions, token_types or None, packing) to rows (T, E) through the seam, with the model's weights.
    """

    model_class: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]
    keys: KeyRules
    refusals: tuple[Refusal, ...] = ()
    positions: Positions = keep_columns
    num_positions: Callable[[PreTrainedConfig], int] = all_positions
    # Whether the class makes a pooler, which no embedding needs, unless told not to.
    has_pooler: bool = False
    # config.json with the field names of config_class, where the model's authors have others.
    rewrite: Callable[[dict[str, Any]], dict[str, Any]] = dict
    # Python files of the model's authors, by module name, that transformers' own class is a port of.
    ported_from: frozenset[str] = frozenset()
    packed: Callable[[Any], nn.Module] | None = None
    classifier: Classifier | None = None
