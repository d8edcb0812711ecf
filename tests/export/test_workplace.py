"""The place where a bundle is made: what becomes of it, whatever happens while it is made."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from export.errors import ExportError
from export.workplace import new_bundle
from service.bundle import MANIFEST


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A bundle that may be replaced."""
    path = tmp_path / "1"
    path.mkdir()
    (path / MANIFEST).write_text("old")
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def test_a_new_bundle_appears_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    destination = tmp_path / "models" / "tiny" / "1"
    with new_bundle(destination) as work:
        (work / "file").write_text("new")
        assert not destination.exists()
    assert names(tmp_path / "models") == ["tiny", "tiny/1", "tiny/1/file"]
    assert (destination / "file").read_text() == "new"


def test_a_bundle_in_progress_does_not_look_like_a_version(tmp_path: Path) -> None:
    with new_bundle(tmp_path / "tiny" / "1") as work:
        assert work.parent.parent == tmp_path / "tiny"
        assert work.parent.name.startswith(".")


def test_a_new_bundle_can_be_read_by_everyone(tmp_path: Path) -> None:
    with new_bundle(tmp_path / "1"):
        pass
    assert (tmp_path / "1").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fill(work: Path) -> None:
        (work / "deep").mkdir()
        (work / "deep" / "file").write_text("half")
        raise error

    with pytest.raises(error), new_bundle(tmp_path / "models" / "tiny" / "1") as work:
        fill(work)
    assert names(tmp_path) == []


def test_a_block_that_fails_leaves_the_other_versions(tmp_path: Path) -> None:
    (tmp_path / "tiny" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match="half"), new_bundle(tmp_path / "tiny" / "2"):
        raise ValueError("half")
    assert names(tmp_path) == ["tiny", "tiny/1"]


def test_an_existing_destination_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    was_entered = False
    with pytest.raises(ExportError, match="exists; give --force"), new_bundle(tmp_path / "1"):
        was_entered = True
    assert not was_entered
    assert names(tmp_path) == ["1"]


def test_a_destination_that_appears_meanwhile_is_not_replaced_without_force(tmp_path: Path) -> None:
    faster = tmp_path / "other" / "1"
    faster.mkdir(parents=True)
    (faster / "file").write_text("faster")
    with pytest.raises(ExportError, match="exists; give --force"), new_bundle(tmp_path / "1"):
        shutil.copytree(faster, tmp_path / "1")
    shutil.rmtree(faster.parent)
    assert names(tmp_path) == ["1", "1/file"]
    assert (tmp_path / "1" / "file").read_text() == "faster"


def test_force_replaces_the_old_bundle_whole(tmp_path: Path, old: Path) -> None:
    with new_bundle(old, force=True) as work:
        (work / "new").write_text("new")
        assert names(old) == [MANIFEST]
    assert names(tmp_path) == ["1", "1/new"]


def test_force_replaces_nothing_but_a_bundle(tmp_path: Path) -> None:
    """A checkpoint called 1 in a directory called like the model, for one."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text("{}")
    with pytest.raises(ExportError, match=r"1 is no bundle \(it has no model.json\)"):
        with new_bundle(tmp_path / "1", force=True):
            pass
    assert names(tmp_path) == ["1", "1/config.json"]


def test_force_does_not_replace_what_appears_meanwhile_and_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is no bundle"), new_bundle(tmp_path / "1", force=True):
        (tmp_path / "1").write_text("a file")
    assert names(tmp_path) == ["1"]


def test_a_link_to_nothing_is_in_the_way_like_anything_else(tmp_path: Path) -> None:
    (tmp_path / "1").symlink_to("nowhere")
    with pytest.raises(ExportError, match="exists; give --force"), new_bundle(tmp_path / "1"):
        pass
    assert names(tmp_path) == ["1"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_with_force_a_block_that_fails_leaves_the_old_bundle(
    tmp_path: Path, old: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), new_bundle(old, force=True):
        raise error
    assert names(tmp_path) == ["1", f"1/{MANIFEST}"]


def test_an_interrupt_between_the_two_renames_brings_the_old_bundle_back(
    tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_bundle(old, force=True):
        pass
    assert names(tmp_path) == ["1", f"1/{MANIFEST}"]


def test_force_without_an_old_bundle_is_fine(tmp_path: Path) -> None:
    with new_bundle(tmp_path / "1", force=True):
        pass
    assert names(tmp_path) == ["1"]


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written to"), new_bundle(tmp_path / "file" / "tiny" / "1"):
        pass


def _kill_while_making(destination: Path, last_words: str = "pass") -> None:
    """An export that gets as far as its second file, does `last_words`, and is killed."""
    code = f"""
