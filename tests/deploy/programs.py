"""Programs of Debian's that some tests need."""

import os
import shutil

import pytest

_PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "amtool": "prometheus-alertmanager",
    "nginx": "nginx-light",
}


def need(program: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    # Debian puts nginx into /usr/sbin, which is not in everybody's PATH.
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed (Debian: apt-get install {_PACKAGES[program]})")
    return found
