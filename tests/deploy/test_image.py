"""The real images: built from this checkout, run read-only, without privileges, as nobody in particular."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from deploy.process import free_ports
from service.client import EncoderClient
from tests.deploy.docker_engine import Docker
from tests.waiting import wait_for

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(2400)]

HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
MAX_OWN_BYTES = 200e6
IDS = [[101, 7592, 102], [101, 7592, 2088, 999, 102]]
_WAIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def models(docker: Docker, demo_image: str) -> Iterator[str]:
    """A volume that the export image has filled, with the name of the volume."""
    volume = docker.run("volume", "create")
    try:
        docker.run(
            "run", "--rm", "--network", "none", *HARDENED, "--volume", f"{volume}:/models", demo_image, seconds=600
        )
        yield volume
    finally:
        docker.run("volume", "rm", "--force", volume)


@contextmanager
def serving(docker: Docker, image: str, models: str, *flags: str, user: str = "") -> Iterator[tuple[str, str]]:
    """A container of a serving image and the address of its gRPC; not waited for."""
    [port] = free_ports(1)
    own = ["--publish", f"127.0.0.1:{port}:8001", "--volume", f"{models}:/models:ro", "--health-interval", "1s"]
    own += ["--user", user] if user else []
    container = docker.run("run", "--detach", *HARDENED, *own, image, *flags)
    try:
        yield container, f"127.0.0.1:{port}"
    finally:
        docker.run("rm", "--force", "--volumes", container)


def wait_for_health(target: str, status: int) -> None:
    with grpc.insecure_channel(target) as channel:
        wait_for(
            lambda: _health(channel) == status,
            lambda: f"health is {_health(channel)}, not {status}",
            seconds=_WAIT_SECONDS,
        )


def _health(channel: grpc.Channel) -> int | None:
    try:
        return int(HealthStub(channel).Check(HealthCheckRequest(), timeout=1.0, wait_for_ready=True).status)
    except grpc.RpcError:
        return None


def test_the_cpu_image_s_own_layers_are_small(
    docker: Docker, cpu_image: str, base_image: str, show: Callable[[str], None]
) -> None:
    own, base = (docker.inspect("image", name)["Size"] for name in (cpu_image, base_image))
    show(f"cpu image: {(own - base) / 1e6:.0f} MB of its own above {base_image} ({base / 1e6:.0f} MB)")
    assert own - base < MAX_OWN_BYTES


def test_the_image_says_how_it_is_to_be_run(docker: Docker, cpu_image: str) -> None:
    config = docker.inspect("image", cpu_image)["Config"]
    assert (config["User"], config["StopSignal"]) == ("10001:10001", "SIGTERM")
    assert config["Healthcheck"]["Test"] == ["CMD", "mhsa-serve", "healthcheck"]
    labels = {name.removeprefix("org.opencontainers.image.") for name in config["Labels"]}
    assert {"title", "description", "licenses", "version", "revision"} <= labels


def test_the_serving_image_has_no_torch_compiler_or_cache(docker: Docker, cpu_image: str) -> None:
    code = """
