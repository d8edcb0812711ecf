"""CPUs by affinity and quota, from directories that look like a kernel's."""

import os
from pathlib import Path

import pytest

from service.cpu import available_cpus


@pytest.fixture(autouse=True)
def _sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(16))}.__getitem__)  # 0 is this process


def cpus(root: Path, files: dict[str, str], memberships: str = "0::/\n") -> int:
    """What is available where `files` are under the cgroup root."""
    for name, text in files.items():
        (root / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / name).write_text(text)
    (root / "memberships").write_text(memberships)
    return available_cpus(root / "cgroup", root / "memberships")


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "none", tmp_path / "none") == 16


def test_a_smaller_affinity_beats_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cpus(tmp_path, {"cpu.max": "400000 100000\n"}) == 2


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("25000 50000\n", 1),
        ("200000 50000\n", 4),
        ("6400000 100000\n", 16),
        ("garbage\n", 16),
        ("", 16),
    ],
)
def test_version_2_quotas_are_rounded_up(tmp_path: Path, cpu_max: str, expected: int) -> None:
    assert cpus(tmp_path, {"cpu.max": cpu_max}) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("150000", 2), ("400000", 4), ("1000", 1)])
def test_version_1_quotas_are_rounded_up(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert cpus(tmp_path, files, "4:memory:/\n1:cpu:/\n0::/\n") == expected


def test_our_own_cgroup_counts_where_the_whole_hierarchy_is_visible(tmp_path: Path) -> None:
    assert cpus(tmp_path, {"slice/unit/cpu.max": "300000 100000"}, "0::/slice/unit\n") == 3


def test_a_limit_further_up_binds_too(tmp_path: Path) -> None:
    files = {"pod/container/cpu.max": "max 100000", "pod/cpu.max": "200000 100000", "cpu.max": "800000 100000"}
    assert cpus(tmp_path, files, "0::/pod/container\n") == 2


def test_a_container_that_sees_its_cgroup_as_the_root_finds_it(tmp_path: Path) -> None:
    assert cpus(tmp_path, {"cpu.max": "300000 100000"}, "0::/docker/0123abcd\n") == 3


def test_a_path_that_leads_out_of_the_namespace_ends_at_the_root(tmp_path: Path) -> None:
    assert cpus(tmp_path, {"cpu.max": "300000 100000"}, "0::/../elsewhere\n") == 3


def test_version_1_shares_its_line_with_other_controllers(tmp_path: Path) -> None:
    files = {"cpu/docker/abc/cpu.cfs_quota_us": "200000", "cpu/docker/abc/cpu.cfs_period_us": "100000"}
    assert cpus(tmp_path, files, "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n") == 2
