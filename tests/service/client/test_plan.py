"""How a client's call is cut into requests, and put together again."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.encoder_pb2 import OUTPUT_POOLED, OUTPUT_TOKENS, EncodeRequest, EncodeResponse, GetModelResponse, Limits
from service.client.plan import MAX_PARTS_IN_FLIGHT, Plan
from service.codec.encoder import decode_request
from service.request import Limits as ServerLimits

HIDDEN = 4


def described(
    *, sequence_tokens: int = 8, sequences: int = 24, tokens: int = 96, num_bytes: int = 1 << 20
) -> GetModelResponse:
    return GetModelResponse(
        model="m",
        version="1",
        hidden_size=HIDDEN,
        limits=Limits(
            max_sequence_tokens=sequence_tokens,
            max_request_sequences=sequences,
            max_request_tokens=tokens,
            max_request_bytes=num_bytes,
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


def answer(rows: int, *, width: int = HIDDEN, version: str = "1") -> EncodeResponse:
    vectors = np.ones((rows, width), "<f4").tobytes()
    return EncodeResponse(pooled=vectors, tokens=vectors, dimensions=width, hidden_size=width, version=version)


def vectors(*lengths: int, width: int = 3) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((length, width)) for length in lengths]


def of_vectors(**sizes: int) -> GetModelResponse:
    model = described(**sizes)
    model.input_size = 3
    return model


def test_vectors_are_sent_as_little_endian_float32() -> None:
    given = [[[1.0, 2.0, -3.0]], vectors(2)[0].astype(np.float16)]

    (request,) = requests_of(given, of_vectors())

    flat = [1.0, 2.0, -3.0, *given[1].ravel().tolist()]
    assert request.embeddings == struct.pack("<9f", *flat)
    assert (list(request.lengths), request.token_ids) == ([1, 2], b"")


def test_parts_of_vectors_fit_a_message_and_are_the_call_in_order() -> None:
    num_bytes = 1024 + 8 * 3 * 4 + 40  # eight vectors
    given = vectors(3, 8, 1, 1, 1, 5, 2)

    requests = requests_of(given, of_vectors(num_bytes=num_bytes, sequences=1000, tokens=1000))

    assert len(requests) > 2
    assert all(request.ByteSize() <= num_bytes for request in requests)
    sent = np.frombuffer(b"".join(request.embeddings for request in requests), "<f4").reshape(-1, 3)
    np.testing.assert_array_equal(sent, np.concatenate(given).astype(np.float32))
    limits = ServerLimits(0, 0, HIDDEN, HIDDEN, 8, 3, 125, num_bytes, num_bytes, input_size=3)
    for request in requests:
        decode_request(request, limits, arrival=0.0, deadline=None)


def test_no_vectors_are_no_requests() -> None:
    plan = Plan(of_vectors(), [], OUTPUT_POOLED, 0, {})

    assert (plan.parts, plan.pooled([]).shape) == ([], (0, HIDDEN))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ([1, 2, 3], r"int64 of shape \(3,\)"),
        ([[1, 2, 3]], r"int64 of shape \(1, 3\)"),
        ([[1.0, 2.0]], r"float64 of shape \(1, 2\)"),
        (np.zeros((0, 3)), r"float64 of shape \(0, 3\)"),
    ],
)
def test_what_is_no_sequence_of_the_models_vectors_is_refused(wrong: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"sequence 1 is {found}; floats of shape \(length, 3\) are wanted"):
        requests_of([*vectors(2), wrong], of_vectors())


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
    limits = ServerLimits(100, 2, HIDDEN, HIDDEN, 8, 3, 12, num_bytes, num_bytes)
    for request in requests:
        decode_request(request, limits, arrival=0.0, deadline=None)
        assert request.ByteSize() <= num_bytes


@given(sequences=sequence_lists, max_sequences=st.integers(1, 40), max_tokens=st.integers(8, 100))
def test_all_parts_in_flight_hold_together_what_one_request_may(
    sequences: list[list[int]], max_sequences: int, max_tokens: int
) -> None:
    model = described(sequences=max_sequences, tokens=max_tokens)
    plan = Plan(model, sequences, OUTPUT_POOLED, 0, {})

    assert 1 <= plan.max_in_flight <= MAX_PARTS_IN_FLIGHT
    for first in range(len(plan.parts)):
        in_flight = [s for part in plan.parts[first : first + plan.max_in_flight] for s in sequences[part]]
        assert len(in_flight) <= max_sequences
        assert sum(map(len, in_flight)) <= max_tokens


def test_sequences_longer_than_their_share_are_fewer_in_flight() -> None:
    assert Plan(described(tokens=96), [[1] * 8] * 20, OUTPUT_POOLED, 0, {}).max_in_flight == 8
    assert Plan(described(tokens=24), [[1] * 8] * 20, OUTPUT_POOLED, 0, {}).max_in_flight == 3
    assert Plan(described(tokens=8), [[1] * 8] * 20, OUTPUT_POOLED, 0, {}).max_in_flight == 1


def test_each_part_is_as_large_as_its_share_of_the_limits_lets_it_be() -> None:
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
        ([[1]], {"priority": "urgent"}, "priority is 'urgent'; it takes high, normal, low"),
    ],
)
def test_what_no_server_could_take_is_refused_here(sequences: list[Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  # the whole text is compared
        requests_of(sequences, **options)
    assert str(refusal.value) == text


def test_answers_of_two_versions_are_not_mixed() -> None:
    plan = Plan(described(), [[1]] * 4, OUTPUT_POOLED, 0, {})

    with pytest.raises(RuntimeError, match="versions 1 and 2"):
        plan.pooled([answer(3), answer(1, version="2")])


def test_the_width_of_the_vectors_is_the_answers_own() -> None:
    wider = answer(4, width=2 * HIDDEN, version="2")

    assert Plan(described(), [[1]] * 2 + [[1, 1]], OUTPUT_POOLED, 0, {}).pooled([answer(3, width=6)]).shape == (3, 6)
    vectors = Plan(described(), [[1], [1, 1, 1]], OUTPUT_TOKENS, 0, {}).tokens([wider])
    assert [array.shape for array in vectors] == [(1, 2 * HIDDEN), (3, 2 * HIDDEN)]


def test_answers_of_two_widths_are_not_mixed() -> None:
    pooled = Plan(described(), [[1]] * 4, OUTPUT_POOLED, 0, {})
    tokens = Plan(described(), [[1]] * 4, OUTPUT_TOKENS, 0, {})

    with pytest.raises(RuntimeError, match="vectors of 4 and 12 dimensions answered parts of one call"):
        pooled.pooled([answer(3), answer(1, width=12)])
    with pytest.raises(RuntimeError, match="vectors of 4 and 12 dimensions answered parts of one call"):
        tokens.tokens([answer(3), answer(1, width=12)])


def test_an_answer_with_other_rows_than_were_asked_for_is_not_believed() -> None:
    plan = Plan(described(), [[1]] * 4, OUTPUT_POOLED, 0, {})

    with pytest.raises(RuntimeError, match="an answer has 32 bytes of vectors; 3 of 4 float32 components take 48"):
        plan.pooled([answer(2), answer(2)])


def test_vectors_of_another_component_type_are_not_believed() -> None:
    plan = Plan(described(), [[1]] * 2, OUTPUT_POOLED, 0, {"vector_type": "float16"})

    with pytest.raises(RuntimeError, match="an answer has 32 bytes of vectors; 2 of 4 float16 components take 16"):
        plan.pooled([answer(2)])


def test_other_dimensions_than_were_asked_for_are_not_believed() -> None:
    plan = Plan(described(), [[1]], OUTPUT_POOLED, 2, {})

    with pytest.raises(RuntimeError, match="the answer's vectors have 4 dimensions; 2 were asked for"):
        plan.pooled([answer(1)])


def test_a_plan_knows_whether_the_version_it_was_made_for_answered() -> None:
    plan = Plan(described(), [[1]] * 4, OUTPUT_POOLED, 0, {})

    assert plan.is_described([answer(3), answer(1)])
    assert not plan.is_described([answer(3), answer(1, version="2")])


def test_the_answer_is_a_float32_array_of_ones_own() -> None:
    plan = Plan(described(), [[1]], OUTPUT_POOLED, 2, {"vector_type": "float16"})

    vectors = plan.pooled([EncodeResponse(pooled=struct.pack("<2e", 0.5, 2.0), dimensions=2, version="1")])

    assert vectors.tolist() == [[0.5, 2.0]]
    assert vectors.dtype == np.float32
    assert vectors.flags.writeable


def test_an_option_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(TypeError, match="no option dimension; there are model, version, timeout"):
        requests_of([[1]], dimension=4)


def test_vectors_of_sequences_may_be_narrower_than_those_of_tokens() -> None:
    model = described()
    model.output_size = 2
    plan = Plan(model, [[1, 2], [3]], OUTPUT_POOLED, 0, {})

    assert plan.pooled([answer(2, width=2)]).shape == (2, 2)
    assert Plan(model, [], OUTPUT_POOLED, 0, {}).pooled([]).shape == (0, 2)
    assert Plan(described(), [], OUTPUT_POOLED, 0, {}).pooled([]).shape == (0, HIDDEN)  # of an older server
