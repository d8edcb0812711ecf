"""Images, built once per run from this checkout, where a Docker engine runs; and a place for what is to be shown."""

import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.deploy.docker_engine import Docker, DockerError, find_docker, run_command
from tests.deploy.paths import DOCKERFILE, ROOT
from tests.deploy.pip_secret import pip_conf

_OFFICIAL_BASE = "python:3.11-slim-bookworm"
_STAND_IN_BASE = "mhsa-serve-test/base:bookworm"
_SHOWN = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What tests measured, after the results: nothing of it is judged."""
    if lines := config.stash.get(_SHOWN, []):
        terminalreporter.section("shown")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="session")
def show(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes a line for the end of the run."""
    return pytestconfig.stash.setdefault(_SHOWN, []).append


@pytest.fixture(scope="session")
def docker() -> Docker:
    found, reason = find_docker()
    if found is None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def base_image(docker: Docker) -> str:
    """What the images are built on. An engine that answers may still be in a sandbox where no container can start."""
    base = _base_image(docker)
    try:
        docker.run("run", "--rm", base, "true")
    except DockerError as error:
        pytest.skip(f"the Docker engine cannot start a container: {str(error).splitlines()[-1]}")
    return base


def _base_image(docker: Docker) -> str:
    """The official image if it is here or can be pulled, else a stand-in of Debian's packages."""
    if docker.has_image(_OFFICIAL_BASE):
        return _OFFICIAL_BASE
    if docker.has_image(_STAND_IN_BASE):
        return _STAND_IN_BASE
    try:
        docker.run("pull", _OFFICIAL_BASE, seconds=300)
    except (DockerError, subprocess.TimeoutExpired):
        try:
            run_command(str(ROOT / "tests/deploy/base-image.sh"), _STAND_IN_BASE, seconds=600)
        except DockerError as error:
            pytest.skip(f"{_OFFICIAL_BASE} cannot be pulled, and no stand-in made: {str(error).splitlines()[-1]}")
        return _STAND_IN_BASE
    return _OFFICIAL_BASE


@pytest.fixture(scope="session")
def build(docker: Docker, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Builds a target of deploy/Dockerfile and returns the image's name; the names are gone after the run."""
    built = []
    with pip_conf(tmp_path_factory.mktemp("pip") / "pip.conf") as (secret, has_torch):

        def build_target(target: str) -> str:
            tag = f"mhsa-serve:test-{target}"
            flags = ["--target", target, "--build-arg", f"BASE={base_image}", "--secret", f"id=pip,src={secret}"]
            if has_torch:
                flags += ["--build-arg", "TORCH_INDEX="]
            docker.build(tag, DOCKERFILE, ROOT, *flags)
            built.append(tag)
            return tag

        yield build_target
    for tag in built:
        docker.run("image", "rm", tag)


@pytest.fixture(scope="session")
def cpu_image(build: Callable[[str], str]) -> str:
    return build("cpu")


@pytest.fixture(scope="session")
def gpu_image(build: Callable[[str], str]) -> str:
    return build("gpu")


@pytest.fixture(scope="session")
def demo_image(build: Callable[[str], str]) -> str:
    """The export image with the demo's checkpoint."""
    return build("demo")


@pytest.fixture(scope="session")
def prometheus_image(docker: Docker, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Prometheus and Alertmanager from Debian, in place of the images that Compose names."""
    tag = "mhsa-serve:test-prometheus"
    dockerfile = ROOT / "tests/deploy/prometheus.Dockerfile"
    docker.build(tag, dockerfile, tmp_path_factory.mktemp("empty"), "--build-arg", f"BASE={base_image}")
    yield tag
    docker.run("image", "rm", tag)
