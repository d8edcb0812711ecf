"""DeBERTa-v2 and v3: attention that ignores transformers' registry and tells content and position apart.

A score is the sum of three products: content with content, which is attention's own, content with position, and
position with content. The last two depend on the distance between two tokens, and go to the fused operator as a bias.
Here the layers of the loaded model are called one by one, with attention itself through the seam; the model stays as it
is, and its own forward is the reference.

Source: transformers' modeling_deberta_v2.py; He et al. 2021, "DeBERTa: Decoding-enhanced BERT with Disentangled
Attention" (3.1), and "DeBERTaV3".
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, DebertaV2Model, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from export.attention import Packing, attend
from export.families.family import Classifier, Family
from export.weights import KeyRules

# Of the convolution. In a wider one a row's second neighbour may be one or two columns further than its first.
_KERNEL_SIZE = 3


class PackedDeberta(nn.Module):
    """The layers of `model` on packed rows."""

    def __init__(self, model: DebertaV2Model) -> None:
        super().__init__()
        self.model: Any = model  # nn.Module knows no attribute's type
        self.distances_of = DistancesOf(model.encoder) if model.encoder.relative_attention else None

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None, packing: Packing) -> Tensor:
        """(T,) -> (T, E)."""
        encoder = self.model.encoder
        types = None if token_types is None else token_types.unsqueeze(0)
        embedded = self.model.embeddings(token_ids.unsqueeze(0), types, positions.unsqueeze(0)).squeeze(0)  # (T, E)
        distances = None if self.distances_of is None else self.distances_of(packing)
        table = encoder.get_rel_embedding()  # (P, E)
        rows: Tensor = embedded
        for index, layer in enumerate(encoder.layer):
            rows = layer.attention.output(_attend(layer.attention.self, rows, table, distances, packing), rows)
            rows = layer.output(layer.intermediate(rows), rows)
            if index == 0 and encoder.conv is not None:
                rows = encoder.conv.LayerNorm(rows + _convolve(encoder.conv, embedded, positions, packing))
        return rows


class Distances(NamedTuple):
    """`near` (N,): the rows of the distance embeddings that a batch can ask for; `pairs` (B, S, S): indices into it."""

    near: Tensor
    pairs: Tensor


class DistancesOf(nn.Module):
    """Which rows of the distance embeddings a batch asks for, and for which query and key."""

    rows: Tensor

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        # A table, made by the very function that the reference uses: another runtime's logarithm can differ in its
        # last bit, and that would move a whole distance into the next bucket.
        self.farthest = encoder.max_relative_positions
        buckets = torch.arange(-self.farthest, self.farthest + 1)
        if encoder.position_buckets > 0:
            buckets = make_log_bucket_position(buckets, encoder.position_buckets, self.farthest).long()
        self.num_rows = len(encoder.rel_embeddings.weight)
        half = self.num_rows // 2
        self.register_buffer("rows", (buckets + half).clamp(0, 2 * half - 1), persistent=False)

    def forward(self, packing: Packing) -> Distances:
        """Short sequences have short distances, and products with all the others are up to a fifth of the work."""
        columns = packing.columns()
        distance = columns.unsqueeze(2) - columns.unsqueeze(1)  # (B, S, S), query minus key
        index = distance.clamp(-self.farthest, self.farthest) + self.farthest
        rows = nn.functional.embedding(index, self.rows.unsqueeze(1)).squeeze(3)  # (B, S, S)
        every, first = torch.arange(self.num_rows, device=rows.device), rows.min()
        # Two at least, which the exporter is told: it takes a size of one for a size that never changes.
        near = ((every >= first) & (every <= rows.max().maximum(first + 1))).nonzero().squeeze(1)
        torch._check(near.shape[0] >= 2)  # type: ignore[no-untyped-call]  # torch's
        return Distances(near, rows - first)


def _attend(own: Any, rows: Tensor, table: Tensor | None, distances: Distances | None, packing: Packing) -> Tensor:
    """(T, E) -> (T, E), before the output projection."""
    query, key, value = own.query_proj(rows), own.key_proj(rows), own.value_proj(rows)  # (T, E) each
    num_terms = 1 + ("c2p" in own.pos_att_type) + ("p2c" in own.pos_att_type)
    scale = (own.attention_head_size * num_terms) ** -0.5
    bias = None
    if table is not None and distances is not None and num_terms > 1:
        bias = _bias(own, packing.pad(query), packing.pad(key), table, distances, scale)
    return attend(query, key, value, num_heads=own.num_attention_heads, scale=scale, bias=bias, packing=packing)


def _bias(own: Any, query: Tensor, key: Tensor, table: Tensor, distances: Distances, scale: float) -> Tensor:
    """(B, H, S, S): content with position and position with content, of (B, S, E).

    The scale goes to what is constant, so that ONNX Runtime computes it once, when it loads the graph.
    """

    def project(layer: nn.Module) -> Tensor:
        return _heads(nn.functional.embedding(distances.near, layer(table) * scale), num_heads)  # (H, N, D)

    num_heads = own.num_attention_heads
    index = distances.pairs.unsqueeze(1).expand(-1, num_heads, -1, -1)  # (B, H, S, S)
    terms = []
    if "c2p" in own.pos_att_type:
        scores = _heads(query, num_heads) @ project(own.key_proj if own.share_att_key else own.pos_key_proj).mT
        terms.append(scores.gather(3, index))  # from (B, H, S, N)
    if "p2c" in own.pos_att_type:
        scores = project(own.query_proj if own.share_att_key else own.pos_query_proj) @ _heads(key, num_heads).mT
        terms.append(scores.gather(2, index))  # from (B, H, N, S)
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., S, E) -> (..., H, S, D)."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(-3, -2)


def _convolve(layer: Any, rows: Tensor, columns: Tensor, packing: Packing) -> Tensor:
    """(T, E) -> (T, E): over each token's column and the two beside it; a column without a token counts as zeros."""
    weight: Tensor = layer.conv.weight.permute(2, 1, 0).flatten(0, 1)  # (3 E, E)
    beside = [_beside(rows, columns, packing, offset) for offset in (-1, 0, 1)]
    convolved = torch.cat(beside, 1) @ weight + layer.conv.bias
    activated: Tensor = ACT2FN[layer.conv_act](convolved)
    return activated


