"""The page of metrics: what callers who do not read it cost, and what of them is logged."""

import logging
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.metrics_page import MAX_CONNECTIONS, MetricsPage

# Only for the test to fail, instead of waiting for ever.
GIVE_UP_SECONDS = 60


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("calls", "Of a test.", registry=registry).inc(3)
    return registry


@pytest.fixture
def page(registry: CollectorRegistry) -> Iterator[MetricsPage]:
    page = MetricsPage(registry, "127.0.0.1", 0, lambda: True)
    page.start()
    yield page
    page.stop()


def connect(page: MetricsPage) -> socket.socket:
    return socket.create_connection(("127.0.0.1", page.port), GIVE_UP_SECONDS)


def read(page: MetricsPage, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{page.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=GIVE_UP_SECONDS) as response:
        body: bytes = response.read()
    return body.decode()


@pytest.mark.parametrize(("accept", "ends"), [("text/plain", False), ("application/openmetrics-text", True)])
def test_the_registry_is_shown_in_the_format_asked_for(page: MetricsPage, accept: str, ends: bool) -> None:
    text = read(page, accept)
    assert "calls_total 3.0" in text
    assert text.endswith("# EOF\n") is ends


def answer(port: int, path: str) -> tuple[int, str]:
    """The status and the text of a page, found or not."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=GIVE_UP_SECONDS) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_is_200_while_the_server_is_ready_else_503(registry: CollectorRegistry) -> None:
    answers = [False, True]
    page = MetricsPage(registry, "127.0.0.1", 0, answers.pop)
    page.start()
    assert answer(page.port, "/health") == (200, "SERVING\n")
    assert answer(page.port, "/health") == (503, "NOT_SERVING\n")
    page.stop()


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics/"])
def test_nowhere_else_is_anything_to_be_taken_for_health(page: MetricsPage, path: str) -> None:
    assert answer(page.port, path) == (404, "there are /metrics and /health\n")


def test_who_holds_on_and_says_nothing_gives_way_to_who_comes(page: MetricsPage) -> None:
    silent = [connect(page) for _ in range(3 * MAX_CONNECTIONS)]
    for first in silent[: 2 * MAX_CONNECTIONS]:
        assert first.recv(1) == b""
    assert "calls_total 3.0" in read(page)
    for last in silent:
        last.close()


class Lines(logging.Handler):
    """Keeps records, and tells when one has come."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.has_come = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.has_come.set()


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger("service.metrics_page")
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(logging.NOTSET)


def test_who_breaks_off_leaves_nothing_that_is_no_line_of_the_log(
    page: MetricsPage, lines: Lines, capfd: pytest.CaptureFixture[str]
) -> None:
    scanner = connect(page)
    scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset in place of an end
    scanner.close()
    assert lines.has_come.wait(GIVE_UP_SECONDS)
    assert {record.levelno for record in lines.records} == {logging.DEBUG}
    assert capfd.readouterr() == ("", "")


class Broken(Collector):
    def collect(self) -> Iterable[Metric]:
        raise ValueError("no numbers today")


def test_a_fault_of_ours_is_logged_with_its_traceback(
    registry: CollectorRegistry, page: MetricsPage, lines: Lines, capfd: pytest.CaptureFixture[str]
) -> None:
    registry.register(Broken())
    with pytest.raises(urllib.error.HTTPError) as caught:
        read(page)
    assert caught.value.code == 500
    caught.value.close()
    (record,) = lines.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    assert capfd.readouterr() == ("", "")
