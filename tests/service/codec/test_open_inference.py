"""The Open Inference Protocol's codec, against values written out and an obvious slow reference."""

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.open_inference_pb2 import InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse
from service.codec.open_inference import InferCall, decode_infer, encode_infer
from service.errors import InvalidRequestError
from service.request import Encoding, Limits, Priority

LIMITS = Limits(
    vocab_size=100,
    type_vocab_size=2,
    hidden_size=3,
    output_size=3,
    max_sequence_tokens=6,
    max_request_sequences=4,
    max_request_tokens=16,
    max_request_bytes=4096,
    max_message_bytes=4096,
)
Matrix = Sequence[Sequence[int]]
Tensor = ModelInferRequest.InferInputTensor
FORMATS = {"INT64": ("q", "int64_contents"), "INT32": ("i", "int_contents")}


def add_input(
    message: ModelInferRequest, name: str, rows: Matrix, *, datatype: str = "INT64", raw: bool = True
) -> Tensor:
    letter, field = FORMATS[datatype]
    values = [value for row in rows for value in row]
    tensor = message.inputs.add(name=name, datatype=datatype, shape=[len(rows), len(rows[0])])
    if raw:
        message.raw_input_contents.append(struct.pack(f"<{len(values)}{letter}", *values))
    else:
        getattr(tensor.contents, field).extend(values)
    return tensor


def message_of(
    ids: Matrix,
    mask: Matrix | None = None,
    types: Matrix | None = None,
    *,
    outputs: Sequence[str] = (),
    datatype: str = "INT64",
    raw: bool = True,
) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m", id="call 1")
    for name, rows in (("input_ids", ids), ("attention_mask", mask), ("token_type_ids", types)):
        if rows is not None:
            add_input(message, name, rows, datatype=datatype, raw=raw)
    for output in outputs:
        message.outputs.add(name=output)
    return message


def decode(message: ModelInferRequest, limits: Limits = LIMITS) -> InferCall:
    return decode_infer(message, limits, arrival=100.0, deadline=None)


def refusal_of(message: ModelInferRequest, limits: Limits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as refusal:
        decode(message, limits)
    return str(refusal.value)


def answer(message: ModelInferRequest, encodings: Sequence[Encoding], limits: Limits = LIMITS) -> ModelInferResponse:
    call = decode(message, limits)
    for index, encoding in enumerate(encodings):
        call.request.complete(index, encoding, 0.0, 0.0)
    return encode_infer(call, request_id=message.id, model="m", version="3")


def floats(data: bytes) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<f", data)]


@st.composite
def masked_batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """ids, mask, types: each row with at least one real token, at most 4 rows of at most 4 columns."""
    width = draw(st.integers(1, 4))
    height = draw(st.integers(1, 4))

    def matrix(low: int, high: int) -> list[list[int]]:
        return [[draw(st.integers(low, high)) for _ in range(width)] for _ in range(height)]

    mask = matrix(0, 1)
    for row in mask:
        row[draw(st.integers(0, width - 1))] = 1
    return matrix(0, 99), mask, matrix(0, 1)


@given(batch=masked_batches(), datatype=st.sampled_from(["INT64", "INT32"]), raw=st.booleans())
def test_exactly_the_real_tokens_go_on_each_with_its_column(
    batch: tuple[list[list[int]], ...], datatype: str, raw: bool
) -> None:
    ids, mask, types = batch

    request = decode(message_of(ids, mask, types, datatype=datatype, raw=raw)).request

    assert len(request.sequences) == len(ids)
    for row, sequence in enumerate(request.sequences):
        columns = [column for column, is_real in enumerate(mask[row]) if is_real]
        assert sequence.position_ids.tolist() == columns
        assert sequence.token_ids.tolist() == [ids[row][column] for column in columns]
        assert sequence.token_type_ids.tolist() == [types[row][column] for column in columns]


@given(batch=masked_batches())
def test_token_vectors_return_to_their_columns_and_zeros_fill_the_rest(batch: tuple[list[list[int]], ...]) -> None:
    ids, mask, _ = batch
    message = message_of(ids, mask, outputs=["last_hidden_state"])
    encodings = []
    for row in range(len(ids)):
        columns = [column for column, is_real in enumerate(mask[row]) if is_real]
        vectors = np.array([[row + 1, column + 1, ids[row][column]] for column in columns], np.float32)
        encodings.append(Encoding(vectors[0], vectors))

    response = answer(message, encodings)

    expected = [
        value
        for row in range(len(ids))
        for column in range(len(ids[0]))
        for value in ([row + 1, column + 1, ids[row][column]] if mask[row][column] else [0, 0, 0])
    ]
    assert floats(response.raw_output_contents[0]) == expected
    assert list(response.outputs[0].shape) == [len(ids), len(ids[0]), 3]


def test_without_a_mask_every_token_is_real() -> None:
    (first, second) = decode(message_of([[5, 6], [7, 8]])).request.sequences

    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5, 6], [7, 8])
    assert second.token_type_ids.tolist() == [0, 0]


