"""The exported file: its names and axes, its operators, and its numbers in plain ONNX Runtime."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from export.attention import Packing, attend
from export.errors import ExportError
from export.graph import PackedModel, check_graph, count_fused, export_graph, write_poisoned
from export.heads import EmbeddingHead
from export.pooling import POOLINGS
from service.bundle import Pooling
from service.packing import PackedBatch, pack
from service.request import TokenSequence
from tests import reference

HEADS, WIDTH = 4, 32
# float32 against float64, sums of at most 32 products of order 1.
TOLERANCE = 1e-6


class OneAttention(nn.Module):
    """An embedding and attention of it with itself; `sharpness` multiplies the logits."""

    def __init__(self, *, is_causal: bool = False, sharpness: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.is_causal = is_causal
        self.sharpness = sharpness

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, *, packing: Packing, token_type_ids: Tensor | None = None
    ) -> Tensor:
        rows = self.embedding(token_ids)
        if token_type_ids is not None:
            rows = rows + self.types(token_type_ids)
        scale = self.sharpness * (WIDTH // HEADS) ** -0.5
        return attend(rows, rows, rows, num_heads=HEADS, scale=scale, is_causal=self.is_causal, packing=packing)

    def expected(self, sequence: TokenSequence) -> np.ndarray[Any, Any]:
        rows = self.embedding.weight.detach().numpy()[sequence.token_ids]
        return reference.attention(rows * self.sharpness, rows, rows, HEADS, is_causal=self.is_causal)


class Lookup(nn.Module):
    """An embedding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)

    def forward(self, token_ids: Tensor, position_ids: Tensor, *, packing: Packing) -> Tensor:
        rows: Tensor = self.embedding(token_ids)
        return rows


class Constant(nn.Module):
    """The same rows whatever the ids are."""

    def forward(self, token_ids: Tensor, position_ids: Tensor, *, packing: Packing) -> Tensor:
        return position_ids.unsqueeze(1).float().expand(-1, WIDTH)


class OwnSoftmax(nn.Module):
    """A model that does its attention itself, as those do that ignore transformers' registry."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)

    def forward(self, token_ids: Tensor, position_ids: Tensor, *, packing: Packing) -> Tensor:
        slots = packing.pad(self.embedding(token_ids))
        return packing.unpad(torch.softmax(slots @ slots.transpose(1, 2), -1) @ slots)


class LooksAtValues(nn.Module):
    """A forward whose path depends on numbers, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)

    def forward(self, token_ids: Tensor, position_ids: Tensor, *, packing: Packing) -> Tensor:
        rows: Tensor = self.embedding(token_ids)
        return rows if rows.sum() > 0 else -rows


def _export(
    path: Path, encoder: nn.Module, mode: Pooling = "mean", *, normalize: bool = False, has_token_types: bool = False
) -> Path:
    graph = path / "model.onnx"
    export_graph(PackedModel(encoder, EmbeddingHead(mode, normalize), has_token_types=has_token_types), graph)
    return graph


