"""The gate: what it measures is right, and each of its limits can fail."""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from export.attention import Packing
from export.checkpoint import Subject, read_checkpoint
from export.encoder import Encoder, EncoderConfig
from export.errors import ExportError
from export.families import TransformersEncoder
from export.graph import PackedModel, count_fused, export_graph
from export.grid import make_grid
from export.heads import EmbeddingHead
from export.verify import (
    MAX_ERROR,
    CaseParity,
    Fusion,
    ParityReport,
    reference_answer,
    verify,
    verify_fusion,
    verify_isolation,
)
from service.packing import PackedBatch, pack
from service.request import TokenSequence
from tests import reference
from tests.checkpoints import write_checkpoint

POOLING = EmbeddingHead("mean", normalize=False)


def _encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(EncoderConfig(50, d_model=32, n_heads=4, n_layers=1, d_ff=64, max_positions=32)).eval()


def _subject(encoder: nn.Module) -> Subject:
    return Subject(
        encoder=encoder,
        num_layers=1,
        vocab_size=50,
        type_vocab_size=0,
        pad_token_id=0,
        max_sequence_tokens=32,
        tokenize=lambda text: [ord(character) % 50 for character in text],
    )


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`_encoder()`, exported as it is."""
    return _export(_encoder(), tmp_path_factory.mktemp("graph"))


def _export(encoder: nn.Module, directory: Path) -> Path:
    path = directory / "model.fp32.onnx"
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


class PassesNaNOn(Altered):
    """Right for numbers; a NaN anywhere is a NaN everywhere."""

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        return rows + 0.0 * rows.sum(0)


class HidesNaN(Altered):
    """Right for numbers; a NaN becomes one."""

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        return torch.where(rows.isnan(), 0.5, rows)


class DividesByZero(Altered):
    """NaN from the graph alone."""

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        return rows / (rows - rows)


def test_a_faithful_graph_passes(graph: Path) -> None:
    report = verify(_subject(_encoder()), POOLING, graph)

    assert report.fusion == Fusion(opset=20, fused_attention_nodes=1, optimized_attention_nodes=1)
    # The gate's own limit.
    assert max(case.token_error for case in report.cases) < MAX_ERROR
    assert {case.name for case in report.cases} >= {"one token", "primes", "left padded", "masks with holes"}


def test_another_weight_is_refused_with_the_worst_case(graph: Path) -> None:
    other = _encoder()
    with torch.no_grad():
        other.layers[0].get_parameter("ff_out.bias")[3] += 1e-3

    with pytest.raises(
        ExportError, match=r"largest error of a token vector is 1\.\d+e-03 in batch '.*'; the limit is 1e-05"
    ):
        verify(_subject(other), POOLING, graph)


def test_a_refusal_shows_the_input_of_the_worst_number(graph: Path) -> None:
    other = _encoder()
    with torch.no_grad():
        other.embedding.weight[17] += 1.0  # one token id's

    with pytest.raises(ExportError) as caught:
        verify(_subject(other), POOLING, graph)

    line = str(caught.value)
    where = re.search(r"in batch '(.+)'; .* worst in sequence (\d+) of (\d+), token (\d+) of (\d+)", line)
    assert where is not None
    batch = make_grid(_subject(other))[where[1]]
    sequence = batch[int(where[2])]
    assert (int(where[3]), int(where[5])) == (len(batch), sequence.num_tokens)
    assert 17 in sequence.token_ids  # wherever attention carried it
    assert f"its token_ids are [{' '.join(map(str, sequence.token_ids))}]" in line


def test_another_pooling_is_refused(graph: Path) -> None:
    with pytest.raises(ExportError, match="pooled vector is"):
        verify(_subject(_encoder()), EmbeddingHead("cls", normalize=False), graph)


def test_a_vector_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="largest error of a token vector is inf"):
        verify(_subject(DividesByZero()), POOLING, _export(DividesByZero(), tmp_path))


def test_an_answer_that_depends_on_batch_mates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"difference between a sequence alone and in company .* worst in sequence"):
        verify(_subject(LeaksToBatchMates()), POOLING, _export(LeaksToBatchMates(), tmp_path))


def test_an_answer_that_depends_on_unused_slots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError,
        match=r"unused slots changes the answer, by up to .* in batch 'one long.*; the limit is 0; worst in sequence",
    ):
        verify(_subject(LooksIntoUnusedSlots()), POOLING, _export(LooksIntoUnusedSlots(), tmp_path))


def test_the_reference_puts_each_token_in_its_column() -> None:
    encoder = _encoder()
    holes = TokenSequence(np.array([7, 8, 9]), np.array([1, 4, 5]), np.zeros(3, np.int64))
    short = TokenSequence(np.array([3]), np.array([0]), np.zeros(1, np.int64))

    found = reference_answer(_subject(encoder), POOLING, [holes, short])

    ids = torch.tensor([[0, 7, 0, 0, 8, 9], [3, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    with torch.no_grad():
        expected = encoder(ids, mask=mask)[mask].numpy()
    assert np.array_equal(found.tokens, expected)
    # A float32 mean of three numbers of order 1 is off by a few roundings of 6e-8 each; another row is off by 0.1.
    np.testing.assert_allclose(found.pooled[0], reference.pool(expected[:3], "mean"), atol=1e-6)


def test_fused_nodes_are_counted_before_and_after_optimisation(tiny_bundle: Path) -> None:
    facts = verify_fusion(tiny_bundle / "model.fp32.onnx", num_layers=2, has_token_types=True)

    assert facts == Fusion(opset=20, fused_attention_nodes=2, optimized_attention_nodes=2)


def test_what_is_counted_is_what_the_engine_makes_of_the_graph(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: list[str] = []

    def spy(path: Path, num_layers: int) -> int:
        nodes.extend(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)
        return count_fused(path, num_layers)

    monkeypatch.setattr("export.verify.count_fused", spy)
    verify_fusion(tiny_bundle / "model.fp32.onnx", num_layers=2, has_token_types=True)

    # One feed-forward network per layer; the embedding's norm and two per layer, which the engine wants as they are.
    assert nodes.count("BiasGelu") == 2
    assert nodes.count("LayerNormalization") == 1 + 2 * 2
    assert nodes.count("SkipLayerNormalization") == 0


def _uneven_batch() -> PackedBatch:
    rng = np.random.default_rng(0)
    zeros = [np.zeros(size, np.int64) for size in (2, 11, 1, 5)]
    return pack([TokenSequence(rng.integers(0, 200, len(row)), np.arange(len(row)), row) for row in zeros])


def test_a_sequence_that_is_nan_harms_no_other(tiny_bundle: Path) -> None:
    verify_isolation(tiny_bundle / "model.fp32.onnx", _uneven_batch(), has_token_types=True)


def test_unused_slots_that_hold_another_sequence_pass_its_nan_on(tiny_bundle: Path) -> None:
    batch = _uneven_batch()
    is_unused = np.arange(batch.longest) >= batch.lengths[:, None]
    of_the_first = dataclasses.replace(batch, pad_index=np.where(is_unused, 0, batch.pad_index))

    with pytest.raises(ExportError, match="a sequence that is NaN changes token vectors of its batch mates"):
        verify_isolation(tiny_bundle / "model.fp32.onnx", of_the_first, has_token_types=True)


def test_a_graph_that_passes_nan_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"changes token vectors of its batch mates, by up to inf; the limit is 0"):
        verify(_subject(PassesNaNOn()), POOLING, _export(PassesNaNOn(), tmp_path))


def test_a_graph_that_hides_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="a sequence that is NaN has token vectors that are not"):
        verify(_subject(HidesNaN()), POOLING, _export(HidesNaN(), tmp_path))


def _report(*names: str) -> ParityReport:
    case = CaseParity(
        "", 3, 7, 4, token_error=2e-6, pooled_error=1e-7, token_cosine=1.0, pooled_cosine=1.0, company_error=0.0
    )
    return ParityReport(tuple(dataclasses.replace(case, name=name) for name in names), Fusion(20, 1, 1))


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_report("one long, many short", "masks with holes").as_table())

    text = console.export_text()
    assert "…" not in text
    assert "one long, many short" in text
    assert "2.0e-06" in text


def test_the_bundle_keeps_the_report(minilm_bundle: Path) -> None:
    report = json.loads((minilm_bundle / "parity.json").read_text())

    assert report["fusion"] == {"opset": 20, "fused_attention_nodes": 6, "optimized_attention_nodes": 6}
    assert {"English text", "longest", "masks with holes"} <= {case["name"] for case in report["cases"]}
    for case in report["cases"]:
        assert case["token_error"] <= report["max_error"] == 1e-5
        assert case["pooled_error"] <= report["max_error"]
        assert min(case["token_cosine"], case["pooled_cosine"]) >= report["min_cosine"] == 0.99999
        assert case["company_error"] <= report["max_company_error"] == 1e-6


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_reference_too_wide_leaves_out_what_is_empty_on_the_left(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(family, tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    rows = [np.arange(44, 64), np.arange(50, 64), np.array([45, 63])]
    sequences = [TokenSequence(row * 3, row, np.zeros(len(row), np.int64)) for row in rows]
    whole = reference_answer(checkpoint, POOLING, sequences)
    sizes = []
    checkpoint.encoder.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape)))
    monkeypatch.setattr("export.verify.MAX_TOKENS_ALONE", 20)

    found = reference_answer(checkpoint, POOLING, sequences)

    assert sizes == [(3, 20)]
    # Shorter rows are summed in another order; positions that start elsewhere are off by 0.1.
    np.testing.assert_allclose(found.tokens, whole.tokens, atol=1e-5)


def test_a_transformers_model_is_its_own_reference(tiny_checkpoint: Path) -> None:
    checkpoint = read_checkpoint(tiny_checkpoint)
    assert isinstance(checkpoint.encoder, TransformersEncoder)
    sequence = TokenSequence(np.array([5, 6, 7]), np.array([2, 3, 5]), np.array([0, 1, 1]))
    subject = dataclasses.replace(_subject(checkpoint.encoder), vocab_size=200, type_vocab_size=2)

    found = reference_answer(subject, POOLING, [sequence])

    checkpoint.encoder.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = checkpoint.encoder.model(
            torch.tensor([[0, 0, 5, 6, 0, 7]]),
            attention_mask=torch.tensor([[0, 0, 1, 1, 0, 1]]),
            token_type_ids=torch.tensor([[0, 0, 0, 1, 0, 1]]),
        ).last_hidden_state[0, [2, 3, 5]]
    assert np.array_equal(found.tokens, expected.numpy())


class Exits(Altered):
    """Leaves, as a user's own module might."""

    def alter(self, rows: Tensor, packing: Packing) -> Tensor:
        return rows

    def forward(self, *arguments: object, mask: Tensor | None = None, **keywords: object) -> Tensor:
        raise SystemExit(0)


def test_a_model_that_pytorch_cannot_run_is_one_line(graph: Path) -> None:
    with pytest.raises(ExportError, match=r"PyTorch cannot run this model on 1 sequences .*SystemExit"):
        verify(_subject(Exits()), POOLING, graph)
