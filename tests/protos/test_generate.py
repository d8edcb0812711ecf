"""The generated code: up to date, beside tritonclient in one process, and the same bytes on the wire."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as triton

from protos import generate
from protos import open_inference_pb2 as ours

OURS, TRITON = "from protos import open_inference_pb2", "from tritonclient.grpc import service_pb2"
PARAMETERS = {
    "bool": {"bool_param": True},
    "int64": {"int64_param": -(2**40)},
    "string": {"string_param": "text é"},
    "double": {"double_param": 0.125},
    "uint64": {"uint64_param": 2**63 + 1},
    "unset": {},
}
CONTENTS = {
    "bool_contents": [True, False],
    "int_contents": [-(2**31), 7],
    "int64_contents": [-(2**63), 7],
    "uint_contents": [2**32 - 1],
    "uint64_contents": [2**64 - 1],
    "fp32_contents": [0.5, -1.25],
    "fp64_contents": [1e300],
    "bytes_contents": [b"\x00\xff", b""],
}
TENSOR = {"name": "t", "datatype": "INT64", "shape": [2, -1], "parameters": PARAMETERS, "contents": CONTENTS}
HEAD = {"model_name": "tiny", "model_version": "3", "id": "call-1", "parameters": PARAMETERS}
METADATA = {"name": "t", "datatype": "FP32", "shape": [-1, 384]}
MESSAGES: dict[str, dict[str, object]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": True},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": True},
    "ModelReadyRequest": {"name": "tiny", "version": "3"},
    "ModelReadyResponse": {"ready": True},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {"name": "server", "version": "1.2", "extensions": ["a", "b"]},
    "ModelMetadataRequest": {"name": "tiny", "version": "3"},
    "ModelMetadataResponse": {
        "name": "tiny",
        "versions": ["1", "3"],
        "platform": "onnx",
        "inputs": [METADATA, METADATA],
        "outputs": [METADATA],
    },
    "ModelInferRequest": {
        **HEAD,
        "inputs": [TENSOR, TENSOR],
        "outputs": [{"name": "o", "parameters": PARAMETERS}],
        "raw_input_contents": [b"\x01\x00", b""],
    },
    "ModelInferResponse": {**HEAD, "outputs": [TENSOR, TENSOR], "raw_output_contents": [b"\x01\x00", b""]},
}


def made(module: object, name: str) -> Message:
    message = getattr(module, name)(**MESSAGES[name])
    assert isinstance(message, Message)
    return message


def wire(message: Message) -> bytes:
    """Maps have no order on the wire unless one is asked for."""
    return message.SerializeToString(deterministic=True)


def test_the_committed_code_is_what_the_protos_give() -> None:
    generate.check()


def test_code_that_is_out_of_date_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def generate_other(output: Path) -> list[Path]:
        (output / "protos").mkdir()
        (output / "protos/encoder_pb2.py").write_text("other")
        return [Path("protos/encoder_pb2.py")]

    monkeypatch.setattr(generate, "generate", generate_other)
    with pytest.raises(SystemExit, match=r"out of date: protos/encoder_pb2\.py; run `make protos`"):
        generate.check()


def test_the_plugins_are_found_without_an_activated_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert Path("protos/open_inference_pb2.pyi") in generate.generate(tmp_path)


@pytest.mark.parametrize("lines", [(OURS, TRITON), (TRITON, OURS)], ids=["ours first", "tritonclient first"])
def test_our_messages_and_tritonclients_live_in_one_process(lines: tuple[str, str]) -> None:
    check = "assert open_inference_pb2.ModelInferRequest is not service_pb2.ModelInferRequest"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join([*lines, check])], cwd=generate.ROOT, check=True, timeout=60
    )


@pytest.mark.parametrize("name", [*MESSAGES])
def test_every_field_of_ours_is_set_in_these_tests(name: str) -> None:
    """Also inside the parts, but for one kind of parameter that has no value: that is one of the cases."""

    def unset(message: Message) -> list[str]:
        present = {field.name: value for field, value in message.ListFields()}
        missing = [f.full_name for f in message.DESCRIPTOR.fields if f.name not in present and not f.containing_oneof]
        for value in present.values():
            parts = [value] if isinstance(value, Message) else value if not isinstance(value, str | bytes | int) else []
            missing += [each for part in parts if isinstance(part, Message) for each in unset(part)]
        return missing

    assert unset(made(ours, name)) == []


@pytest.mark.parametrize("name", [*MESSAGES])
def test_our_bytes_are_tritonclients_bytes(name: str) -> None:
    assert wire(made(ours, name)) == wire(made(triton, name))


@pytest.mark.parametrize("name", [*MESSAGES])
def test_tritonclient_reads_what_we_write(name: str) -> None:
    assert getattr(triton, name).FromString(made(ours, name).SerializeToString()) == made(triton, name)


@pytest.mark.parametrize("name", [*MESSAGES])
def test_we_read_what_tritonclient_writes(name: str) -> None:
    assert getattr(ours, name).FromString(made(triton, name).SerializeToString()) == made(ours, name)


def test_every_message_of_the_protocol_is_in_these_tests() -> None:
    parts = {"InferParameter", "InferTensorContents"}
    assert set(ours.DESCRIPTOR.message_types_by_name) == set(MESSAGES) | parts


def test_our_methods_are_tritonclients_methods_by_name_and_type() -> None:
    theirs = triton.DESCRIPTOR.pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name
    service = ours.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == "inference.GRPCInferenceService"
    assert {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"} == set(
        service.methods_by_name
    )
    for name, method in service.methods_by_name.items():
        assert method.input_type.full_name == theirs[name].input_type.full_name
        assert method.output_type.full_name == theirs[name].output_type.full_name
