"""The command from end to end: its lines, its exit codes, and the nothing it leaves when refused or stopped."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from export.__main__ import main
from service.bundle import read_bundle

POOLED = ["--pooling", "mean", "--no-normalize"]


def _export(checkpoint: Path, output: Path, *more: str) -> int:
    return main([str(checkpoint), "--output", str(output), *more])


def _contents(directory: Path) -> list[Path]:
    return list(directory.rglob("*")) if directory.exists() else []


def test_the_command_shows_its_steps_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "export",
        str(checkpoint),
        "--output",
        str(tmp_path / "models"),
        "--pooling",
        "max",
        "--normalize",
    ]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for line, step in zip(
        lines, ("read checkpoint", "export graph", "verify against PyTorch", "write bundle"), strict=False
    ):
        assert f" s  {step}: " in line
    assert "left aside: pooler.dense.bias, pooler.dense.weight" in lines[0]
    assert any("masks with holes" in line for line in lines)
    assert lines[-1] == f"bundle: {tmp_path / 'models' / 'tiny' / '1'}"


def _remove_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def _remove_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()


def _claim_another_type(checkpoint: Path) -> None:
    content = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(content | {"model_type": "t5"}))


def _leave_alone(checkpoint: Path) -> None:
    pass


def _be_a_file(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_text("")


def _go_in_circles(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to(checkpoint)


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        (_remove_weights, POOLED, "neither model.safetensors"),
        (_remove_config, POOLED, "config.json: No such file"),
        (_claim_another_type, POOLED, "model_type 't5' is not supported"),
        (_be_a_file, POOLED, "tiny: not a readable safetensors file"),
        (_go_in_circles, POOLED, "tiny is not a directory; give the one"),
        (_leave_alone, [], "give --pooling mean|cls|last|max|mean_sqrt_len and --normalize"),
        (_leave_alone, ["--pooling", "mean"], "give --pooling mean|cls|last|max|mean_sqrt_len and --normalize"),
        (_leave_alone, ["--task", "classification"], "--task classification needs a ...ForSequenceClassification"),
        (_leave_alone, [*POOLED, "--name", "../escape"], "name '../escape' is not letters"),
        (_leave_alone, [*POOLED, "--name", ""], "name '' is not letters"),
        (_leave_alone, [*POOLED, "--version", "v2"], "version 'v2' is not a whole number"),
        (_leave_alone, [*POOLED, "--version", "0"], "version '0' is not a whole number"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    arguments: list[str],
    message: str,
) -> None:
    spoil(checkpoint)

    assert _export(checkpoint, tmp_path / "models", *arguments) == 2

    error = capsys.readouterr().err
    assert error.startswith("mhsa-export: ")
    assert message in error
    assert error.count("\n") == 1
    assert _contents(tmp_path / "models") == []


def test_an_output_that_cannot_be_written_is_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").write_text("a file")

    assert _export(checkpoint, tmp_path / "models", *POOLED) == 2

    error = capsys.readouterr().err
    assert str(tmp_path / "models") in error
    assert error.count("\n") == 1


def test_a_failed_gate_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.verify.MAX_COMPANY_ERROR", 1e-12)

    assert _export(checkpoint, tmp_path / "models", *POOLED) == 2

    assert "a sequence alone and in company" in capsys.readouterr().err
    assert _contents(tmp_path / "models") == []


NO_SPACE = "the bundle cannot be written, "


def test_a_file_that_may_not_be_that_long_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    done = _in_process(
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))", checkpoint, tmp_path / "models"
    )

    assert done.returncode == 2
    assert done.stderr.startswith(f"mhsa-export: {tmp_path / 'models' / 'tiny'}: {NO_SPACE}")
    assert "make room, or give another --output" in done.stderr
    assert done.stderr.count("\n") == 1
    assert _contents(tmp_path / "models") == []


def _can_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="a full disk is a mount, which takes root")
def test_a_full_disk_is_one_line_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """There is room for the 97 KiB of weights, and not for ONNX Runtime's copy of them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
mount -t tmpfs -o size=120k none {disk}
{sys.executable} -m export {checkpoint} --output {disk}/models {" ".join(POOLED)}
code=$?
find {disk} -mindepth 1
exit $code"""

    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith(f"mhsa-export: {disk}/models/tiny: {NO_SPACE}")
    assert done.stderr.count("\n") == 1
    assert all(" s  " in line for line in done.stdout.splitlines())  # the steps, and nothing that was found


@pytest.mark.skipif(not _can_mount(), reason="a read-only disk is a mount, which takes root")
def test_a_disk_that_is_read_only_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
mount -t tmpfs -o ro none {disk}
{sys.executable} -m export {checkpoint} --output {disk} {" ".join(POOLED)}"""

    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"mhsa-export: {disk}/tiny: cannot be written to (Read-only file system)\n"


