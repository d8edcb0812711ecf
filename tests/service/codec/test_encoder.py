"""The typed API's codec, against values written out and an obvious slow reference."""

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.encoder_pb2 import (
    OUTPUT_POOLED,
    OUTPUT_POOLED_AND_TOKENS,
    OUTPUT_TOKENS,
    PRIORITY_HIGH,
    PRIORITY_LOW,
    PRIORITY_NORMAL,
    PRIORITY_UNSPECIFIED,
    VECTOR_TYPE_FLOAT16,
    VECTOR_TYPE_FLOAT32,
    EncodeRequest,
    EncodeResponse,
)
from service.codec.encoder import decode_request, encode_response, foreseen_bytes
from service.errors import InvalidRequestError
from service.request import Encoding, Limits, Priority, Request

LIMITS = Limits(
    vocab_size=100,
    type_vocab_size=2,
    hidden_size=4,
    output_size=4,
    max_sequence_tokens=6,
    max_request_sequences=5,
    max_request_tokens=20,
    max_request_bytes=4096,
    max_message_bytes=4096,
)
Sequences = Sequence[Sequence[int]]


def ids_bytes(sequences: Sequences) -> bytes:
    return b"".join(struct.pack("<i", i) for sequence in sequences for i in sequence)


def message_of(sequences: Sequences, **fields: object) -> EncodeRequest:
    lengths = [len(sequence) for sequence in sequences]
    return EncodeRequest(**{"token_ids": ids_bytes(sequences), "lengths": lengths, **fields})  # type: ignore[arg-type]


def decode(message: EncodeRequest, limits: Limits = LIMITS) -> Request:
    return decode_request(message, limits, arrival=10.0, deadline=None)


def answer(message: EncodeRequest, encodings: Sequence[Encoding], limits: Limits = LIMITS) -> EncodeResponse:
    request = decode(message, limits)
    for index, encoding in enumerate(encodings):
        request.complete(index, encoding, 11.0, 13.0)
    return encode_response(message, request, limits, version="7", now=14.0)


def floats(data: bytes) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<f", data)]


def pooled(*rows: Sequence[float]) -> list[Encoding]:
    return [Encoding(np.array(row, np.float32), None) for row in rows]


lists_of_ids = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=5).filter(
    lambda sequences: sum(map(len, sequences)) <= 20
)


@given(sequences=lists_of_ids, data=st.data())
def test_any_ragged_batch_comes_through_as_it_was_sent(sequences: list[list[int]], data: st.DataObject) -> None:
    types = [[data.draw(st.integers(0, 1)) for _ in sequence] for sequence in sequences]

    request = decode(message_of(sequences, token_type_ids=ids_bytes(types)))

    assert [s.token_ids.tolist() for s in request.sequences] == sequences
    assert [s.token_type_ids.tolist() for s in request.sequences] == types
    assert [s.position_ids.tolist() for s in request.sequences] == [list(range(len(s))) for s in sequences]


def test_the_engine_gets_native_int64() -> None:
    (sequence,) = decode(message_of([[1, 2]], token_type_ids=ids_bytes([[0, 1]]))).sequences

    assert {sequence.token_ids.dtype, sequence.position_ids.dtype, sequence.token_type_ids.dtype} == {
        np.dtype(np.int64)
    }


def test_token_types_are_zero_when_none_are_sent() -> None:
    assert decode(message_of([[1, 2, 3]])).sequences[0].token_type_ids.tolist() == [0, 0, 0]


def test_arrival_and_deadline_are_handed_on() -> None:
    request = decode_request(message_of([[1]]), LIMITS, arrival=5.0, deadline=9.0)

    assert (request.arrival, request.deadline) == (5.0, 9.0)


@pytest.mark.parametrize(
    ("output", "wants_tokens"),
    [(0, False), (OUTPUT_POOLED, False), (OUTPUT_TOKENS, True), (OUTPUT_POOLED_AND_TOKENS, True)],
)
def test_tokens_are_computed_only_where_asked_for(output: int, wants_tokens: bool) -> None:
    assert decode(message_of([[1]], output=output)).wants_tokens is wants_tokens


