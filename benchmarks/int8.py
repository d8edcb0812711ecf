"""`python -m benchmarks.int8`: int8 against fp32 and against the other ways to it; exit code 1 when a figure is missed.

Every candidate is made of the bundle's fp32 graph and runs the same batches in the same rounds, on as many threads as
there are CPUs. The batches are those that suit fp32 best. Rates are ratios to fp32 within a round, the median over
rounds. Quality is that of `export.quality`, on text that no candidate was calibrated on. No torch in this process.
"""

import argparse
import io
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks import machine
from benchmarks.comparison import Stopwatch, comparison_parser, is_chosen, parse_comparison, run_comparison
from benchmarks.contenders import BUDGETS, rotated
from benchmarks.int8_candidates import CANDIDATES, OURS
from benchmarks.measurement import Slice, ratio, sequences_per_second
from benchmarks.offline import run_batches
from benchmarks.report import new_table
from benchmarks.traces import Batch, by_budget, mixed_trace, round_up, short_trace
from export.quality import MAX_COMPANY_ERROR, MIN_COSINE, MIN_SPEARMAN, QualityReport, measure_quality
from export.texts import Tokenize, calibration_probes, held_out_probes
from service.bundle import TOKENIZER, read_bundle
from service.cpu import available_cpus
from service.engine import Engine

FP32 = "fp32"
MIN_RATE = 1.4
TRACES = {"mixed": mixed_trace, "short": short_trace}
_SEARCH_SEQUENCES = {"mixed": 96, "short": 288}
_SEARCH_TRIES = 3


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate: what it loses, and the size of its graph and weights."""

    quality: QualityReport
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Rows by their names; for each trace, the slices of every row."""

    rows: Mapping[str, Row]
    slices: Mapping[str, Mapping[str, Sequence[Slice]]]

    def rate(self, trace: str, name: str) -> float:
        """Sequences per second over those of fp32."""
        return ratio(self.slices[trace][name], self.slices[trace][FP32], sequences_per_second).median


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    console = Console(width=140, highlight=False)
    return run_comparison("benchmarks.int8", lambda work: _run(options, work, console))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = comparison_parser(
        "benchmarks.int8",
        "Compare int8 with fp32: rates and quality.",
        rounds=7,
        seconds=0.7,
        slice_="of a slice of fp32",
        only="candidates with TEXT in their name",
    )
    return parse_comparison(parser, arguments)


def _run(options: argparse.Namespace, work: Path, console: Console) -> int:
    stopwatch = Stopwatch()
    logging.disable(logging.WARNING)  # the library's, through the root logger
    onnxruntime.set_default_logger_severity(3)
    console.print(machine.describe())
    engines, rows = _make_rows(options, work, console)
    with stopwatch.during_rounds():
        figures = Figures(rows, {trace: _measure(trace, engines, options) for trace in TRACES})
    console.print(candidates_table(figures))
    is_missed = OURS in rows and print_verdicts(figures, console)
    console.print(stopwatch.summary(options.rounds))
    return int(is_missed)


def _make_rows(options: argparse.Namespace, work: Path, console: Console) -> tuple[dict[str, Engine], dict[str, Row]]:
    """fp32 and every candidate: opened, and judged."""
    bundle = read_bundle(options.bundle)
    tokenize = _open_tokenizer(options.bundle)
    limit = bundle.manifest.max_sequence_tokens
    sequences = [probe.sequence for probe in calibration_probes(tokenize, limit)]
    probes = held_out_probes(tokenize, limit)
    graphs = {FP32: bundle.graph_path("fp32")}
    for name, make in CANDIDATES.items():
        if is_chosen(name, options.only):
            started = time.monotonic()
            graphs[name] = work / str(len(graphs)) / "int8.onnx"
            graphs[name].parent.mkdir()
            with redirect_stdout(io.StringIO()):  # the library's own progress
                make(graphs[FP32], graphs[name], sequences)
            console.print(f"made {name}: {time.monotonic() - started:.0f} s")
    has_token_types = bundle.manifest.type_vocab_size > 0
    engines = {
        name: Engine(graph, num_runners=available_cpus(), has_token_types=has_token_types)
        for name, graph in graphs.items()
    }
    rows = {
        name: Row(measure_quality(engines[FP32], engines[name], probes), _size(graph)) for name, graph in graphs.items()
    }
    return engines, rows


def _open_tokenizer(bundle: Path) -> Tokenize:
    tokenizer = Tokenizer.from_file(str(bundle / TOKENIZER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return tokenize


def _size(graph: Path) -> int:
    """Bytes of a graph and of its weights; what a file of weights holds for other graphs is not counted."""
    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    outside = (entry for tensor in tensors for entry in tensor.external_data)
    return graph.stat().st_size + sum(int(entry.value) for entry in outside if entry.key == "length")


def _measure(trace_name: str, engines: Mapping[str, Engine], options: argparse.Namespace) -> dict[str, list[Slice]]:
    """Every row's slices, of the batches that suit fp32 best."""
    make = TRACES[trace_name]
    budget, rate = _find_budget(engines[FP32], make(_SEARCH_SEQUENCES[trace_name], 0).part(0))
    trace = make(round_up(options.seconds * rate), options.rounds)
    slices: dict[str, list[Slice]] = {name: [] for name in engines}
    for number in range(1, options.rounds + 1):
        batches = by_budget(trace.part(number), budget)
        for name, engine in rotated(engines, number):
            slices[name].append(run_batches(engine, batches))
    return slices


def _find_budget(engine: Engine, sequences: Batch) -> tuple[int, float]:
    """The tokens a run that suit an engine best, and its sequences per second then."""
    tries = [
        (sequences_per_second(run_batches(engine, by_budget(sequences, budget))), budget)
        for _ in range(_SEARCH_TRIES)  # one budget after the other, again and again: the best was disturbed least
        for budget in BUDGETS
    ]
    rate, budget = max(tries)
    return budget, rate


def candidates_table(figures: Figures) -> Table:
    """A line for each candidate."""
    headings = ["candidate", *TRACES, "min cosine", "mean cosine", "Spearman", "company", "MiB"]
    table = new_table("int8: rates over fp32, quality on held-out text", headings)
    for name, row in figures.rows.items():
        table.add_row(
            name,
            *(f"{figures.rate(trace, name):.2f}" for trace in TRACES),
            f"{row.quality.min_cosine:.4f}",
            f"{row.quality.mean_cosine:.4f}",
            f"{row.quality.spearman:.4f}",
            f"{row.quality.company_error:.0e}",
            f"{row.num_bytes / 2**20:.0f}",
        )
    return table


def print_verdicts(figures: Figures, console: Console) -> bool:
    """Print the wanted figures of ours; whether one was missed."""
    quality = figures.rows[OURS].quality
    table = new_table(f"wanted of {OURS}", ["figure", "limit", "found", ""])
    outcomes = []
    for name, found, limit, is_least in (
        *((f"rate over fp32, {trace}", figures.rate(trace, OURS), MIN_RATE, True) for trace in TRACES),
        ("smallest cosine", quality.min_cosine, MIN_COSINE, True),
        ("Spearman of similarities", quality.spearman, MIN_SPEARMAN, True),
        ("alone against company", quality.company_error, MAX_COMPANY_ERROR, False),
    ):
        is_held = found >= limit if is_least else found <= limit
        outcomes.append(is_held)
        sign = ">=" if is_least else "<="
        table.add_row(name, f"{sign} {limit:g}", f"{found:.4g}", "held" if is_held else "[bold red]missed")
    console.print(table)
    return not all(outcomes)


if __name__ == "__main__":
    sys.exit(main())
