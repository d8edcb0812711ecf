"""`mhsa-serve`: which command, then run it. Without the name of one, it serves."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from service import logs
from service.config import flag, parse_settings, variable
from service.errors import StartupError

log = logging.getLogger(__name__)


def main() -> None:
    """Exit code 0 after a drain, 1 if the engine died, 2 if it could not start; other commands have their own."""
    _open_standard_streams()
    # By default gRPC's C++ writes a line of its own for whoever says to a TLS port what is no TLS, as port scanners do.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    name, *arguments = sys.argv[1:] or [""]
    code = _COMMANDS[name](arguments) if name in _COMMANDS else _serve(sys.argv[1:])
    _flush_log()
    with contextlib.suppress(OSError):  # nobody reads it, or its disk is full; the exit code is still to be told
        sys.stdout.flush()
    # A thread that ONNX Runtime holds, loading a model or in a run that would not end, aborts the process if it comes
    # back while the interpreter is taken apart.
    os._exit(code)


def _serve(arguments: Sequence[str]) -> int:
    # The first process of a container gets no signal that it has no handler for, and a second of imports is before us.
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    try:
        settings = parse_settings(arguments)
        logs.configure(settings.log_level, settings.log_format, sys.stderr)
        with _onnx_runtime():
            from service.server import Server, serve

        async def run() -> int:
            return await serve(Server(settings))

        # Not asyncio.run, which would close gRPC's server; serve says why not.
        return asyncio.new_event_loop().run_until_complete(run())
    except StartupError as error:
        if _wants_json(arguments):
            logs.configure("info", "json", sys.stderr)  # the settings may have been what was wrong
            log.critical("%s", error, extra=logs.fields(event="refused"))
        else:
            _complain(f"mhsa-serve: {error}\n")
        return 2


def _wants_json(arguments: Sequence[str]) -> bool:
    """Also where other settings are wrong, so that there are none yet."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag("log_format"), dest="format", default=os.environ.get(variable("log_format")))
    return bool(parser.parse_known_args(arguments)[0].format == "json")


def _calibrate(arguments: Sequence[str]) -> int:
    try:
        with _onnx_runtime():
            from service import calibrate_command

        calibrate_command.main(arguments)
    except StartupError as error:
        _complain(f"mhsa-serve calibrate: {error}\n")
        return 2
    return 0


def _healthcheck(arguments: Sequence[str]) -> int:
    from service import healthcheck  # gRPC, which `mhsa-serve --help` can do without

    return healthcheck.main(arguments)


def _complain(line: str) -> None:
    _flush_log()  # this is the last line
    with contextlib.suppress(OSError):
        sys.stderr.write(line)


def _flush_log() -> None:
    """Not `logging.shutdown`, whose handler of last resort waits for stderr, and so for ever where nobody reads it."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _open_standard_streams() -> None:
    """Who started us may have closed them. The next socket would then be file 2, to which gRPC's C++ writes its log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


@contextmanager
def _onnx_runtime() -> Iterator[None]:
    """Around imports that need it. Raises `StartupError` where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        raise StartupError("ONNX Runtime is not installed; install mhsa-serve[cpu] or, for CUDA, [gpu]") from None


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"calibrate": _calibrate, "healthcheck": _healthcheck}


if __name__ == "__main__":
    main()
