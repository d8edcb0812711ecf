"""The check of a server's health, against real gRPC servers."""

import datetime
import itertools
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import grpc
import pytest
import trustme
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from deploy.process import free_ports
from protos import encoder_pb2
from service.healthcheck import READY, main

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@contextmanager
def serving(credentials: grpc.ServerCredentials | None = None, **statuses: int) -> Iterator[str]:
    """A health service on a free port; its address. `ready` and `live` name the two services that are asked for."""
    servicer = HealthServicer()
    servicer.set(READY, statuses.get("ready", SERVING))
    servicer.set("", statuses.get("live", SERVING))
    server = grpc.server(ThreadPoolExecutor(2))
    add_HealthServicer_to_server(servicer, server)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def check(target: str, *flags: str, environment: Mapping[str, str] | None = None) -> int:
    """The command's exit code; it waits as long as a busy machine takes."""
    return main(["--timeout", "60", "--target", target, *flags], environment or {})


def tls(*names: str, not_after: datetime.datetime | None = None) -> grpc.ServerCredentials:
    leaf = trustme.CA().issue_cert(*names, not_after=not_after)
    chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    return grpc.ssl_server_credentials([(leaf.private_key_pem.bytes(), chain)])


def test_a_serving_server_is_0_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as target:
        assert check(target) == 0
    assert capsys.readouterr() == ("", "")


def test_a_server_that_does_not_serve_is_1_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ready=NOT_SERVING) as target:
        assert check(target) == 1
    assert capsys.readouterr().err == f"mhsa-serve healthcheck: {target}: NOT_SERVING\n"


def test_the_service_asked_for_is_the_one_that_counts() -> None:
    with serving(ready=NOT_SERVING, live=SERVING) as target:
        assert check(target, "--service", "") == 0


def test_a_service_that_is_not_there_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as target:
        assert check(target, "--service", "other") == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_nobody_there_is_1_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    assert check(f"127.0.0.1:{port}") == 1
    error = capsys.readouterr().err
    assert (error.count("\n"), "UNAVAILABLE" in error) == (1, True)


@pytest.mark.parametrize(("flags", "word"), [([], "DEADLINE_EXCEEDED"), (["--tls"], "timed out")])
def test_a_server_that_is_silent_is_1_after_the_timeout(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["--target", target, "--timeout", "0.2", *flags], {}) == 1
    assert word in capsys.readouterr().err, "gRPC alone gives up after 20 s, and calls it UNAVAILABLE"


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost"])
def test_without_a_target_the_server_of_the_same_environment_is_asked(host: str) -> None:
    with serving() as target:
        assert main(["--timeout", "60"], {"MHSA_HOST": host, "MHSA_GRPC_PORT": target.partition(":")[2]}) == 0


def test_a_port_that_only_the_server_knows_must_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"MHSA_GRPC_PORT": "0"}) == 1
    assert "give --target" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "asked"), [("::", "[::1]"), ("::2", "[::2]"), ("0.0.0.0", "127.0.0.1")])
def test_an_address_that_cannot_be_called_is_another_and_ipv6_is_bracketed(
    host: str, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports(1)
    assert main(["--timeout", "0.2"], {"MHSA_HOST": host, "MHSA_GRPC_PORT": str(port)}) == 1
    assert f" {asked}:{port}: " in capsys.readouterr().err


def test_a_proxy_is_not_for_the_server_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    with serving() as target:
        assert check(target) == 0


@pytest.mark.parametrize(
    "names",
    [
        ["a.example.com"],
        ["*.example.com"],
        ["10.1.2.3"],
        ["2001:db8::1"],
        ["a.example", "b.example"],
        ["somebody@example.com", "a.example"],
    ],
)
def test_tls_is_spoken_whatever_the_certificate_names(names: list[str]) -> None:
    with serving(tls(*names)) as target:
        assert check(target, environment={"MHSA_TLS_CERT": "/run/tls.crt"}) == 0
        assert check(target, "--tls") == 0


def test_a_server_that_speaks_tls_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tls("127.0.0.1")) as target:
        assert check(target) == 1
    assert capsys.readouterr().err.endswith("; it speaks TLS: give --tls\n")


def test_a_certificate_with_nothing_but_a_common_name_will_do() -> None:
    leaf = trustme.CA().issue_cert(common_name="encoder")
    pair = (leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes())
    with serving(grpc.ssl_server_credentials([pair])) as target:
        assert check(target, "--tls") == 0


def test_a_step_that_has_nothing_left_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(100, step=5)
    monkeypatch.setattr("service.healthcheck.time", mock.Mock(monotonic=lambda: next(clock)))
    assert main(["--target", "127.0.0.1:1", "--tls", "--timeout", "5"], {}) == 1
    assert capsys.readouterr().err == "mhsa-serve healthcheck: 127.0.0.1:1: timed out\n"


def test_every_step_has_only_what_the_steps_before_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a check with TLS could take three times its timeout, and the container's engine would kill it."""
    given: list[float] = []
    clock = itertools.count(100)
    monkeypatch.setattr("service.healthcheck.time", mock.Mock(monotonic=lambda: next(clock)))
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: mock.MagicMock(verify_flags=0))

    def show(_address: object, timeout: float) -> str:
        given.append(timeout)
        return ""

    def connect(_address: object, timeout: float) -> socket.socket:
        given.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(ssl, "get_server_certificate", show)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert main(["--target", "127.0.0.1:1", "--tls", "--timeout", "5"], {}) == 1
    assert given == [4, 3]


@pytest.mark.parametrize("flags", [[], ["--tls"]])
def test_what_is_no_host_is_1_and_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", f"{'a' * 70}.example:1", *flags], {}) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--timeout", seconds], {}) == 1
    assert "--timeout" in capsys.readouterr().err


def test_an_expired_certificate_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tls("a.example", not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))) as target:
        assert check(target, "--tls") == 1
    assert "expired" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--port", "1"], "--port"),
        (["--time", "1"], "--time"),
        (["--timeout", "soon"], "--timeout"),
        (["--target", "here"], "HOST:PORT"),
    ],
)
def test_bad_usage_is_1_since_docker_keeps_2(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, {}) == 1
    error = capsys.readouterr().err
    assert (error.count("\n"), word in error) == (1, True)


def test_the_service_of_a_ready_server_is_our_api() -> None:
    assert encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name == READY


def test_the_command_imports_nothing_heavy() -> None:
    [port] = free_ports(1)
    command = [sys.executable, "-X", "importtime", "-m", "service", "healthcheck", "--target", f"127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 1
    assert "service.healthcheck" in imported
    heavy = {"numpy", "onnxruntime", "prometheus_client", "protos.encoder_pb2", "service.server"}
    assert imported & heavy == set()
