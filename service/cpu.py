"""How many CPUs this process may really use: its affinity mask and its cgroups' quotas, not the host's core count."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from service.cgroups import MEMBERSHIPS, ROOT, directories


def available_cpus(cgroup_root: Path = ROOT, memberships: Path = MEMBERSHIPS) -> int:
    """Whole CPUs, at least 1. A quota of 1.5 CPUs counts as 2 threads' worth; so does the kernel's scheduler."""
    quotas = [math.ceil(quota) for quota in _cgroup_quotas(cgroup_root, memberships)]
    return min([len(os.sched_getaffinity(0)), *quotas])


def _cgroup_quotas(root: Path, memberships: Path) -> Iterator[float]:
    """CPUs that each cgroup around us allows. Source: kernel cgroup-v2.rst, sched-bwc.rst."""
    for controller, read in (("", _quota_v2), ("cpu", _quota_v1)):
        for directory in directories(root, memberships, controller):
            if (quota := read(directory)) is not None:
                yield quota


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