@pytest.mark.parametrize(
    ("number", "priority"),
    [
        (PRIORITY_UNSPECIFIED, Priority.NORMAL),
        (PRIORITY_HIGH, Priority.HIGH),
        (PRIORITY_NORMAL, Priority.NORMAL),
        (PRIORITY_LOW, Priority.LOW),
    ],
)
def test_the_priority_is_handed_on(number: int, priority: Priority) -> None:
    assert decode(message_of([[1]], priority=number)).priority is priority


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (EncodeRequest(), "the request has no sequences; it takes 1 to 5"),
        (message_of([[1]] * 6), "the request has 6 sequences; the limit is 5"),
        (message_of([[1], [], [2]]), "sequence 1 has no tokens; the least is 1"),
        (message_of([[1], [1] * 7]), "sequence 1 has 7 tokens; the limit is 6"),
        (message_of([[1] * 6] * 4), "the request has 24 tokens; the limit is 20"),
        (message_of([[1]], lengths=[2**32 - 1]), "sequence 0 has 4294967295 tokens; the limit is 6"),
        (message_of([[1, 2]], lengths=[3]), "token_ids has 8 bytes; lengths add up to 3 tokens, which take 12"),
        (message_of([[1]], token_ids=b"\1\0\0"), "token_ids has 3 bytes; lengths add up to 1 tokens, which take 4"),
        (message_of([[1]], token_ids=b""), "token_ids has 0 bytes; lengths add up to 1 tokens, which take 4"),
        (message_of([[5], [1, 100]]), "sequence 1, token 1: token id is 100; the model takes 0 to 99"),
        (message_of([[5, 5], [-1], [7]]), "sequence 1, token 0: token id is -1; the model takes 0 to 99"),
        (message_of([[2**31 - 1]]), "sequence 0, token 0: token id is 2147483647; the model takes 0 to 99"),
        (message_of([[-(2**31)]]), "sequence 0, token 0: token id is -2147483648; the model takes 0 to 99"),
        (
            message_of([[1, 2]], token_type_ids=ids_bytes([[0]])),
            "token_type_ids has 4 bytes; lengths add up to 2 tokens, which take 8",
        ),
        (
            message_of([[1, 2]], token_type_ids=ids_bytes([[0, 2]])),
            "sequence 0, token 1: token type is 2; the model takes 0 to 1",
        ),
        (
            message_of([[1]], output=9),
            "output is 9; it takes one of OUTPUT_UNSPECIFIED, OUTPUT_POOLED, OUTPUT_TOKENS, OUTPUT_POOLED_AND_TOKENS",
        ),
        (
            message_of([[1]], vector_type=3),
            "vector_type is 3; it takes one of VECTOR_TYPE_UNSPECIFIED, VECTOR_TYPE_FLOAT32, VECTOR_TYPE_FLOAT16",
        ),
        (message_of([[1]], dimensions=5), "dimensions is 5; the model has 4"),
        (
            message_of([[1]], priority=4),
            "priority is 4; it takes one of PRIORITY_UNSPECIFIED, PRIORITY_HIGH, PRIORITY_NORMAL, PRIORITY_LOW",
        ),
    ],
)
def test_a_bad_message_is_refused_with_the_item_the_value_and_the_limit(message: EncodeRequest, text: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        decode(message)
    assert str(refusal.value) == text


def test_a_model_without_token_types_takes_only_zeros() -> None:
    limits = Limits(100, 0, 4, 4, 6, 5, 20, 4096, 4096)
    decode(message_of([[1]], token_type_ids=ids_bytes([[0]])), limits)

    with pytest.raises(InvalidRequestError, match="token type is 1; the model takes 0 to 0"):
        decode(message_of([[1]], token_type_ids=ids_bytes([[1]])), limits)


@pytest.mark.parametrize(
    ("output", "num_bytes"),
    [(OUTPUT_POOLED, 2 * 4 * 4), (OUTPUT_TOKENS, 5 * 4 * 4), (OUTPUT_POOLED_AND_TOKENS, 7 * 4 * 4)],
)
def test_an_answer_that_would_not_fit_is_refused_before_it_is_computed(output: int, num_bytes: int) -> None:
    message = message_of([[1, 2, 3], [4, 5]], output=output)
    decode(message, Limits(100, 2, 4, 4, 6, 5, 20, 4096, max_message_bytes=num_bytes + 512))

    with pytest.raises(
        InvalidRequestError, match=f"would take {num_bytes + 512} bytes; the limit is {num_bytes + 511}"
    ):
        decode(message, Limits(100, 2, 4, 4, 6, 5, 20, 4096, max_message_bytes=num_bytes + 511))


@pytest.mark.parametrize(
    ("output", "answer_bytes"),
    [(OUTPUT_POOLED, 2 * 4 * 4), (OUTPUT_TOKENS, 5 * 4 * 4), (OUTPUT_POOLED_AND_TOKENS, 7 * 4 * 4)],
)
def test_a_request_holds_its_message_what_is_made_of_it_and_its_answer(output: int, answer_bytes: int) -> None:
    message = message_of([[1, 2, 3], [4, 5]], output=output)

    # 700 for the objects of a sequence, three int64 a token, 512 around an answer.
    expected = len(message.SerializeToString()) + 2 * 700 + 5 * 24 + answer_bytes + 512
    assert decode(message).num_bytes == expected
    assert foreseen_bytes(message, LIMITS) == expected


@pytest.mark.parametrize(
    "message",
    [
        message_of([[1]], lengths=[1] * 6),
        message_of([[1]], lengths=[21]),
        message_of([[1]], dimensions=2000),
    ],
)
def test_of_a_message_too_large_to_pass_only_itself_is_foreseen(message: EncodeRequest) -> None:
    assert foreseen_bytes(message, LIMITS) == len(message.SerializeToString())


def test_a_message_that_is_wrong_in_another_way_is_foreseen_all_the_same() -> None:
    assert foreseen_bytes(message_of([[1]], vector_type=9, output=9), LIMITS) > 0


def test_half_width_and_fewer_dimensions_make_the_answer_smaller() -> None:
    message = message_of([[1], [2]], vector_type=VECTOR_TYPE_FLOAT16, dimensions=3)

    decode(message, Limits(100, 2, 4, 4, 6, 5, 20, 4096, max_message_bytes=2 * 3 * 2 + 512))


def test_no_answer_is_larger_than_was_foreseen() -> None:
    message = message_of([[1] * 6, [2] * 6], output=OUTPUT_POOLED_AND_TOKENS)
    vectors = np.full((6, 4), 1e30, np.float32)

    response = answer(message, [Encoding(vectors[0], vectors)] * 2)

    assert response.ByteSize() <= 2 * 4 * 4 + 12 * 4 * 4 + 512


def test_pooled_vectors_are_little_endian_rows_in_order() -> None:
    response = answer(message_of([[1], [2]]), pooled([1, 2, 3, 4], [5, 6, 7, 8]))

    assert floats(response.pooled) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert response.tokens == b""
    assert (response.dimensions, response.hidden_size, response.vector_type) == (4, 4, VECTOR_TYPE_FLOAT32)


def test_token_vectors_are_rows_in_the_order_of_the_tokens() -> None:
    message = message_of([[1, 2], [3]], output=OUTPUT_TOKENS)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)

    response = answer(message, [Encoding(rows[0], rows[:2]), Encoding(rows[0], rows[2:])])

    assert floats(response.tokens) == list(range(12))
    assert response.pooled == b""


