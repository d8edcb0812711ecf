"""What every comparison does alike: its options, its errors, and the line about the machine that it ends with."""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from benchmarks.field import BenchmarkError
from benchmarks.load import LoadError
from benchmarks.machine import foreign_cpu_seconds
from deploy.process import ServerProcessError
from service.errors import StartupError


def comparison_parser(
    prog: str, description: str, *, rounds: int, seconds: float, slice_: str, only: str
) -> argparse.ArgumentParser:
    """A parser of the common options with these defaults; `slice_` and `only` say of what seconds and names are."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--bundle", type=Path, default=Path("models/all-MiniLM-L6-v2/1"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"{slice_} (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="TEXT", help=f"only {only}; may be repeated")
    return parser


def parse_comparison(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with 2 where there is nothing to compare."""
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds must be above 0")
    return options


def is_chosen(name: str, only: Sequence[str] | None) -> bool:
    """Whether --only leaves a name in."""
    return not only or any(text in name for text in only)


def run_comparison(prog: str, compare: Callable[[Path], int]) -> int:
    """The exit code: that of `compare`, 2 with one line on what stopped it, or 130 for Ctrl-C and SIGTERM.

    `compare` gets a directory to work in, which is gone afterwards.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="mhsa-benchmarks-") as work:
            return compare(Path(work))
    except (BenchmarkError, LoadError, ServerProcessError, StartupError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


class Stopwatch:
    """How long a comparison takes, and how much CPU time others take during its rounds."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._foreign_seconds = 0.0

    @contextmanager
    def during_rounds(self) -> Iterator[None]:
        before = foreign_cpu_seconds()
        yield
        self._foreign_seconds = foreign_cpu_seconds() - before

    def summary(self, num_rounds: int) -> str:
        """One line."""
        return (
            f"{num_rounds} rounds; {time.monotonic() - self._started:.0f} s in all; "
            f"during the rounds others took {self._foreign_seconds:.0f} CPU seconds of this machine"
        )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
