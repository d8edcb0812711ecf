"""`mhsa-serve`: which command, then run it. Without the name of one, it serves."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from service import logs
from service.config import parse_settings
from service.errors import StartupError

log = logging.getLogger(__name__)


def main() -> None:
    """Exit code 0 after a drain, 1 if the engine died, 2 if it could not start; other commands have their own."""
    name, *arguments = sys.argv[1:] or [""]
    code = _COMMANDS[name](arguments) if name in _COMMANDS else _serve(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    # A thread that ONNX Runtime holds, loading a model or in a run that would not end, aborts the process if it comes
    # back while the interpreter is taken apart.
    os._exit(code)


def _serve(arguments: Sequence[str]) -> int:
    is_json = False
    try:
        settings = parse_settings(arguments)
        is_json = settings.log_format == "json"
        logs.configure(settings.log_level, settings.log_format, sys.stderr)
        with _onnx_runtime():
            from service.server import Server, serve

        async def run() -> int:
            return await serve(Server(settings))

        # Not asyncio.run, which would close gRPC's server; serve says why not.
        return asyncio.new_event_loop().run_until_complete(run())
    except StartupError as error:
        if is_json:
            log.critical("%s", error, extra=logs.fields(event="refused"))
        else:
            sys.stderr.write(f"mhsa-serve: {error}\n")
        return 2


def _calibrate(arguments: Sequence[str]) -> int:
    try:
        with _onnx_runtime():
            from service import calibrate_command

        calibrate_command.main(arguments)
    except StartupError as error:
        sys.stderr.write(f"mhsa-serve calibrate: {error}\n")
        return 2
    return 0


def _healthcheck(arguments: Sequence[str]) -> int:
    from service import healthcheck  # gRPC, which `mhsa-serve --help` can do without

    return healthcheck.main(arguments)


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
