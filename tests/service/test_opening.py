"""Which device and precision a bundle is opened with."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from service.bundle import Bundle, Golden, Precision, graph_file
from service.config import Device, PrecisionChoice, Settings
from service.engine import RealDevice, has_cuda
from service.errors import StartupError
from service.opening import choose_precision, open_engine, wanted_device
from tests.fakes import MANIFEST
from tests.graphs import TABLE, lookup_graph, sequence

SETTINGS = Settings(models=Path("/models"), threads=2)
# A moment long past: only what has to be measured is.
NO_TIME = 0.0


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """In fp32 and int8; both graphs are a table, which no precision changes."""
    facts = MANIFEST.graphs["fp32"]
    precisions: tuple[Precision, ...] = ("fp32", "int8")
    graphs = {name: replace(facts, file=lookup_graph(tmp_path / graph_file(name)).name) for name in precisions}
    golden = Golden((sequence(1),), TABLE[[1]], TABLE[[1]])
    return Bundle(tmp_path, replace(MANIFEST, graphs=graphs), "d" * 64, golden)


@pytest.mark.parametrize(
    ("offered", "device", "chosen"),
    [
        (["fp32", "fp16", "int8"], "cpu", "int8"),
        (["fp32", "fp16", "int8"], "cuda", "fp16"),
        (["fp32", "fp16"], "cpu", "fp32"),
        (["fp32", "int8"], "cuda", "fp32"),
    ],
)
def test_auto_takes_the_fastest_that_the_device_is_made_for(
    offered: list[Precision], device: RealDevice, chosen: Precision
) -> None:
    assert choose_precision(offered, "auto", device) == chosen


@pytest.mark.parametrize("wanted", ["fp32", "int8"])
def test_what_the_operator_wants_is_taken(wanted: PrecisionChoice) -> None:
    assert choose_precision(["fp32", "fp16", "int8"], wanted, "cpu") == wanted


@pytest.mark.parametrize(
    ("offered", "wanted", "device", "refusal"),
    [
        (["fp32"], "int8", "cpu", "--precision int8: the bundle has fp32; export it with --precision int8"),
        (["fp16", "fp32"], "fp16", "cpu", "--precision fp16: not on device cpu: ONNX Runtime has no fp16 products"),
        (["fp32", "int8"], "int8", "cuda", "--precision int8: not on device cuda: ONNX Runtime's int8 is for CPUs"),
        (["fp16"], "auto", "cpu", "the bundle has fp16, and none is for cpu: ONNX Runtime has no fp16 products"),
    ],
)
def test_what_would_not_be_served_well_is_refused_with_the_reason(
    offered: list[Precision], wanted: PrecisionChoice, device: RealDevice, refusal: str
) -> None:
    with pytest.raises(StartupError) as caught:
        choose_precision(offered, wanted, device)
    assert refusal in str(caught.value)


def test_the_chosen_graph_is_opened(bundle: Bundle) -> None:
    (bundle.path / graph_file("fp32")).unlink()
    opened = open_engine(bundle, SETTINGS, NO_TIME)
    assert (opened.precision, opened.engine.provider) == ("int8", "CPUExecutionProvider")


def test_the_layouts_of_so_many_threads_are_measured_and_one_is_taken(bundle: Bundle) -> None:
    opened = open_engine(bundle, SETTINGS, NO_TIME)
    assert [one.layout for one in opened.layouts] == [(2, 1), (1, 2)]
    assert min(min(one.tokens_per_second, one.lone_seconds) for one in opened.layouts) > 0
    assert (opened.engine.num_runners, opened.engine.num_threads) in [(2, 1), (1, 2)]
    assert opened.engine.num_threads_alone in (1, 2)


def test_as_many_runners_are_taken_as_the_operator_says(bundle: Bundle) -> None:
    engine = open_engine(bundle, replace(SETTINGS, runners=4, threads=4), NO_TIME).engine
    assert (engine.num_runners, engine.num_threads) == (4, 1)
    assert engine.num_threads_alone in (1, 4)


def test_one_thread_leaves_no_choice(bundle: Bundle) -> None:
    opened = open_engine(bundle, replace(SETTINGS, threads=1), NO_TIME)
    assert (opened.engine.num_runners, opened.engine.num_threads, opened.layouts) == (1, 1, [])


def test_on_cuda_there_is_one_runner_whatever_the_operator_says(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, int, int]] = []

    class CudaEngine:
        def __init__(
            self, graph: Path, *, device: str, num_runners: int, num_threads: int, has_token_types: bool
        ) -> None:
            opened.append((device, num_runners, num_threads))

    monkeypatch.setattr("service.opening.Engine", CudaEngine)
    found = open_engine(bundle, replace(SETTINGS, device="cuda", runners=4), NO_TIME)
    assert (opened, found.layouts, found.precision) == ([("cuda", 1, 1)], [], "fp32")


def test_without_memory_for_a_second_session_there_is_one(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.opening.available_bytes", lambda: -1)
    opened = open_engine(bundle, SETTINGS, NO_TIME)
    assert (opened.engine.num_runners, opened.engine.num_threads_alone, opened.layouts) == (2, 1, [])


def test_a_refusal_names_the_bundle(bundle: Bundle) -> None:
    with pytest.raises(StartupError, match=f"^{bundle.path}: --precision fp16: the bundle has fp32, int8"):
        open_engine(bundle, replace(SETTINGS, device="cpu", precision="fp16"), NO_TIME)


def test_auto_takes_the_cpu_where_cuda_does_not_work_and_says_why(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where libraries are missing: the wheel lists CUDA, and the session takes the CPU without an error."""
    real = ort.InferenceSession

    def fall_back(*arguments: Any, providers: list[Any], **options: Any) -> ort.InferenceSession:
        return real(*arguments, providers=providers[-1:], **options)

    monkeypatch.setattr(ort, "InferenceSession", fall_back)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    with caplog.at_level(logging.WARNING):
        opened = open_engine(bundle, SETTINGS, NO_TIME)
    assert (opened.engine.provider, opened.precision) == ("CPUExecutionProvider", "int8")
    assert wanted_device("auto") == "cuda", "so that metrics tell what was wanted from what was had"
    assert "cuda cannot be used, taking cpu: device cuda: ONNX Runtime fell back" in caplog.text


def test_auto_says_what_it_took(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_engine(bundle, SETTINGS, NO_TIME)
    assert caplog.records[-1].getMessage() == "device auto: took CPUExecutionProvider"


@pytest.mark.skipif(has_cuda(), reason="this onnxruntime has CUDA in it")
@pytest.mark.parametrize(("device", "wanted"), [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_without_cuda_in_it_only_the_operator_wants_a_gpu(device: Device, wanted: RealDevice) -> None:
    assert wanted_device(device) == wanted
