"""MPNet: its attention ignores transformers' registry and adds a relative position bias to the scores.

Here the layers of the loaded model are called one by one, with attention itself through the seam; the model stays as it
is, and its own forward is the reference. The bias is made of the columns that tokens had, once for all layers.

Source: transformers' modeling_mpnet.py; Song et al. 2020, "MPNet: Masked and Permuted Pre-training".
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MPNetConfig, MPNetForSequenceClassification, MPNetModel, PreTrainedConfig

from export.attention import Packing, attend
from export.families.family import Classifier, Family, count_tokens, positions_after_pad
from export.weights import KeyRules

# From this distance on all are in one bucket: max_distance of `relative_position_bucket`.
_FARTHEST = 128
# What transformers' code has, whatever the configuration says.
_NUM_BUCKETS, _PAD = 32, 1


class PackedMPNet(nn.Module):
    """The layers of `model` on packed rows."""

    buckets: Tensor

    def __init__(self, model: MPNetModel) -> None:
        super().__init__()
        self.model: Any = model  # nn.Module knows no attribute's type
        # A table, made by the very function that the reference uses: its logarithm lands on whole numbers, and the last
        # bit of another runtime's logarithm would move a whole distance into the next bucket.
        distances = torch.arange(-_FARTHEST, _FARTHEST + 1)
        buckets = model.encoder.relative_position_bucket(distances)  # type: ignore[no-untyped-call]  # transformers'
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, _token_types: Tensor | None, packing: Packing) -> Tensor:
        """(T,) -> (T, E)."""
        rows: Tensor = self.model.embeddings(token_ids.unsqueeze(0), positions.unsqueeze(0)).squeeze(0)  # (T, E)
        bias = self._bias(packing)
        for layer in self.model.encoder.layer:
            attention, own = layer.attention, layer.attention.attn
            query, key, value = own.q(rows), own.k(rows), own.v(rows)  # (T, E) each
            attended = attend(query, key, value, num_heads=own.num_attention_heads, bias=bias, packing=packing)
            rows = attention.LayerNorm(own.o(attended) + rows)
            rows = layer.output(layer.intermediate(rows), rows)
        return rows

    def _bias(self, packing: Packing) -> Tensor:
        """(B, H, S, S)."""
        columns = packing.columns()
        distance = columns.unsqueeze(1) - columns.unsqueeze(2)  # (B, S, S), key minus query
        of_distance = self.model.encoder.relative_attention_bias(self.buckets)  # (2 x farthest + 1, H)
        bias: Tensor = nn.functional.embedding(
            distance.clamp(-_FARTHEST, _FARTHEST) + _FARTHEST, of_distance
        )  # (B, S, S, H)
        return bias.permute(0, 3, 1, 2)


def _refuse(config: PreTrainedConfig) -> str | None:
    if config.pad_token_id != _PAD:
        return f"pad_token_id is {config.pad_token_id}; MPNet counts positions from {_PAD}, so it must be {_PAD}"
    if config.relative_attention_num_buckets < _NUM_BUCKETS:
        found = config.relative_attention_num_buckets
        return f"relative_attention_num_buckets is {found}; transformers' MPNet uses {_NUM_BUCKETS} of them"
    return None


MPNET = Family(
    model_class=MPNetModel,
    config_class=MPNetConfig,
    keys=KeyRules(
        prefix="mpnet.",
        unused_prefixes=("pooler.", "lm_head.", "classifier.", "qa_outputs."),
        buffers=("embeddings.position_ids",),
    ),
    refusals=(_refuse,),
    positions=count_tokens,
    num_positions=positions_after_pad,
    has_pooler=True,
    packed=PackedMPNet,
    classifier=Classifier(MPNetForSequenceClassification),
)
