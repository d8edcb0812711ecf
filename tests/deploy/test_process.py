"""Child processes: whatever happens in the block, nothing is left running."""

import os
import socket
from pathlib import Path

import pytest

from deploy.process import ServerProcess, ServerProcessError, free_ports, require_free


def make_process(arguments: list[str]) -> ServerProcess:
    grpc_port, metrics_port = free_ports(2)
    return ServerProcess("service", arguments, grpc_port=grpc_port, metrics_port=metrics_port)


def test_a_server_that_cannot_start_is_reported_in_its_own_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerProcessError, match="make one with mhsa-export"),
        make_process(["--models", str(tmp_path)]) as server,
    ):
        server.wait_until_serving()


def test_a_server_is_ended_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), make_process(["--models", str(tmp_path)]) as server:
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerProcessError, match=f"port {port} is taken"):
            require_free(port)


def test_free_ports_differ() -> None:
    assert len(set(free_ports(5))) == 5
