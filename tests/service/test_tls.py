"""A certificate that changes while it is served, as a client's handshake sees it."""

import logging
import os
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from service.errors import StartupError
from service.tls import ServedCertificate
from tests.integration.server_process import write_certificate


@dataclass(frozen=True, slots=True)
class Served:
    """A server's files, its port, and when each chain that it has read expires."""

    chain: Path
    key: Path
    port: int
    read: list[float]

    def shown(self) -> str:
        """What a new connection gets to see."""
        return ssl.get_server_certificate(("127.0.0.1", self.port)).strip()

    def replace(self, chain: Path | None = None, key: Path | None = None) -> None:
        for new, old in ((chain, self.chain), (key, self.key)):
            if new is not None:
                os.replace(new, old)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def served(authority: trustme.CA, tmp_path: Path) -> Iterator[Served]:
    chain, key = write_certificate(authority, tmp_path / "tls")
    read: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_secure_port("127.0.0.1:0", ServedCertificate(chain, key, read.append).credentials())
        server.start()
        yield Served(chain, key, port, read)
        server.stop(None).wait()


def test_a_renewed_certificate_is_in_the_next_handshake(
    served: Served, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    chain, key = write_certificate(authority, tmp_path / "new")
    old, new = served.chain.read_text().strip(), chain.read_text().strip()
    assert served.shown() == old
    served.replace(chain, key)
    assert [served.shown(), served.shown()] == [new, new]
    assert len(served.read) == 2, "at the start and once more"
    assert [record.getMessage() for record in caplog.records] == ["the TLS certificate is renewed"]


def test_half_a_renewal_changes_nothing_and_is_said_once(
    served: Served, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = write_certificate(authority, tmp_path / "new")
    old, new = served.chain.read_text().strip(), chain.read_text().strip()
    served.replace(chain)
    assert [served.shown(), served.shown()] == [old, old]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the TLS certificate is not renewed: --tls-cert" in caplog.text
    assert "not a pair" in caplog.text
    served.replace(key=key)
    assert served.shown() == new


def test_files_that_vanish_leave_what_is_served(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    old = served.chain.read_text().strip()
    served.chain.unlink()
    assert [served.shown(), served.shown()] == [old, old]
    assert [record.getMessage() for record in caplog.records] == [
        f"the TLS certificate is not renewed: --tls-cert {served.chain}: No such file or directory"
    ]


def test_what_is_no_pair_at_the_start_is_refused(authority: trustme.CA, tmp_path: Path) -> None:
    chain, _ = write_certificate(authority, tmp_path / "one")
    _, key = write_certificate(authority, tmp_path / "another")
    with pytest.raises(StartupError, match="not a pair"):
        ServedCertificate(chain, key, lambda _: None).credentials()
