"""A real server process with the real model, one for all tests that do not stop it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.server_process import ServerProcess


@pytest.fixture(scope="session")
def minilm_server(minilm_bundle: Path) -> Iterator[ServerProcess]:
    """Serving; its address is `.address`."""
    with ServerProcess(minilm_bundle.parents[1]) as server:
        server.wait_until_serving()
        yield server
        server.terminate()
        assert server.exit_code() == 0, "".join(server.log)
