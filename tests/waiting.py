"""Waiting for what another process or thread will do at a time of its own. The limit only ends a test that hangs."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    find: Callable[[], T | None],
    failure: Callable[[], str],
    *,
    seconds: float = 60.0,
    pause_seconds: float = 0.02,
) -> T:
    """The first true result of `find`, called again and again. Fails with the text of `failure` after `seconds`."""
    give_up_at = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < give_up_at, failure()
        time.sleep(pause_seconds)
    return found
