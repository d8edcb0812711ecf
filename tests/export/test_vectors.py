"""Models fed with vectors, one a token: the graph's inputs, the grid's batches, and a gate that can fail."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from export.attention import Packing
from export.checkpoint import Subject
from export.encoder import MultiHeadSelfAttention
from export.errors import ExportError
from export.graph import PackedModel, check_graph, export_graph
from export.grid import make_grid
from export.heads import EmbeddingHead
from export.verify import reference_answer, verify, verify_isolation
from service.engine import Engine
from service.packing import pack
from service.request import TokenSequence
from tests import reference

HEAD = EmbeddingHead("mean", normalize=False)
INPUT_SIZE, WIDTH, HEADS = 5, 16, 4
# float32 against float64, sums of at most 16 products of order 1.
TOLERANCE = 1e-6


class Projected(nn.Module):
    """A projection of the vectors and one attention: outputs are wider than inputs."""

    def __init__(self, *, passes_nan_on: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(INPUT_SIZE, WIDTH)
        self.attention = MultiHeadSelfAttention(WIDTH, HEADS)
        self.passes_nan_on = passes_nan_on

    def forward(
        self,
        embeddings: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        rows: Tensor = self.attention(self.project(embeddings), mask=mask, packing=packing)
        return rows if packing is None or not self.passes_nan_on else rows + 0.0 * rows.sum(0)

    def expected(self, sequence: TokenSequence) -> np.ndarray[Any, Any]:
        assert sequence.embeddings is not None
        weight, bias = (p.detach().double().numpy() for p in (self.project.weight, self.project.bias))
        weights = {key: tensor.numpy() for key, tensor in self.attention.state_dict().items()}
        return reference.self_attention(sequence.embeddings @ weight.T + bias, weights, HEADS)


def _subject(encoder: nn.Module) -> Subject:
    return Subject(
        encoder=encoder,
        num_layers=1,
        vocab_size=0,
        type_vocab_size=0,
        pad_token_id=0,
        max_sequence_tokens=24,
        tokenize=None,
        input_size=INPUT_SIZE,
    )


def _export(encoder: nn.Module, directory: Path) -> Path:
    path = directory / "model.onnx"
    export_graph(PackedModel(encoder.eval(), HEAD, has_token_types=False, input_size=INPUT_SIZE), path)
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`Projected()`, exported."""
    return _export(Projected(), tmp_path_factory.mktemp("vectors"))


def _sequences(*lengths: int) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    return [
        TokenSequence.of_vectors(rng.standard_normal((length, INPUT_SIZE), np.float32), np.arange(length))
        for length in lengths
    ]


def test_vectors_take_the_place_of_the_token_ids(graph: Path) -> None:
    inputs = {
        value.name: (
            value.type.tensor_type.elem_type,
            [a.dim_param or a.dim_value for a in value.type.tensor_type.shape.dim],
        )
        for value in onnx.load(graph).graph.input
    }

    assert inputs.keys() == {"embeddings", "position_ids", "pad_index", "unpad_index", "lengths"}
    assert inputs["embeddings"] == (onnx.TensorProto.FLOAT, ["tokens", INPUT_SIZE])


def test_the_engine_answers_vectors_with_the_formula(graph: Path) -> None:
    sequences = _sequences(5, 1, 11, 2)

    found = Engine(graph, has_token_types=False).run(pack(sequences), wants_tokens=True)

    expected = [Projected().expected(sequence) for sequence in sequences]
    assert found.token_embeddings is not None
    np.testing.assert_allclose(found.token_embeddings, np.concatenate(expected), atol=TOLERANCE)
    np.testing.assert_allclose(
        found.sentence_embedding, [reference.pool(rows, "mean") for rows in expected], atol=TOLERANCE
    )


def test_a_faithful_graph_passes(graph: Path) -> None:
    report = verify(_subject(Projected().eval()), HEAD, graph)

    # Without a tokenizer there is no text to compare on.
    assert {case.name for case in report.cases} == {
        "one token",
        "one sequence",
        "longest",
        "ones and twos",
        "primes",
        "all equal",
        "one long, many short",
        "left padded",
        "masks with holes",
    }


def test_another_weight_is_refused(graph: Path) -> None:
    other = Projected().eval()
    with torch.no_grad():
        other.project.bias[3] += 1e-2

    with pytest.raises(
        ExportError, match=r"largest error of a token vector is.*the vector of token \d+ begins \[(\S+ ){3}\S+\]"
    ):
        verify(_subject(other), HEAD, graph)


def test_a_graph_of_another_input_size_is_refused(graph: Path) -> None:
    with pytest.raises(ExportError, match="its inputs are"):
        check_graph(graph, num_layers=1, has_token_types=False, input_size=INPUT_SIZE + 1)


def test_a_vector_of_nan_that_spoils_batch_mates_is_refused(tmp_path: Path) -> None:
    ill = Projected(passes_nan_on=True)

    with pytest.raises(ExportError, match="a sequence that is NaN changes token vectors of its batch mates"):
        verify_isolation(_export(ill, tmp_path), pack(_sequences(3, 4, 1)), has_token_types=False)


def test_the_reference_puts_each_vector_in_its_column() -> None:
    encoder = Projected().eval()
    (drawn,) = _sequences(3)
    holes = dataclasses.replace(drawn, position_ids=np.array([1, 4, 5]))

    found = reference_answer(_subject(encoder), HEAD, [holes])

    # Without positions the columns change nothing; padding that were seen would.
    np.testing.assert_allclose(found.tokens, encoder.expected(drawn), atol=TOLERANCE)


def test_the_grid_draws_vectors_as_wide_as_the_input() -> None:
    for sequences in make_grid(_subject(nn.Identity())).values():
        for sequence in sequences:
            assert sequence.embeddings is not None
            assert sequence.embeddings.shape == (sequence.num_tokens, INPUT_SIZE)
            assert sequence.embeddings.dtype == np.float32
