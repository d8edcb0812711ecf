"""A name server on loopback for one name, as a headless Service has it: the addresses of the pods that are ready.

gRPC's own resolver asks it, by a target that names it: dns://HOST:PORT/NAME:PORT. Source: RFC 1035, section 4.
"""

import socket
import struct
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_A = 1
_HEADER_BYTES = 12
_ANSWER = b"\x85\x80"  # an authoritative answer without error
_SAME_NAME = b"\xc0\x0c"  # a pointer to the question's


class NameServer:
    """Answers every question for an IPv4 address with `addresses`, to be kept 0 seconds. A context manager."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._answer_all)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def target(self, port: int) -> str:
        """What a client is told, for servers on this port."""
        host, own_port = self._socket.getsockname()
        return f"dns://{host}:{own_port}/mhsa.test:{port}"

    def _answer_all(self) -> None:
        while True:
            question, caller = self._socket.recvfrom(512)
            if not question:
                return
            self._socket.sendto(self._answer(question), caller)

    def _answer(self, question: bytes) -> bytes:
        end = question.index(b"\0", _HEADER_BYTES) + 1
        (kind,) = struct.unpack_from(">H", question, end)
        found = list(self.addresses) if kind == _A else []
        records = [_SAME_NAME + struct.pack(">HHIH", _A, 1, 0, 4) + socket.inet_aton(address) for address in found]
        counts = struct.pack(">HHHH", 1, len(found), 0, 0)
        return question[:2] + _ANSWER + counts + question[_HEADER_BYTES : end + 4] + b"".join(records)
