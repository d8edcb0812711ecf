"""What ONNX Runtime makes of an exported graph: the operators that it has in one piece are used."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from export.attention import Packing
from export.graph import PackedModel, export_graph
from export.heads import EmbeddingHead
from service.engine import Engine, write_optimized
from service.packing import pack
from service.request import TokenSequence

WIDTH = 32


class RmsNorm(nn.Module):
    """An embedding, divided by its root mean square as transformers' models do it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, token_ids: Tensor, position_ids: Tensor, *, packing: Packing) -> Tensor:
        rows: Tensor = self.embedding(token_ids)
        return self.weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_root_mean_square_norm_is_one_node_for_the_engine(tmp_path: Path) -> None:
    """ONNX Runtime has its own name for it, and knows it by a division."""
    encoder = RmsNorm()
    graph = tmp_path / "model.onnx"
    export_graph(PackedModel(encoder, EmbeddingHead("mean", normalize=False), has_token_types=False), graph)
    write_optimized(graph, tmp_path / "optimized.onnx")
    ids = [np.array([7, 8, 9, 10, 11]), np.array([3, 4, 5])]
    batch = pack([TokenSequence(row, np.arange(len(row)), np.zeros_like(row)) for row in ids])

    nodes = Counter(
        node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    )
    assert nodes["SimplifiedLayerNormalization"] == 1
    rows = encoder.embedding.weight.detach().numpy()[batch.token_ids].astype(np.float64)
    expected = encoder.weight.detach().numpy() * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)
    found = Engine(graph, has_token_types=False).run(batch, wants_tokens=True).token_embeddings
    assert found is not None
    # float32 against float64, products of order 1.
    np.testing.assert_allclose(found, expected, atol=1e-6)
