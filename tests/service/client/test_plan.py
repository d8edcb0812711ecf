"""How a client's call is cut into requests, and put together again."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.encoder_pb2 import OUTPUT_POOLED, OUTPUT_TOKENS, EncodeRequest, EncodeResponse, GetModelResponse, Limits
from service.client.plan import Plan
from service.codec.encoder import decode_request
from service.request import Limits as ServerLimits

HIDDEN = 4


def described(
    *, sequence_tokens: int = 8, sequences: int = 3, tokens: int = 12, num_bytes: int = 1 << 20
) -> GetModelResponse:
    return GetModelResponse(
        model="m",
        version="1",
        hidden_size=HIDDEN,
        limits=Limits(
            max_sequence_tokens=sequence_tokens,
            max_request_sequences=sequences,
            max_request_tokens=tokens,
            max_message_bytes=num_bytes,
        ),
    )


def requests_of(
    sequences: Sequence[Any], model: GetModelResponse | None = None, output: Any = OUTPUT_POOLED, **options: Any
) -> list[EncodeRequest]:
    plan = Plan(model or described(), sequences, output, 0, options)  # type: ignore[arg-type]
    return [plan.request(part) for part in plan.parts]


def sequences_in(request: EncodeRequest) -> list[list[int]]:
    ids = [i for (i,) in struct.iter_unpack("<i", request.token_ids)]
    ends = np.cumsum(request.lengths).tolist()
    return [ids[end - length : end] for end, length in zip(ends, request.lengths, strict=True)]


sequence_lists = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=8), max_size=12)


@given(sequences=sequence_lists, output=st.sampled_from([OUTPUT_POOLED, OUTPUT_TOKENS]), with_types=st.booleans())
def test_the_parts_are_the_call_in_order_and_a_server_takes_each(
    sequences: list[list[int]], output: int, with_types: bool
) -> None:
    num_bytes = 1024 + 8 * HIDDEN * 4  # eight vectors: one sequence of the greatest length
    model = described(num_bytes=num_bytes)
    types = [[0] * len(sequence) for sequence in sequences] if with_types else None

    requests = requests_of(sequences, model, output, token_type_ids=types)

    assert [sequence for request in requests for sequence in sequences_in(request)] == sequences
    limits = ServerLimits(100, 2, HIDDEN, 8, 3, 12, num_bytes)
    for request in requests:
        decode_request(request, limits, arrival=0.0, deadline=None)
        assert request.ByteSize() <= num_bytes


def test_each_part_is_as_large_as_the_limits_let_it_be() -> None:
    assert [len(request.lengths) for request in requests_of([[1]] * 7)] == [3, 3, 1]
    assert [len(request.lengths) for request in requests_of([[1] * 6] * 5)] == [2, 2, 1]


def test_the_bytes_of_the_answer_split_a_call() -> None:
    two_vectors = described(num_bytes=1024 + 2 * HIDDEN * 4)
    half = {"vector_type": "float16"}

    assert [len(r.lengths) for r in requests_of([[1]] * 3, two_vectors)] == [2, 1]
    assert [len(r.lengths) for r in requests_of([[1]] * 3, two_vectors, **half)] == [3]
    assert [len(r.lengths) for r in requests_of([[1, 1]] * 2, two_vectors, OUTPUT_TOKENS)] == [1, 1]


def test_a_sequence_whose_answer_fits_no_message_goes_alone_to_be_refused() -> None:
    small = described(num_bytes=1024 + HIDDEN * 4)

    assert [len(r.lengths) for r in requests_of([[1], [1, 1, 1], [1]], small, OUTPUT_TOKENS)] == [1, 1, 1]


def test_arrays_and_lists_of_any_integer_type_are_alike() -> None:
    mixed = [[1, 2], np.array([3], np.uint64), (4, 5), np.array([6, 7], np.int16)]

    assert [s for request in requests_of(mixed) for s in sequences_in(request)] == [[1, 2], [3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("sequences", "options", "text"),
    [
        ([[1], []], {}, "sequence 1: a list of at least one integer is wanted"),
        ([[1.5]], {}, "sequence 0: a list of at least one integer is wanted"),
        (["text"], {}, "sequence 0: a list of at least one integer is wanted"),
        ([1, 2], {}, "sequence 0: a list of at least one integer is wanted"),
        ([[2**31]], {}, "sequence: ids from 2147483648 to 2147483648; they go from 0 to 2147483647"),
        ([[1], [-1]], {}, "sequence: ids from -1 to 1; they go from 0 to 2147483647"),
        ([[1], [1] * 9], {}, "sequence 1 has 9 tokens; model 'm' takes 8"),
        ([[1, 2]], {"token_type_ids": [[0]]}, "token_type_ids must have one array for each sequence, as long as it"),
        ([[1]], {"vector_type": "int8"}, "vector_type is 'int8'; it takes float32 or float16"),
    ],
)
def test_what_no_server_could_take_is_refused_here(sequences: list[Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  # the whole text is compared
        requests_of(sequences, **options)
    assert str(refusal.value) == text


def test_answers_of_two_versions_are_not_mixed() -> None:
    plan = Plan(described(), [[1]] * 4, OUTPUT_POOLED, 0, {})
    row = np.ones((1, HIDDEN), "<f4").tobytes()

    with pytest.raises(RuntimeError, match="versions 1 and 2"):
        plan.pooled([EncodeResponse(pooled=row * 3, version="1"), EncodeResponse(pooled=row, version="2")])


def test_the_answer_is_a_float32_array_of_ones_own() -> None:
    plan = Plan(described(), [[1]], OUTPUT_POOLED, 2, {"vector_type": "float16"})

    vectors = plan.pooled([EncodeResponse(pooled=struct.pack("<2e", 0.5, 2.0), version="1")])

    assert vectors.tolist() == [[0.5, 2.0]]
    assert vectors.dtype == np.float32
    assert vectors.flags.writeable
