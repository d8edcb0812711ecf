"""On a hand-written graph: plain products, one of slots, a Gemm, and some that are not of tokens or not constant."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from export.products import collect_activations, find_products, group_products
from service.packing import PackedBatch
from service.request import Float32Array

GRAPH = """
<ir_version: 9, opset_import: ["" : 20]>
products (int64[T] token_ids, int64[B, S] pad_index) => (float[T, 4] token_embeddings, float[B, 3] sentence_embedding)
<int64 first = {0}, int64[1] front = {0}>
{
    rows = Gather (table, token_ids)
    plain = MatMul (rows, square)
    biased = Add (plain, "block.query.bias")
    slots = Unsqueeze (biased, front)
    again = MatMul (slots, square)
    activated = Gelu (again)
    flat = Squeeze (activated, front)
    token_embeddings = Gemm <transB = 1> (flat, upright, "block.output.bias")
    both = MatMul (token_embeddings, pair)
    first_rows = Gather <axis = 1> (pad_index, first)
    pooled = Gather (token_embeddings, first_rows)
    sentence_embedding = MatMul (pooled, head)
    weights = Transpose (table)
    pair = MatMul (weights, table)
}
"""
SHAPES = {
    "table": (50, 4),
    "square": (4, 4),
    "block.query.bias": (4,),
    "upright": (4, 4),
    "block.output.bias": (4,),
    "head": (4, 3),
}


@pytest.fixture
def weights() -> dict[str, Float32Array]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def graph(tmp_path: Path, weights: dict[str, Float32Array]) -> Path:
    model = parser.parse_model(GRAPH)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(model, tmp_path / "graph.onnx")
    return tmp_path / "graph.onnx"


def test_products_with_a_constant_matrix_are_found(graph: Path) -> None:
    found = {product.output: product for product in find_products(onnx.load(graph).graph)}

    assert list(found) == ["plain", "again", "token_embeddings", "sentence_embedding", "pair"]
    assert (found["plain"].bias, found["plain"].label) == ("block.query.bias", "block.query")
    assert (found["again"].bias, found["again"].label) == (None, "again")
    assert (found["token_embeddings"].bias, found["token_embeddings"].is_gemm) == ("block.output.bias", True)


def test_a_bias_of_several_products_names_none_of_them(graph: Path) -> None:
    model = onnx.load(graph)
    model.graph.node.append(onnx.helper.make_node("MatMul", ["rows", "square"], ["other"]))
    model.graph.node.append(onnx.helper.make_node("Add", ["other", "block.query.bias"], ["other biased"]))

    labels = {product.output: product.label for product in find_products(model.graph)}

    assert (labels["plain"], labels["other"]) == ("plain", "other")


def test_a_weight_that_lies_on_its_side_is_turned(graph: Path, weights: dict[str, Float32Array]) -> None:
    model = onnx.load(graph)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    gemm = next(product for product in find_products(model.graph) if product.is_gemm)

    np.testing.assert_array_equal(gemm.read_weight(initializers), weights["upright"].T)


def test_what_is_not_one_row_per_token_is_left_out(graph: Path, batch: PackedBatch) -> None:
    found = collect_activations(graph, ["rows", "slots", "flat", "pooled", "weights"], [batch, batch])

    assert {name: activation.num_axes for name, activation in found.items()} == {"rows": 2, "slots": 3, "flat": 2}


def test_rows_are_what_goes_into_the_product(graph: Path, batch: PackedBatch, weights: dict[str, Float32Array]) -> None:
    found = collect_activations(graph, ["rows"], [batch])["rows"].rows

    np.testing.assert_array_equal(found, weights["table"][batch.token_ids])


def test_a_bound_is_known_only_right_behind_its_operator(graph: Path, batch: PackedBatch) -> None:
    found = collect_activations(graph, ["rows", "activated", "flat"], [batch])

    assert {name: activation.lowest for name, activation in found.items()} == {
        "rows": None,
        "activated": -0.1701,
        "flat": None,
    }


def test_products_that_share_a_weight_or_an_activation_are_one_group(graph: Path) -> None:
    groups = group_products(find_products(onnx.load(graph).graph))

    outputs = [[product.output for product in group] for group in groups]
    assert outputs == [["plain", "again"], ["token_embeddings"], ["sentence_embedding"], ["pair"]]
