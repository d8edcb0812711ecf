"""mhsa.encoder.v1 <-> request: little-endian bytes of int32 ids or float32 vectors come, vectors leave."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from protos.encoder_pb2 import (
    OUTPUT_POOLED,
    OUTPUT_POOLED_AND_TOKENS,
    OUTPUT_TOKENS,
    OUTPUT_UNSPECIFIED,
    PRIORITY_HIGH,
    PRIORITY_LOW,
    PRIORITY_NORMAL,
    PRIORITY_UNSPECIFIED,
    VECTOR_TYPE_FLOAT16,
    VECTOR_TYPE_FLOAT32,
    VECTOR_TYPE_UNSPECIFIED,
    EncodeRequest,
    EncodeResponse,
    Output,
    Timings,
    VectorType,
)
from protos.encoder_pb2 import Priority as WirePriority
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
from service.request import Encoding, Float32Array, Int64Array, Limits, Priority, Request, TokenSequence

WIRE_ID = np.dtype("<i4")
WIRE_FLOAT = np.dtype("<f4")
VECTOR_TYPES: dict[int, np.dtype[np.floating]] = {
    VECTOR_TYPE_UNSPECIFIED: np.dtype("<f4"),
    VECTOR_TYPE_FLOAT32: np.dtype("<f4"),
    VECTOR_TYPE_FLOAT16: np.dtype("<f2"),
}
POOLED_OUTPUTS = frozenset({OUTPUT_UNSPECIFIED, OUTPUT_POOLED, OUTPUT_POOLED_AND_TOKENS})
TOKEN_OUTPUTS = frozenset({OUTPUT_TOKENS, OUTPUT_POOLED_AND_TOKENS})

PRIORITIES: dict[int, Priority] = {
    PRIORITY_UNSPECIFIED: Priority.NORMAL,
    PRIORITY_HIGH: Priority.HIGH,
    PRIORITY_NORMAL: Priority.NORMAL,
    PRIORITY_LOW: Priority.LOW,
}

OUTPUTS = frozenset(Output.values())

# Everything in an answer but its vectors: tags, lengths, timings, version, and a stream's envelope with its id.
ENVELOPE_BYTES = 512


def decode_request(
    message: EncodeRequest, limits: Limits, *, arrival: float, deadline: float | None, caller: str = ""
) -> Request:
    """Check a message and make the queue's request of it. Raises `InvalidRequestError`."""
    _check_options(message, limits)
    check_number(len(message.lengths), limits, "sequence")
    lengths = list(message.lengths)
    num_tokens = check_lengths(lengths, limits, "sequence")
    answer_bytes = _answer_bytes(message, len(lengths), num_tokens, limits)
    check_answer(answer_bytes, limits)
    read = _read_vectors if limits.input_size else _read_tokens
    return Request(
        sequences=tuple(read(message, lengths, num_tokens, limits)),
        wants_tokens=message.output in TOKEN_OUTPUTS,
        arrival=arrival,
        deadline=deadline,
        priority=PRIORITIES[message.priority],
        caller=caller,
        num_bytes=held_bytes(message.ByteSize(), len(lengths), num_tokens, answer_bytes, limits),
    )


def foreseen_bytes(message: EncodeRequest, limits: Limits) -> int:
    """What the request of a message will hold, before it is checked; of one that is too large, only the message."""
    message_bytes = message.ByteSize()
    num_sequences = len(message.lengths)
    if num_sequences > limits.max_request_sequences or (num_tokens := sum(message.lengths)) > limits.max_request_tokens:
        return message_bytes
    answer_bytes = _answer_bytes(message, num_sequences, num_tokens, limits)
    if answer_bytes > limits.max_message_bytes:
        return message_bytes
    return held_bytes(message_bytes, num_sequences, num_tokens, answer_bytes, limits)


def encode_response(
    message: EncodeRequest, request: Request, limits: Limits, *, version: str, now: float
) -> EncodeResponse:
    """The answer to `message`, whose `request` is done. Raises `InvalidRequestError` where float16 cannot hold it."""
    encodings = cast("list[Encoding]", request.encodings)  # the batcher has settled the request, so none is None
    dtype = VECTOR_TYPES[message.vector_type]
    return EncodeResponse(
        pooled=_pooled_bytes(encodings, message.dimensions, dtype) if message.output in POOLED_OUTPUTS else b"",
        tokens=_token_bytes(encodings, dtype) if message.output in TOKEN_OUTPUTS else b"",
        dimensions=message.dimensions or limits.output_size,
        hidden_size=limits.hidden_size,
        vector_type=message.vector_type or VECTOR_TYPE_FLOAT32,
        num_tokens=request.num_tokens,
        timings=_timings(request, now),
        version=version,
    )


def _check_options(message: EncodeRequest, limits: Limits) -> None:
    if message.output not in OUTPUTS:
        raise InvalidRequestError(f"output is {message.output}; it takes one of {', '.join(Output.keys())}")
    if message.vector_type not in VECTOR_TYPES:
        raise InvalidRequestError(
            f"vector_type is {message.vector_type}; it takes one of {', '.join(VectorType.keys())}"
        )
    if message.priority not in PRIORITIES:
        raise InvalidRequestError(f"priority is {message.priority}; it takes one of {', '.join(WirePriority.keys())}")
    if message.dimensions and limits.is_classifier:
        raise InvalidRequestError(f"dimensions is {message.dimensions}; a classifier's logits are only given whole")
    if message.dimensions > limits.output_size:
        raise InvalidRequestError(f"dimensions is {message.dimensions}; the model has {limits.output_size}")


