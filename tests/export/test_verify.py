"""The gate: what it measures is right, and each of its five limits can fail."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from export.attention import Packing
from export.checkpoint import read_checkpoint
from export.encoder import Encoder, EncoderConfig
from export.errors import ExportError
from export.graph import PackedModel, export_graph
from export.grid import Subject
from export.pooling import PoolingChoice
from export.verify import CaseParity, ParityReport, reference_answer, verify, verify_fusion
from service.bundle import GraphFacts
from service.request import TokenSequence
from tests import reference

POOLING = PoolingChoice("mean", normalize=False)


def _encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(EncoderConfig(50, d_model=32, n_heads=4, n_layers=1, d_ff=64, max_positions=32)).eval()


def _subject(encoder: nn.Module, pooling: PoolingChoice = POOLING) -> Subject:
    return Subject(
        encoder=encoder,
        pooling=pooling,
        num_layers=1,
        vocab_size=50,
        type_vocab_size=0,
        pad_token_id=0,
        max_sequence_tokens=32,
    )


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`_encoder()`, exported as it is."""
    return _export(_encoder(), tmp_path_factory.mktemp("graph"))


def _export(encoder: nn.Module, directory: Path) -> Path:
    path = directory / "model.onnx"
    export_graph(PackedModel(encoder, POOLING, has_token_types=False), path)
    return path


class Altered(nn.Module):
    """`_encoder()` with a fault in its packed form only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()

    def forward(self, token_ids: Tensor, position_ids: Tensor | None = None, **form: Any) -> Tensor:
        rows: Tensor = self.encoder(token_ids, position_ids, **form)
        return rows if form.get("packing") is None else self.alter(rows, form["packing"])

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        raise NotImplementedError


class LeaksToBatchMates(Altered):
    """Off by less than parity allows, but by another amount in each batch."""

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        return rows + 4e-6 * torch.tanh(rows.sum(0))


class LooksIntoUnusedSlots(Altered):
    """Off by a bit or two, depending on what stands in unused slots."""

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        return rows + 1e-9 * packing.pad(rows).sum((0, 1))


class DividesByZero(Altered):
    """NaN from the graph alone."""

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        return rows / (rows - rows)


def test_a_faithful_graph_passes(graph: Path) -> None:
    report = verify(_subject(_encoder()), graph)

    assert report.graph == GraphFacts(opset=20, fused_attention_nodes=1, optimized_attention_nodes=1)
    assert max(case.token_error for case in report.cases) < 1e-5
    assert {case.name for case in report.cases} >= {"one token", "primes", "left padded", "masks with holes"}


def test_another_weight_is_refused_with_the_worst_case(graph: Path) -> None:
    other = _encoder()
    with torch.no_grad():
        other.layers[0].get_parameter("ff_out.bias")[3] += 1e-3

    with pytest.raises(
        ExportError, match=r"largest error of a token vector is 1\.\d+e-03 in batch '.*'; the limit is 1e-05"
    ):
        verify(_subject(other), graph)


def test_another_pooling_is_refused(graph: Path) -> None:
    with pytest.raises(ExportError, match="pooled vector is"):
        verify(_subject(_encoder(), PoolingChoice("cls", normalize=False)), graph)


def test_a_vector_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="largest error of a token vector is inf"):
        verify(_subject(DividesByZero()), _export(DividesByZero(), tmp_path))


def test_an_answer_that_depends_on_batch_mates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="difference between a sequence alone and in company"):
        verify(_subject(LeaksToBatchMates()), _export(LeaksToBatchMates(), tmp_path))


def test_an_answer_that_depends_on_unused_slots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"what stands in unused slots changes the answer, by up to .*; the limit is 0"
    ):
        verify(_subject(LooksIntoUnusedSlots()), _export(LooksIntoUnusedSlots(), tmp_path))


def test_the_reference_puts_each_token_in_its_column() -> None:
    encoder = _encoder()
    holes = TokenSequence(np.array([7, 8, 9]), np.array([1, 4, 5]), np.zeros(3, np.int64))
    short = TokenSequence(np.array([3]), np.array([0]), np.zeros(1, np.int64))

    found = reference_answer(_subject(encoder), [holes, short])

    ids = torch.tensor([[0, 7, 0, 0, 8, 9], [3, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    with torch.no_grad():
        expected = encoder(ids, mask=mask)[mask].numpy()
    assert np.array_equal(found.tokens, expected)
    # float32 mean of three numbers.
    np.testing.assert_allclose(found.pooled[0], reference.pool(expected[:3], "mean"), atol=1e-6)


def test_onnx_runtime_fuses_what_the_exporter_left_to_it(tiny_bundle: Path, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # the warning that an optimised file is for this machine only
    ort.InferenceSession(str(tiny_bundle / "model.onnx"), options, providers=["CPUExecutionProvider"])

    nodes = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node]
    # the embedding's and two per layer; one feed-forward network per layer
    assert nodes.count("SkipLayerNormalization") == 1 + 2 * 2
    assert nodes.count("BiasGelu") == 2
    assert nodes.count("MultiHeadAttention") == 2


def test_fused_nodes_are_counted_before_and_after_optimisation(tiny_bundle: Path) -> None:
    facts = verify_fusion(tiny_bundle / "model.onnx", num_layers=2, has_token_types=True)

    assert facts == GraphFacts(opset=20, fused_attention_nodes=2, optimized_attention_nodes=2)


def _report(*names: str) -> ParityReport:
    case = CaseParity(
        "", 3, 7, 4, token_error=2e-6, pooled_error=1e-7, token_cosine=1.0, pooled_cosine=1.0, company_error=0.0
    )
    return ParityReport(tuple(dataclasses.replace(case, name=name) for name in names), GraphFacts(20, 1, 1))


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_report("one long, many short", "masks with holes").as_table())

    text = console.export_text()
    assert "…" not in text
    assert "one long, many short" in text
    assert "2.0e-06" in text


def test_the_bundle_keeps_the_report(minilm_bundle: Path) -> None:
    report = json.loads((minilm_bundle / "parity.json").read_text())

    assert report["graph"] == {"opset": 20, "fused_attention_nodes": 6, "optimized_attention_nodes": 6}
    assert {"English text", "longest", "masks with holes"} <= {case["name"] for case in report["cases"]}
    for case in report["cases"]:
        assert case["token_error"] <= report["max_error"] == 1e-5
        assert case["pooled_error"] <= report["max_error"]
        assert min(case["token_cosine"], case["pooled_cosine"]) >= report["min_cosine"] == 0.99999
        assert case["company_error"] <= report["max_company_error"] == 1e-6


def test_a_transformers_model_is_its_own_reference(tiny_checkpoint: Path) -> None:
    checkpoint = read_checkpoint(tiny_checkpoint)
    sequence = TokenSequence(np.array([5, 6, 7]), np.array([2, 3, 5]), np.array([0, 1, 1]))
    subject = dataclasses.replace(_subject(checkpoint.encoder), vocab_size=200, type_vocab_size=2)

    found = reference_answer(subject, [sequence])

    checkpoint.encoder.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = checkpoint.encoder.model(
            torch.tensor([[0, 0, 5, 6, 0, 7]]),
            attention_mask=torch.tensor([[0, 0, 1, 1, 0, 1]]),
            token_type_ids=torch.tensor([[0, 0, 0, 1, 0, 1]]),
        ).last_hidden_state[0, [2, 3, 5]]
    assert np.array_equal(found.tokens, expected.numpy())
