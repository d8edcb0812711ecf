"""Files that others change while the server runs: have they, since the last time somebody looked?

Asked and not told: looking costs two microseconds, and what tells (inotify) misses how Kubernetes changes the files of
a mounted Secret, which is to swap a link in a directory above.
"""

from pathlib import Path


class WatchedFiles:
    """Some files, and what they looked like the last time."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen: tuple[int, ...] | None = None

    def have_changed(self) -> bool:
        """Whether they differ from the last time that this was asked; yes the first time.

        To be asked before the files are read: what changes after that is found the next time.
        """
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def _look(self) -> tuple[int, ...]:
        """What changes with the files; nothing where they cannot be looked at."""
        try:
            stats = [path.stat() for path in self._paths]
        except OSError:
            return ()
        return tuple(number for one in stats for number in (one.st_mtime_ns, one.st_ino, one.st_size))
