"""One call of a client, without its waiting: what to send and how the answers fit together.

A call is cut so that `MAX_PARTS_IN_FLIGHT` parts, on the wire together, hold no more than the server lets one request
hold: however long a call is, it takes no more of a queue than one request may. Of longer parts, where one sequence is
more than its share, fewer are in flight.

The limits are those of a description that the client asked for once. What is in an answer is believed only as far as
the answer itself says: a server may have been replaced by one with another model since.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protos.encoder_pb2 import (
    OUTPUT_TOKENS,
    PRIORITY_HIGH,
    PRIORITY_LOW,
    PRIORITY_NORMAL,
    PRIORITY_UNSPECIFIED,
    VECTOR_TYPE_FLOAT16,
    VECTOR_TYPE_FLOAT32,
    EncodeRequest,
    EncodeResponse,
    GetModelResponse,
    Output,
    Priority,
)

# Parts of one call on the wire at once: enough to keep a server's runners busy, few enough to leave others their turn.
MAX_PARTS_IN_FLIGHT = 8
# What a message has besides ids, lengths and vectors, rounded up.
_ENVELOPE_BYTES = 1024
# A length on the wire, at most.
_LENGTH_BYTES = 5

Sequences = Sequence[ArrayLike]
Task = Literal["embedding", "classification"]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


class CallOptions(TypedDict, total=False):
    """What every call takes by keyword.

    `model`, `version`: as in the API, empty for the server's default. `timeout`: seconds for the whole call.
    `token_type_ids`: one array for each sequence, as long. `vector_type`: what the wire carries; arrays are float32.
    `priority`: how urgent it is beside other calls; normal where nothing is said.
    """

    model: str
    version: str
    timeout: float | None
    token_type_ids: Sequences | None
    vector_type: Literal["float32", "float16"]
    priority: Literal["high", "normal", "low"]


_PRIORITIES = {"high": PRIORITY_HIGH, "normal": PRIORITY_NORMAL, "low": PRIORITY_LOW}


class Plan:
    """One call: its sequences, cut into parts that the server takes, and its answers put together again."""

    def __init__(
        self,
        described: GetModelResponse,
        sequences: Sequences,
        output: Output.ValueType,
        dimensions: int,
        options: CallOptions,
        task: Task | None = None,
    ) -> None:
        if unknown := options.keys() - CallOptions.__annotations__.keys():
            raise TypeError(
                f"no option {', '.join(sorted(unknown))}; there are {', '.join(CallOptions.__annotations__)}"
            )
        if task is not None:
            _require_task(described, task)
        self._options = options
        self._output = output
        self._dimensions = dimensions
        self._described = described
        self._is_half = _is_half(options.get("vector_type", "float32"))
        self._priority = _priority(options.get("priority"))
        self._inputs, self._lengths = _flatten(sequences, described.input_size)
        self._token_types = self._flatten_types(options.get("token_type_ids"))
        self._ends = np.cumsum(self._lengths)
        _check_lengths(self._lengths, described)
        self.parts = self._split()
        self.max_in_flight = self._max_in_flight()

    def request(self, part: slice) -> EncodeRequest:
        """The message for one part."""
        span = slice(int(self._ends[part.start] - self._lengths[part.start]), int(self._ends[part.stop - 1]))
        return EncodeRequest(
            model=self._options.get("model", ""),
            version=self._options.get("version", ""),
            token_ids=b"" if self._described.input_size else self._inputs[span].tobytes(),
            embeddings=self._inputs[span].tobytes() if self._described.input_size else b"",
            lengths=self._lengths[part].tolist(),
            token_type_ids=b"" if self._token_types is None else self._token_types[span].tobytes(),
            output=self._output,
            vector_type=VECTOR_TYPE_FLOAT16 if self._is_half else VECTOR_TYPE_FLOAT32,
            dimensions=self._dimensions,
            priority=self._priority,
        )

    def pooled(self, responses: Sequence[EncodeResponse]) -> Float32Array:
        """(n, dimensions or output_size). Raises `RuntimeError` where the answers are not of one model to this call."""
        _check_versions(responses)
        width = _one_width([response.dimensions for response in responses], self._width)
        if self._dimensions and width != self._dimensions:
            raise RuntimeError(f"the answer's vectors have {width} dimensions; {self._dimensions} were asked for")
        return self._join(
            [response.pooled for response in responses], [part.stop - part.start for part in self.parts], width
        )

    def tokens(self, responses: Sequence[EncodeResponse]) -> list[Float32Array]:
        """n arrays (L, hidden_size). Raises `RuntimeError` as `pooled` does."""
        _check_versions(responses)
        width = _one_width([response.hidden_size for response in responses], self._width)
        num_tokens = [int(self._lengths[part].sum()) for part in self.parts]
        rows = self._join([response.tokens for response in responses], num_tokens, width)
        return np.split(rows, self._ends[:-1]) if self._ends.size else []

    def is_described(self, responses: Sequence[EncodeResponse]) -> bool:
        """Whether the version that the call was cut for has given every answer."""
        return all(response.version == self._described.version for response in responses)

    @property
    def _width(self) -> int:
        """Of a vector, by the description."""
        hidden_size: int = self._described.hidden_size
        if self._output == OUTPUT_TOKENS:
            return hidden_size
        return self._dimensions or self._described.output_size or hidden_size  # older servers have no output_size

    def _join(self, chunks: Sequence[bytes], num_rows: Sequence[int], width: int) -> Float32Array:
        component = np.dtype("<f2" if self._is_half else "<f4")
        for chunk, wanted in zip(chunks, num_rows, strict=True):
            if len(chunk) != wanted * width * component.itemsize:
                raise RuntimeError(
                    f"an answer has {len(chunk)} bytes of vectors; {wanted} of {width} {component.name} components "
                    f"take {wanted * width * component.itemsize}"
                )
        return np.frombuffer(b"".join(chunks), component).astype(np.float32).reshape(-1, width)

    def _flatten_types(self, token_type_ids: Sequences | None) -> NDArray[np.int32] | None:
        if token_type_ids is None:
            return None
        token_types, lengths = _flatten_ids("token_type_ids", token_type_ids)
        if not np.array_equal(lengths, self._lengths):
            raise ValueError("token_type_ids must have one array for each sequence, as long as it")
        return token_types

    def _split(self) -> list[slice]:
        """The fewest runs of sequences that each keep its share of a request's limits, and a message's. A sequence that
        keeps none goes alone: the server takes it, or says what is wrong with it.
        """
        limits = self._described.limits
        ids = 4 * (self._described.input_size or 1) + (0 if self._token_types is None else 4)
        vectors = self._lengths if self._output == OUTPUT_TOKENS else np.ones_like(self._lengths)
        max_request_bytes = limits.max_request_bytes - _ENVELOPE_BYTES
        max_bytes = limits.max_message_bytes - _ENVELOPE_BYTES
        costs = [
            (np.ones_like(self._lengths), limits.max_request_sequences // MAX_PARTS_IN_FLIGHT),
            (self._lengths, limits.max_request_tokens // MAX_PARTS_IN_FLIGHT),
            (self._lengths * ids + _LENGTH_BYTES, max_request_bytes),
            (vectors * self._width * (2 if self._is_half else 4), max_bytes),
        ]
        return _pack_greedily([(np.cumsum(cost), limit) for cost, limit in costs], self._lengths.size)

    def _max_in_flight(self) -> int:
        """As many parts as hold together what one request may."""
        limits = self._described.limits
        most_sequences = max((part.stop - part.start for part in self.parts), default=1)
        most_tokens = max((int(self._lengths[part].sum()) for part in self.parts), default=1)
        fitting = min(limits.max_request_sequences // most_sequences, limits.max_request_tokens // most_tokens)
        return max(1, min(MAX_PARTS_IN_FLIGHT, fitting))


def _pack_greedily(spent: list[tuple[Int64Array, int]], count: int) -> list[slice]:
    """Runs of 0..count, each the longest that spends at most the limit of every running total."""
    parts: list[slice] = []
    start = 0
    while start < count:
        before = [int(total[start - 1]) if start else 0 for total, _ in spent]
        ends = [np.searchsorted(t, b + limit, side="right") for (t, limit), b in zip(spent, before, strict=True)]
        stop = max(start + 1, int(min(ends)))
        parts.append(slice(start, stop))
        start = stop
    return parts


def _flatten(sequences: Sequences, input_size: int) -> tuple[NDArray[np.int32] | Float32Array, Int64Array]:
    """What the model takes: token ids, or vectors where it has an input size."""
    return _flatten_vectors("sequence", sequences, input_size) if input_size else _flatten_ids("sequence", sequences)


def _flatten_vectors(name: str, sequences: Sequences, input_size: int) -> tuple[Float32Array, Int64Array]:
    """All vectors back to back as the wire has them (T, input_size), and the length of each sequence (n,)."""
    arrays = [np.asarray(sequence) for sequence in sequences]
    for index, array in enumerate(arrays):
        if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] != input_size or array.dtype.kind != "f":
            raise ValueError(
                f"{name} {index} is {array.dtype} of shape {array.shape}; "
                f"floats of shape (length, {input_size}) are wanted, length at least 1"
            )
    with np.errstate(over="ignore"):  # too large for float32: infinite, which the server refuses by its place
        flat = np.concatenate([np.empty((0, input_size), "<f4"), *(array.astype("<f4") for array in arrays)])
    return flat, np.array([len(array) for array in arrays], np.int64)


def _flatten_ids(name: str, sequences: Sequences) -> tuple[NDArray[np.int32], Int64Array]:
    """All ids back to back as the wire has them (T,), and the length of each sequence (n,)."""
    arrays = [np.asarray(sequence) for sequence in sequences]
    for index, array in enumerate(arrays):
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(f"{name} {index}: a list of at least one integer is wanted")
    flat = np.concatenate([np.empty(0, np.int64), *(array.astype(np.int64) for array in arrays)])
    if flat.size and (flat.min() < 0 or flat.max() > np.iinfo(np.int32).max):
        raise ValueError(f"{name}: ids from {flat.min()} to {flat.max()}; they go from 0 to {np.iinfo(np.int32).max}")
    return flat.astype("<i4"), np.array([array.size for array in arrays], np.int64)


def _require_task(described: GetModelResponse, task: Task) -> None:
    """Logits are not to be compared as embeddings are, nor embeddings to be read as scores."""
    if (found := described.task or "embedding") != task:  # older servers have embeddings alone
        instead = {"embedding": "encode", "classification": "classify"}.get(found, "a newer client")
        raise ValueError(f"model {described.model!r} is for {found}, not {task}; use {instead}")


def _is_half(vector_type: str) -> bool:
    if vector_type not in ("float32", "float16"):
        raise ValueError(f"vector_type is {vector_type!r}; it takes float32 or float16")
    return vector_type == "float16"


def _priority(name: str | None) -> Priority.ValueType:
    if name is None:
        return PRIORITY_UNSPECIFIED
    if name not in _PRIORITIES:
        raise ValueError(f"priority is {name!r}; it takes {', '.join(_PRIORITIES)}")
    return _PRIORITIES[name]


def _check_versions(responses: Sequence[EncodeResponse]) -> None:
    """While a new version is rolled out two servers may differ; vectors of two models must not be compared."""
    if len(versions := sorted({response.version for response in responses})) > 1:
        raise RuntimeError(
            f"versions {' and '.join(versions)} answered parts of one call; name a version, or try again"
        )


def _one_width(found: Sequence[int], described: int) -> int:
    if len(widths := sorted(set(found))) > 1:
        raise RuntimeError(
            f"vectors of {' and '.join(map(str, widths))} dimensions answered parts of one call; try again"
        )
    return widths[0] if widths else described


def _check_lengths(lengths: Int64Array, described: GetModelResponse) -> None:
    limit = described.limits.max_sequence_tokens
    if lengths.size and lengths.max() > limit:
        index = int(np.argmax(lengths > limit))
        raise ValueError(f"sequence {index} has {lengths[index]} tokens; model {described.model!r} takes {limit}")