def _beside(rows: Tensor, columns: Tensor, packing: Packing, offset: int) -> Tensor:
    """(T, E): of each row the one whose column is `offset` further, or zeros where its sequence has none there."""
    num_tokens = rows.shape[0]
    there = (torch.arange(num_tokens, device=rows.device) + offset).clamp(0, num_tokens - 1)  # (T,)
    sequences = packing.unpad_index // packing.pad_index.shape[1]  # (T,)
    is_beside = (sequences[there] == sequences) & (columns[there] - columns == offset)
    return nn.functional.embedding(there, rows).where(is_beside.unsqueeze(1), 0.0)


def _refuse(config: PreTrainedConfig) -> str | None:
    if unknown := sorted(set(config.pos_att_type or ()) - {"c2p", "p2c"}):
        return f"pos_att_type has {', '.join(unknown)}, which transformers ignores; supported: c2p, p2c"
    kernel_size, groups = getattr(config, "conv_kernel_size", 0), getattr(config, "conv_groups", 1)
    if kernel_size not in (0, _KERNEL_SIZE):
        return f"conv_kernel_size is {kernel_size}; supported: 0 and {_KERNEL_SIZE}, which every released DeBERTa has"
    if kernel_size and groups != 1:
        return f"conv_groups is {groups}; supported: 1, which every released DeBERTa has"
    return None


DEBERTA_V2 = Family(
    model_class=DebertaV2Model,
    config_class=DebertaV2Config,
    keys=KeyRules(
        prefix="deberta.",
        unused_prefixes=("pooler.", "cls.", "lm_predictions.", "mask_predictions.", "classifier.", "qa_outputs."),
        # Saved by checkpoints whose input has no positions, too.
        buffers=("embeddings.position_ids", "embeddings.position_embeddings.weight"),
    ),
    refusals=(_refuse,),
    packed=PackedDeberta,
    classifier=Classifier(DebertaV2ForSequenceClassification),
)
