"""From a bundle on disk to a running model, on a graph that looks its answers up in a table."""

import logging
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from service.bundle import GOLDEN, MANIFEST, Golden, GraphFacts, graph_file, write_golden, write_manifest
from service.config import Settings
from service.cost_model import Sample
from service.cost_tracker import WINDOW_RUNS
from service.engine import Engine
from service.errors import BundleError, EngineError, StartupError
from service.loading import load_model
from service.logs import TextFormatter
from service.metrics import Metrics
from service.packing import pack
from service.repository import BundlePath, Model
from service.request import Limits, Request
from tests.fakes import MANIFEST as MANIFEST_OF_FAKE
from tests.graphs import HIDDEN_SIZE, TABLE, VOCAB_SIZE, lookup_graph, sequence

GRAPH = graph_file("fp32")
IDS = [[3, 1, 4], [1], [5, 9, 2, 6]]


@pytest.fixture
def bundle(tmp_path: Path) -> BundlePath:
    """A bundle of a graph whose right answers are rows of a table, with golden outputs from the table."""
    path = tmp_path / "models" / "tiny" / "1"
    path.mkdir(parents=True)
    lookup_graph(path / GRAPH)
    write_golden(path / GOLDEN, golden())
    write_manifest(path, MANIFEST_VALUE)
    return BundlePath("tiny", 1, path)


FACTS = GraphFacts(GRAPH, 20, 0, 0, token_tolerance=0.25, pooled_tolerance=0.25, kept_in_fp32=[])
MANIFEST_VALUE = replace(
    MANIFEST_OF_FAKE,
    name="tiny",
    hidden_size=HIDDEN_SIZE,
    output_size=HIDDEN_SIZE,
    vocab_size=VOCAB_SIZE,
    max_sequence_tokens=8,
    pooling="cls",
    graphs={"fp32": FACTS},
)


def golden(error: float = 0.0) -> Golden:
    tokens = TABLE[[token for ids in IDS for token in ids]]
    tokens[-1, -1] += error
    return Golden(tuple(sequence(*ids) for ids in IDS), tokens, TABLE[[ids[0] for ids in IDS]])


SETTINGS = Settings(models=Path("/models"), device="cpu", threads=2)


async def load(bundle: BundlePath, metrics: Metrics | None = None, settings: Settings = SETTINGS) -> Model:
    return await load_model(
        bundle, settings, metrics or Metrics(CollectorRegistry()), on_health=lambda: None, on_death=lambda: None
    )


def checksums(bundle: BundlePath) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in bundle.path.iterdir()}


async def test_a_whole_bundle_is_loaded_and_answers(bundle: BundlePath) -> None:
    loaded = await load(bundle)
    request = Request(tuple(sequence(*ids) for ids in IDS), wants_tokens=False, arrival=0.0, deadline=None)
    await loaded.batcher.submit(request)
    await loaded.batcher.stop()
    answers = [encoding.pooled.tolist() for encoding in request.encodings if encoding is not None]
    assert answers == [TABLE[ids[0]].tolist() for ids in IDS]


async def test_a_loaded_model_knows_what_it_is(bundle: BundlePath) -> None:
    loaded = await load(bundle)
    await loaded.batcher.stop()
    assert (loaded.name, loaded.version) == ("tiny", "1")
    assert (loaded.provider, loaded.precision) == ("CPUExecutionProvider", "fp32")
    assert loaded.digest == sha256((bundle.path / MANIFEST).read_bytes()).hexdigest()
    assert replace(loaded.manifest, files={}) == MANIFEST_VALUE


async def test_the_limits_are_the_models_and_the_settings(bundle: BundlePath) -> None:
    given = replace(SETTINGS, max_queued_tokens=100, max_request_sequences=7, max_message_bytes=5000)
    loaded = await load(bundle, settings=given)
    await loaded.batcher.stop()
    assert loaded.limits == Limits(
        vocab_size=VOCAB_SIZE,
        type_vocab_size=2,
        hidden_size=HIDDEN_SIZE,
        output_size=HIDDEN_SIZE,
        max_sequence_tokens=8,
        max_request_sequences=7,
        max_request_tokens=100,
        max_request_bytes=16 * 2**20,
        max_message_bytes=5000,
    )


async def test_a_loaded_model_is_in_the_metrics(bundle: BundlePath) -> None:
    metrics = Metrics(CollectorRegistry())
    loaded = await load(bundle, metrics)
    await loaded.batcher.stop()
    labels = {"model": "tiny", "version": "1"}
    described = {"provider": "CPUExecutionProvider", "precision": "fp32", "digest": loaded.digest, "wanted": "cpu"}
    assert metrics.registry.get_sample_value("mhsa_model_info", labels | described) == 1
    assert (metrics.registry.get_sample_value("mhsa_model_load_seconds", labels) or 0) > 0


