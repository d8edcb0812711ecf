"""Where the limits of this process's cgroups are written: version 2 has one tree, version 1 one for each controller.

A container often sees its own cgroup as the root and, in `/proc/self/cgroup`, a path that is not there: only the root
is then read. Source: kernel cgroup-v2.rst, cgroup-v1.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIPS = Path("/proc/self/cgroup")


def directories(root: Path, memberships: Path, controller: str = "") -> Iterator[Path]:
    """From our own cgroup up to the root; every limit on the way binds. Without a controller, those of version 2."""
    top = root / controller
    inner = top / _own_cgroups(memberships).get(controller, "").lstrip("/")
    for directory in (inner, *inner.parents):
        yield directory
        if directory == top:
            break


def _own_cgroups(memberships: Path) -> dict[str, str]:
    """Our cgroup by controller; version 2 has one for all of them, under ""."""
    try:
        lines = [line.split(":", 2) for line in memberships.read_text().splitlines()]
    except OSError:
        return {}
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
