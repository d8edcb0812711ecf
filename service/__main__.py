"""`mhsa-serve`: parse, log, run."""

import asyncio
import logging
import os
import sys

from service import logs
from service.config import Settings, parse_settings
from service.errors import StartupError

log = logging.getLogger(__name__)


def main() -> None:
    """Serve until told to stop. Exit code 0 after a drain, 1 if the engine died, 2 if it could not start."""
    if sys.argv[1:2] == ["healthcheck"]:
        from service import healthcheck  # gRPC, which `mhsa-serve --help` can do without

        sys.exit(healthcheck.main(sys.argv[2:]))
    is_json = False
    try:
        settings = parse_settings(sys.argv[1:])
        is_json = settings.log_format == "json"
        logs.configure(settings.log_level, settings.log_format, sys.stderr)
        code = _serve(settings)
    except StartupError as error:
        if is_json:
            log.critical("%s", error, extra=logs.fields(event="refused"))
        else:
            sys.stderr.write(f"mhsa-serve: {error}\n")
        code = 2
    logging.shutdown()
    # A thread that ONNX Runtime holds, loading a model or in a run that would not end, aborts the process if it comes
    # back while the interpreter is taken apart.
    os._exit(code)


def _serve(settings: Settings) -> int:
    try:
        from service.server import Server, serve
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        raise StartupError("ONNX Runtime is not installed; install mhsa-serve[cpu] or, for CUDA, [gpu]") from None

    async def run() -> int:
        return await serve(Server(settings))

    # Not asyncio.run, which would close gRPC's server; serve says why not.
    return asyncio.new_event_loop().run_until_complete(run())


if __name__ == "__main__":
    main()