def test_ids_under_the_mask_need_not_be_in_the_vocabulary() -> None:
    (sequence,) = decode(message_of([[-100, 7, 5000]], [[0, 1, 0]], [[9, 1, 9]])).request.sequences

    assert (sequence.token_ids.tolist(), sequence.token_type_ids.tolist()) == ([7], [1])


def test_columns_past_the_longest_sequence_are_free_if_the_mask_takes_them_out() -> None:
    (sequence,) = decode(message_of([[7] + [0] * 9], [[1] + [0] * 9])).request.sequences

    assert sequence.token_ids.tolist() == [7]


def test_inputs_may_come_in_any_order_and_of_either_type() -> None:
    message = ModelInferRequest()
    add_input(message, "attention_mask", [[0, 1]], datatype="INT32")
    add_input(message, "input_ids", [[4, 5]])

    assert decode(message).request.sequences[0].token_ids.tolist() == [5]


def with_input(**fields: object) -> ModelInferRequest:
    """A message whose second input is wrong in some way."""
    message = message_of([[1, 2]])
    tensor = add_input(message, "attention_mask", [[1, 1]])
    for name, value in fields.items():
        if name == "shape":
            tensor.shape[:] = value  # type: ignore[call-overload]
        else:
            setattr(tensor, name, value)
    return message


def of_shape(shape: Sequence[int], *, raw: bool = True) -> ModelInferRequest:
    """A message whose ids claim a shape that their two elements don't have: who reads them says so."""
    message = message_of([[1, 2]], outputs=["sentence_embedding"], raw=raw)
    message.inputs[0].shape[:] = shape
    return message


def without_data() -> ModelInferRequest:
    message = message_of([[1, 2]])
    message.raw_input_contents.clear()
    return message


def with_contents_beside_raw() -> ModelInferRequest:
    message = message_of([[1, 2]])
    message.inputs[0].contents.int64_contents.extend([1, 2])
    return message


def with_contents_in_the_wrong_field() -> ModelInferRequest:
    message = message_of([[1, 2]], raw=False)
    message.inputs[0].contents.CopyFrom(InferTensorContents(int_contents=[1, 2]))
    return message


def with_two_kinds_of_contents() -> ModelInferRequest:
    message = message_of([[1, 2]], raw=False)
    message.inputs[0].contents.fp32_contents.append(1)
    return message


def with_surplus_raw() -> ModelInferRequest:
    message = message_of([[1, 2]])
    message.raw_input_contents.append(b"")
    return message


def without_ids() -> ModelInferRequest:
    message = ModelInferRequest()
    add_input(message, "attention_mask", [[1]])
    return message


