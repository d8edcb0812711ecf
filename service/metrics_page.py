"""The page that Prometheus reads, in threads of its own, so that it is there while the event loop is busy.

A connection costs a thread, also of one who says nothing, and a container has only so many of both. So the oldest of
`MAX_CONNECTIONS` gives way to the newest: a scrape comes and is done in milliseconds, and who holds on reads nothing.

Lines of the log are the log's alone: the standard library would print tracebacks of callers who break off.
"""

import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MAX_CONNECTIONS = 32

# Any: WSGI's environment and its start_response.
_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

log = logging.getLogger(__name__)


class MetricsPage:
    """Shows a registry over HTTP, and at /health whether calls are served, for who can ask by HTTP alone.

    `port` is the one that was taken, after the start.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, is_ready: Callable[[], bool]) -> None:
        pages = {"/metrics": make_wsgi_app(registry), "/health": _health(is_ready)}
        self._app = _logging_its_faults(_by_path(pages))
        self._host = host
        self.port = port

    def start(self) -> None:
        """Listen, and answer. Raises `OSError` where that cannot be, `UnicodeError` for what is no host name."""
        family, _, _, _, address = socket.getaddrinfo(self._host, self.port, type=socket.SOCK_STREAM)[0]
        self._server = _Server(family, address)
        self._server.set_app(self._app)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS
    allow_reuse_port = False  # a second server would share the port without a word

    def __init__(self, family: int, address: Any) -> None:  # Any: an address of whatever family
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}  # Any: as the base class has a connection; the oldest is the first
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the base class's question to the name server what this host is called."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                self._end(next(iter(self._open)))
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        # Under the lock: a number that is closed may be another socket's the next moment.
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, _request: Any, client_address: Any) -> None:
        log.debug("the connection of %s broke off", client_address, exc_info=True)

    def _end(self, request: socket.socket) -> None:
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a connection had ended: %s", error)


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """A scrape every few seconds is no news."""


def _by_path(pages: Mapping[str, _App]) -> _App:
    """Any other path is not found: a load balancer that asked there would take the metrics for an answer."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if page := pages.get(environ["PATH_INFO"]):
            return page(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [f"there are {' and '.join(pages)}\n".encode()]

    return serve


def _health(is_ready: Callable[[], bool]) -> _App:
    def serve(_environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, text = ("200 OK", b"SERVING\n") if is_ready() else ("503 Service Unavailable", b"NOT_SERVING\n")
        start_response(status, [("Content-Type", "text/plain")])
        return [text]

    return serve


def _logging_its_faults(app: _App) -> _App:
    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except Exception:
            log.exception("the metrics cannot be read")
            start_response("500 Internal Server Error", [])
            return [b""]

    return serve