import os, signal, sys
from pathlib import Path
from export.workplace import new_bundle
with new_bundle(Path(sys.argv[1]), force=True) as new:
    (new / "model.json").write_text("half")
    {last_words}
    os.kill(os.getpid(), signal.SIGKILL)"""
    done = subprocess.run([sys.executable, "-c", code, str(destination)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_next_export_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    _kill_while_making(tmp_path / "1")
    assert len(names(tmp_path)) == 3  # the place, new, the file
    with new_bundle(tmp_path / "1"):
        pass
    assert names(tmp_path) == ["1"]


def test_an_export_of_another_version_is_not_touched(tmp_path: Path) -> None:
    _kill_while_making(tmp_path / "11")
    before = names(tmp_path)
    with new_bundle(tmp_path / "1"):
        pass
    assert names(tmp_path) == [*before, "1"]


def test_a_bundle_whose_replacement_was_killed_comes_back(tmp_path: Path, old: Path) -> None:
    _kill_while_making(old, "Path(sys.argv[1]).rename(new.parent / 'old')")
    assert not old.exists()
    with pytest.raises(ExportError, match="exists; give --force"), new_bundle(old):
        pass
    assert names(tmp_path) == ["1", f"1/{MANIFEST}"]
    assert (old / MANIFEST).read_text() == "old"


def test_an_export_that_lives_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    with new_bundle(tmp_path / "1") as slower:
        (slower / "file").write_text("slower")
        with pytest.raises(ValueError, match="faster"), new_bundle(tmp_path / "1"):
            raise ValueError("faster")
    assert names(tmp_path) == ["1", "1/file"]


def test_a_place_that_is_taken_for_a_leftover_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        Path(f"/proc/self/fd/{descriptor}").readlink().rmdir()

    monkeypatch.setattr(fcntl, "flock", lock)
    with new_bundle(tmp_path / "1"):
        pass
    assert names(tmp_path) == ["1"]


def test_without_locks_nothing_is_taken_for_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _kill_while_making(tmp_path / "1")
    before = names(tmp_path)

    def lock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", lock)
    with new_bundle(tmp_path / "1"):
        pass
    assert names(tmp_path) == [*before, "1"]


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_cleaning_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(number, interrupt)
    remove = shutil.rmtree

    def interrupted(path: Path, ignore_errors: bool) -> None:
        signal.raise_signal(number)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(ValueError, match="refused"), new_bundle(tmp_path / "models" / "1"):
        raise ValueError("refused")
    assert names(tmp_path) == []
    assert signal.getsignal(number) is interrupt


def test_a_signal_while_the_place_is_made_interrupts_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_entered = False
    lock = fcntl.flock

    def interrupted(descriptor: int, operation: int) -> None:
        signal.raise_signal(signal.SIGINT)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt), new_bundle(tmp_path / "1"):
        was_entered = True
    assert not was_entered
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None])
def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path, code: int | None) -> None:
    error = OSError("problem writing element 1024 to file") if code is None else OSError(code, os.strerror(code))
    with pytest.raises(ExportError, match=rf"{tmp_path}/models: the bundle cannot be written, .* MiB are free .* room"):
        with new_bundle(tmp_path / "models" / "1"):
            raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize(("free", "expected"), [(4096, ExportError), (2**30, RuntimeError)])
def test_a_writer_that_lost_the_reason_failed_for_space_where_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: type[Exception]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(expected, match="serialization failed"), new_bundle(tmp_path / "1"):
        raise RuntimeError("serialization failed")


def test_a_refusal_on_a_full_disk_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(ExportError, match=r"^NaN in weights$"), new_bundle(tmp_path / "1"):
        raise ExportError("NaN in weights")