import importlib.util, pathlib, shutil
print([name for name in ("torch", "transformers", "onnx", "pip") if importlib.util.find_spec(name)])
print([name for name in ("cc", "gcc", "c++", "make") if shutil.which(name)])
print([str(path) for path in pathlib.Path("/").glob("*/.cache")], pathlib.Path("/src").exists())
"""
    printed = docker.run("run", "--rm", *HARDENED, "--entrypoint", "python", cpu_image, "-c", code)
    assert printed.splitlines() == ["[]", "[]", "[] False"]


def test_the_serving_image_can_trace(docker: Docker, cpu_image: str) -> None:
    code = "from service.tracing import Tracing; Tracing.to_collector('http://127.0.0.1:1'); print('traces')"
    assert docker.run("run", "--rm", *HARDENED, "--entrypoint", "python", cpu_image, "-c", code) == "traces"


def test_it_serves_read_only_as_nobody_and_answers_a_client(
    docker: Docker, cpu_image: str, models: str, show: Callable[[str], None]
) -> None:
    started_at = time.monotonic()
    with serving(docker, cpu_image, models) as (container, target):
        wait_for_health(target, HealthCheckResponse.SERVING)
        show(f"cpu image: SERVING {time.monotonic() - started_at:.1f} s after `docker run` (all-MiniLM-L6-v2)")
        with EncoderClient(target) as client:
            vectors = client.encode(IDS, timeout=30)
        assert docker.run("exec", container, "id", "-u") == "10001"
        assert docker.run("exec", container, "mhsa-serve", "healthcheck") == ""
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)  # normalized in float32


def test_the_engine_sees_its_health(docker: Docker, cpu_image: str, models: str) -> None:
    with serving(docker, cpu_image, models) as (container, _):

        def status() -> str:
            return docker.run("inspect", "--format", "{{.State.Health.Status}}", container)

        wait_for(lambda: status() != "starting", lambda: "Docker does not check it", seconds=_WAIT_SECONDS)
        assert status() == "healthy"


def test_it_drains_on_sigterm_and_exits_0(docker: Docker, cpu_image: str, models: str) -> None:
    with serving(docker, cpu_image, models, "--drain-seconds", "600") as (container, target):
        wait_for_health(target, HealthCheckResponse.SERVING)
        docker.run("kill", "--signal", "TERM", container)
        wait_for_health(target, HealthCheckResponse.NOT_SERVING)
        with EncoderClient(target) as client:
            assert client.encode(IDS, timeout=30).shape == (2, 384)
        docker.run("kill", "--signal", "TERM", container)  # a second one ends the drain
        assert docker.run("wait", container, seconds=60) == "0"


def test_any_other_user_will_do(docker: Docker, cpu_image: str, models: str) -> None:
    with serving(docker, cpu_image, models, user="23456:0") as (_, target):
        wait_for_health(target, HealthCheckResponse.SERVING)


def test_without_models_it_ends_with_one_line(docker: Docker, cpu_image: str) -> None:
    command = [docker.program, "run", "--rm", *HARDENED, cpu_image]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("mhsa-serve: ")
    assert "Traceback" not in done.stderr


def test_the_gpu_image_lacks_nothing_but_the_driver(
    docker: Docker, gpu_image: str, base_image: str, show: Callable[[str], None]
) -> None:
    """What CUDA's wheels hold is found by the libraries' own run paths; the driver's library comes with the machine."""
    own, base = (docker.inspect("image", name)["Size"] for name in (gpu_image, base_image))
    show(f"gpu image: {(own - base) / 1e9:.2f} GB of its own")
    code = """
import pathlib, subprocess
import onnxruntime
library = pathlib.Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
wheels = pathlib.Path(onnxruntime.__file__).parents[1] / "nvidia"
path = ":".join(str(directory) for directory in sorted(wheels.glob("*/lib")))
done = subprocess.run(["ldd", library], env={"LD_LIBRARY_PATH": path}, capture_output=True, text=True, check=True)
print(sorted(line.split()[0] for line in done.stdout.splitlines() if "not found" in line))
"""
    printed = docker.run("run", "--rm", *HARDENED, "--entrypoint", "python", gpu_image, "-c", code)
    assert printed == str([] if has_gpu(docker) else ["libcuda.so.1"])


def test_the_gpu_image_without_a_gpu_ends_with_one_line_unless_told_that_a_cpu_will_do(
    docker: Docker, gpu_image: str, models: str
) -> None:
    if has_gpu(docker):
        pytest.skip("this machine has a GPU")
    command = [docker.program, "run", "--rm", *HARDENED, "--volume", f"{models}:/models:ro", gpu_image]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("mhsa-serve: device cuda: ONNX Runtime fell back to the CPU")
    with serving(docker, gpu_image, models, "--device", "auto") as (container, target):
        wait_for_health(target, HealthCheckResponse.SERVING)
        assert "device auto: took CPUExecutionProvider" in docker.run("logs", container)


def has_gpu(docker: Docker) -> bool:
    return "nvidia" in docker.run("info", "--format", "{{json .Runtimes}}")
