"""What every comparison takes on its command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def comparison_parser(
    prog: str, description: str, *, rounds: int, seconds: float, slice_: str
) -> argparse.ArgumentParser:
    """A parser of --bundle, --rounds and --seconds with these defaults; `slice_` says of what the seconds are."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--bundle", type=Path, default=Path("models/all-MiniLM-L6-v2/1"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"{slice_} (default: %(default)s)")
    return parser


def parse_comparison(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with 2 where there is nothing to compare."""
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds and --seconds must be above 0")
    return options
