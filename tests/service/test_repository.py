"""Which bundles are found, which model a request means, and that a model that is off is not served."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from service.bundle import GOLDEN, GRAPH, MANIFEST, Golden, GraphFacts, Manifest, write_golden, write_manifest
from service.config import Settings
from service.errors import BundleError, InvalidRequestError, NotFoundError, StartupError, UnavailableError
from service.metrics import Metrics
from service.packing import pack
from service.repository import BundlePath, Model, Repository, find_bundles, load_model
from service.request import Limits, Request
from tests.fakes import FakeBatcher, fake_model, fake_repository
from tests.graphs import HIDDEN_SIZE, TABLE, VOCAB_SIZE, lookup_graph, sequence

IDS = [[3, 1, 4], [1], [5, 9, 2, 6]]


def make_bundle_directory(models: Path, name: str, version: str) -> None:
    (models / name / version).mkdir(parents=True)
    (models / name / version / MANIFEST).write_text("{}")


def found(models: Path) -> list[tuple[str, int]]:
    return [(bundle.name, bundle.version) for bundle in find_bundles(models)]


def test_every_version_of_every_model_is_found_in_the_order_of_numbers(tmp_path: Path) -> None:
    for name, version in [("b", "9"), ("b", "10"), ("a", "2")]:
        make_bundle_directory(tmp_path, name, version)
    assert found(tmp_path) == [("a", 2), ("b", 9), ("b", 10)]


def test_a_found_bundle_knows_where_it_lies(tmp_path: Path) -> None:
    make_bundle_directory(tmp_path, "a", "2")
    assert find_bundles(tmp_path) == [BundlePath("a", 2, tmp_path / "a" / "2")]


@pytest.mark.parametrize(
    "version",
    [
        "latest",
        "v1",
        "01",
        "0",
        "-1",
        "1.0",
        "1 ",
        "+1",
        "1_0",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "1\N{ARABIC-INDIC DIGIT ONE}",
        "1" * 19,
        ".1-tmp",
    ],
)
def test_only_a_positive_decimal_number_is_a_version(tmp_path: Path, version: str) -> None:
    make_bundle_directory(tmp_path, "a", "1")
    make_bundle_directory(tmp_path, "a", version)
    assert found(tmp_path) == [("a", 1)]


def test_names_with_a_leading_dot_are_passed_over(tmp_path: Path) -> None:
    make_bundle_directory(tmp_path, "a", "1")
    make_bundle_directory(tmp_path, ".b", "1")
    assert found(tmp_path) == [("a", 1)]


def test_stray_files_and_directories_without_a_manifest_are_passed_over(tmp_path: Path) -> None:
    make_bundle_directory(tmp_path, "a", "1")
    (tmp_path / "README.md").write_text("")
    (tmp_path / "a" / "notes.txt").write_text("")
    (tmp_path / "a" / "2").mkdir()
    (tmp_path / "a" / "3").write_text("")
    (tmp_path / "lost+found").mkdir()
    assert found(tmp_path) == [("a", 1)]


def test_a_version_may_be_a_link_to_where_the_bundle_lies(tmp_path: Path) -> None:
    make_bundle_directory(tmp_path / "store", "blob", "123abc")
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "a" / "1").symlink_to(tmp_path / "store" / "blob" / "123abc")
    assert found(tmp_path / "models") == [("a", 1)]


def test_a_link_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    make_bundle_directory(tmp_path, "a", "1")
    (tmp_path / "a" / "2").symlink_to(tmp_path / "gone")
    assert found(tmp_path) == [("a", 1)]


@pytest.mark.parametrize("there", [True, False])
def test_without_any_bundle_the_start_is_refused(tmp_path: Path, *, there: bool) -> None:
    models = tmp_path if there else tmp_path / "none"
    with pytest.raises(StartupError, match="make one with mhsa-export"):
        find_bundles(models)


def model(name: str = "tiny", version: str = "1", *, is_alive: bool = True) -> Model:
    batcher = FakeBatcher()
    batcher.is_alive = is_alive
    return fake_model(batcher, name=name, version=version)


def test_a_model_is_found_by_name_and_version() -> None:
    one, two = model(version="1"), model(version="2")
    repository = fake_repository(one, two, model("other"))
    assert repository.get("tiny", "1") is one
    assert repository.get("tiny", "2") is two


def test_without_a_version_the_highest_number_is_meant() -> None:
    ten = model(version="10")
    assert fake_repository(ten, model(version="9")).get("tiny") is ten


def test_without_a_name_the_only_model_is_meant() -> None:
    ten = model(version="10")
    assert fake_repository(ten, model(version="9")).get("") is ten


def test_without_a_name_two_models_are_too_many() -> None:
    with pytest.raises(InvalidRequestError, match="names no model"):
        fake_repository(model("secret"), model("hidden")).get("")


def test_an_unknown_name_is_not_found_and_nothing_else_is_listed() -> None:
    with pytest.raises(NotFoundError) as caught:
        fake_repository(model("secret")).get("tinny")
    assert str(caught.value) == "no model 'tinny'"


def test_a_long_name_is_not_repeated_whole() -> None:
    with pytest.raises(NotFoundError) as caught:
        fake_repository(model()).get("x" * 10_000)
    assert len(str(caught.value)) < 200


def test_an_unknown_version_is_not_found_and_no_other_is_listed() -> None:
    with pytest.raises(NotFoundError) as caught:
        fake_repository(model(version="7")).get("tiny", "2")
    assert str(caught.value) == "model 'tiny' has no version 2"


@pytest.mark.parametrize("version", ["latest", "01", "0", "-1", "1.0", " 1", "1\n", "9" * 5000])
def test_a_version_that_is_no_number_is_invalid(version: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^version is .{,50}; it takes a positive decimal number, or nothing$"
    ):
        fake_repository(model()).get("tiny", version)


def test_a_model_that_is_loading_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match="'tiny' version 1 is loading"):
        fake_repository(loading=[("tiny", 1)]).get("tiny")


def test_the_highest_version_is_meant_even_while_it_is_loading() -> None:
    with pytest.raises(UnavailableError, match="version 2 is loading"):
        fake_repository(model(version="1"), loading=[("tiny", 2)]).get("tiny")


def test_a_draining_server_is_unavailable_for_every_model_that_it_has() -> None:
    repository = fake_repository(model(), loading=[("other", 1)])
    repository.is_draining = True
    for name in ("tiny", "other"):
        with pytest.raises(UnavailableError, match="draining"):
            repository.get(name)


def test_a_lame_duck_still_serves() -> None:
    one = model()
    repository = fake_repository(one)
    repository.is_lame_duck = True
    assert repository.get("tiny") is one


def test_a_model_whose_engine_is_dead_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match="its engine is dead"):
        fake_repository(model(is_alive=False)).get("tiny")


def test_versions_are_listed_by_number_loaded_or_not() -> None:
    repository = fake_repository(model(version="10"), loading=[("tiny", 9)])
    assert repository.versions("tiny") == ["9", "10"]
    with pytest.raises(NotFoundError):
        repository.versions("other")


def test_only_loaded_models_are_listed() -> None:
    one = model()
    assert fake_repository(one, loading=[("tiny", 2), ("other", 1)]).models == [one]


def test_a_server_is_ready_once_every_model_is() -> None:
    repository = fake_repository(model(), loading=[("other", 1)])
    assert not repository.is_ready
    repository.add(model("other"))
    assert repository.is_ready


def test_a_server_without_models_is_never_ready() -> None:
    assert not Repository([]).is_ready


@pytest.mark.parametrize("state", ["is_lame_duck", "is_draining"])
def test_a_server_that_is_leaving_is_not_ready(state: str) -> None:
    repository = fake_repository(model())
    setattr(repository, state, True)
    assert not repository.is_ready


def test_a_server_with_a_dead_engine_is_not_ready() -> None:
    assert not fake_repository(model(), model("other", is_alive=False)).is_ready


@pytest.fixture
def bundle(tmp_path: Path) -> BundlePath:
    """A bundle of a graph whose right answers are rows of a table, with golden outputs from the table."""
    path = tmp_path / "models" / "tiny" / "1"
    path.mkdir(parents=True)
    lookup_graph(path / GRAPH)
    write_golden(path / GOLDEN, golden())
    write_manifest(path, MANIFEST_VALUE)
    return BundlePath("tiny", 1, path)


MANIFEST_VALUE = Manifest(
    name="tiny",
    family="table",
    hidden_size=HIDDEN_SIZE,
    num_layers=1,
    num_heads=2,
    vocab_size=VOCAB_SIZE,
    type_vocab_size=2,
    pad_token_id=0,
    max_sequence_tokens=8,
    pooling="cls",
    normalize=False,
    precision="fp32",
    golden_tolerance=0.25,
    graph=GraphFacts(opset=20, fused_attention_nodes=0, optimized_attention_nodes=0),
    versions={},
)


def golden(error: float = 0.0) -> Golden:
    tokens = TABLE[[token for ids in IDS for token in ids]]
    tokens[-1, -1] += error
    return Golden(tuple(sequence(*ids) for ids in IDS), tokens, TABLE[[ids[0] for ids in IDS]])


SETTINGS = Settings(models=Path("/models"), device="cpu", threads=2)


async def load(bundle: BundlePath, metrics: Metrics | None = None, settings: Settings = SETTINGS) -> Model:
    return await load_model(bundle, settings, metrics or Metrics(CollectorRegistry()), lambda: None)


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
    assert (loaded.name, loaded.version, loaded.provider) == ("tiny", "1", "CPUExecutionProvider")
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
        max_sequence_tokens=8,
        max_request_sequences=7,
        max_request_tokens=100,
        max_message_bytes=5000,
    )


async def test_a_loaded_model_is_in_the_metrics(bundle: BundlePath) -> None:
    metrics = Metrics(CollectorRegistry())
    loaded = await load(bundle, metrics)
    await loaded.batcher.stop()
    labels = {"model": "tiny", "version": "1"}
    described = {"provider": "CPUExecutionProvider", "precision": "fp32", "digest": loaded.digest}
    assert metrics.registry.get_sample_value("mhsa_model_info", labels | described) == 1
    assert (metrics.registry.get_sample_value("mhsa_model_load_seconds", labels) or 0) > 0


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
        StartupError, match=r"differ from PyTorch's by (3\.8e-01|inf), the limit is 2\.5e-01; it is not"
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

    def differs(engine: object, batch: object, pooled: object, tokens: object, *, alone: bool) -> float:
        seen.append(alone)
        return 1.0 if alone else 0.0

    monkeypatch.setattr("service.repository.largest_difference", differs)
    with pytest.raises(StartupError, match="differ from PyTorch's by"):
        await load(bundle)
    assert seen == [False, True]


def test_the_golden_batch_of_these_tests_is_ragged() -> None:
    assert pack(golden().sequences).fill < 1
    assert not np.array_equal(TABLE[3], TABLE[1])