def test_a_checkpoint_with_the_output_in_it_and_without_a_name_is_exported(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)

    assert _export(Path(), Path("models"), *POOLED) == 0

    assert read_bundle(checkpoint / "models" / "tiny" / "1").manifest.name == "tiny"


def test_an_interrupt_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("export.steps.export_graph", interrupt)

    assert _export(checkpoint, tmp_path / "models", *POOLED) == 130

    assert capsys.readouterr().err == "mhsa-export: interrupted; no bundle is left half-written\n"
    assert _contents(tmp_path / "models") == []


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM, signal.SIGINT)])
def test_signals_in_the_middle_leave_nothing(
    checkpoint: Path, tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    command = [sys.executable, "-m", "export", str(checkpoint), "--output", str(tmp_path / "models"), *POOLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "read checkpoint" in process.stdout.readline()  # the rest takes seconds
        for number in numbers:
            process.send_signal(number)
        _, error = process.communicate()

    assert process.returncode in {128 + number for number in numbers}
    assert error == "mhsa-export: interrupted; no bundle is left half-written\n"
    assert _contents(tmp_path / "models") == []


def test_the_signals_are_as_they_were_afterwards(checkpoint: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    _export(checkpoint, tmp_path, "--name", "")

    assert signal.getsignal(signal.SIGTERM) is before


def _in_process(preparation: str, checkpoint: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter, after some lines of Python."""
    code = f"import sys\n{preparation}\nfrom export.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(checkpoint), "--output", str(output), *POOLED]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_is_one_line(checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    signals = f"""
import signal
class SignalsAtTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            signal.raise_signal({int(number)})
sys.meta_path.insert(0, SignalsAtTorch())"""

    done = _in_process(signals, checkpoint, tmp_path / "models")

    assert (done.returncode, done.stderr) == (
        128 + number,
        "mhsa-export: interrupted; no bundle is left half-written\n",
    )


@pytest.mark.parametrize("package", ["onnxruntime", "torch", "rich"])
def test_a_package_that_is_not_installed_is_one_line(checkpoint: Path, tmp_path: Path, package: str) -> None:
    done = _in_process(f"sys.modules[{package!r}] = None", checkpoint, tmp_path / "models")

    assert (done.returncode, done.stderr) == (
        2,
        f"mhsa-export: {package} is not installed; install mhsa-serve[cpu,export] or mhsa-serve[gpu,export]\n",
    )


def test_an_engine_that_cannot_load_the_graph_is_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.engine.ort.InferenceSession", lambda *_, **__: json.loads("{"))

    assert _export(checkpoint, tmp_path / "models", *POOLED) == 2

    error = capsys.readouterr().err
    assert "cannot load it" in error
    assert error.count("\n") == 1
    assert _contents(tmp_path / "models") == []


def test_an_existing_bundle_is_replaced_only_by_force(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--name", "model", "--no-normalize", "--pooling")
    assert _export(checkpoint, tmp_path, *arguments, "mean") == 0
    first = read_bundle(tmp_path / "model" / "1").digest

    assert _export(checkpoint, tmp_path, *arguments, "cls") == 2
    assert "exists; give --force to replace it" in capsys.readouterr().err
    assert read_bundle(tmp_path / "model" / "1").digest == first

    assert _export(checkpoint, tmp_path, *arguments, "cls", "--force") == 0
    assert read_bundle(tmp_path / "model" / "1").manifest.pooling == "cls"
