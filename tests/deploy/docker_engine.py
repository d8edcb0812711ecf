"""The Docker engine of this machine, for tests that build the real images and run them."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.paths import ROOT

_BUILD_SECONDS = 1800  # gigabytes for the gpu image


class DockerError(Exception):
    """A docker command failed; the text is the end of what it said."""


@dataclass(frozen=True, slots=True)
class Docker:
    """A command line that can build with BuildKit, and an engine that answers it."""

    program: str

    def run(self, *arguments: str, seconds: float = 120.0, environment: Mapping[str, str] | None = None) -> str:
        """`docker <arguments>`; its output without the last newline. Raises `DockerError`."""
        return run_command(self.program, *arguments, seconds=seconds, environment=environment)

    def has_image(self, name: str) -> bool:
        try:
            self.run("image", "inspect", name)
        except DockerError:
            return False
        return True

    def build(self, tag: str, dockerfile: Path, context: Path, *arguments: str) -> None:
        """Build on the host's network, which a sandbox may have a way out of when bridges have none."""
        flags = ["--network", "host", "--file", str(dockerfile), "--tag", tag, *arguments]
        self.run("build", *flags, str(context), seconds=_BUILD_SECONDS, environment={"DOCKER_BUILDKIT": "1"})

    def inspect(self, kind: str, name: str) -> Any:  # Any: the engine's own JSON
        return json.loads(self.run(kind, "inspect", name))[0]

    def labelled(self, label: str) -> dict[str, str]:
        """Containers, volumes and networks with this label, by kind; a kind without any is left out."""
        kinds = {"container": ("ps", "--all"), "volume": ("volume", "ls"), "network": ("network", "ls")}
        found = {kind: self.run(*command, "--quiet", "--filter", f"label={label}") for kind, command in kinds.items()}
        return {kind: names for kind, names in found.items() if names}


def run_command(*command: str, seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """The output, stdout then stderr. Raises `DockerError` with it when the command fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    output = (done.stdout + done.stderr).rstrip("\n")
    if done.returncode:
        raise DockerError(f"{' '.join(command[:3])}: exit code {done.returncode}\n{output[-4000:]}")
    return output


def find_docker() -> tuple[Docker | None, str]:
    """A command line and its engine, or None and the reason."""
    programs = [
        program for program in (shutil.which("docker"), "/usr/bin/docker") if program and Path(program).exists()
    ]
    if not programs:
        return None, "no docker command (Debian: apt-get install docker.io)"
    reason = ""
    for program in programs:
        docker = Docker(program)
        try:
            docker.run("version", "--format", "{{.Server.Version}}", seconds=20)
            if not _has_buildkit(docker):
                raise DockerError(f"{program} has no BuildKit: its plugin buildx is missing")
        except (DockerError, subprocess.TimeoutExpired) as error:
            reason = f"no Docker engine: {str(error).splitlines()[-1]}"
        else:
            return docker, ""
    return None, reason


def _has_buildkit(docker: Docker) -> bool:
    """Up to version 22 the command line had BuildKit in it; since then it is a plugin."""
    try:
        docker.run("buildx", "version", seconds=20)
    except DockerError:
        return int(docker.run("version", "--format", "{{.Client.Version}}").partition(".")[0]) < 23
    return True
