"""`mhsa-serve healthcheck`: is the server beside us serving? For a container's HEALTHCHECK and for exec probes.

It runs every few seconds beside a busy server, so it imports gRPC and nothing heavier. It reads the server's own
variables, so that ports are configured once. Exit codes are 0 and 1, since Docker reserves 2.

A server's certificate is for the name that clients use, not for 127.0.0.1. So the check trusts whatever certificate the
server shows, as the kubelet does. An expired one fails, since then no client can call.
"""

import argparse
import ipaddress
import math
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from service.config import read_setting
from service.errors import StartupError

# Written out, since importing protos.encoder_pb2 builds every message of the API. A test compares the two.
READY = "mhsa.encoder.v1.EncoderService"
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address to listen on that cannot be called: one that can


class NotServingError(Exception):
    """The server is not SERVING, or does not answer; the text is one line."""


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Ask once; 0 if the answer is SERVING, else 1 with a line on stderr."""
    try:
        options = _parse(arguments, environment)
        check(options.target, options.service, is_tls=options.tls, seconds=options.timeout)
    except (NotServingError, StartupError) as error:
        sys.stderr.write(f"mhsa-serve healthcheck: {error}\n")
        return 1
    return 0


def check(target: str, service: str, *, is_tls: bool, seconds: float) -> None:
    """Raises `NotServingError` unless `service` is SERVING at `target`, HOST:PORT, within so many seconds."""
    # The environment may name a proxy, which cannot reach this container's loopback.
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    left = _countdown(seconds)
    try:
        if is_tls:
            certificate, name = _shown_certificate(target, left)
            options.append(("grpc.ssl_target_name_override", name))
            credentials = grpc.ssl_channel_credentials(certificate.encode())
            channel = grpc.secure_channel(target, credentials, options)
        else:
            channel = grpc.insecure_channel(target, options)
        with channel:
            answer = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=left())
    except grpc.RpcError as error:
        hint = "; it speaks TLS: give --tls" if not is_tls and _speaks_tls(target, error, left) else ""
        raise NotServingError(f"{target}: {error.code().name}: {error.details()}{hint}") from None
    except (OSError, UnicodeError) as error:  # the second: what cannot be a host's name
        raise NotServingError(f"{target}: {error}") from None
    if answer.status != HealthCheckResponse.SERVING:
        raise NotServingError(f"{target}: {HealthCheckResponse.ServingStatus.Name(answer.status)}")


def _countdown(seconds: float) -> Callable[[], float]:
    """What is left of it, for one step after the other. Raises `TimeoutError` when nothing is."""
    end = time.monotonic() + seconds

    def left() -> float:
        if (remaining := end - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        return remaining

    return left


def _speaks_tls(target: str, error: grpc.RpcError, left: Callable[[], float]) -> bool:
    """Whether that is why a call over plain text has failed: gRPC says only that the socket was closed."""
    if error.code() != grpc.StatusCode.UNAVAILABLE:
        return False
    try:
        return bool(ssl.get_server_certificate(_address(target), timeout=left()))
    except (OSError, UnicodeError):
        return False


def _address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host.strip("[]"), int(port)


def _shown_certificate(target: str, left: Callable[[], float]) -> tuple[str, str]:
    """The certificate of the server, and a name that it is good for. Raises `OSError`."""
    address = _address(target)
    shown = ssl.get_server_certificate(address, timeout=left())
    context = ssl.create_default_context(cadata=shown)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it whoever has signed it
    with socket.create_connection(address, left()) as plain, context.wrap_socket(plain) as connection:
        return shown, _a_name_of(connection.getpeercert() or {})


def _a_name_of(certificate: Mapping[str, Any]) -> str:  # Any: as Python decodes certificates
    """One that gRPC finds in it: a host's, an address, or the old common name; it knows no others, as URIs are."""
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS" and name != "*"]
    names += [
        str(ipaddress.ip_address(name)) for kind, name in certificate.get("subjectAltName", ()) if kind == "IP Address"
    ]
    names += [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if names else ""


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < math.inf:
        raise ValueError
    return seconds


def _parse(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    parser = _Parser(
        prog="mhsa-serve healthcheck",
        description="Exit 0 if the server answers SERVING, else 1.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", help="HOST:PORT (default: MHSA_HOST and MHSA_GRPC_PORT, as the server takes them)")
    parser.add_argument(
        "--service",
        default=READY,
        help="health service to ask for; '' is whether the process lives (default: %(default)s, whether it serves)",
    )
    # Less than the 5 s after which Docker and the kubelet end the command, as our image and chart configure them.
    parser.add_argument("--timeout", type=_seconds, default=3.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument(
        "--tls",
        action="store_true",
        help="the server speaks TLS; its certificate is not verified (on by MHSA_TLS_CERT)",
    )
    options = parser.parse_args(arguments)
    options.target = options.target or _own_target(environment)
    options.tls = options.tls or read_setting("tls_cert", environment) is not None
    if not options.target.rpartition(":")[2].isdecimal():
        raise StartupError(f"--target {options.target[:64]!r} is not HOST:PORT")
    return options


def _own_target(environment: Mapping[str, str]) -> str:
    host, port = read_setting("host", environment), read_setting("grpc_port", environment)
    if port == 0:
        raise StartupError("MHSA_GRPC_PORT is 0, so only the server knows its port; give --target HOST:PORT")
    host = _ANY_HOST.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(message)
