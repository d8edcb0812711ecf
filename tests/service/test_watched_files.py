"""Files that change, vanish and come back."""

import os
from pathlib import Path

import pytest

from service.watched_files import WatchedFiles


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two files behind a link to their directory, as of a mounted Secret."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        for name in ("a", "b"):
            (tmp_path / version / name).write_text(version)
    (tmp_path / "data").symlink_to("one")
    return [tmp_path / "data" / name for name in ("a", "b")]


def test_the_first_time_they_have(paths: list[Path]) -> None:
    files = WatchedFiles(*paths)
    assert [files.have_changed(), files.have_changed()] == [True, False]


def test_a_link_that_leads_elsewhere_is_a_change(paths: list[Path], tmp_path: Path) -> None:
    files = WatchedFiles(*paths)
    files.have_changed()
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", tmp_path / "data")
    assert [files.have_changed(), files.have_changed()] == [True, False]


@pytest.mark.parametrize("which", [0, 1])
def test_each_of_them_counts(paths: list[Path], which: int) -> None:
    files = WatchedFiles(*paths)
    files.have_changed()
    paths[which].write_text("longer than before")
    assert files.have_changed()


def test_they_may_vanish_and_come_back(paths: list[Path]) -> None:
    files = WatchedFiles(*paths)
    files.have_changed()
    paths[0].unlink()
    assert [files.have_changed(), files.have_changed()] == [True, False]
    paths[0].write_text("back")
    assert files.have_changed()