def with_too_few_elements() -> ModelInferRequest:
    message = message_of([[1, 2]], raw=False)
    message.inputs[0].contents.int64_contents.pop()
    return message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (ModelInferRequest(), "the input 'input_ids' is missing"),
        (without_ids(), "the input 'input_ids' is missing"),
        (
            with_input(name="position_ids"),
            "no input 'position_ids'; the model has input_ids, attention_mask, token_type_ids",
        ),
        (with_input(name="input_ids"), "input 'input_ids' is given twice"),
        (with_input(datatype="FP32"), "attention_mask is 'FP32'; it takes INT64 or INT32"),
        (with_input(shape=[2]), "attention_mask has shape [2]; it takes [rows, columns], each at least 1"),
        (with_input(shape=[1, 2, 1]), "attention_mask has shape [1, 2, 1]; it takes [rows, columns], each at least 1"),
        (with_input(shape=[0, 2]), "attention_mask has shape [0, 2]; it takes [rows, columns], each at least 1"),
        (with_input(shape=[-1, -2]), "attention_mask has shape [-1, -2]; it takes [rows, columns], each at least 1"),
        (with_input(shape=[2, 1]), "attention_mask has shape [2, 1]; input_ids has [1, 2]"),
        (of_shape([1, 3]), "input_ids has 16 raw bytes; INT64 of shape [1, 3] takes 24"),
        (with_input(datatype="INT32"), "attention_mask has 16 raw bytes; INT32 of shape [1, 2] takes 8"),
        (without_data(), "input_ids has 0 elements in int64_contents; shape [1, 2] takes 2"),
        (with_too_few_elements(), "input_ids has 1 elements in int64_contents; shape [1, 2] takes 2"),
        (with_contents_beside_raw(), "input_ids has contents beside raw_input_contents; give one of them"),
        (with_contents_in_the_wrong_field(), "input_ids has int_contents; INT64 goes into int64_contents"),
        (with_two_kinds_of_contents(), "input_ids has fp32_contents; INT64 goes into int64_contents"),
        (with_surplus_raw(), "raw_input_contents has 2 entries; inputs has 1"),
        (message_of([[1, 100]]), "row 0, column 1: input_ids is 100; the model takes 0 to 99"),
        (message_of([[0, 1], [0, -1]], [[1, 1], [0, 1]]), "row 1, column 1: input_ids is -1; the model takes 0 to 99"),
        (message_of([[2**40]]), f"row 0, column 0: input_ids is {2**40}; the model takes 0 to 99"),
        (message_of([[1, 1]], types=[[0, 2]]), "row 0, column 1: token_type_ids is 2; the model takes 0 to 1"),
        (message_of([[1, 1]], [[1, 2]]), "row 0, column 1: attention_mask is 2; it takes 0 or 1"),
        (message_of([[1, 1]], [[-1, 1]]), "row 0, column 0: attention_mask is -1; it takes 0 or 1"),
        (message_of([[1, 1], [1, 1]], [[1, 1], [0, 0]]), "row 1 has no tokens; the least is 1"),
        (message_of([[1]] * 5), "the request has 5 rows; the limit is 4"),
        (message_of([[1] * 5] * 4), "the request has 20 tokens; the limit is 16"),
        (message_of([[1] * 7]), "row 0 has a real token in column 6; the model has positions for 6 columns"),
        (
            message_of([[1] * 8, [1] * 8], [[1] + [0] * 7, [0] * 7 + [1]]),
            "row 1 has a real token in column 7; the model has positions for 6 columns",
        ),
        (
            message_of([[1]], outputs=["logits"]),
            "no output 'logits'; the model has sentence_embedding, last_hidden_state",
        ),
        (message_of([[1]], outputs=["sentence_embedding"] * 2), "output 'sentence_embedding' is requested twice"),
    ],
)
def test_a_bad_message_is_refused_with_the_item_the_value_and_the_limit(message: ModelInferRequest, text: str) -> None:
    assert refusal_of(message) == text


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([5, 1], "the request has 5 rows; the limit is 4"),
        ([2**62, 2**62], f"the request has {2**62} rows; the limit is 4"),
        (
            [4, 65],
            "the request has 4 rows of 65 columns; the limit is 256 cells, real or not; pad less or send fewer rows",
        ),
        (
            [1, 2**62],
            f"the request has 1 rows of {2**62} columns; the limit is 256 cells, real or not; "
            "pad less or send fewer rows",
        ),
    ],
)
def test_the_rectangle_is_limited_before_any_of_it_is_read(raw: bool, shape: Sequence[int], text: str) -> None:
    assert refusal_of(of_shape(shape, raw=raw)) == text


