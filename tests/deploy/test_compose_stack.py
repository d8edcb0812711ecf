"""docker-compose.yml up and down for real: export, encoder, Prometheus, Alertmanager. No registry, so no Grafana.

Compose does not build here, since its builder is a plugin of Docker's that not every machine has: the fixtures have
built the images, and compose.local.yml names them.
"""

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.process import free_ports
from service.client import EncoderClient
from tests.deploy.compose import LOCAL, MAIN, compose
from tests.deploy.docker_engine import Docker
from tests.waiting import wait_for

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1200)]

PROJECT = "mhsa-serve-test"
SERVICES = ("encoder", "prometheus", "alertmanager")
IDS = [[101, 7592, 102], [101, 7592, 2088, 999, 102], [101, 102]]
_UP_SECONDS = 600.0
_SCRAPE_SECONDS = 90.0  # several scrapes


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that is up, on free ports of this machine."""

    environment: dict[str, str]

    def compose(self, *arguments: str, seconds: float = _UP_SECONDS) -> str:
        flags = ("--project-name", PROJECT, *arguments)
        return compose(*flags, files=(MAIN, LOCAL), seconds=seconds, environment=self.environment)

    def address(self, port: str) -> str:
        return f"127.0.0.1:{self.environment[port]}"

    def prometheus(self, path: str) -> Any:  # Any: Prometheus' own JSON
        with urllib.request.urlopen(f"http://{self.address('PROMETHEUS_PORT')}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[float]:
        result = self.prometheus(f"query?query={urllib.parse.quote(expression)}")["result"]
        return [float(series["value"][1]) for series in result]


@pytest.fixture(scope="module")
def stack(
    docker: Docker, cpu_image: str, demo_image: str, prometheus_image: str, show: Callable[[str], None]
) -> Iterator[Stack]:
    names = ("GRPC_PORT", "METRICS_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT")
    stack = Stack({**dict(zip(names, map(str, free_ports(4)), strict=True)), "ENCODER_CPUS": "1"})
    stack.compose("down", "--volumes")  # of a run that was killed
    try:
        started_at = time.monotonic()
        stack.compose("up", "--detach", "--wait", "--no-build", *SERVICES)
        show(
            f"Compose: {', '.join(SERVICES)} healthy {time.monotonic() - started_at:.0f} s after `up`, export included"
        )
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "60")


def wait_until(is_so: Callable[[], bool], failure: str) -> None:
    wait_for(is_so, lambda: failure, seconds=_SCRAPE_SECONDS, pause_seconds=0.25)


def test_a_client_s_sequences_are_counted_in_prometheus(stack: Stack, show: Callable[[str], None]) -> None:
    with EncoderClient(stack.address("GRPC_PORT")) as client:
        assert client.encode(IDS, timeout=30).shape == (3, 384)
    expression = 'mhsa_sequences_total{model="all-MiniLM-L6-v2"}'
    wait_until(lambda: stack.query(expression) == [3.0], "Prometheus has not counted the three sequences")
    show(f"Compose: {expression} is {stack.query(expression)[0]:.0f} after a call of {len(IDS)}")


def test_prometheus_evaluates_our_rules_and_finds_alertmanager(stack: Stack) -> None:
    def health() -> set[str]:
        return {rule["health"] for group in stack.prometheus("rules")["groups"] for rule in group["rules"]}

    wait_until(lambda: "unknown" not in health(), "rules are not evaluated")
    assert health() == {"ok"}
    wait_until(lambda: bool(stack.prometheus("alertmanagers")["activeAlertmanagers"]), "no Alertmanager was found")


def test_a_filled_volume_is_not_exported_into_again(stack: Stack) -> None:
    assert "all-MiniLM-L6-v2 is there" in stack.compose("run", "--rm", "export")


def test_the_encoder_sees_its_cpu_limit(stack: Stack) -> None:
    code = "from service.cpu import available_cpus; print(available_cpus())"
    assert stack.compose("exec", "--no-TTY", "encoder", "python", "-c", code) == "1"


def test_down_leaves_nothing(docker: Docker, stack: Stack) -> None:
    encoder = stack.compose("ps", "--quiet", "encoder")
    stack.compose("stop", "encoder")
    assert docker.inspect("container", encoder)["State"]["ExitCode"] == 0
    stack.compose("down", "--volumes")
    assert docker.labelled(f"com.docker.compose.project={PROJECT}") == {}
