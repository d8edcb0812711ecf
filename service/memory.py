"""How much memory this process has, and may still have: the machine's, or less where a cgroup allows less."""

import os
from collections.abc import Iterator
from pathlib import Path

from service.cgroups import MEMBERSHIPS, ROOT, directories

_PROC = Path("/proc")
# Limit, use, and in memory.stat the part of the use that the kernel gives up before it kills, by controller.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def resident_bytes(proc: Path = _PROC) -> int:
    """What this process has in memory; 0 where that is not to be found."""
    try:
        return int((proc / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def available_bytes(proc: Path = _PROC, cgroup_root: Path = ROOT, memberships: Path = MEMBERSHIPS) -> float:
    """What may still be taken before the kernel kills; infinite where nothing is known of a limit."""
    return min([_of_machine(proc), *_of_cgroups(cgroup_root, memberships)])


def _of_machine(proc: Path) -> float:
    try:
        fields = _fields((proc / "meminfo").read_text().replace(":", ""))
    except OSError:
        return float("inf")
    return 1024 * fields["MemAvailable"] if "MemAvailable" in fields else float("inf")


def _of_cgroups(root: Path, memberships: Path) -> Iterator[float]:
    for controller, (limit, use, reclaimable) in _FILES.items():
        for directory in directories(root, memberships, controller):
            try:
                left = int((directory / limit).read_text()) - int((directory / use).read_text())
                yield max(0, left + _fields((directory / "memory.stat").read_text()).get(reclaimable, 0))
            except (OSError, ValueError):  # no such cgroup, or "max": no limit
                continue


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number; what follows the number is its unit."""
    return {words[0]: int(words[1]) for line in text.splitlines() if len(words := line.split()) >= 2}
