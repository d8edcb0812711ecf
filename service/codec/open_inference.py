"""Open Inference Protocol v2 <-> request: a padded rectangle with a mask comes in, only its real tokens go on.

What the protocol leaves open:

- A real token keeps its column as position, so left padding and holes are exact; the limit is on the column.
- The size of the rectangle is limited before any of it is read: rows as sequences are, cells to `MAX_CELLS_PER_TOKEN`
  times the limit on tokens. Width alone is not: tokenizers pad to a length of their own, 512 for a model of 256.
- What the mask takes out is dropped unread: tokenizers pad with -1 and -100 too, and nothing will look at them.
- A request that names no output gets all of them, as in Triton; name `sentence_embedding` to spare the rest.
- A classifier has `logits` in place of `sentence_embedding`, so that neither is taken for the other.
- Answers are always raw, one entry per output: clients of the protocol read nothing else.
- `timeout` (microseconds) shortens the call's deadline; `priority` is Triton's, 1 the most urgent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from service.codec.infer_inputs import (
    IDS,
    MASK,
    MAX_CELLS_PER_TOKEN,
    TYPES,
    VECTORS,
    input_names,
    read_shape,
    read_tensors,
)
from service.codec.infer_parameters import read_deadline, read_priority, refuse_parameters
from service.codec.sequences import (
    Locate,
    check_answer,
    check_ids,
    check_lengths,
    check_number,
    check_vectors,
    held_bytes,
    spans,
    token_type_bound,
)
from service.errors import InvalidRequestError
from service.request import Encoding, Float32Array, Limits, Request, TokenSequence

SENTENCE, LOGITS, TOKENS = "sentence_embedding", "logits", "last_hidden_state"

# Everything in an answer but its vectors and the request's id: names, shapes, tags, version.
ENVELOPE_BYTES = 1024


_IntegerArray = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class InferCall:
    """A decoded call: the queue's request, the outputs to answer with, and `is_real` (B, S), where its tokens stood."""

    request: Request
    outputs: tuple[str, ...]
    is_real: NDArray[np.bool_]


def output_names(limits: Limits) -> tuple[str, ...]:
    """What a model can be asked for: one row for each sequence, and one for each token."""
    return (LOGITS if limits.is_classifier else SENTENCE, TOKENS)


def decode_infer(
    message: ModelInferRequest, limits: Limits, *, arrival: float, deadline: float | None, caller: str = ""
) -> InferCall:
    """Check a message and make the queue's request of it. Raises `InvalidRequestError`."""
    _check_numbers(message, limits)
    refuse_parameters("the request", message.parameters)
    deadline = read_deadline(message.parameters, arrival, deadline)
    priority = read_priority(message.parameters)
    outputs = _outputs(message.outputs, output_names(limits))
    shape = read_shape(message.inputs, limits)
    _check_rectangle(shape, limits)
    answer_bytes = _answer_bytes(message, outputs, shape, limits)
    check_answer(answer_bytes, limits)
    tensors = read_tensors(message, limits)
    is_real = _is_real(tensors.get(MASK), shape)
    rows, columns = np.nonzero(is_real)  # (T,), row after row
    lengths = is_real.sum(axis=1).tolist()
    _check_columns(rows, columns, limits)
    num_tokens = check_lengths(lengths, limits, "row")

    def locate(index: int) -> str:
        return f"row {rows[index]}, column {columns[index]}"

    if limits.input_size:
        vectors = check_vectors(VECTORS, tensors[VECTORS][is_real], locate)  # (T, input_size)
        sequences = [TokenSequence.of_vectors(vectors[s], columns[s]) for s in spans(lengths)]
    else:
        token_ids = check_ids(IDS, tensors[IDS][is_real], limits.vocab_size, locate)
        token_types = _token_types(tensors.get(TYPES), is_real, limits, locate)
        sequences = [TokenSequence(token_ids[s], columns[s], token_types[s]) for s in spans(lengths)]
    num_bytes = held_bytes(message.ByteSize(), len(sequences), num_tokens, answer_bytes, limits)
    request = Request(tuple(sequences), TOKENS in outputs, arrival, deadline, priority, caller, num_bytes)
    return InferCall(request, outputs, is_real)


