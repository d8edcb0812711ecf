"""Memory left, from files that look like a kernel's."""

import math
from pathlib import Path

import pytest

from service.memory import available_bytes, resident_bytes

MIB = 2**20
MEMINFO = (
    "MemTotal:       8388608 kB\nMemFree:         123456 kB\nMemAvailable:    4194304 kB\nHugePages_Total:       0\n"
)
STAT = f"anon {100 * MIB}\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\n"


def available(root: Path, files: dict[str, str], memberships: str = "0::/\n") -> float:
    """What is left where `files` are, under `proc` and `cgroup`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "memberships").write_text(memberships)
    return available_bytes(root / "proc", root / "cgroup", root / "memberships")


def version_2(directory: str, limit: str, use: int) -> dict[str, str]:
    return {
        f"cgroup{directory}/memory.max": f"{limit}\n",
        f"cgroup{directory}/memory.current": f"{use}\n",
        f"cgroup{directory}/memory.stat": STAT,
    }


def test_without_cgroups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available(tmp_path, {"proc/meminfo": MEMINFO}) == 4096 * MIB


def test_where_nothing_is_written_there_is_no_limit(tmp_path: Path) -> None:
    assert available(tmp_path, {}) == math.inf


def test_a_cgroups_limit_counts_with_what_the_kernel_would_give_up(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, **version_2("", str(512 * MIB), 200 * MIB)}
    assert available(tmp_path, files) == (512 - 200 + 30) * MIB


def test_a_machine_with_less_than_the_cgroup_allows_counts(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, **version_2("", str(16384 * MIB), 200 * MIB)}
    assert available(tmp_path, files) == 4096 * MIB


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    assert available(tmp_path, {"proc/meminfo": MEMINFO, **version_2("", "max", 200 * MIB)}) == 4096 * MIB


def test_a_limit_further_up_binds_too(tmp_path: Path) -> None:
    files = {**version_2("/pod/container", "max", 1), **version_2("/pod", str(100 * MIB), 90 * MIB)}
    assert available(tmp_path, files, "0::/pod/container\n") == (100 - 90 + 30) * MIB


def test_a_cgroup_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert available(tmp_path, version_2("", str(100 * MIB), 150 * MIB)) == 0


def test_version_1_has_its_own_names(tmp_path: Path) -> None:
    directory = "cgroup/memory/docker/abc"
    files = {
        f"{directory}/memory.limit_in_bytes": f"{300 * MIB}\n",
        f"{directory}/memory.usage_in_bytes": f"{100 * MIB}\n",
        f"{directory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * MIB}\n",
    }
    assert available(tmp_path, files, "5:memory:/docker/abc\n0::/\n") == (300 - 100 + 5) * MIB


def test_what_this_process_has_grows_with_what_it_takes() -> None:
    before = resident_bytes()
    taken = b"x" * (64 * MIB)
    assert resident_bytes() - before == pytest.approx(len(taken), rel=0.1)


def test_where_proc_is_not_there_nothing_is_known(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path) == 0
