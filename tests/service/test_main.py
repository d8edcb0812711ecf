"""The command line, as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.__main__ import _COMMANDS
from service.version import installed_version


@pytest.mark.parametrize("words", [["--models"], ["calibrate"]])
def test_without_onnx_runtime_the_line_says_what_to_install(tmp_path: Path, words: list[str]) -> None:
    hidden = "import sys; sys.modules['onnxruntime'] = None; from service.__main__ import main; main()"
    command = [sys.executable, "-c", hidden, *words, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "install mhsa-serve[cpu]" in done.stderr


def test_help_names_every_setting_and_needs_no_models() -> None:
    done = subprocess.run([sys.executable, "-m", "service", "--help"], capture_output=True, text=True, check=True)
    assert "--max-queued-tokens" in done.stdout
    assert "MHSA_MAX_QUEUED_TOKENS" in done.stdout


def test_the_release_is_told() -> None:
    done = subprocess.run([sys.executable, "-m", "service", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mhsa-serve {installed_version()}\n"


def test_help_names_the_other_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "service", "--help"], capture_output=True, text=True, check=True)
    words = " ".join(done.stdout.split())
    assert all(f"mhsa-serve {name}" in words for name in _COMMANDS)


def test_a_wrong_setting_is_one_line() -> None:
    command = [sys.executable, "-m", "service", "--models", "/nowhere", "--threads", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "mhsa-serve: --threads (MHSA_THREADS) is -1; it takes 0 to 1024\n")


@pytest.mark.parametrize(("flags", "variables"), [(["--log-format", "json"], {}), ([], {"MHSA_LOG_FORMAT": "json"})])
def test_a_wrong_setting_is_one_object_where_the_log_is_json(flags: list[str], variables: dict[str, str]) -> None:
    command = [sys.executable, "-m", "service", "--models", "/nowhere", "--threads", "-1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    (line,) = done.stderr.splitlines()
    assert (done.returncode, json.loads(line)["event"]) == (2, "refused")
    assert json.loads(line)["message"] == "--threads (MHSA_THREADS) is -1; it takes 0 to 1024"


@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_the_exit_code_is_told_where_nobody_reads_what_is_written(redirections: str) -> None:
    command = f'"{sys.executable}" -m service --models /nowhere {redirections}'
    assert subprocess.run(command, shell=True, check=False).returncode == 2


def test_no_socket_gets_the_number_of_a_stream_that_was_closed() -> None:
    """For what native code writes to stderr would go to a caller."""
    code = (
        "import os, sys; from service.__main__ import _open_standard_streams as f; f(); sys.exit(os.open('.', 0) < 3)"
    )
    command = f'"{sys.executable}" -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(command, shell=True, check=False).returncode == 0


def test_sigterm_ends_a_first_process_that_is_still_importing() -> None:
    """The kernel drops a signal for a container's first process that has no handler; as if it were ignored."""
    code = """
import importlib.abc, os, signal, sys
class Terminator(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "service.server":
            os.kill(os.getpid(), signal.SIGTERM)
            sys.exit("it went on")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.meta_path.insert(0, Terminator())
from service.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "--models", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bundle_that_is_none_is_one_line_of_calibrate(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service", "calibrate", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"mhsa-serve calibrate: {tmp_path}: no readable model.json")


def test_calibrate_prints_and_is_done(tiny_bundle: Path) -> None:
    """With a thread of ONNX Runtime still there, the process must end all the same."""
    command = [sys.executable, "-m", "service", "calibrate", str(tiny_bundle), "--device", "cpu", "--threads", "2"]
    command += ["--log-level", "error"]  # a busy machine is worth a warning
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "calibrated in" in done.stdout
