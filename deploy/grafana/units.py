"""Grafana's units, written as Grafana writes them."""

from collections.abc import Callable

_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LARGE = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def format_value(value: float, unit: str) -> str:
    """A value of one of Grafana's units, in three digits."""
    return _FORMATS[unit](value)


def _scaled(scales: tuple[tuple[float, str], ...], rest: str) -> Callable[[float], str]:
    def format_scaled(value: float) -> str:
        for scale, name in scales:
            if abs(value) >= 0.9999 * scale:
                return f"{value / scale:.3g} {name}"
        return f"{value:.3g} {rest}".rstrip()

    return format_scaled


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _with(suffix: str, scale: float = 1.0) -> Callable[[float], str]:
    return lambda value: f"{_digits(value * scale)}{suffix}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "s": _scaled(_TIMES, "s"),
    "bytes": _scaled(_BYTES, "B"),
    "decmbytes": _with(" MB"),
    "percent": _with("%"),
    "percentunit": _with("%", 100.0),
    "reqps": _with(" req/s"),
    "ops": _with(" ops/s"),
    "short": _scaled(_LARGE, ""),
    "none": _with(""),
}