def _answer_bytes(message: EncodeRequest, num_sequences: int, num_tokens: int, limits: Limits) -> int:
    pooled = num_sequences * (message.dimensions or limits.output_size) if message.output in POOLED_OUTPUTS else 0
    tokens = num_tokens * limits.hidden_size if message.output in TOKEN_OUTPUTS else 0
    dtype = VECTOR_TYPES.get(message.vector_type, WIRE_FLOAT)
    return (pooled + tokens) * dtype.itemsize + ENVELOPE_BYTES


def _read_tokens(
    message: EncodeRequest, lengths: list[int], num_tokens: int, limits: Limits
) -> Iterator[TokenSequence]:
    if message.embeddings:
        raise InvalidRequestError(
            f"the request has {len(message.embeddings)} bytes of embeddings; the model takes token_ids"
        )
    locate = _locator(lengths)
    token_ids = check_ids("token id", _read("token_ids", message.token_ids, num_tokens), limits.vocab_size, locate)
    token_types = _token_types(message, num_tokens, limits, locate)
    positions = _positions(limits.max_sequence_tokens)
    for span in spans(lengths):
        yield TokenSequence(token_ids[span], positions[: span.stop - span.start], token_types[span])


def _read_vectors(
    message: EncodeRequest, lengths: list[int], num_tokens: int, limits: Limits
) -> Iterator[TokenSequence]:
    for name in ("token_ids", "token_type_ids"):
        if data := getattr(message, name):
            raise InvalidRequestError(f"the request has {len(data)} bytes of {name}; the model takes embeddings")
    wanted = num_tokens * limits.input_size * WIRE_FLOAT.itemsize
    if len(message.embeddings) != wanted:
        raise InvalidRequestError(
            f"embeddings has {len(message.embeddings)} bytes; lengths add up to {num_tokens} tokens, "
            f"which take {wanted} as float32 vectors of {limits.input_size}"
        )
    flat = np.frombuffer(message.embeddings, WIRE_FLOAT).reshape(num_tokens, limits.input_size)
    vectors = check_vectors("embeddings", flat, _locator(lengths))
    positions = _positions(limits.max_sequence_tokens)
    for span in spans(lengths):
        yield TokenSequence.of_vectors(vectors[span], positions[: span.stop - span.start])


def _read(name: str, data: bytes, num_tokens: int) -> NDArray[np.int32]:
    if len(data) != num_tokens * WIRE_ID.itemsize:
        raise InvalidRequestError(
            f"{name} has {len(data)} bytes; lengths add up to {num_tokens} tokens, "
            f"which take {num_tokens * WIRE_ID.itemsize}"
        )
    return np.frombuffer(data, WIRE_ID)


def _token_types(message: EncodeRequest, num_tokens: int, limits: Limits, locate: Locate) -> Int64Array:
    if not message.token_type_ids:
        return np.zeros(num_tokens, np.int64)
    token_types = _read("token_type_ids", message.token_type_ids, num_tokens)
    return check_ids("token type", token_types, token_type_bound(limits), locate)


@cache
def _positions(count: int) -> Int64Array:
    """0, 1, 2, ...: every sequence's positions begin so, and share this one array."""
    positions = np.arange(count)
    positions.setflags(write=False)
    return positions


def _locator(lengths: Sequence[int]) -> Locate:
    def locate(index: int) -> str:
        sequence, span = next((i, span) for i, span in enumerate(spans(lengths)) if index < span.stop)
        return f"sequence {sequence}, token {index - span.start}"

    return locate


def _pooled_bytes(encodings: list[Encoding], dimensions: int, dtype: np.dtype[np.floating]) -> bytes:
    rows = np.concatenate([encoding.pooled for encoding in encodings]).reshape(len(encodings), -1)  # (B, N)
    return _to_bytes(_truncate(rows, dimensions) if dimensions else rows, dtype)


def _truncate(rows: Float32Array, dimensions: int) -> Float32Array:
    """The leading components, scaled back to length 1; a zero vector stays zero. Squares are summed in float64."""
    kept = rows[:, :dimensions]  # (B, dimensions)
    norms = np.sqrt(np.einsum("bd,bd->b", kept, kept, dtype=np.float64))  # (B,)
    return (kept / np.where(norms > 0, norms, 1)[:, None]).astype(np.float32)


def _token_bytes(encodings: list[Encoding], dtype: np.dtype[np.floating]) -> bytes:
    rows = [encoding.tokens for encoding in encodings if encoding.tokens is not None]
    return _to_bytes(np.concatenate(rows), dtype)  # (T, E)


def _to_bytes(rows: Float32Array, dtype: np.dtype[np.floating]) -> bytes:
    if dtype.itemsize == 2:
        return _to_float16(rows, dtype).tobytes()
    return rows.astype(dtype, copy=False).tobytes()


def _to_float16(rows: Float32Array, dtype: np.dtype[np.floating]) -> NDArray[np.floating]:
    with np.errstate(over="ignore"):  # refused below, with a reason
        converted = rows.astype(dtype)
    if not np.isfinite(converted).all():
        raise InvalidRequestError(
            f"float16 holds up to 65504 and a vector has {np.abs(rows).max():.6g}; ask for VECTOR_TYPE_FLOAT32"
        )
    return converted


def _timings(request: Request, now: float) -> Timings:
    started = now if request.first_started is None else request.first_started
    finished = now if request.last_finished is None else request.last_finished
    return Timings(
        queue_seconds=started - request.arrival,
        compute_seconds=finished - started,
        total_seconds=now - request.arrival,
    )
