"""Where a bundle is made: a hidden directory beside its destination, renamed when done and gone when not.

    <name>/.mhsa-export-<version>-<random>/   locked as long as its export lives
        new/                                  the bundle in the making
        old/                                  the one that --force replaces, between two renames

A killed export (SIGKILL, out of memory, power) cannot clean up, so the next one into the same place does. The kernel
drops a lock with its process: who can take it knows that the directory is nobody's, and two exports at once never take
each other's for a leftover. A bundle found in `old` alone is put back first.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten

from export.errors import ExportError
from export.signals import shielded
from service.bundle import MANIFEST

_NEW, _OLD = "new", "old"
# numpy and ONNX Runtime lose the errno. Less than this is left only where somebody has just failed to write.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LEAST_FREE_BYTES = 2**20
# Another export may remove an empty parent, or take a directory that is not locked yet for a leftover.
_TRIES = 10


@contextmanager
def new_bundle(destination: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes `destination` when the block ends well, and is gone when it does not.

    Raises `ExportError` before anything is done if `destination` exists, and is no bundle or `force` is not set.
    """
    with shielded() as shield:
        _clear_leftovers(destination)
        _require_free(destination, force)
        new_parents = [parent for parent in destination.parents if not parent.exists()]
        try:
            work, lock = _make_work_directory(destination)
            try:
                with _named_if_disk_is_full(destination.parent), shield.lowered():
                    yield work / _NEW
                _put(work, destination, force)
            finally:
                shutil.rmtree(work, ignore_errors=True)
                os.close(lock)
        finally:
            for parent in new_parents:
                with suppress(OSError):  # not empty: it went well
                    parent.rmdir()


def _require_free(destination: Path, force: bool) -> None:
    if not os.path.lexists(destination):
        return
    if not force:
        raise ExportError(f"{destination} exists; give --force to replace it, or another --version")
    if not (destination / MANIFEST).is_file():
        raise ExportError(
            f"{destination} is no bundle (it has no {MANIFEST}), and --force replaces only bundles; "
            "move it away, or give another --version"
        )


def _make_work_directory(destination: Path) -> tuple[Path, int]:
    """The directory, with `new` in it, and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
            return work, _lock_and_fill(work)
        except FileNotFoundError as error:  # it was removed
            reason = error.strerror
        except OSError as error:
            raise ExportError(f"{destination.parent}: cannot be written to ({error.strerror})") from None
    raise ExportError(f"{destination.parent}: cannot be written to ({reason})")


def _lock_and_fill(work: Path) -> int:
    lock = os.open(work, os.O_DIRECTORY)
    # Where the file system has no locks, nobody else gets one either, and nobody takes the directory for a leftover.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for whoever has done so just now, and removes it
    try:
        (work / _NEW).mkdir()
    except OSError:
        os.close(lock)
        shutil.rmtree(work, ignore_errors=True)
        raise
    return lock


def _put(work: Path, destination: Path, force: bool) -> None:
    """Put `new` in the place of `destination`, which comes back if that fails."""
    new, old = work / _NEW, work / _OLD
    new.chmod(0o755)
    _require_free(destination, force)  # another export may have been faster
    if os.path.lexists(destination):
        destination.rename(old)
    try:
        new.rename(destination)
    except BaseException:
        _put_back(old, destination)
        _require_free(destination, force)
        raise


def _put_back(old: Path, destination: Path) -> None:
    if os.path.lexists(old) and not os.path.lexists(destination):
        old.rename(destination)


def _clear_leftovers(destination: Path) -> None:
    """Remove what killed exports left of this version, once the bundle that one was replacing is back."""
    for work in destination.parent.glob(f"{_prefix(destination)}*"):
        with suppress(OSError):  # locked by its export, or gone meanwhile
            lock = os.open(work, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _put_back(work / _OLD, destination)
                shutil.rmtree(work, ignore_errors=True)
            finally:
                os.close(lock)


def _prefix(destination: Path) -> str:
    return f".mhsa-export-{destination.name}-"


@contextmanager
def _named_if_disk_is_full(directory: Path) -> Iterator[None]:
    """Raise `ExportError` for whatever a library says when the disk is full; its own words may be about anything."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        free = shutil.disk_usage(directory).free
        is_writing = isinstance(error, OSError) and error.errno in {*_NO_SPACE, None}
        if not is_writing and free >= _LEAST_FREE_BYTES:
            raise
        raise ExportError(
            f"{directory}: the bundle cannot be written, {free / 2**20:.1f} MiB are free ({shorten(str(error), 160)}); "
            "make room, or give another --output"
        ) from error
