"""On the tiny BERT and on a tiny ALBERT, whose layers share their weights."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from export.checkpoint import read_checkpoint
from export.encoder import Activation, Encoder, EncoderConfig, Norm
from export.errors import ExportError
from export.graph import PackedModel, count_fused, export_graph
from export.heads import EmbeddingHead
from export.quantize import choose_groups, quantize
from export.sensitivity import rank_groups
from export.verify import verify_isolation
from service.engine import Engine
from service.packing import PackedBatch, pack
from service.request import TokenSequence
from tests.checkpoints import write_checkpoint
from tests.graphs import lookup_graph

# Two layers: query, key, value, output, and the two of the feed-forward part.
NUM_PRODUCTS = 12


@pytest.fixture(scope="module")
def fp32_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def batches() -> list[PackedBatch]:
    rng = np.random.default_rng(2)
    return [make_batch(rng, (9, 30, 1, 17, 4)) for _ in range(4)]


def export_tiny(family: str, directory: Path) -> Path:
    write_checkpoint(family, directory / "checkpoint")
    encoder = read_checkpoint(directory / "checkpoint").encoder
    export_graph(PackedModel(encoder, EmbeddingHead("mean", False), has_token_types=True), directory / "fp32.onnx")
    return directory / "fp32.onnx"


def make_batch(rng: np.random.Generator, lengths: tuple[int, ...]) -> PackedBatch:
    return pack([TokenSequence(rng.integers(5, 200, n), np.arange(n), np.zeros(n, np.int64)) for n in lengths])


def count_operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def test_every_product_of_tokens_becomes_one_of_integers(
    fp32_graph: Path, batches: list[PackedBatch], tmp_path: Path
) -> None:
    record = quantize(fp32_graph, tmp_path / "int8.onnx", batches)

    operators = count_operators(tmp_path / "int8.onnx")
    assert (operators["MatMulIntegerToFloat"], operators["MatMul"]) == (NUM_PRODUCTS, 0)
    assert operators["QuantizeLinear"] == 8  # query, key and value take the same integers
    assert count_fused(tmp_path / "int8.onnx", 2) == 2
    assert len(record.products) == NUM_PRODUCTS
    assert "encoder.model.encoder.layer.1.output.dense" in {product.name for product in record.products}
    assert record.kept_in_fp32 == ()
    assert record.calibration_tokens == 4 * 61


def test_it_answers_almost_as_fp32_does(fp32_graph: Path, batches: list[PackedBatch], tmp_path: Path) -> None:
    quantize(fp32_graph, tmp_path / "int8.onnx", batches[:3])

    answers = [Engine(path).run(batches[3], wants_tokens=True) for path in (tmp_path / "int8.onnx", fp32_graph)]
    found, expected = (outputs.token_embeddings for outputs in answers)
    assert found is not None
    assert expected is not None
    # Twelve products with 1/127 of a row's largest value as their step, on vectors that reach 3; a lost bias, scale or
    # zero is off by 0.5 and more.
    np.testing.assert_allclose(found, expected, atol=0.1)


@pytest.mark.parametrize(("norm", "activation"), [("post", "relu"), ("pre", "gelu")])
def test_so_does_a_model_of_two_axes_whose_products_add_their_own_bias(
    norm: Norm, activation: Activation, batches: list[PackedBatch], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(200, 32, 4, 2, 64, 64, norm=norm, activation=activation))
    export_graph(PackedModel(encoder, EmbeddingHead("mean", False), has_token_types=False), tmp_path / "fp32.onnx")
    assert count_operators(tmp_path / "fp32.onnx")["Gemm"] == NUM_PRODUCTS

    record = quantize(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", batches[:3])

    assert sum(product.is_one_sided for product in record.products) == 2  # behind the activation of each layer
    found, expected = (
        Engine(tmp_path / name, has_token_types=False).run(batches[3]).sentence_embedding
        for name in ("int8.onnx", "fp32.onnx")
    )
    np.testing.assert_allclose(found, expected, atol=0.1)  # as above


def test_company_changes_no_answer(fp32_graph: Path, batches: list[PackedBatch], tmp_path: Path) -> None:
    quantize(fp32_graph, tmp_path / "int8.onnx", batches)
    engine = Engine(tmp_path / "int8.onnx")
    sequences = [TokenSequence(np.array([9, 8, n]), np.arange(3), np.zeros(3, np.int64)) for n in range(5, 40)]

    together = engine.run(pack(sequences)).sentence_embedding
    alone = np.concatenate([engine.run(pack([sequence])).sentence_embedding for sequence in sequences])

    # The mean over tokens is fp32's own; a scale that depends on the batch is off by 1e-2.
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_a_sequence_that_is_nan_stays_nan_and_spoils_no_other(
    fp32_graph: Path, batches: list[PackedBatch], tmp_path: Path
) -> None:
    quantize(fp32_graph, tmp_path / "int8.onnx", batches)

    verify_isolation(tmp_path / "int8.onnx", batches[0], has_token_types=True)


def test_the_same_graph_and_batches_give_the_same_file(
    fp32_graph: Path, batches: list[PackedBatch], tmp_path: Path
) -> None:
    digests = set()
    for _ in range(2):
        quantize(fp32_graph, tmp_path / "int8.onnx", batches)
        files = [tmp_path / "int8.onnx", tmp_path / "int8.onnx.data"]
        digests.add(hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest())

    assert len(digests) == 1


def test_what_loses_most_stays_in_fp32_when_the_cosine_is_missed(
    fp32_graph: Path, batches: list[PackedBatch], tmp_path: Path
) -> None:
    every = quantize(fp32_graph, tmp_path / "every.onnx", batches)

    record = quantize(fp32_graph, tmp_path / "int8.onnx", batches, min_cosine=1.1)  # which nothing reaches

    groups, _ = choose_groups(fp32_graph, batches)
    worst = rank_groups(fp32_graph, groups, batches[0], "embedding")[:4]  # half of the eight groups, and no more
    assert set(record.kept_in_fp32) == {product.label for group in worst for product in group.products}
    assert {product.name for product in every.products} == {
        *record.kept_in_fp32,
        *(product.name for product in record.products),
    }
    assert count_operators(tmp_path / "int8.onnx")["MatMul"] == len(record.kept_in_fp32)
    assert record.calibration_cosine > every.calibration_cosine


def test_no_more_stays_in_fp32_than_the_cosine_needs(
    fp32_graph: Path, batches: list[PackedBatch], tmp_path: Path
) -> None:
    lost = 1 - quantize(fp32_graph, tmp_path / "int8.onnx", batches).calibration_cosine

    record = quantize(fp32_graph, tmp_path / "int8.onnx", batches, min_cosine=1 - 0.9 * lost)

    assert 1 <= len(record.kept_in_fp32) < NUM_PRODUCTS // 2
    assert record.calibration_cosine >= 1 - 0.9 * lost


def test_weights_that_layers_share_stay_shared(tmp_path: Path, batches: list[PackedBatch]) -> None:
    record = quantize(export_tiny("albert", tmp_path), tmp_path / "int8.onnx", batches)

    weights = [
        tensor
        for tensor in onnx.load(tmp_path / "int8.onnx").graph.initializer
        if numpy_helper.to_array(tensor).dtype == np.int8
    ]
    assert len(record.products) == 1 + 2 * 6  # one product from the embedding's width to the layers'
    assert len(weights) == 1 + 6


def test_a_graph_without_products_is_refused(tmp_path: Path, batches: list[PackedBatch]) -> None:
    graph = lookup_graph(tmp_path / "lookup.onnx")
    small = pack([TokenSequence(np.array([1, 2]), np.arange(2), np.zeros(2, np.int64))])

    with pytest.raises(ExportError, match=r"lookup\.onnx: no product of tokens with a constant weight"):
        quantize(graph, tmp_path / "int8.onnx", [small])
