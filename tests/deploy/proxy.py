"""nginx with deploy/nginx/nginx.conf, its ports and paths a test's own; nothing is left when the block ends."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.process import free_ports
from tests.deploy.chart import DEPLOY

CONFIG = DEPLOY / "nginx" / "nginx.conf"
# Debian's is in /usr/sbin, which not everybody's PATH has.
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)")
_SERVERS = ("127.0.0.1:8001", "127.0.0.1:8011")
_LISTEN = "127.0.0.1:8080"
_START_SECONDS = 30


@contextmanager
def proxy(directory: Path, targets: Sequence[str]) -> Iterator[str]:
    """The address of an nginx before two servers, HOST:PORT each."""
    (port,) = free_ports(1)
    log = directory / "nginx.log"
    with log.open("w") as output:
        process = subprocess.Popen(_command(directory, targets, port), stderr=output)
        try:
            _wait_until_listening(process, port, log)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _command(directory: Path, targets: Sequence[str], port: int) -> list[str]:
    text = CONFIG.read_text()
    changes = {_LISTEN: f"127.0.0.1:{port}", "/tmp/mhsa-nginx": str(directory / "nginx")}
    changes |= dict(zip(_SERVERS, targets, strict=True))
    for old, new in changes.items():
        assert old in text, f"{CONFIG} has no {old}"
        text = text.replace(old, new)
    path = directory / "nginx.conf"
    path.write_text(text)
    # Of root's, workers become nobody, who cannot reach pytest's directories.
    user = "user root;" if os.getuid() == 0 else ""
    assert NGINX is not None
    return [NGINX, "-c", str(path), "-g", f"daemon off; {user}"]


def _wait_until_listening(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    give_up_at = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < give_up_at:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise AssertionError(f"nginx does not listen:\n{log.read_text()}")
