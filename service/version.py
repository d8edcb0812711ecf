"""Which release of this program runs."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """As the package has it; `unknown` where it runs from a source tree that is not installed."""
    try:
        return version("mhsa-serve")
    except PackageNotFoundError:
        return "unknown"
