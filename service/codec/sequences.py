"""What both APIs check about a ragged batch, and how it becomes the queue's sequences.

`locate` turns an index into the flat tokens into the caller's own words, "sequence 3, token 7" or "row 3, column 7". It
is called only for the first token that is wrong: right ones cost one pass over the array.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidRequestError
from service.request import Float32Array, Int64Array, Limits

Locate = Callable[[int], str]
# Of a token's three int64.
_TOKEN_BYTES = 3 * 8
# The objects around a sequence's numbers: 420 as decoded, 160 as answered, 120 in the queue. Measured with tracemalloc.
_SEQUENCE_BYTES = 700
_UNSIGNED = {np.dtype(f"{order}i{size}"): np.dtype(f"{order}u{size}") for order in "<>" for size in (4, 8)}


def check_number(count: int, limits: Limits, noun: str) -> None:
    """Check the number of sequences, before any of them is looked at. `noun` is the API's word for a sequence."""
    if count == 0:
        raise InvalidRequestError(f"the request has no {noun}s; it takes 1 to {limits.max_request_sequences}")
    if count > limits.max_request_sequences:
        raise InvalidRequestError(f"the request has {count} {noun}s; the limit is {limits.max_request_sequences}")


def check_lengths(lengths: Sequence[int], limits: Limits, noun: str) -> int:
    """Check the number of tokens, one sequence by one and in all; returns it."""
    if min(lengths) < 1:
        raise InvalidRequestError(f"{noun} {lengths.index(0)} has no tokens; the least is 1")
    if max(lengths) > limits.max_sequence_tokens:
        index = next(i for i, length in enumerate(lengths) if length > limits.max_sequence_tokens)
        raise InvalidRequestError(
            f"{noun} {index} has {lengths[index]} tokens; the limit is {limits.max_sequence_tokens}"
        )
    if (num_tokens := sum(lengths)) > limits.max_request_tokens:
        raise InvalidRequestError(f"the request has {num_tokens} tokens; the limit is {limits.max_request_tokens}")
    return num_tokens


def check_ids(name: str, ids: NDArray[np.signedinteger[Any]], bound: int, locate: Locate) -> Int64Array:
    """Ids as native int64 (T,), each in [0, bound). Seen as unsigned, a negative id is huge: one comparison does."""
    unsigned = ids.view(_UNSIGNED[ids.dtype])
    if int(unsigned.max()) >= bound:
        index = int(np.argmax(unsigned >= bound))
        raise InvalidRequestError(f"{locate(index)}: {name} is {ids[index]}; the model takes 0 to {bound - 1}")
    return ids.astype(np.int64)


def check_vectors(name: str, vectors: NDArray[np.floating[Any]], locate: Locate) -> Float32Array:
    """Vectors as native float32 (T, input_size), each number finite: NaN would be answered as a fault of the engine."""
    if not (is_finite := np.isfinite(vectors)).all():
        index, component = np.argwhere(~is_finite)[0]
        raise InvalidRequestError(
            f"{locate(int(index))}: component {component} of {name} is {vectors[index, component]}; "
            "the model takes finite numbers"
        )
    return vectors.astype(np.float32, copy=False)


def check_answer(num_bytes: int, limits: Limits) -> None:
    """Refuse a request whose answer would not fit into a message, before any of it is computed."""
    if num_bytes > limits.max_message_bytes:
        raise InvalidRequestError(
            f"the answer would take {num_bytes} bytes; the limit is {limits.max_message_bytes}; send fewer sequences"
        )


def held_bytes(message_bytes: int, num_sequences: int, num_tokens: int, answer_bytes: int, limits: Limits) -> int:
    """What a request holds in memory while it is in flight: its message, what is made of it, and its answer."""
    token_bytes = _TOKEN_BYTES + 4 * limits.input_size
    return message_bytes + num_sequences * _SEQUENCE_BYTES + num_tokens * token_bytes + answer_bytes


def token_type_bound(limits: Limits) -> int:
    """A model without token types takes the one type 0, which it ignores."""
    return max(limits.type_vocab_size, 1)


def spans(lengths: Iterable[int]) -> Iterator[slice]:
    """Where each sequence stands among the flat tokens."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length
