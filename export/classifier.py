"""Sequence classification: the head that transformers itself puts on an encoder, on packed rows.

Every `...ForSequenceClassification` does the same three things: run the encoder, take one row of each sequence or the
mean of its rows, compute the logits. Here the encoder's place in transformers' own model is taken by a module that
answers with rows it is given, so layers, activations and their order stay transformers'. In a batch of one row for each
sequence, "the first row", "the last row" and "the mean" are that row; which row it is gets decided here, packed.

Two things are not as in a padded batch. A classifier of the first row gets the first real token, where transformers
takes column 0, a pad if the padding is on the left. And logits are served as they are: no sigmoid, no softmax.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from export.attention import Packing
from export.errors import ExportError
from export.heads import Head
from export.pooling import keep_nan, pool
from service.bundle import Pooling

# Which rows transformers' class looks at. "late" computes logits for every token and takes their mean.
ClassifiedBy = Literal["cls", "mean", "last", "late"]
_POOLINGS: dict[ClassifiedBy, Pooling] = {"cls": "cls", "mean": "mean", "last": "last", "late": "mean"}


class _Outputs(NamedTuple):
    """What an encoder of transformers answers with, as far as heads ask."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None
    cache: None = None
    hidden_states: None = None
    attentions: None = None


class _GivenRows(nn.Module):
    """Stands in the encoder's place and answers with `inputs_embeds`; keeps the encoder's pooler, if it had one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(encoder, "pooler", None)
        self.pooler_activation = getattr(encoder, "pooler_activation", None)

    def forward(self, _input_ids: Tensor | None = None, *, inputs_embeds: Tensor, **_others: object) -> _Outputs:
        return _Outputs(inputs_embeds, self._pool(inputs_embeds))

    def _pool(self, rows: Tensor) -> Tensor | None:
        if self.pooler is None:
            return None
        if self.pooler_activation is None:
            pooled: Tensor = self.pooler(rows)
        else:  # ALBERT's pooler is in parts, and the row is taken outside of them
            pooled = self.pooler_activation(self.pooler(rows[:, 0]))
        return pooled


class ClassifierHead(Head):
    """The head of `model`, a `...ForSequenceClassification` that loses its encoder here."""

    normalize = False

    def __init__(self, model: PreTrainedModel, classified_by: ClassifiedBy) -> None:
        super().__init__()
        encoder = model.base_model
        setattr(model, model.base_model_prefix, _GivenRows(encoder))
        if hasattr(encoder, "pooler"):
            setattr(encoder, "pooler", None)  # noqa: B010  # it moved; nn.Module is typed to hold no None
        self.model = model
        self.classified_by = classified_by
        self.pooling = _POOLINGS[classified_by]
        self.labels = _labels(model)

    def output_size(self, _hidden_size: int) -> int:
        return len(self.labels)

    def forward(self, rows: Tensor, packing: Packing, token_ids: Tensor) -> Tensor:
        if self.classified_by == "late":
            return pool(self._logits_of_each(rows), packing, "mean")
        if self.classified_by == "last":
            return self._logits_of_each(_last_that_counts(rows, packing, token_ids, self.model.config.pad_token_id))
        return self._logits_of_each(pool(rows, packing, self.pooling))

    def reference(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=token_ids.unsqueeze(0), inputs_embeds=rows.unsqueeze(0)).logits
        return logits.squeeze(0)

    def _logits_of_each(self, rows: Tensor) -> Tensor:
        """(N, E) -> (N, labels): each row as if it were a sequence."""
        if self.classified_by == "last":  # transformers looks at token ids to find its row, so go past that
            logits: Tensor = self.model.get_submodule("score")(rows)
        else:
            logits = self.model(inputs_embeds=rows.unsqueeze(1)).logits
        return keep_nan(logits, rows)


def _last_that_counts(rows: Tensor, packing: Packing, token_ids: Tensor, pad_token_id: int | None) -> Tensor:
    """(T, E) -> (B, E): the last row whose token is not the pad token, or the first one. Without a pad token the last.

    It goes by the token's id, not by the mask. Source: transformers' GenericForSequenceClassification.forward.
    """
    if pad_token_id is None:
        return pool(rows, packing, "last")
    slots = packing.is_real() & (token_ids[packing.pad_index] != pad_token_id)  # (B, S)
    last = (torch.arange(slots.shape[1], device=rows.device) * slots).amax(1)  # (B,)
    return rows.index_select(0, packing.pad_index[:, 0] + last)


def _labels(model: PreTrainedModel) -> list[str]:
    """The name of each logit, which transformers looks up by its number. Raises `ExportError`."""
    names: dict[int, str] = model.config.id2label  # type: ignore[assignment]  # typed as read; the keys are made numbers
    if names.keys() != set(range(len(names))) or not all(isinstance(name, str) for name in names.values()):
        raise ExportError(
            f"config.json: id2label is {names!r}; it must have a text for each of 0 to {len(names) - 1}; correct it"
        )
    return [names[index] for index in range(len(names))]
