"""On a hand-written graph in which the product with the larger error of its own hardly counts."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from export.integers import Group
from export.quantize import choose_groups
from export.sensitivity import rank_groups
from service.packing import PackedBatch

GRAPH = """
<ir_version: 9, opset_import: ["" : 20]>
branches (int64[T] token_ids, int64[B, S] pad_index) => (float[T, 16] token_embeddings, float[B, 16] sentence_embedding)
<int64 first = {0}, float little = {0.001}, float far = {50}>
{
    rows = Gather (table, token_ids)
    heavy = MatMul (rows, heavy_weight)
    wild = Add (rows, far)
    faint = MatMul (wild, faint_weight)
    whisper = Mul (faint, little)
    token_embeddings = Add (heavy, whisper)
    first_rows = Gather <axis = 1> (pad_index, first)
    sentence_embedding = Gather (token_embeddings, first_rows)
}
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.normal(size=(50, 16)),
        "heavy_weight": rng.normal(size=(16, 16)),
        "faint_weight": rng.normal(size=(16, 16)),
    }
    # So that of the product of what is far from 0 only a little is left, and of the error all.
    weights["faint_weight"] -= weights["faint_weight"].mean(0)
    model = parser.parse_model(GRAPH)
    for name, value in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(model, tmp_path / "graph.onnx")
    return tmp_path / "graph.onnx"


def outputs(groups: list[Group]) -> list[str]:
    return [product.output for group in groups for product in group.products]


def test_what_counts_is_the_answer_and_not_the_product_s_own_error(graph: Path, batch: PackedBatch) -> None:
    groups, _ = choose_groups(graph, [batch])
    errors = {product.output: group.migration.error for group in groups for product in group.products}
    assert errors["faint"] > errors["heavy"]

    assert outputs(rank_groups(graph, groups, batch, "embedding")) == ["heavy", "faint"]
    assert outputs(rank_groups(graph, groups[::-1], batch, "embedding")) == ["heavy", "faint"]


def test_a_classifier_is_ranked_by_its_mean_token_vector(graph: Path, batch: PackedBatch) -> None:
    """Logits that do not depend on the products at all: by their cosine every product would be harmless."""
    model = onnx.load(graph)
    model.graph.node[-1].input[0] = "table"
    onnx.save(model, graph)
    groups, _ = choose_groups(graph, [batch])

    assert outputs(rank_groups(graph, groups[::-1], batch, "classification")) == ["heavy", "faint"]
    assert outputs(rank_groups(graph, groups, batch, "classification")) == ["heavy", "faint"]
