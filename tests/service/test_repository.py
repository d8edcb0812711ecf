"""Which bundles are found, which model a request means, and that a model that is off is not served."""

import errno
import os
import re
from pathlib import Path

import pytest

from service.bundle import MANIFEST
from service.errors import DrainingError, InvalidRequestError, NotFoundError, StartupError, UnavailableError
from service.repository import BundlePath, Model, Repository, find_bundles
from tests.fakes import FakeBatcher, fake_model, fake_repository


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


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("empty", "no <name>/<version>/model.json in it; make one with mhsa-export"),
        ("none", "no such directory; it holds <name>/<version>/model.json, made with mhsa-export"),
        ("a", "this is one model's directory; the one above it is wanted: {models}"),
        ("a/1", "this is a bundle; the directory above <name>/<version>/ is wanted: {models}"),
    ],
)
def test_without_any_bundle_the_start_is_refused_with_what_is_wanted(tmp_path: Path, given: str, hint: str) -> None:
    make_bundle_directory(tmp_path, "a", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError) as refusal:
        find_bundles(tmp_path / given)
    assert str(refusal.value) == f"--models {tmp_path / given}: {hint.format(models=tmp_path)}"


def close_to_us(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """As of another user, mode 0700; tests may run as root, who may read everything."""
    listed = os.listdir

    def refuse(path: Path) -> list[str]:
        if Path(path).is_relative_to(directory):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)


@pytest.mark.parametrize("closed", [".", "a", "a/1"])
def test_where_we_may_not_read_is_told_from_where_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    make_bundle_directory(tmp_path, "a", "1")
    close_to_us(monkeypatch, tmp_path / closed)
    complaint = f"user {os.geteuid()} may not read {tmp_path / closed}; let that user read and enter it"
    with pytest.raises(StartupError, match=re.escape(complaint)):
        find_bundles(tmp_path)


def test_a_model_that_we_may_not_read_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        make_bundle_directory(tmp_path, name, "1")
    (tmp_path / "lost+found").mkdir()
    close_to_us(monkeypatch, tmp_path / "b")
    assert found(tmp_path) == [("a", 1)]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'b'}: user {os.geteuid()} may not read it; nothing in it is served"
    ]


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
        with pytest.raises(DrainingError, match="draining"):
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


def test_a_lame_duck_is_not_ready_in_any_of_its_models() -> None:
    repository = fake_repository(model())
    assert repository.is_model_ready(model().name, "")
    repository.is_lame_duck = True
    assert not repository.is_model_ready(model().name, "")


def test_a_model_that_is_not_served_is_not_found_when_asked_if_it_is_ready() -> None:
    with pytest.raises(NotFoundError):
        fake_repository(model()).is_model_ready("nobody", "")
