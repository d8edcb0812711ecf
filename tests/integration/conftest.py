"""A real server process with the real model, one for all tests that do not stop it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.server_process import TestedServer


@pytest.fixture(scope="session")
def minilm_server(minilm_bundle: Path) -> Iterator[TestedServer]:
    """Serving; its address is `.target`."""
    with TestedServer(minilm_bundle.parents[1]) as server:
        server.wait_until_serving()
        yield server
        assert server.stop() == 0, server.log()
