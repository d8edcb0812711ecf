"""The release, as it is installed."""

import importlib.metadata

import pytest

from service import version


def test_it_is_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "version", {"mhsa-serve": "1.2.3"}.__getitem__)
    assert version.installed_version() == "1.2.3"


def test_a_source_tree_that_is_not_installed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    assert version.installed_version() == "unknown"