def _run(graph: Path, batch: PackedBatch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    feeds = {value.name: getattr(batch, value.name) for value in session.get_inputs()}
    tokens, pooled = session.run(["token_embeddings", "sentence_embedding"], feeds)
    return tokens, pooled


def _random_batch(*lengths: int) -> tuple[list[TokenSequence], PackedBatch]:
    rng = np.random.default_rng(0)
    zeros = [np.zeros(length, np.int64) for length in lengths]
    sequences = [TokenSequence(rng.integers(0, 50, len(row)), np.arange(len(row)), row) for row in zeros]
    return sequences, pack(sequences)


@pytest.mark.parametrize("has_token_types", [True, False])
def test_inputs_and_outputs_have_the_promised_names_types_and_axes(tmp_path: Path, has_token_types: bool) -> None:
    graph = onnx.load(_export(tmp_path, OneAttention(), has_token_types=has_token_types)).graph

    found = {
        value.name: (value.type.tensor_type.elem_type, [axis.dim_param for axis in value.type.tensor_type.shape.dim])
        for value in (*graph.input, *graph.output)
    }
    int64, int32, float32 = onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.FLOAT
    types = {"token_type_ids": (int64, ["tokens"])} if has_token_types else {}
    assert found == types | {
        "token_ids": (int64, ["tokens"]),
        "position_ids": (int64, ["tokens"]),
        "pad_index": (int64, ["sequences", "longest"]),
        "unpad_index": (int64, ["tokens"]),
        "lengths": (int32, ["sequences"]),
        "token_embeddings": (float32, ["tokens", ""]),
        "sentence_embedding": (float32, ["sequences", ""]),
    }


@pytest.mark.parametrize("lengths", [(1,), (2,), (31,), (1, 1), (5, 3, 7), (4, 4, 4), (29, 1, 2, 1)])
def test_any_batch_runs_and_is_the_formula(attention_graph: Path, lengths: tuple[int, ...]) -> None:
    sequences, batch = _random_batch(*lengths)

    tokens, pooled = _run(attention_graph, batch)

    expected = [OneAttention().expected(sequence) for sequence in sequences]
    np.testing.assert_allclose(tokens, np.concatenate(expected), atol=TOLERANCE)
    np.testing.assert_allclose(pooled, [reference.pool(rows, "mean") for rows in expected], atol=TOLERANCE)


@pytest.fixture(scope="session")
def attention_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One attention, mean pooling."""
    return _export(tmp_path_factory.mktemp("graph"), OneAttention())


@pytest.mark.parametrize("mode", POOLINGS)
def test_every_pooling_is_exported(tmp_path: Path, mode: Pooling) -> None:
    sequences, batch = _random_batch(5, 1, 7)

    _, pooled = _run(_export(tmp_path, OneAttention(), mode, normalize=True), batch)

    rows = [OneAttention().expected(sequence) for sequence in sequences]
    expected = [reference.normalize(reference.pool(row, mode)) for row in rows]
    np.testing.assert_allclose(pooled, expected, atol=TOLERANCE)


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_one_row_that_is_not_finite_shows_in_the_pooled_vector(tmp_path: Path, mode: Pooling) -> None:
    encoder = Lookup()
    nn.init.constant_(encoder.embedding.weight[7], float("nan"))
    _, batch = _random_batch(5, 3)
    batch.token_ids[:] = [1, 2, 7, 3, 4, 5, 6, 8]

    _, pooled = _run(_export(tmp_path, encoder, mode), batch)

    assert np.isnan(pooled[0]).all()
    assert np.isfinite(pooled[1]).all()


def test_causal_attention_is_exported(tmp_path: Path) -> None:
    sequences, batch = _random_batch(5, 1, 7)

    tokens, _ = _run(_export(tmp_path, OneAttention(is_causal=True)), batch)

    expected = [OneAttention(is_causal=True).expected(sequence) for sequence in sequences]
    np.testing.assert_allclose(tokens, np.concatenate(expected), atol=TOLERANCE)


def test_the_scale_is_exported(tmp_path: Path) -> None:
    sequences, batch = _random_batch(5, 1, 7)

    tokens, _ = _run(_export(tmp_path, OneAttention(sharpness=0.25)), batch)

    expected = [OneAttention(sharpness=0.25).expected(sequence) for sequence in sequences]
    np.testing.assert_allclose(tokens, np.concatenate(expected), atol=TOLERANCE)


def test_masked_keys_stay_hidden_behind_logits_of_a_hundred_thousand(tmp_path: Path) -> None:
    encoder = OneAttention(sharpness=-3e4)  # the operator's own default lowers masked scores by a mere 10,000
    sequences, batch = _random_batch(9, 2, 3)

    tokens, _ = _run(_export(tmp_path, encoder), batch)

    # float32 logits of 1e5 are good to 1e-2, so only rows with one clear winner are exact; an unmasked pad is off by 1.
    np.testing.assert_allclose(tokens, np.concatenate([encoder.expected(s) for s in sequences]), atol=0.1)


def test_a_vector_of_zeros_is_normalized_to_zeros(tmp_path: Path) -> None:
    encoder = OneAttention()
    nn.init.zeros_(encoder.embedding.weight)

    _, pooled = _run(_export(tmp_path, encoder, normalize=True), _random_batch(3, 2)[1])

    assert np.array_equal(pooled, np.zeros((2, WIDTH)))


def test_attention_is_one_node_per_layer_between_plain_gathers(tiny_bundle: Path) -> None:
    nodes = Counter(node.op_type for node in onnx.load(tiny_bundle / "model.fp32.onnx").graph.node)

    assert nodes["MultiHeadAttention"] == 2
    # three embeddings; query, key, value and the way back in each of two layers; pooling
    assert nodes["Gather"] == 3 + 2 * 4 + 1
    assert nodes["Reshape"] == 2 * 6  # three that join heads, one on the way back, two around the row of one batch
    assert not {"Softmax", "GatherND", "ScatterND", "Expand", "Loop", "If"} & nodes.keys()


def test_weights_lie_beside_the_graph(tiny_bundle: Path) -> None:
    model = onnx.load(tiny_bundle / "model.fp32.onnx", load_external_data=False)

    embedding = next(tensor for tensor in model.graph.initializer if "word_embeddings" in tensor.name)
    assert {entry.key: entry.value for entry in embedding.external_data}["location"] == "model.onnx.data"


def test_the_file_says_nothing_about_the_machine_that_made_it(tiny_bundle: Path) -> None:
    content = (tiny_bundle / "model.fp32.onnx").read_bytes()

    assert b"site-packages" not in content
    assert str(Path(__file__).parents[2]).encode() not in content


def test_attention_outside_the_seam_is_refused(tmp_path: Path) -> None:
    graph = _export(tmp_path, OwnSoftmax())

    with pytest.raises(ExportError, match="0 fused attention nodes and 1 Softmax for 1 layers"):
        check_graph(graph, num_layers=1, has_token_types=False)


def test_a_model_that_torch_cannot_export_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^torch \S+ cannot export this model: \w+: .*data-dependent.*") as refusal:
        _export(tmp_path, LooksAtValues())

    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_too_few_is_refused(attention_graph: Path) -> None:
    with pytest.raises(ExportError, match="1 fused attention nodes and 0 Softmax for 2 layers"):
        count_fused(attention_graph, num_layers=2)


def test_attention_in_the_body_of_another_node_is_refused(attention_graph: Path, tmp_path: Path) -> None:
    model = onnx.load(attention_graph)
    softmax = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "inner", [], [])
    loop = helper.make_graph([helper.make_node("Loop", ["", "go"], ["y"], body=softmax)], "outer", [], [])
    empty = helper.make_graph([], "empty", [], [])
    model.graph.node.append(helper.make_node("If", ["go"], ["y"], then_branch=empty, else_branch=loop))
    onnx.save(model, tmp_path / "model.onnx")

    with pytest.raises(ExportError, match="1 fused attention nodes and 1 Softmax for 1 layers"):
        count_fused(tmp_path / "model.onnx", num_layers=1)


def test_a_poisoned_copy_has_one_more_token_id_which_is_nan(tiny_bundle: Path, tmp_path: Path) -> None:
    _, batch = _random_batch(3, 2)
    expected, _ = _run(tiny_bundle / "model.fp32.onnx", batch)

    token_id = write_poisoned(tiny_bundle / "model.fp32.onnx", tmp_path / "model.onnx")

    assert token_id == 200
    assert np.array_equal(_run(tmp_path / "model.onnx", batch)[0], expected)
    batch.token_ids[1] = token_id
    found, _ = _run(tmp_path / "model.onnx", batch)
    assert np.isnan(found[:3]).all()
    assert np.array_equal(found[3:], expected[3:])


class PositionsFirst(nn.Module):
    """Looks up by what is computed from token ids before it looks up the token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(2, 4), nn.Embedding(9, 4)

    def forward(self, token_ids: Tensor, position_ids: Tensor, packing: Packing) -> Tensor:
        rows: Tensor = self.positions((token_ids != 0).long()) + self.tokens(token_ids)
        return rows


def test_the_table_of_tokens_is_poisoned_and_no_other(tmp_path: Path) -> None:
    assert write_poisoned(_export(tmp_path, PositionsFirst()), tmp_path / "poisoned.onnx") == 9


def test_a_graph_without_a_table_of_tokens_cannot_be_poisoned(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="looks no token ids up"):
        write_poisoned(_export(tmp_path, Constant()), tmp_path / "poisoned.onnx")


@pytest.mark.parametrize("name", ["pad_index", "token_embeddings"])
def test_an_axis_that_became_constant_is_refused(attention_graph: Path, tmp_path: Path, name: str) -> None:
    model = onnx.load(attention_graph)
    value = next(value for value in (*model.graph.input, *model.graph.output) if value.name == name)
    value.type.tensor_type.shape.dim[0].dim_value = 3
    onnx.save(model, tmp_path / "model.onnx")

    with pytest.raises(ExportError, match=rf"'{name}': \(3,"):
        check_graph(tmp_path / "model.onnx", num_layers=1, has_token_types=False)


def test_a_graph_without_the_models_token_types_is_refused(attention_graph: Path) -> None:
    with pytest.raises(ExportError, match="its inputs are"):
        check_graph(attention_graph, num_layers=1, has_token_types=True)