def test_both_are_sent_where_both_are_asked_for() -> None:
    rows = np.ones((1, 4), np.float32)

    response = answer(message_of([[1]], output=OUTPUT_POOLED_AND_TOKENS), [Encoding(rows[0], rows)])

    assert (len(response.pooled), len(response.tokens)) == (16, 16)


def test_tokens_that_only_a_batch_mate_wanted_are_not_sent() -> None:
    rows = np.ones((1, 4), np.float32)

    assert answer(message_of([[1]]), [Encoding(rows[0], rows)]).tokens == b""


def test_fewer_dimensions_are_the_leading_ones_at_length_one() -> None:
    response = answer(message_of([[1], [2]], dimensions=2), pooled([3, 4, 100, 100], [0, -2, 7, 7]))

    # 0.6 and 0.8 are not exact in float32: its spacing there is 6e-8.
    np.testing.assert_allclose(floats(response.pooled), [0.6, 0.8, 0.0, -1.0], atol=6e-8)
    assert response.dimensions == 2


def test_all_dimensions_asked_for_by_number_are_scaled_too() -> None:
    assert floats(answer(message_of([[1]], dimensions=4), pooled([2, 0, 0, 0])).pooled) == [1, 0, 0, 0]


def test_a_vector_whose_leading_components_are_zero_stays_zero() -> None:
    assert floats(answer(message_of([[1]], dimensions=2), pooled([0, 0, 1, 1])).pooled) == [0, 0]


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_lengths_beyond_the_range_of_float32_squares_are_scaled_right(size: float) -> None:
    response = answer(message_of([[1]], dimensions=2), pooled([3 * size, 4 * size, 0, 0]))

    np.testing.assert_allclose(floats(response.pooled), [0.6, 0.8], atol=6e-8)  # float32's spacing