def test_a_rectangle_at_the_limit_is_read() -> None:
    mask = [[1] + [0] * 63] * 4

    assert decode(message_of([[1] * 64] * 4, mask, outputs=["sentence_embedding"])).request.num_tokens == 4


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
def test_an_answer_that_would_not_fit_is_refused_before_the_rectangle_is_read(raw: bool) -> None:
    message = of_shape([4, 4], raw=raw)
    message.outputs.add(name="last_hidden_state")

    assert refusal_of(message, Limits(100, 2, 3, 3, 6, 4, 16, 4096, max_message_bytes=1100)) == (
        "the answer would take 1270 bytes; the limit is 1100; send fewer sequences"
    )


def test_a_request_holds_its_message_what_is_made_of_it_and_its_answer() -> None:
    message = message_of([[1, 2, 0], [3, 0, 0]], [[1, 1, 0], [1, 0, 0]], outputs=["last_hidden_state"])

    # 700 for the objects of a sequence, three int64 a token; the answer has all 6 cells, and 6 bytes of id.
    expected = len(message.SerializeToString()) + 2 * 700 + 3 * 24 + 6 * 3 * 4 + 6 + 1024
    assert decode(message).request.num_bytes == expected


def test_a_model_without_token_types_takes_only_zeros() -> None:
    limits = Limits(100, 0, 3, 3, 6, 4, 16, 4096, 4096)
    decode(message_of([[1]], types=[[0]]), limits)

    assert refusal_of(message_of([[1]], types=[[1]]), limits) == (
        "row 0, column 0: token_type_ids is 1; the model takes 0 to 0"
    )


@pytest.mark.parametrize(
    "name", ["sequence_id", "sequence_start", "shared_memory_region", "shared_memory_byte_size", "classification"]
)
def test_a_parameter_that_would_change_the_answer_is_refused_wherever_it_stands(name: str) -> None:
    parameter = InferParameter(int64_param=1)
    on_request, on_input, on_output = (message_of([[1]], outputs=["sentence_embedding"]) for _ in range(3))
    on_request.parameters[name].CopyFrom(parameter)
    on_input.inputs[0].parameters[name].CopyFrom(parameter)
    on_output.outputs[0].parameters[name].CopyFrom(parameter)

    for message, owner in (
        (on_request, "the request"),
        (on_input, "input 'input_ids'"),
        (on_output, "output 'sentence_embedding'"),
    ):
        assert refusal_of(message) == f"{owner} has the parameter {name!r}, which this server does not support"


def test_other_parameters_are_ignored() -> None:
    message = message_of([[1]])
    message.parameters["binary_data_output"].bool_param = True
    message.inputs[0].parameters["binary_data"].bool_param = True

    assert decode(message).request.num_tokens == 1


def test_timeout_and_priority_reach_the_queue() -> None:
    message = message_of([[1]])
    message.parameters["timeout"].int64_param = 250_000
    message.parameters["priority"].uint64_param = 1

    request = decode_infer(message, LIMITS, arrival=100.0, deadline=107.0).request

    assert (request.deadline, request.priority) == (100.25, Priority.HIGH)


def test_all_outputs_are_sent_when_none_is_named() -> None:
    vectors = np.array([[1, 2, 3]], np.float32)

    response = answer(message_of([[1]]), [Encoding(vectors[0], vectors)])

    assert [output.name for output in response.outputs] == ["sentence_embedding", "last_hidden_state"]


def test_token_vectors_are_computed_only_where_asked_for() -> None:
    assert not decode(message_of([[1]], outputs=["sentence_embedding"])).request.wants_tokens


def test_outputs_are_raw_one_entry_each_in_the_order_asked_for() -> None:
    vectors = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    message = message_of([[1, 2]], outputs=["last_hidden_state", "sentence_embedding"])

    response = answer(message, [Encoding(np.array([7, 8, 9], np.float32), vectors)])

    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [
        ("last_hidden_state", "FP32", [1, 2, 3]),
        ("sentence_embedding", "FP32", [1, 3]),
    ]
    assert [floats(raw) for raw in response.raw_output_contents] == [[1, 2, 3, 4, 5, 6], [7, 8, 9]]


