"""`mhsa-export CHECKPOINT --output models`, `mhsa-export inspect BUNDLE`: command lines, signals and exit codes.

0 done, 2 refused (one line on stderr says what to do), 128 + n stopped by signal n (130: Ctrl-C, 143: SIGTERM). Nothing
is left behind but a bundle that passed. The steps, and with them torch, are imported where a signal or a package that
is not there still ends in one line.
"""

import argparse
import logging
import signal
import sys
import typing
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from export.errors import ExportError
from export.signals import Interrupted, interruptible
from service.bundle import Pooling, Precision, Task
from service.errors import StartupError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # A checkpoint in a directory of that name is ./inspect.
    is_inspection = arguments[:1] == ["inspect"]
    options = _parse_inspection(arguments[1:]) if is_inspection else _parse(arguments)
    with interruptible():
        try:
            (_inspect if is_inspection else _export)(options)
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            return _fail("interrupted; no bundle is left half-written", 128 + number)
        except (ExportError, StartupError, OSError) as error:
            return _fail(str(error), 2)
    return 0


def _export(options: argparse.Namespace) -> None:
    silence_libraries()
    with _naming_what_is_not_installed():
        from rich.console import Console

        from export.steps import export_checkpoint
    console = Console()
    path, report = export_checkpoint(**vars(options), console=console)
    for table in (report.as_table(), *(quality.as_table() for quality in report.quality)):
        console.print(table)
    console.print(f"bundle: {path}", highlight=False, soft_wrap=True)


def _inspect(options: argparse.Namespace) -> None:
    with _naming_what_is_not_installed():
        from export.inspection import inspect_bundle
    inspection = inspect_bundle(options.bundle)
    print(inspection.as_json() if options.json else inspection.as_text())  # noqa: T201  # what was asked for


@contextmanager
def _naming_what_is_not_installed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        extras = "mhsa-serve[cpu,export] or mhsa-serve[gpu,export]"
        raise ExportError(f"{package} is not installed; install {extras}") from None


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())  # some of it is from libraries, on several lines
    print(f"mhsa-export: {line}", file=sys.stderr)  # noqa: T201  # a command line speaks through stderr
    return code


def _parse_inspection(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mhsa-export inspect",
        description="Check every file of a bundle and print what is inside. It needs onnx and numpy, no torch.",
        epilog="To export a checkpoint in a directory called inspect, write ./inspect.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="<models>/<name>/<version>")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    return parser.parse_args(arguments)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mhsa-export",
        description="Export a checkpoint to a verified bundle that mhsa-serve serves.",
        epilog="`mhsa-export inspect BUNDLE` checks a bundle and prints what is inside.",
    )
    parser.add_argument(
        "checkpoint_path",
        metavar="CHECKPOINT",
        type=Path,
        nargs="?",
        help="directory with config.json and safetensors, or a bare .safetensors file with what --set says of it",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="what weights alone do not tell of a bare file: model_type, num_heads, ... (what is missing is listed)",
    )
    parser.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:BUILD",
        help="in place of CHECKPOINT: a function of yours that returns an export.modules.ServedModule; its code is run",
    )
    parser.add_argument(
        "--weights", metavar="FILE", type=Path, help="safetensors that --module's module is given before it is exported"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="directory of all bundles: <output>/<name>/<version>/"
    )
    parser.add_argument("--name", help="the model's name for clients; the checkpoint directory's name if not given")
    parser.add_argument(
        "--version", default="1", help="a whole number; the server's default is the highest (default: 1)"
    )
    parser.add_argument("--pooling", choices=typing.get_args(Pooling), help="needed where the checkpoint does not say")
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="divide vectors by their length, or don't; needed where the checkpoint does not say (no modules.json)",
    )
    parser.add_argument(
        "--task",
        choices=typing.get_args(Task),
        help="embedding: leave a classifier's head aside; default: what the checkpoint is",
    )
    parser.add_argument(
        "--precision",
        dest="precisions",
        metavar="LIST",
        type=_precisions,
        default=("fp32",),
        help="one or more of fp32, int8 (for CPUs), fp16 (for CUDA), with commas between them (default: fp32)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="what int8 and fp16 may lose to fp32: 1 - cosine of any text, and twice that in rank correlation "
        "(default: 0.01 for int8, 0.001 for fp16)",
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle of the same name and version")
    return parser.parse_args(arguments)


def _precisions(text: str) -> tuple[Precision, ...]:
    known = typing.get_args(Precision)
    given = [name.strip() for name in text.split(",")]
    if unknown := [name for name in given if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return tuple(given)  # type: ignore[arg-type]  # each is one of the literals


def silence_libraries() -> None:
    """Our own lines are the report; the libraries' warnings are noise in it. Errors are exceptions and still pass."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
