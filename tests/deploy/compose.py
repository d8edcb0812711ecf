"""The real Compose, as PyPI packages it: `config` needs no engine."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deploy.docker_engine import run_command
from tests.deploy.paths import ROOT

PROGRAM = str(Path(sys.executable).parent / "docker-compose")
MAIN, GPU, LOCAL = "docker-compose.yml", "deploy/compose.gpu.yml", "tests/deploy/compose.local.yml"


def compose(
    *arguments: str,
    files: tuple[str, ...] = (MAIN,),
    seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """`docker compose --file ... <arguments>`; its output. Raises `DockerError`."""
    flags = [flag for file in files for flag in ("--file", file)]
    return run_command(
        PROGRAM, "--project-directory", str(ROOT), *flags, *arguments, seconds=seconds, environment=environment
    )


def services(*files: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:  # Any: Compose's own JSON
    """Every service as Compose understands it from these files."""
    text = compose("config", "--format", "json", files=files, environment=environment)
    parsed: dict[str, Any] = json.loads(text)["services"]
    return parsed
