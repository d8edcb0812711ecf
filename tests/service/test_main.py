"""The command line, as a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from service.__main__ import _COMMANDS


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


def test_help_names_the_other_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "service", "--help"], capture_output=True, text=True, check=True)
    words = " ".join(done.stdout.split())
    assert all(f"mhsa-serve {name}" in words for name in _COMMANDS)


def test_a_wrong_setting_is_one_line() -> None:
    command = [sys.executable, "-m", "service", "--models", "/nowhere", "--threads", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "mhsa-serve: --threads (MHSA_THREADS) is -1; it takes 0 to 1024\n")


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
