"""The certificate that the server uses, read again when its files change.

cert-manager and others renew certificates while their users run, and Kubernetes then changes the files of a mounted
Secret. gRPC asks for the certificate at every handshake, on threads of its own. That is when the files are looked at:
two calls of stat(2), beside milliseconds of cryptography. Clients' connections, which end after
`--max-connection-age-seconds`, and health checks keep handshakes coming. Connections that are open stay as they are.

A new pair is used only if it is one. While it is not, as between the writing of one file and the other, the server goes
on with the pair that it has.
"""

import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from service.certificate import first_expiry
from service.errors import StartupError, unreadable
from service.logs import fields
from service.watched_files import WatchedFiles

log = logging.getLogger(__name__)


class ServedCertificate:
    """A certificate chain and its key; `on_read` gets the Unix time at which the chain expires."""

    def __init__(self, chain: Path, key: Path, on_read: Callable[[float], None]) -> None:
        self._chain = chain
        self._key = key
        self._on_read = on_read
        self._files = WatchedFiles(chain, key)
        self._lock = threading.Lock()

    def credentials(self) -> grpc.ServerCredentials:
        """What a port is opened with. Raises `StartupError` where the files are no pair."""
        self._files.have_changed()
        # None is allowed, and means that nothing has changed; the stubs do not know that.
        return grpc.dynamic_ssl_server_credentials(self._read(), self._renewed)  # type: ignore[arg-type]

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The pair, if its files have changed since the last time."""
        with self._lock:
            # Of a pair that is wrong, no is said the next time, so it is in the log once.
            if not self._files.have_changed():
                return None
            try:
                renewed = self._read()
            except StartupError as error:
                log.warning("the TLS certificate is not renewed: %s", error, extra=fields(event="not_renewed"))
                return None
            log.info("the TLS certificate is renewed", extra=fields(event="renewed"))
            return renewed

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Both files. Raises `StartupError`."""
        try:
            pair = (self._key.read_bytes(), self._chain.read_bytes())
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self._chain, self._key)
        except ssl.SSLError as error:
            # gRPC itself would take any bytes, and refuse every connection.
            reason = error.reason or "neither is PEM"
            raise StartupError(f"--tls-cert {self._chain}, --tls-key {self._key}: not a pair: {reason}") from None
        except OSError as error:
            which = "--tls-key" if error.filename == str(self._key) else "--tls-cert"
            raise StartupError(f"{which} {unreadable(error)}") from None
        self._on_read(first_expiry(pair[1]))
        return grpc.ssl_server_certificate_configuration([pair])
