"""What depends on distances, in the exported file: its numbers in plain ONNX Runtime, and how often it is computed."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from export.attention import Packing, attend
from export.graph import PackedModel, count_fused, export_graph
from export.heads import EmbeddingHead
from export.verify import verify_isolation
from service.packing import PackedBatch, pack
from service.request import TokenSequence
from tests import reference

HEADS, WIDTH, WINDOW = 4, 32, 3
# float32 against float64, sums of at most 32 products of order 1.
TOLERANCE = 1e-6


class LocalAttention(nn.Module):
    """An embedding and two layers of attention within a window; the second one starts from the embedding, too."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.is_causal = is_causal

    def forward(self, token_ids: Tensor, position_ids: Tensor, *, packing: Packing) -> Tensor:
        rows = self.embedding(token_ids)
        return self._attend(rows, packing) + self._attend(rows.flip(1), packing)

    def _attend(self, rows: Tensor, packing: Packing) -> Tensor:
        bias = packing.window_bias(WINDOW)
        return attend(rows, rows, rows, num_heads=HEADS, is_causal=self.is_causal, bias=bias, packing=packing)

    def expected(self, sequence: TokenSequence) -> np.ndarray[Any, Any]:
        bias = reference.window_bias(sequence.position_ids.tolist(), WINDOW, HEADS)
        rows = self.embedding.weight.detach().numpy()[sequence.token_ids]
        both = [reference.attention(x, x, x, HEADS, is_causal=self.is_causal, bias=bias) for x in (rows, rows[:, ::-1])]
        return both[0] + both[1]


@pytest.fixture(scope="module", params=[False, True], ids=["both ways", "causal"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalAttention, Path]:
    """The module and the graph of it."""
    module, graph = LocalAttention(is_causal=request.param), tmp_path_factory.mktemp("window") / "model.onnx"
    export_graph(PackedModel(module, EmbeddingHead("mean", False), has_token_types=False), graph)
    return module, graph


def _sequences(*columns: list[int]) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    return [
        TokenSequence(rng.integers(0, 50, len(row)), np.array(row), np.zeros(len(row), np.int64)) for row in columns
    ]


def _run(graph: Path, batch: PackedBatch) -> np.ndarray[Any, Any]:
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    feeds = {value.name: getattr(batch, value.name) for value in session.get_inputs()}
    tokens: np.ndarray[Any, Any] = session.run(["token_embeddings"], feeds)[0]
    return tokens


BATCHES = {
    "one token": [[0]],
    "ragged": [[*range(13)], [0], [*range(5)], [0, 1]],
    "left padded": [[5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8]],
    "with holes": [[0, 2, 3, 7, 8, 9], [1, 4, 5], [0, 30]],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_window_is_the_formula(exported: tuple[LocalAttention, Path], name: str) -> None:
    module, graph = exported
    sequences = _sequences(*BATCHES[name])

    tokens = _run(graph, pack(sequences))

    expected = np.concatenate([module.expected(sequence) for sequence in sequences])
    np.testing.assert_allclose(tokens, expected, atol=TOLERANCE)


def test_unused_slots_do_not_change_a_bit(exported: tuple[LocalAttention, Path]) -> None:
    batch = pack(_sequences(*BATCHES["ragged"]))
    is_unused = np.arange(batch.longest) >= batch.lengths[:, None]
    other = dataclasses.replace(batch, pad_index=np.where(is_unused, 4, batch.pad_index))

    assert np.array_equal(_run(exported[1], batch), _run(exported[1], other))


def test_a_batch_mate_of_nan_does_not_show(exported: tuple[LocalAttention, Path]) -> None:
    verify_isolation(exported[1], pack(_sequences(*BATCHES["ragged"])), has_token_types=False)


def test_layers_of_one_window_compute_it_once(exported: tuple[LocalAttention, Path]) -> None:
    assert count_fused(exported[1], 2) == 2
    assert Counter(node.op_type for node in onnx.load(exported[1]).graph.node)["Abs"] == 1
