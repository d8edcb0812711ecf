"""A server as a child process: start it, wait until it serves, and stop it whatever happens in between.

The child has a process group of its own. Ctrl-C in a terminal signals the whole foreground group: the child would start
to drain at once, and take its parent's SIGTERM for a second signal, which cuts the drain short.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

# Only to end what hangs: a start takes seconds, also on a busy machine, and a stop the drain and the grace, 35 s.
_START_SECONDS = 120.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.1


class ServerProcessError(Exception):
    """The server did not start, or has ended; the text is the last line of its log."""


class ServerProcess:
    """`python -m <module> <arguments>`, a server that takes --grpc-port and --metrics-port. A context manager.

    It is asked at `host`, where the arguments must let it listen.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], *, grpc_port: int, metrics_port: int, host: str = "127.0.0.1"
    ) -> None:
        ports = ["--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)]
        self._command = [sys.executable, "-m", module, *ports, *arguments]
        self.host = host
        self.grpc_port = grpc_port
        self.metrics_port = metrics_port

    def __enter__(self) -> Self:
        # Another process on the port would answer the health check in the server's place.
        for port in (self.grpc_port, self.metrics_port):
            require_free(port, self.host)
        self._log = tempfile.TemporaryFile("w+")  # closed in __exit__
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, process_group=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def target(self) -> str:
        """Where its gRPC listens."""
        return f"{self.host}:{self.grpc_port}"

    def wait_until_serving(self) -> str:
        """Return its target when health says SERVING. Raises `ServerProcessError` if it ends or takes too long."""
        give_up_at = time.monotonic() + _START_SECONDS
        with grpc.insecure_channel(self.target) as channel:
            while not _is_serving(HealthStub(channel)):
                if self._process.poll() is not None or time.monotonic() > give_up_at:
                    raise ServerProcessError(self.last_line())
                time.sleep(_POLL_SECONDS)
        return self.target

    def wait(self, seconds: float | None = None) -> int:
        """Wait until it ends by itself; its exit code."""
        return self._process.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, and do not wait."""
        self._process.send_signal(number)

    def stop(self) -> int:
        """Ask it to drain and wait; kill it if it will not end. Its exit code, negative for a signal."""
        self._process.terminate()
        try:
            return self._process.wait(_STOP_SECONDS)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def log(self) -> str:
        """What it has written so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def last_line(self) -> str:
        """The last line it wrote, which says why it ended."""
        lines = self.log().strip().splitlines()
        return lines[-1] if lines else f"{' '.join(self._command)} said nothing"


def require_free(port: int, host: str = "127.0.0.1") -> None:
    """Raises `ServerProcessError` when something listens on the port at `host`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: TIME_WAIT does not count
        try:
            probe.bind((host, port))
        except OSError:
            raise ServerProcessError(
                f"port {port} is taken; stop what listens there (ss -ltnp) and try again"
            ) from None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _is_serving(stub: HealthStub) -> bool:
    try:
        answer = stub.Check(HealthCheckRequest(), timeout=1.0)
    except grpc.RpcError:
        return False
    return bool(answer.status == HealthCheckResponse.SERVING)
