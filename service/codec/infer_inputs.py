"""The inputs of the Open Inference Protocol: tensors, raw or typed, of a padded rectangle; names, shapes and bytes.

Which inputs there are depends on the model: `input_ids`, with `token_type_ids`, or for a model of vectors
`inputs_embeds`; either with `attention_mask`. They are transformers' names.
"""

import math
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.open_inference_pb2 import ModelInferRequest
from service.codec.infer_parameters import refuse_parameters
from service.errors import InvalidRequestError
from service.request import Limits

IDS, VECTORS, MASK, TYPES = "input_ids", "inputs_embeds", "attention_mask", "token_type_ids"
# Reading a cell of a typed tensor takes 30 ns on the event loop, so cells that hold nothing are bounded by those that
# may hold something. Fill below a sixteenth is far from any traffic that anybody pads on purpose.
MAX_CELLS_PER_TOKEN = 16

_InferInput = ModelInferRequest.InferInputTensor
_INTEGERS: dict[str, tuple[np.dtype[Any], str]] = {
    "INT64": (np.dtype("<i8"), "int64_contents"),
    "INT32": (np.dtype("<i4"), "int_contents"),
}
_FLOATS: dict[str, tuple[np.dtype[Any], str]] = {"FP32": (np.dtype("<f4"), "fp32_contents")}


def input_names(limits: Limits) -> tuple[str, ...]:
    """What a model takes; the first is needed."""
    if limits.input_size:
        return VECTORS, MASK
    # A model without token types takes those of type 0, and ignores them.
    return IDS, MASK, TYPES


def read_shape(inputs: Iterable[_InferInput], limits: Limits) -> tuple[int, int]:
    """(B, S), which every input has; nothing of their contents is read. Raises `InvalidRequestError`."""
    needed, *_ = names = input_names(limits)
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in inputs:
        _check_tensor(tensor, names, shapes, limits)
        shapes[tensor.name] = tuple(tensor.shape)
    if needed not in shapes:
        raise InvalidRequestError(f"the input {needed!r} is missing")
    rows, columns = shapes[needed][:2]
    for name, shape in shapes.items():
        if shape[:2] != (rows, columns):
            raise InvalidRequestError(f"{name} has shape {list(shape)}; {needed} has {list(shapes[needed])}")
    return rows, columns


def read_tensors(message: ModelInferRequest, limits: Limits) -> dict[str, NDArray[Any]]:
    """Every input as (B, S), or (B, S, input_size); its shape has been checked. Raises `InvalidRequestError`."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequestError(f"raw_input_contents has {len(raw)} entries; inputs has {len(message.inputs)}")
    return {
        tensor.name: _read_raw(tensor, raw[index]) if raw else _read_typed(tensor, limits)
        for index, tensor in enumerate(message.inputs)
    }


def _check_tensor(tensor: _InferInput, names: tuple[str, ...], seen: Container[str], limits: Limits) -> None:
    if tensor.name not in names:
        raise InvalidRequestError(f"no input {tensor.name[:64]!r}; the model has {', '.join(names)}")
    if tensor.name in seen:
        raise InvalidRequestError(f"input {tensor.name!r} is given twice")
    if tensor.datatype not in (datatypes := _datatypes(tensor)):
        raise InvalidRequestError(f"{tensor.name} is {tensor.datatype[:64]!r}; it takes {' or '.join(datatypes)}")
    tail = [limits.input_size] if tensor.name == VECTORS else []
    if len(tensor.shape) != 2 + len(tail) or min(tensor.shape) < 1 or list(tensor.shape[2:]) != tail:
        wanted = ", ".join(["rows", "columns", *map(str, tail)])
        raise InvalidRequestError(
            f"{tensor.name} has shape {list(tensor.shape[:8])}; it takes [{wanted}], each at least 1"
        )
    refuse_parameters(f"input {tensor.name!r}", tensor.parameters)


def _datatypes(tensor: _InferInput) -> dict[str, tuple[np.dtype[Any], str]]:
    return _FLOATS if tensor.name == VECTORS else _INTEGERS


def _read_raw(tensor: _InferInput, data: bytes) -> NDArray[Any]:
    if tensor.HasField("contents"):
        raise InvalidRequestError(f"{tensor.name} has contents beside raw_input_contents; give one of them")
    dtype, _ = _datatypes(tensor)[tensor.datatype]
    if len(data) != (wanted := math.prod(tensor.shape) * dtype.itemsize):
        raise InvalidRequestError(
            f"{tensor.name} has {len(data)} raw bytes; {tensor.datatype} of shape {list(tensor.shape)} takes {wanted}"
        )
    return np.frombuffer(data, dtype).reshape(tensor.shape)


def _read_typed(tensor: _InferInput, limits: Limits) -> NDArray[Any]:
    dtype, field = _datatypes(tensor)[tensor.datatype]
    if surplus := [f.name for f, _ in tensor.contents.ListFields() if f.name != field]:
        raise InvalidRequestError(f"{tensor.name} has {surplus[0]}; {tensor.datatype} goes into {field}")
    values = getattr(tensor.contents, field)
    if len(values) != (wanted := math.prod(tensor.shape)):
        raise InvalidRequestError(
            f"{tensor.name} has {len(values)} elements in {field}; shape {list(tensor.shape)} takes {wanted}"
        )
    if wanted > (most := MAX_CELLS_PER_TOKEN * limits.max_request_tokens):
        raise InvalidRequestError(
            f"{tensor.name} has {wanted} elements in {field}; the limit is {most}; send raw_input_contents"
        )
    return np.fromiter(values, dtype, wanted).reshape(tensor.shape)
