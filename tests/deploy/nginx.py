"""nginx with deploy/nginx/nginx.conf, its ports and paths a test's own; nothing is left when the block ends."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from deploy.process import free_ports
from tests.deploy.paths import DEPLOY
from tests.deploy.programs import need
from tests.waiting import wait_for

CONFIG = DEPLOY / "nginx" / "nginx.conf"
_SERVER = re.compile(r"( *)server (127\.0\.0\.1:\d+)( .*;\n)")
_LISTEN = "listen 127.0.0.1:8080 "
_TLS = re.compile(r"( *)# (listen .* ssl|ssl_certificate)")
_CLIENT_TLS = re.compile(r"( *)# (ssl_client_certificate|ssl_verify_client)")
_TLS_LISTEN = "listen 127.0.0.1:8443 "
_PATHS = "/tmp/mhsa-nginx"


class Nginx:
    """A running nginx. `target` is where it listens."""

    def __init__(self, directory: Path, targets: Sequence[str], certificates: Path | None) -> None:
        (port,) = free_ports(1)
        self._certificates = certificates
        self.target = f"127.0.0.1:{port}"
        self._config = directory / "nginx.conf"
        self._log = directory / "nginx.log"
        self._write(targets)
        # Of root's, workers become nobody, who cannot reach pytest's directories.
        user = "user root;" if os.getuid() == 0 else ""
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [need("nginx"), "-c", str(self._config), "-g", f"daemon off; {user}"], stderr=output
            )

    def use(self, targets: Sequence[str]) -> None:
        """Send calls to these servers from now on: a reload, as an operator does it; returns when it is over."""
        old = self._workers()
        self._write(targets)
        self._process.send_signal(signal.SIGHUP)
        wait_for(lambda: not old & self._workers(), lambda: f"old workers stay:\n{self._log.read_text()}")

    def wait_until_listening(self) -> None:
        """Raises `AssertionError` if it ends or takes too long."""
        host, _, port = self.target.partition(":")

        def is_listening() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex((host, int(port))) == 0

        wait_for(is_listening, lambda: f"nginx does not listen:\n{self._log.read_text()}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _workers(self) -> set[int]:
        return {child.pid for child in psutil.Process(self._process.pid).children()}

    def _write(self, targets: Sequence[str]) -> None:
        text = CONFIG.read_text()
        found = list(_SERVER.finditer(text))
        assert len(found) == 2
        assert _LISTEN in text
        assert _PATHS in text
        indent, _, rest = found[0].groups()
        servers = "".join(f"{indent}server {target}{rest}" for target in targets)
        text = text[: found[0].start()] + servers + text[found[-1].end() :]
        if self._certificates is not None:
            assert len(_TLS.findall(text)) == 3
            text = _TLS.sub(r"\1\2", text.replace(f"{_LISTEN}http2;\n", ""))
            if (self._certificates / "ca.crt").exists():
                assert len(_CLIENT_TLS.findall(text)) == 2
                text = _CLIENT_TLS.sub(r"\1\2", text)
            text = text.replace(_TLS_LISTEN, _LISTEN).replace("/etc/nginx/tls", str(self._certificates))
        text = text.replace(_LISTEN, f"listen {self.target} ").replace(_PATHS, str(self._config.parent / "nginx"))
        self._config.write_text(text)


@contextmanager
def run_nginx(directory: Path, targets: Sequence[str], certificates: Path | None = None) -> Iterator[Nginx]:
    """An nginx before these servers, HOST:PORT each; with a directory of tls.crt and tls.key it speaks TLS.

    With ca.crt there too it wants client certificates.
    """
    running = Nginx(directory, targets, certificates)
    try:
        running.wait_until_listening()
        yield running
    finally:
        running.stop()
