"""How many CPUs this process may really use: its affinity mask and its cgroups' quotas, not the host's core count."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def available_cpus(cgroup_root: Path = Path("/sys/fs/cgroup"), memberships: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs, at least 1. A quota of 1.5 CPUs counts as 2 threads' worth; so does the kernel's scheduler."""
    quotas = [math.ceil(quota) for quota in _cgroup_quotas(cgroup_root, memberships)]
    return min([len(os.sched_getaffinity(0)), *quotas])


def _cgroup_quotas(root: Path, memberships: Path) -> Iterator[float]:
    """CPUs that each cgroup around us allows, from our own up to the root; every one of them binds.

    A container often sees its own cgroup as the root and, in `memberships`, a path that is not there: only the root
    is then read. Source: kernel cgroup-v2.rst, sched-bwc.rst.
    """
    own = _own_cgroups(memberships)
    hierarchies: list[tuple[Path, str, Callable[[Path], float | None]]] = [
        (root, own.get("", ""), _quota_v2),
        (root / "cpu", own.get("cpu", ""), _quota_v1),
    ]
    for top, path, read in hierarchies:
        inner = top / path.lstrip("/")
        for directory in (inner, *inner.parents):
            if (quota := read(directory)) is not None:
                yield quota
            if directory == top:
                break


def _own_cgroups(memberships: Path) -> dict[str, str]:
    """Our cgroup by controller; version 2 has one for all of them, under ""."""
    try:
        lines = [line.split(":", 2) for line in memberships.read_text().splitlines()]
    except OSError:
        return {}
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def _quota_v2(directory: Path) -> float | None:
    try:
        quota_us, period_us = map(int, (directory / "cpu.max").read_text().split())
    except (OSError, ValueError):  # no such cgroup, or "max": no limit
        return None
    return quota_us / period_us


def _quota_v1(directory: Path) -> float | None:
    try:
        quota_us, period_us = (int((directory / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None
