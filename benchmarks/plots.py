"""Latency and goodput against load, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.cases import Point
from benchmarks.terms import TIMEOUT_SECONDS

_INCHES = (10.0, 4.2)


def plot(title: str, points: Sequence[Point], path: Path) -> None:
    """A line for each of the points' lines; goodput on the left, the accepted's p50 and p99 on the right."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    figure.suptitle(title)
    goodput, latency = figure.subplots(1, 2)
    for number, line in enumerate(dict.fromkeys(point.line for point in points)):
        found = sorted((point for point in points if point.line == line), key=lambda point: point.load)
        loads, colour = [point.load for point in found], f"C{number}"
        goodput.plot(loads, [point.goodput for point in found], "o-", color=colour, label=line)
        latency.plot(loads, [point.p99 for point in found], "o-", color=colour, label=f"{line}, p99")
        latency.plot(loads, [point.p50 for point in found], "--", color=colour, alpha=0.6, label=f"{line}, p50")
    goodput.axhline(1.0, color="grey", linewidth=0.8)
    goodput.set(ylabel="answered in time, over capacity", ylim=(0, None))
    latency.axhline(TIMEOUT_SECONDS, color="grey", linewidth=0.8)
    latency.set(ylabel="seconds of the accepted", yscale="log")
    for axes in (goodput, latency):
        axes.set(xlabel="offered load, over capacity")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
