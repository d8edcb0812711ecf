"""Vectors in place of token ids, through both codecs, against values written out."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.encoder_pb2 import OUTPUT_TOKENS, EncodeRequest
from protos.open_inference_pb2 import ModelInferRequest
from service.codec.encoder import decode_request
from service.codec.open_inference import decode_infer
from service.errors import InvalidRequestError
from service.request import Limits, Request, TokenSequence

LIMITS = Limits(
    vocab_size=0,
    type_vocab_size=0,
    hidden_size=3,
    output_size=3,
    max_sequence_tokens=6,
    max_request_sequences=4,
    max_request_tokens=16,
    max_request_bytes=4096,
    max_message_bytes=4096,
    input_size=2,
)
OF_IDS = replace(LIMITS, vocab_size=9, input_size=0)
Vectors = Sequence[Sequence[float]]


def floats_bytes(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def typed(sequences: Sequence[Vectors], **fields: Any) -> EncodeRequest:
    flat = [value for sequence in sequences for vector in sequence for value in vector]
    lengths = [len(sequence) for sequence in sequences]
    return EncodeRequest(**({"embeddings": floats_bytes(flat), "lengths": lengths} | fields))


def infer(
    rows: Sequence[Vectors], mask: Sequence[Sequence[int]] | None = None, *, raw: bool = True, **changes: Any
) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m")
    flat = [value for row in rows for vector in row for value in vector]
    shape = [len(rows), len(rows[0]), len(rows[0][0])]
    tensor = message.inputs.add(**({"name": "inputs_embeds", "datatype": "FP32", "shape": shape} | changes))
    bits = None if mask is None else [bit for row in mask for bit in row]
    if bits is not None:
        message.inputs.add(name="attention_mask", datatype="INT64", shape=shape[:2])
    if raw:
        message.raw_input_contents.append(floats_bytes(flat))
        if bits is not None:
            message.raw_input_contents.append(struct.pack(f"<{len(bits)}q", *bits))
    else:
        tensor.contents.fp32_contents.extend(flat)
        if bits is not None:
            message.inputs[1].contents.int64_contents.extend(bits)
    return message


def decode(message: EncodeRequest | ModelInferRequest, limits: Limits = LIMITS) -> Request:
    if isinstance(message, EncodeRequest):
        return decode_request(message, limits, arrival=1.0, deadline=None)
    return decode_infer(message, limits, arrival=1.0, deadline=None).request


def refusal_of(message: EncodeRequest | ModelInferRequest, limits: Limits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as refusal:
        decode(message, limits)
    return str(refusal.value)


def vectors_of(sequence: TokenSequence) -> list[list[float]]:
    assert sequence.embeddings is not None
    assert sequence.embeddings.dtype == np.float32
    rows: list[list[float]] = sequence.embeddings.tolist()
    return rows


A, B, C = [1.0, -2.0], [0.5, 4.0], [-0.0, 65536.0]


def test_the_typed_api_cuts_vectors_into_sequences() -> None:
    request = decode(typed([[A, B], [C]]))

    assert [vectors_of(sequence) for sequence in request.sequences] == [[A, B], [C]]
    assert [sequence.position_ids.tolist() for sequence in request.sequences] == [[0, 1], [0]]
    assert (request.num_tokens, request.sequences[0].num_tokens) == (3, 2)


@pytest.mark.parametrize("raw", [True, False])
def test_the_open_protocol_keeps_the_real_vectors_and_their_columns(raw: bool) -> None:
    nan = [float("nan")] * 2  # what is masked is not looked at

    request = decode(infer([[A, nan, B], [nan, nan, C]], [[1, 0, 1], [0, 0, 1]], raw=raw))

    assert [vectors_of(sequence) for sequence in request.sequences] == [[A, B], [C]]
    assert [sequence.position_ids.tolist() for sequence in request.sequences] == [[0, 2], [2]]


def test_a_request_holds_its_vectors_beside_its_message() -> None:
    message = typed([[A, B], [C]])

    # 700 for the objects of a sequence; of a token three int64 and its vector; the answer, and 512 around it.
    answer_bytes = 2 * LIMITS.output_size * 4 + 512
    assert decode(message).num_bytes == len(message.SerializeToString()) + 2 * 700 + 3 * (24 + 2 * 4) + answer_bytes


def test_without_a_mask_every_vector_is_real() -> None:
    request = decode(infer([[A, B], [C, A]]))

    assert [vectors_of(sequence) for sequence in request.sequences] == [[A, B], [C, A]]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(sequences=st.lists(st.lists(st.tuples(finite, finite), min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_finite_vectors_arrive_to_the_bit(sequences: list[list[tuple[float, float]]]) -> None:
    request = decode(typed(sequences))

    found = [vectors_of(sequence) for sequence in request.sequences]
    assert found == [[list(vector) for vector in sequence] for sequence in sequences]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused_with_its_place(value: float) -> None:
    assert refusal_of(typed([[A, B], [C, [1.0, value]]])) == (
        f"sequence 1, token 1: component 1 of embeddings is {value}; the model takes finite numbers"
    )
    assert refusal_of(infer([[A, B], [[value, 0.0], C]])) == (
        f"row 1, column 0: component 0 of inputs_embeds is {value}; the model takes finite numbers"
    )


@pytest.mark.parametrize(
    ("message", "limits", "refusal"),
    [
        (typed([[A]], token_ids=b"1234"), LIMITS, "the request has 4 bytes of token_ids; the model takes embeddings"),
        (
            typed([[A]], embeddings=b"", token_ids=b"1234"),
            LIMITS,
            "the request has 4 bytes of token_ids; the model takes embeddings",
        ),
        (
            typed([[A]], token_type_ids=b"1234"),
            LIMITS,
            "the request has 4 bytes of token_type_ids; the model takes embeddings",
        ),
        (typed([[A]]), OF_IDS, "the request has 8 bytes of embeddings; the model takes token_ids"),
        (
            typed([[A]], token_ids=b"1234"),
            OF_IDS,
            "the request has 8 bytes of embeddings; the model takes token_ids",
        ),
        (
            typed([[A, B]], lengths=[3]),
            LIMITS,
            "embeddings has 16 bytes; lengths add up to 3 tokens, which take 24 as float32 vectors of 2",
        ),
        (
            typed([[A]], embeddings=b""),
            LIMITS,
            "embeddings has 0 bytes; lengths add up to 1 tokens, which take 8 as float32 vectors of 2",
        ),
        (
            typed([[A]], embeddings=b"1234567"),
            LIMITS,
            "embeddings has 7 bytes; lengths add up to 1 tokens, which take 8",
        ),
        (typed([[A] * 7]), LIMITS, "sequence 0 has 7 tokens; the limit is 6"),
        (typed([[A] * 6] * 3), LIMITS, "the request has 18 tokens; the limit is 16"),
        (
            typed([[A] * 6] * 2, output=OUTPUT_TOKENS),
            replace(LIMITS, max_message_bytes=600),
            "the answer would take 656",
        ),
    ],
)
def test_the_typed_api_refuses_what_does_not_fit(message: EncodeRequest, limits: Limits, refusal: str) -> None:
    assert refusal_of(message, limits).startswith(refusal)


def _ids(name: str = "input_ids") -> ModelInferRequest:
    message = ModelInferRequest()
    message.inputs.add(name=name, datatype="INT64", shape=[1, 1])
    message.raw_input_contents.append(struct.pack("<q", 1))
    return message


@pytest.mark.parametrize(
    ("message", "limits", "refusal"),
    [
        (_ids(), LIMITS, "no input 'input_ids'; the model has inputs_embeds, attention_mask"),
        (_ids("attention_mask"), LIMITS, "the input 'inputs_embeds' is missing"),
        (infer([[A]]), OF_IDS, "no input 'inputs_embeds'; the model has input_ids, attention_mask, token_type_ids"),
        (infer([[A]], datatype="FP16"), LIMITS, "inputs_embeds is 'FP16'; it takes FP32"),
        (infer([[A]], datatype="INT64"), LIMITS, "inputs_embeds is 'INT64'; it takes FP32"),
        (infer([[A]], shape=[1, 2]), LIMITS, "inputs_embeds has shape [1, 2]; it takes [rows, columns, 2], each"),
        (infer([[A]], shape=[1, 1, 3]), LIMITS, "inputs_embeds has shape [1, 1, 3]; it takes [rows, columns, 2]"),
        (infer([[A]], shape=[2, 1, 2]), LIMITS, "inputs_embeds has 8 raw bytes; FP32 of shape [2, 1, 2] takes 16"),
        (infer([[A]], [[1, 1]]), LIMITS, "attention_mask has 16 raw bytes"),
        (infer([[A, B]], [[0, 0]]), LIMITS, "row 0 has no tokens; the least is 1"),
        (infer([[A] * 7]), LIMITS, "row 0 has a real token in column 6; the model has positions for 6 columns"),
        (infer([[A] * 3], raw=False, shape=[1, 2, 2]), LIMITS, "inputs_embeds has 6 elements in fp32_contents; shape"),
    ],
)
def test_the_open_protocol_refuses_what_does_not_fit(message: ModelInferRequest, limits: Limits, refusal: str) -> None:
    assert refusal_of(message, limits).startswith(refusal)


def test_masks_of_another_rectangle_are_refused() -> None:
    message = infer([[A, B]], [[1, 1]])
    message.inputs[1].shape[:] = [2, 1]

    assert refusal_of(message) == "attention_mask has shape [2, 1]; inputs_embeds has [1, 2, 2]"


def test_typed_contents_are_bounded_and_raw_ones_by_the_message() -> None:
    """Reading a typed number takes time on the event loop, as a typed id does."""
    wide = replace(LIMITS, input_size=600)
    message = infer([[[0.0] * 600]], raw=False)

    assert refusal_of(message, wide) == (
        "inputs_embeds has 600 elements in fp32_contents; the limit is 256; send raw_input_contents"
    )
    assert decode(infer([[[0.0] * 600]]), wide).num_tokens == 1
