"""Generate the Python code of both protos: `python -m protos.generate`; `--check` only compares.

The code of open_inference.proto is moved into a descriptor pool of its own. Protobuf's default pool is one per process,
and tritonclient, KServe and others register the same messages there under another file name: whoever comes second
dies of "duplicate symbol 'inference.ServerLiveRequest'".
"""

import sys
import sysconfig
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
SOURCES = ("protos/encoder.proto", "protos/open_inference.proto")
SHARED_POOL = "_descriptor_pool.Default()"
PRIVATE_POOL = "_descriptor_pool.DescriptorPool()"


def generate(output: Path) -> list[Path]:
    """Write protos/*_pb2.py, *_pb2_grpc.py and their stubs under `output`; their paths relative to it."""
    outputs = [f"--{kind}_out=quiet:{output}" for kind in ("mypy", "mypy_grpc")]
    outputs += [f"--{kind}_out={output}" for kind in ("python", "grpc_python")]
    # Beside this Python, not on PATH: the environment need not be activated.
    outputs += [f"--plugin=protoc-gen-{kind}={SCRIPTS / f'protoc-gen-{kind}'}" for kind in ("mypy", "mypy_grpc")]
    includes = [f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
    if protoc.main(["protoc", *includes, *outputs, *SOURCES]) != 0:
        raise SystemExit("protoc failed; it says why above")
    _move_to_private_pool(output / "protos/open_inference_pb2.py")
    return sorted(path.relative_to(output) for path in output.glob("protos/*_pb2*.py*"))


def check() -> None:
    """Exit with an error if the committed code is not what the protos give."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory)
        stale = [str(path) for path in generate(output) if _text(ROOT / path) != _text(output / path)]
    if stale:
        raise SystemExit(f"generated code is out of date: {', '.join(stale)}; run `make protos`")


def _move_to_private_pool(generated: Path) -> None:
    code = generated.read_text()
    if code.count(SHARED_POOL) != 1:
        raise SystemExit(f"{generated}: protoc's code has changed, {SHARED_POOL!r} is not in it once")
    generated.write_text(code.replace(SHARED_POOL, PRIVATE_POOL))


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check()
    elif not sys.argv[1:]:
        generate(ROOT)
    else:
        raise SystemExit("usage: python -m protos.generate [--check]")