def encode_infer(call: InferCall, *, request_id: str, model: str, version: str) -> ModelInferResponse:
    """The answer to a call whose request is done."""
    encodings = cast("list[Encoding]", call.request.encodings)  # the batcher has settled the request
    response = ModelInferResponse(model_name=model, model_version=version, id=request_id)
    for name in call.outputs:
        tensor = _last_hidden_state(encodings, call.is_real) if name == TOKENS else _pooled(encodings)
        response.outputs.add(name=name, datatype="FP32", shape=tensor.shape)
        response.raw_output_contents.append(tensor.astype("<f4", copy=False).tobytes())
    return response


def _check_numbers(message: ModelInferRequest, limits: Limits) -> None:
    """Before anything is looked through: a message of millions of empty parts must not hold everybody up."""
    for name, count, most in (
        ("inputs", len(message.inputs), len(input_names(limits))),
        ("outputs", len(message.outputs), len(output_names(limits))),
    ):
        if count > most:
            raise InvalidRequestError(f"the request has {count} {name}; the limit is {most}")


def _outputs(
    requested: Iterable[ModelInferRequest.InferRequestedOutputTensor], known: tuple[str, ...]
) -> tuple[str, ...]:
    names: list[str] = []
    for output in requested:
        if output.name not in known:
            raise InvalidRequestError(f"no output {output.name[:64]!r}; the model has {', '.join(known)}")
        if output.name in names:
            raise InvalidRequestError(f"output {output.name!r} is requested twice")
        refuse_parameters(f"output {output.name!r}", output.parameters)
        names.append(output.name)
    return tuple(names) or known


def _check_rectangle(shape: tuple[int, int], limits: Limits) -> None:
    rows, columns = shape
    check_number(rows, limits, "row")
    if rows * columns > (most := MAX_CELLS_PER_TOKEN * limits.max_request_tokens):
        raise InvalidRequestError(
            f"the request has {rows} rows of {columns} columns; the limit is {most} cells, real or not; "
            "pad less or send fewer rows"
        )


def _is_real(mask: _IntegerArray | None, shape: tuple[int, int]) -> NDArray[np.bool_]:
    if mask is None:
        return np.ones(shape, np.bool_)
    is_real: NDArray[np.bool_] = mask == 1
    if not (is_real | (mask == 0)).all():
        row, column = np.argwhere((mask != 0) & (mask != 1))[0]
        raise InvalidRequestError(f"row {row}, column {column}: attention_mask is {mask[row, column]}; it takes 0 or 1")
    return is_real


def _check_columns(rows: NDArray[np.int64], columns: NDArray[np.int64], limits: Limits) -> None:
    if columns.size and columns.max() >= limits.max_sequence_tokens:
        index = int(np.argmax(columns >= limits.max_sequence_tokens))
        raise InvalidRequestError(
            f"row {rows[index]} has a real token in column {columns[index]}; "
            f"the model has positions for {limits.max_sequence_tokens} columns"
        )


def _token_types(
    types: _IntegerArray | None, is_real: NDArray[np.bool_], limits: Limits, locate: Locate
) -> NDArray[np.int64]:
    if types is None:
        return np.zeros(np.count_nonzero(is_real), np.int64)
    return check_ids(TYPES, types[is_real], token_type_bound(limits), locate)


def _answer_bytes(message: ModelInferRequest, outputs: tuple[str, ...], shape: tuple[int, int], limits: Limits) -> int:
    rows, columns = shape
    pooled = rows * limits.output_size if outputs != (TOKENS,) else 0
    tokens = rows * columns * limits.hidden_size if TOKENS in outputs else 0
    return (pooled + tokens) * 4 + len(message.id.encode()) + ENVELOPE_BYTES


def _pooled(encodings: list[Encoding]) -> Float32Array:
    return np.concatenate([encoding.pooled for encoding in encodings]).reshape(len(encodings), -1)  # (B, N)


def _last_hidden_state(encodings: list[Encoding], is_real: NDArray[np.bool_]) -> Float32Array:
    rows = np.concatenate([encoding.tokens for encoding in encodings if encoding.tokens is not None])  # (T, E)
    states = np.zeros((*is_real.shape, rows.shape[1]), np.float32)  # (B, S, E)
    states[is_real] = rows
    return states