def test_an_answer_is_raw_even_where_the_request_was_typed() -> None:
    vectors = np.array([[1, 2, 3]], np.float32)

    response = answer(message_of([[1]], raw=False, outputs=["sentence_embedding"]), [Encoding(vectors[0], None)])

    assert floats(response.raw_output_contents[0]) == [1, 2, 3]
    assert not response.outputs[0].HasField("contents")


def test_an_answer_repeats_the_id_and_names_model_and_version() -> None:
    vectors = np.zeros((1, 3), np.float32)

    response = answer(message_of([[1]]), [Encoding(vectors[0], vectors)])

    assert (response.id, response.model_name, response.model_version) == ("call 1", "m", "3")


def test_an_answer_that_would_not_fit_is_refused_before_it_is_computed() -> None:
    message = message_of([[1, 2], [3, 4]])
    foreseen = (2 + 4) * 3 * 4 + len("call 1") + 1024
    decode(message, Limits(100, 2, 3, 3, 6, 4, 16, 4096, max_message_bytes=foreseen))

    assert refusal_of(message, Limits(100, 2, 3, 3, 6, 4, 16, 4096, max_message_bytes=foreseen - 1)) == (
        f"the answer would take {foreseen} bytes; the limit is {foreseen - 1}; send fewer sequences"
    )


def test_no_answer_is_larger_than_was_foreseen() -> None:
    vectors = np.zeros((2, 3), np.float32)

    response = answer(message_of([[1, 2]]), [Encoding(vectors[0], vectors)])

    assert response.ByteSize() <= (1 + 2) * 3 * 4 + len("call 1") + 1024


def test_a_message_of_many_empty_parts_is_refused_before_they_are_looked_at() -> None:
    message = ModelInferRequest()
    for _ in range(4):
        message.inputs.add()
    assert refusal_of(message) == "the request has 4 inputs; the limit is 3"
    message = ModelInferRequest()
    for number in range(65):
        message.parameters[str(number)].bool_param = True
    assert refusal_of(message) == "the request has 65 parameters; the limit is 64"


# Token vectors of 3, and 2 logits for a sequence.
CLASSIFIER = dataclasses.replace(LIMITS, output_size=2, is_classifier=True)


def test_a_classifier_answers_with_logits() -> None:
    rows = np.ones((1, 3), np.float32)
    encodings = [Encoding(np.array([i, 7], np.float32), rows) for i in (5, 6)]

    response = answer(message_of([[1], [2]]), encodings, CLASSIFIER)

    assert [(output.name, list(output.shape)) for output in response.outputs] == [
        ("logits", [2, 2]),
        ("last_hidden_state", [2, 1, 3]),
    ]
    assert floats(response.raw_output_contents[0]) == [5, 7, 6, 7]


def test_logits_are_not_asked_for_as_an_embedding_nor_an_embedding_as_logits() -> None:
    decode(message_of([[1]], outputs=["logits"]), CLASSIFIER)

    assert refusal_of(message_of([[1]], outputs=["sentence_embedding"]), CLASSIFIER) == (
        "no output 'sentence_embedding'; the model has logits, last_hidden_state"
    )
    assert refusal_of(message_of([[1]], outputs=["logits"])) == (
        "no output 'logits'; the model has sentence_embedding, last_hidden_state"
    )


@pytest.mark.parametrize(
    ("outputs", "num_floats"), [(["logits"], 2 * 2), (["last_hidden_state"], 2 * 2 * 3), ([], 2 * 2 + 2 * 2 * 3)]
)
def test_an_answers_size_is_foreseen_from_both_widths(outputs: list[str], num_floats: int) -> None:
    message = message_of([[1, 2], [3, 4]], outputs=outputs)
    num_bytes = num_floats * 4 + len("call 1") + 1024

    decode(message, dataclasses.replace(CLASSIFIER, max_message_bytes=num_bytes))
    short = dataclasses.replace(CLASSIFIER, max_message_bytes=num_bytes - 1)
    assert f"the answer would take {num_bytes} bytes" in refusal_of(message, short)