def test_float16_is_rounded_to_nearest_even() -> None:
    response = answer(
        message_of([[1]], vector_type=VECTOR_TYPE_FLOAT16), pooled([0.1, 1 + 2**-11, 1 + 3 * 2**-11, -65504])
    )

    assert response.vector_type == VECTOR_TYPE_FLOAT16
    assert struct.unpack("<4e", response.pooled) == (0.0999755859375, 1.0, 1 + 2**-9, -65504)


@pytest.mark.parametrize("output", [OUTPUT_POOLED, OUTPUT_TOKENS])
def test_a_vector_too_large_for_float16_is_refused_and_not_made_infinite(output: int) -> None:
    rows = np.array([[1, -70000, 3, 4]], np.float32)
    message = message_of([[1]], vector_type=VECTOR_TYPE_FLOAT16, output=output)

    with pytest.raises(
        InvalidRequestError, match="float16 holds up to 65504 and a vector has 70000; ask for VECTOR_TYPE_FL"
    ):
        answer(message, [Encoding(rows[0], rows)])


def test_an_answer_says_where_its_time_went() -> None:
    response = answer(message_of([[1, 2], [3]]), pooled([0, 0, 0, 0], [0, 0, 0, 0]))

    timings = response.timings
    assert (timings.queue_seconds, timings.compute_seconds, timings.total_seconds) == (1.0, 2.0, 4.0)
    assert (response.num_tokens, response.version) == (3, "7")


# Token vectors of 4, and 2 for a sequence: of a dense layer, or logits.
NARROW = dataclasses.replace(LIMITS, output_size=2)
CLASSIFIER = dataclasses.replace(NARROW, is_classifier=True)


@pytest.mark.parametrize("limits", [NARROW, CLASSIFIER])
def test_pooled_vectors_may_have_a_width_of_their_own(limits: Limits) -> None:
    message = message_of([[1], [2]], output=OUTPUT_POOLED_AND_TOKENS)
    rows = np.ones((1, 4), np.float32)

    response = answer(message, [Encoding(np.array([i, 7], np.float32), rows) for i in (5, 6)], limits)

    assert floats(response.pooled) == [5, 7, 6, 7]
    assert (response.dimensions, response.hidden_size) == (2, 4)
    assert len(response.tokens) == 2 * 4 * 4


def test_dimensions_are_at_most_the_pooled_ones() -> None:
    decode(message_of([[1]], dimensions=2), NARROW)
    with pytest.raises(InvalidRequestError, match="dimensions is 3; the model has 2"):
        decode(message_of([[1]], dimensions=3), NARROW)


def test_a_classifiers_logits_are_not_cut() -> None:
    with pytest.raises(InvalidRequestError, match="dimensions is 1; a classifier's logits are only given whole"):
        decode(message_of([[1]], dimensions=1), CLASSIFIER)


def test_an_answers_size_is_foreseen_from_both_widths() -> None:
    message = message_of([[1, 2], [3]], output=OUTPUT_POOLED_AND_TOKENS)
    num_bytes = (2 * 2 + 3 * 4) * 4 + 512

    decode(message, dataclasses.replace(NARROW, max_message_bytes=num_bytes))
    with pytest.raises(InvalidRequestError, match=f"the answer would take {num_bytes} bytes"):
        decode(message, dataclasses.replace(NARROW, max_message_bytes=num_bytes - 1))
