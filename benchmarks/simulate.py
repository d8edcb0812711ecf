"""`python -m benchmarks.simulate`: the real scheduler in virtual time, on machines that are not here.

Three questions, each a table and a picture of latency and goodput against load: our queue against plain ones on the CPU
that `bench-overload` measures; the same on a GPU; and, in front of many replicas, what it is worth to look where a
request is sent to. A trace of your own takes the place of the drawn ones with --trace.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.arrivals import Arrival, TraceError, read_trace, write_trace
from benchmarks.balancing import BALANCERS
from benchmarks.cases import Case, Point, capacity, draw, lengths_of
from benchmarks.devices import CPU, DEVICES, Device
from benchmarks.plots import plot
from benchmarks.report import new_table
from benchmarks.terms import OURS, RIVALS
from service.cpu import available_cpus

LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
FLEET_LOADS = (0.5, 0.7, 0.9, 1.1)
# What a drawn trace lasts at the highest load.
_SECONDS = 5.0
_FLEET_SECONDS = 3.5
NOTE = """\
Loads and goodput: over capacity, what callers who wait for their answers get of one replica. p50 and p99: of those that
were accepted. Late: accepted, and not answered in time; given up: refused, but only after a wait of 0.2 s.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    console = Console(width=120, highlight=False)
    try:
        recorded = read_trace(options.trace) if options.trace else None
    except TraceError as error:
        print(f"benchmarks.simulate: {error}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(available_cpus(), get_context("spawn")) as executor:
        for name, cases in _questions(options, recorded):
            started = time.monotonic()
            points = list(executor.map(Case.run, cases))
            path = options.output / f"{name.replace(' ', '-')}.png"
            plot(name, points, path)
            console.print(points_table(name, points))
            console.print(
                f"{sum(len(case.trace) for case in cases):,} requests, {time.monotonic() - started:.0f} s: {path}\n"
            )
    console.print(NOTE)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.simulate", description="Replay a trace through the scheduler in virtual time; plot what comes."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/simulate"), help="of pictures (default: %(default)s)"
    )
    parser.add_argument("--trace", type=Path, help="JSON lines (benchmarks/arrivals.py), in place of those drawn")
    parser.add_argument("--write-trace", type=Path, metavar="FILE", help="keep the trace that is drawn for one CPU")
    parser.add_argument("--bursty", action="store_true", help="draw requests in bursts of 10, not one by one")
    parser.add_argument("--replicas", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--device", choices=DEVICES, default=CPU.name, help="of a replica (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.replicas < 1:
        parser.error("--replicas must be above 0")
    return options


def _questions(options: argparse.Namespace, recorded: list[Arrival] | None) -> Sequence[tuple[str, list[Case]]]:
    fleet = DEVICES[options.device]
    name = f"{options.replicas} {fleet.name} replicas"
    return [
        *((f"one {device.name}", _queues(device, options, recorded)) for device in DEVICES.values()),
        (name, _balancers(fleet, options, recorded)),
    ]


def _queues(device: Device, options: argparse.Namespace, recorded: list[Arrival] | None) -> list[Case]:
    trace, rate = _trace(device, 1, max(LOADS) * _SECONDS, options, recorded)
    if device is CPU and options.write_trace:
        write_trace(options.write_trace, trace)
    return [
        Case(queue, device, trace, load, rate, queue=queue, seed=options.seed)
        for queue in (OURS, *RIVALS)
        for load in LOADS
    ]


def _balancers(device: Device, options: argparse.Namespace, recorded: list[Arrival] | None) -> list[Case]:
    replicas = options.replicas
    trace, rate = _trace(device, replicas, max(FLEET_LOADS) * _FLEET_SECONDS, options, recorded)
    return [
        Case(balancer, device, trace, load, rate, num_replicas=replicas, balancer=balancer, seed=options.seed)
        for balancer in BALANCERS
        for load in FLEET_LOADS
    ]


def _trace(
    device: Device, num_replicas: int, seconds: float, options: argparse.Namespace, recorded: list[Arrival] | None
) -> tuple[list[Arrival], float]:
    """A trace that is all of capacity, or the recorded one as it is; and that capacity, in tokens a second."""
    requests = lengths_of(recorded)
    rate = num_replicas * capacity(device, requests)
    if recorded is not None:
        return recorded, rate
    return draw(rate, seconds, requests, seed=options.seed, is_bursty=options.bursty), rate


def points_table(name: str, points: Sequence[Point]) -> Table:
    """A line for each point."""
    headings = ["load", "goodput", "in time", "refused", "given up", "late", "accepted p50 ms", "p99 ms"]
    table = new_table(name, ["", *headings])
    for point in points:
        table.add_row(
            point.line,
            f"{point.load:g}x",
            f"{point.goodput:.3f}",
            *(f"{part:.1%}" for part in (point.in_time, point.refused, point.given_up, point.late)),
            f"{1000 * point.p50:.0f}",
            f"{1000 * point.p99:.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