async def test_what_a_model_costs_is_in_the_metrics_and_in_the_log(
    bundle: BundlePath, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(CollectorRegistry())
    with caplog.at_level("INFO"):
        loaded = await load(bundle, metrics, replace(SETTINGS, runners=2, max_batch_tokens=77))
    await loaded.batcher.stop()

    def shown(name: str) -> float:
        value = metrics.registry.get_sample_value(f"mhsa_{name}", {"model": "tiny", "version": "1"})
        assert value is not None
        return value

    assert (shown("runners"), shown("run_threads"), shown("batch_budget_tokens")) == (2, 1, 77)
    assert (shown("cost_drift_ratio"), shown("cost_refits_total")) == (1, 0)
    assert shown("lone_run_threads") in (1, 2)
    assert shown("plateau_tokens_per_second") > 0
    assert shown("cost_run_seconds") + shown("cost_token_seconds") + shown("cost_pair_seconds") > 0
    said = f"a run takes {1e3 * shown('cost_run_seconds'):.2f} ms + {1e3 * shown('cost_token_seconds'):.4f} ms a token"
    assert any(said in message and "2 runners x 1 threads" in message for message in caplog.messages)


async def test_runs_that_take_longer_than_predicted_change_the_model_the_metrics_and_the_log(
    bundle: BundlePath, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(CollectorRegistry())
    loaded = await load(bundle, metrics)
    costs = loaded.batcher._scheduler.costs
    with caplog.at_level("INFO"):
        for _ in range(WINDOW_RUNS):
            costs.observe(Sample(1, 8, 8, 3 * costs.cost.seconds(1, 8, 8)))
    await loaded.batcher.stop()
    labels = {"model": "tiny", "version": "1"}
    assert metrics.registry.get_sample_value("mhsa_cost_refits_total", labels) == 1
    assert metrics.registry.get_sample_value("mhsa_cost_drift_ratio", labels) == pytest.approx(3)
    assert "runs take 3.00 times as long as predicted; fitted again" in caplog.text


async def test_an_answer_just_within_the_tolerance_is_served(bundle: BundlePath) -> None:
    write_golden(bundle.path / GOLDEN, golden(error=0.25))
    write_manifest(bundle.path, MANIFEST_VALUE)
    await (await load(bundle)).batcher.stop()


@pytest.mark.parametrize("error", [0.375, float("nan"), float("inf")])
async def test_a_model_whose_answers_are_off_is_not_served_and_nothing_is_removed(
    bundle: BundlePath, error: float
) -> None:
    write_golden(bundle.path / GOLDEN, golden(error))
    write_manifest(bundle.path, MANIFEST_VALUE)
    before = checksums(bundle)
    with pytest.raises(
        StartupError,
        match=r"fp32 token vectors differ from PyTorch's by (3\.8e-01|inf), the limit is 2\.5e-01; it is not",
    ):
        await load(bundle)
    assert checksums(bundle) == before


async def test_a_damaged_bundle_is_not_served(bundle: BundlePath) -> None:
    (bundle.path / GRAPH).write_bytes(b"x")
    with pytest.raises(BundleError, match=f"{GRAPH}: sha256 is"):
        await load(bundle)


async def test_a_graph_that_the_engine_cannot_open_stops_the_start(bundle: BundlePath) -> None:
    (bundle.path / GRAPH).write_bytes(b"x")
    write_manifest(bundle.path, MANIFEST_VALUE)
    with pytest.raises(StartupError, match="cannot load it"):
        await load(bundle)


async def test_a_graph_with_other_inputs_than_the_manifest_says_stops_the_start(bundle: BundlePath) -> None:
    write_manifest(bundle.path, replace(MANIFEST_VALUE, type_vocab_size=0))
    with pytest.raises(StartupError, match=r"the engine cannot run it \(.*token_type_ids.*\); export it again"):
        await load(bundle)


async def test_golden_ids_that_the_model_does_not_have_stop_the_start(bundle: BundlePath) -> None:
    written = golden()
    outside = (sequence(3, 1, VOCAB_SIZE), *written.sequences[1:])
    write_golden(bundle.path / GOLDEN, replace(written, sequences=outside))
    write_manifest(bundle.path, MANIFEST_VALUE)
    with pytest.raises(StartupError, match=r"the engine cannot run it \(.*Gather.*\); export it again"):
        await load(bundle)


async def test_both_ways_of_running_are_verified(bundle: BundlePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session for one runner and the one over all CPUs: a fault in the second alone must not be served either."""
    seen: list[bool] = []

    def differs(engine: object, batch: object, pooled: object, tokens: object, *, alone: bool) -> tuple[float, float]:
        seen.append(alone)
        return (1.0 if alone else 0.0), 0.0

    monkeypatch.setattr("service.preparing.differences", differs)
    with pytest.raises(StartupError, match="differ from PyTorch's by"):
        await load(bundle)
    assert seen == [False, True]


async def test_what_a_models_runners_say_in_the_log_names_the_model(
    bundle: BundlePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(bundle.path, MANIFEST_VALUE)
    model = await load(bundle)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(TextFormatter().format(record))  # type: ignore[method-assign]
    logging.getLogger("service.batcher").addHandler(handler)
    monkeypatch.setattr(Engine, "run", lambda *_, **__: 1 // 0)
    with pytest.raises(EngineError):
        await model.batcher.submit(Request((sequence(3),), wants_tokens=False, arrival=0.0, deadline=None))
    logging.getLogger("service.batcher").removeHandler(handler)
    await model.batcher.stop()

    assert "a runner thread died; the model is no longer served model=tiny version=1\n" in lines[0]


def test_the_golden_batch_of_these_tests_is_ragged() -> None:
    assert pack(golden().sequences).fill < 1
    assert not np.array_equal(TABLE[3], TABLE[1])


async def test_sequences_that_the_settings_refuse_and_the_model_would_take_are_warned_of(
    bundle: BundlePath, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = await load(bundle, settings=replace(SETTINGS, max_queued_tokens=3))
    await loaded.batcher.stop()
    assert any("sequences above 3 tokens are refused" in message for message in caplog.messages)
