"""`mhsa-export inspect`: what it tells is what is in the bundle, and a bad bundle is one line."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from export.__main__ import main
from export.inspection import Inspection, inspect_bundle
from service.bundle import read_bundle, write_manifest


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil, in a directory called 1."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "tiny" / "1"))


@pytest.fixture(scope="module")
def inspection(tiny_bundle: Path) -> Inspection:
    """Of the tiny bundle."""
    return inspect_bundle(tiny_bundle)


def test_it_says_what_the_model_is(inspection: Inspection) -> None:
    lines = inspection.as_text().splitlines()

    assert lines[:5] == [
        "name       tiny, version 1",
        "model      bert, for embedding",
        "layers     2, of 4 heads and hidden size 32",
        "input      token ids below 200, 2 token types, pad 0, at most 64 tokens",
        "output     32 numbers, mean pooling, not normalized",
    ]
    assert f"digest     {inspection.bundle.digest}" in lines
    assert any(line.startswith("made with  ") and "onnxruntime 1." in line for line in lines)


def test_parameters_are_those_of_the_checkpoint(inspection: Inspection, tiny_checkpoint: Path) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    kept = [tensor for name, tensor in tensors.items() if not name.startswith("pooler.")]
    # Random weights, but biases of zeros and norms of ones: what is equal is stored once.
    expected = sum({tensor.tobytes(): tensor.size for tensor in kept}.values())

    graph = inspection.graphs["fp32"]
    assert (graph.parameters, graph.bytes_by_dtype) == (expected, {"float32": 4 * expected})
    assert f"fp32       model.fp32.onnx, opset 20, {expected:,} parameters (float32 " in inspection.as_text()


def test_operators_are_counted(inspection: Inspection) -> None:
    graph = inspection.graphs["fp32"]

    assert graph.fused == {"com.microsoft.MultiHeadAttention": 2}
    # query, key, value, the way out, and two of the feed-forward network in each of two layers
    assert graph.operators["MatMul"] == 2 * 6
    assert "  fused    com.microsoft.MultiHeadAttention x 2; 2 attention nodes when loaded\n" in inspection.as_text()


def test_the_worst_of_parity_is_told(inspection: Inspection, tiny_bundle: Path) -> None:
    cases = json.loads((tiny_bundle / "parity.json").read_text())["cases"]
    worst = max(cases, key=lambda case: case["token_error"])

    text = inspection.as_text()
    assert f"  token error    {worst['token_error']:.2g} at worst, in batch {worst['name']!r}\n" in text
    assert "max_error 1e-05, min_cosine 0.99999" in text


def test_what_another_precision_loses_is_told(bundle: Path) -> None:
    parity = json.loads((bundle / "parity.json").read_text())
    quality = {"precision": "int8", "num_texts": 200, "min_cosine": 0.9976, "worst_text": "a\nb", "cosine_limit": 0.99}
    (bundle / "parity.json").write_text(json.dumps(parity | {"quality": [quality]}))
    manifest = json.loads((bundle / "model.json").read_text())
    manifest["files"]["parity.json"] = sha256((bundle / "parity.json").read_bytes()).hexdigest()
    (bundle / "model.json").write_text(json.dumps(manifest))

    line = "  int8           against fp32 on 200 texts, min_cosine 0.9976, cosine_limit 0.99"
    assert line in inspect_bundle(bundle).as_text().splitlines()


def test_every_file_is_listed_with_size_and_sha256(inspection: Inspection, tiny_bundle: Path) -> None:
    files = json.loads(inspection.as_json())["files"]

    expected = {path.relative_to(tiny_bundle).as_posix(): path for path in tiny_bundle.rglob("*") if path.is_file()}
    assert files == {
        name: {"size": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for name, path in expected.items()
    }
    for name, file in files.items():
        assert any(
            line.startswith(file["sha256"]) and line.endswith(f"  {name}") for line in inspection.as_text().split("\n")
        )


def test_json_holds_everything(inspection: Inspection, tiny_bundle: Path) -> None:
    content = json.loads(inspection.as_json())

    assert content["manifest"] == json.loads((tiny_bundle / "model.json").read_text())
    assert content["parity"] == json.loads((tiny_bundle / "parity.json").read_text())
    assert content["graphs"]["fp32"]["operators"]["com.microsoft.MultiHeadAttention"] == 2
    assert content["size"] == sum(path.stat().st_size for path in tiny_bundle.rglob("*") if path.is_file())


def test_each_precision_labels_and_prompts_are_told(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    shutil.copyfile(bundle / "model.fp32.onnx", bundle / "model.int8.onnx")
    facts = manifest.graphs["fp32"]
    second = dataclasses.replace(facts, file="model.int8.onnx", kept_in_fp32=["layer 0, query"], token_tolerance=0.5)
    write_manifest(
        bundle,
        dataclasses.replace(
            manifest,
            graphs={"fp32": facts, "int8": second},
            task="classification",
            normalize=False,
            labels=["bad", "good", *map(str, range(30))],
            prompts={"query": "query: "},
            default_prompt="query",
        ),
    )

    lines = inspect_bundle(bundle).as_text().splitlines()

    assert any(line.startswith("int8       model.int8.onnx, opset 20, ") for line in lines)
    assert "  in fp32  1: layer 0, query" in lines
    assert {"prompts    query: 'query: '", "default    query"} <= set(lines)
    assert any(line.startswith("labels     bad, good, 0, 1, ") for line in lines)


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_the_command_needs_neither_torch_nor_a_runtime(bundle: Path, option: list[str]) -> None:
    missing = "torch transformers onnxruntime onnxscript rich safetensors tokenizers"
    code = f"import sys\nfor name in {missing.split()}: sys.modules[name] = None\n"
    code += "from export.__main__ import main\nsys.exit(main(sys.argv[1:]))"

    command = [sys.executable, "-c", code, "inspect", str(bundle), *option]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    inspection = inspect_bundle(bundle)
    assert done.stdout == (inspection.as_json() if option else inspection.as_text()) + "\n"


def _change_a_weight(bundle: Path) -> None:
    weights = bundle / "model.onnx.data"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)


def _remove_manifest(bundle: Path) -> None:
    (bundle / "model.json").unlink()


def _record_a_graph_that_is_none(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    (bundle / "model.fp32.onnx").write_bytes(b"no graph")
    write_manifest(bundle, manifest)


def _record_a_report_that_is_none(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    (bundle / "parity.json").write_text("{")
    write_manifest(bundle, manifest)


def _record_a_report_without_cases(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    (bundle / "parity.json").write_text("{}")
    write_manifest(bundle, manifest)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_change_a_weight, "model.onnx.data: sha256 is "),
        (_remove_manifest, "no readable model.json"),
        (_record_a_graph_that_is_none, "model.fp32.onnx: not an ONNX graph; export the bundle again"),
        (_record_a_report_that_is_none, "parity.json: no report of parity (JSONDecodeError("),
        (_record_a_report_without_cases, "parity.json: no report of parity (KeyError("),
        (shutil.rmtree, "no readable model.json"),
    ],
)
def test_a_bad_bundle_is_one_line(
    bundle: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], message: str
) -> None:
    spoil(bundle)

    assert main(["inspect", str(bundle)]) == 2

    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("mhsa-export: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_checkpoint_called_inspect_is_exported_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inspect").mkdir()
    monkeypatch.chdir(tmp_path)

    assert main(["./inspect", "--output", "models"]) == 2

    assert "inspect/config.json: No such file or directory" in capsys.readouterr().err
