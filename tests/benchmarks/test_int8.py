"""The report on rows that are written out here, and every candidate on a tiny model."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.int8 import FP32, Figures, Row, candidates_table, print_verdicts
from benchmarks.int8_candidates import CANDIDATES, OURS
from benchmarks.measurement import Batches, Slice
from export.checkpoint import read_checkpoint
from export.graph import PackedModel, export_graph
from export.heads import EmbeddingHead
from export.quality import QualityReport
from service.engine import Engine
from service.packing import pack
from service.request import TokenSequence
from tests.checkpoints import write_checkpoint

GOOD = QualityReport(200, 0.995, 0.999, 0.99, 1e-7, "")


def make_slices(*seconds: float) -> list[Slice]:
    return [Slice(10, 100, duration, 0.0, 0.0, Batches(1.0, 1.0, 1.0)) for duration in seconds]


def make_figures(mixed: float = 1.5, short: float = 1.5, quality: QualityReport = GOOD) -> Figures:
    slices = {
        trace: {FP32: make_slices(1.0, 1.0, 1.0), OURS: make_slices(1 / rate, 1 / rate, 9.0)}
        for trace, rate in (("mixed", mixed), ("short", short))
    }
    return Figures({FP32: Row(GOOD, 1), OURS: Row(quality, 2**21)}, slices)


def show(figures: Figures) -> tuple[str, bool]:
    text = StringIO()
    console = Console(file=text, width=140)
    console.print(candidates_table(figures))
    is_missed = print_verdicts(figures, console)
    return text.getvalue(), is_missed


def test_a_disturbed_round_does_not_count() -> None:
    text, is_missed = show(make_figures())

    assert not is_missed
    assert text.count("1.50") == 2
    assert text.count(" held ") == 5


@pytest.mark.parametrize(
    "figures",
    [
        make_figures(mixed=1.39),
        make_figures(short=1.39),
        make_figures(quality=QualityReport(200, 0.9899, 0.999, 0.99, 1e-7, "")),
        make_figures(quality=QualityReport(200, 0.995, 0.999, 0.9799, 1e-7, "")),
        make_figures(quality=QualityReport(200, 0.995, 0.999, 0.99, 2e-6, "")),
        make_figures(quality=QualityReport(200, float("nan"), 0.999, 0.99, 1e-7, "")),
    ],
)
def test_one_missed_figure_fails_the_run(figures: Figures) -> None:
    text, is_missed = show(figures)

    assert is_missed
    assert (text.count("missed"), text.count(" held ")) == (1, 4)


@pytest.fixture(scope="module")
def fp32_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    write_checkpoint("bert", directory / "checkpoint")
    encoder = read_checkpoint(directory / "checkpoint").encoder
    export_graph(PackedModel(encoder, EmbeddingHead("mean", True), has_token_types=True), directory / "fp32.onnx")
    return directory / "fp32.onnx"


@pytest.mark.filterwarnings("ignore:.*")  # the library's own
@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_makes_a_model_like_the_first(name: str, fp32_graph: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(rng.integers(5, 200, length), np.arange(length), np.zeros(length, np.int64))
        for length in (9, 30, 1, 17, 4, 25, 12, 8)
    ]

    CANDIDATES[name](fp32_graph, tmp_path / "int8.onnx", sequences)

    found, expected = (
        Engine(path).run(pack(sequences)).sentence_embedding for path in (tmp_path / "int8.onnx", fp32_graph)
    )
    cosines = (found * expected).sum(1)
    assert cosines.min() > 0.8  # cut percentiles lose most of all; another model's vectors have 0.1
    assert cosines.min() < 1 - 1e-7  # and it is not fp32 again
