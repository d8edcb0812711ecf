"""deploy/Dockerfile and what it reads, without an engine. test_image.py builds and runs it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.requirements import requirements
from service.config import read_setting
from tests.deploy.paths import DOCKERFILE, ROOT

DOCKERFILES = (DOCKERFILE, ROOT / "tests/deploy/prometheus.Dockerfile")
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def pins(path: Path) -> dict[str, str]:
    """Versions by name, as PEP 503 writes names."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_is_a_version_and_never_latest() -> None:
    text = DOCKERFILE.read_text()
    [base] = re.findall(r"^ARG BASE=(.+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+(\.\d+)?-slim-\w+", base)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - {"${BASE}"} <= set(re.findall(r" AS (\S+)", text))


def test_the_label_has_the_project_s_version() -> None:
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    assert f"ARG VERSION={version}\n" in DOCKERFILE.read_text()


def test_the_server_is_the_target_of_a_build_without_one() -> None:
    assert re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)[-1] == "cpu"


def test_the_ports_are_the_server_s() -> None:
    [ports] = re.findall(r"^EXPOSE (.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert [int(port) for port in ports.split()] == [read_setting("grpc_port", {}), read_setting("metrics_port", {})]


def test_the_gpu_image_gets_a_gpu_and_never_falls_back_from_it() -> None:
    _, _, stage = DOCKERFILE.read_text().partition(" AS gpu\n")
    environment = dict(re.findall(r"(\w+)=(\S+)", stage.partition("\nFROM ")[0]))
    assert environment["MHSA_DEVICE"] == "cuda"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_requirements_are_the_project_s_and_the_extra_s() -> None:
    extras = 'cpu = ["b>=1"]\ngpu = ["c"]\notel = ["d", "e"]'
    pyproject = f'[project]\ndependencies = ["a>=1"]\n[project.optional-dependencies]\n{extras}'
    assert requirements(pyproject, "cpu") == ["a>=1", "b>=1"]
    assert requirements(pyproject, "gpu", "otel") == ["a>=1", "c", "d", "e"]


@pytest.mark.parametrize("extra", ["cpu", "gpu", "otel", "export"])
def test_what_an_image_installs_is_locked(extra: str) -> None:
    locked = pins(ROOT / "constraints.txt") | pins(ROOT / "deploy/constraints-gpu.txt")
    names = {re.split(r"[\[>=<~!; ]", line)[0].lower().replace("_", "-") for line in requirements(PYPROJECT, extra)}
    assert names - locked.keys() == set()


def test_the_two_locks_do_not_name_one_package_twice() -> None:
    assert pins(ROOT / "constraints.txt").keys() & pins(ROOT / "deploy/constraints-gpu.txt").keys() == set()


@pytest.mark.deploy
@pytest.mark.timeout(600)
def test_the_gpu_image_s_lock_resolves_and_is_whole(tmp_path: Path) -> None:
    """Asks the index, downloads nothing but metadata: the wheels are gigabytes."""
    locks = (ROOT / "constraints.txt", ROOT / "deploy/constraints-gpu.txt")
    # All that glibc 2.36 of the base can load; pip takes these names one by one.
    platforms = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014")]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--only-binary=:all:", "--python-version=3.11", f"--target={tmp_path}", *platforms]
    command += [f"--constraint={lock}" for lock in locks]
    done = subprocess.run(
        [*command, *requirements(PYPROJECT, "gpu", "otel")], capture_output=True, text=True, check=False
    )
    if "NewConnectionError" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    installed = {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"]
        for item in json.loads(done.stdout)["install"]
    }
    locked = pins(locks[0]) | pins(locks[1])
    assert installed == {name: locked.get(name) for name in installed}
    assert "nvidia-cublas" in installed  # only the extra cudnn brings it
