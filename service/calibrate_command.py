"""`mhsa-serve calibrate BUNDLE`: what the server would find out about a bundle on this machine, without serving it.

For whoever wants to know why the server chose what it chose, or what a machine can do: `--json` is for comparing many.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from service import logs
from service.config import add_flags, settings_from
from service.preparing import Prepared, prepare

_SETTINGS = ("device", "precision", "threads", "runners", "max_batch_tokens", "log_level", "log_format")


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Calibrate one bundle and print what was found. Raises `StartupError`; --help and unknown flags exit."""
    parser = argparse.ArgumentParser(
        prog="mhsa-serve calibrate",
        description="Open a bundle as the server would, measure it on this machine and print what was found.",
        allow_abbrev=False,
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="<models>/<name>/<version>")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in tokens and seconds")
    add_flags(parser, _SETTINGS)
    given = vars(parser.parse_args(arguments))
    path, is_json = given.pop("bundle"), given.pop("json")
    settings = settings_from({"models": path, **given}, environment)
    logs.configure(settings.log_level, settings.log_format, sys.stderr)
    found = describe(prepare(path, settings), settings.max_batch_tokens)
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if is_json else "\n".join(_lines(found)) + "\n")


def describe(prepared: Prepared, max_batch_tokens: int) -> dict[str, Any]:
    """Everything that is printed, as JSON has it."""
    engine, calibration = prepared.engine, prepared.calibration
    cost = calibration.cost
    return {
        "model": prepared.bundle.manifest.name,
        "provider": engine.provider,
        "precision": prepared.precision,
        "difference": prepared.difference,
        "layouts": [
            {
                "runners": one.layout.num_runners,
                "threads": one.layout.num_threads,
                "tokens_per_second": one.tokens_per_second,
                "lone_seconds": one.lone_seconds,
            }
            for one in prepared.layouts
        ],
        "runners": engine.num_runners,
        "threads": engine.num_threads,
        "lone_threads": engine.num_threads_alone,
        "grid": [
            {
                "sequences": sample.num_sequences,
                "length": sample.longest,
                "seconds": sample.seconds,
                "predicted_seconds": cost.seconds(sample.num_sequences, sample.num_tokens, sample.longest),
            }
            for sample in calibration.samples
        ],
        "cost": {"run_seconds": cost.per_run, "token_seconds": cost.per_token, "pair_seconds": cost.per_pair},
        "worst_error": calibration.worst_error,
        "measured_budget_tokens": calibration.max_batch_tokens,
        "budget_tokens": max_batch_tokens or calibration.max_batch_tokens,
        "tokens_per_second": engine.num_runners * calibration.tokens_per_second,
        "calibration_seconds": prepared.calibration_seconds,
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['model']}: {found['precision']} on {found['provider']}, within {found['difference']:.1e} of PyTorch"
    yield ""
    yield f"{'runners x threads':>18} {'tokens/s':>10} {'lone runs':>10}"
    for one in found["layouts"]:
        layout = f"{one['runners']} x {one['threads']}"
        yield f"{layout:>18} {one['tokens_per_second']:>10.0f} {1e3 * one['lone_seconds']:>7.2f} ms"
    yield f"taken: {found['runners']} x {found['threads']}, and {found['lone_threads']} threads for a lone run"
    yield ""
    yield f"{'sequences x tokens':>18} {'measured':>10} {'predicted':>10} {'error':>6} {'tokens/s':>10}"
    for run in found["grid"]:
        shape, seconds, predicted = f"{run['sequences']} x {run['length']}", run["seconds"], run["predicted_seconds"]
        rate = run["sequences"] * run["length"] / seconds
        error = f"{100 * (predicted / seconds - 1):+.0f}%"
        yield f"{shape:>18} {1e3 * seconds:>7.2f} ms {1e3 * predicted:>7.2f} ms {error:>6} {rate:>10.0f}"
    cost = found["cost"]
    yield (
        f"a run takes {1e3 * cost['run_seconds']:.2f} ms + {1e3 * cost['token_seconds']:.4f} ms a token "
        f"+ {1e3 * cost['pair_seconds']:.6f} ms a pair, within {100 * found['worst_error']:.0f}%"
    )
    yield ""
    yield f"budget: {found['budget_tokens']} tokens a run (measured: {found['measured_budget_tokens']})"
    yield f"rate: {found['tokens_per_second']:.0f} tokens/s with every runner busy"
    yield f"calibrated in {found['calibration_seconds']:.1f} s"
