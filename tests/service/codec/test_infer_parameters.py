"""What the Open Inference Protocol's parameters mean, and which values of them are refused."""

from collections.abc import Mapping

import pytest

from protos.open_inference_pb2 import InferParameter
from service.codec.infer_parameters import read_deadline, read_priority
from service.errors import InvalidRequestError
from service.request import Priority

WHOLE = pytest.mark.parametrize("kind", ["int64_param", "uint64_param"])


def of(name: str, kind: str, value: int) -> Mapping[str, InferParameter]:
    parameter = InferParameter()
    setattr(parameter, kind, value)
    return {name: parameter}


@WHOLE
@pytest.mark.parametrize(
    ("microseconds", "deadline", "expected"),
    [(250_000, None, 100.25), (250_000, 100.1, 100.1), (250_000, 107.0, 100.25), (0, None, None), (0, 107.0, 107.0)],
)
def test_the_timeout_can_only_shorten_the_deadline(
    kind: str, microseconds: int, deadline: float | None, expected: float | None
) -> None:
    assert read_deadline(of("timeout", kind, microseconds), 100.0, deadline) == expected


def test_without_a_timeout_the_deadline_is_the_calls() -> None:
    assert [read_deadline({}, 100.0, deadline) for deadline in (None, 107.0)] == [None, 107.0]


@WHOLE
@pytest.mark.parametrize(
    ("number", "priority"), [(0, Priority.NORMAL), (1, Priority.HIGH), (2, Priority.NORMAL), (3, Priority.LOW)]
)
def test_the_priority_is_tritons_where_1_is_the_most_urgent(kind: str, number: int, priority: Priority) -> None:
    assert read_priority(of("priority", kind, number)) is priority


def test_without_a_priority_it_is_normal() -> None:
    assert read_priority({}) is Priority.NORMAL


@pytest.mark.parametrize(("kind", "number"), [("int64_param", -1), ("int64_param", 4), ("uint64_param", 2**64 - 1)])
def test_a_priority_that_there_is_not_is_refused(kind: str, number: int) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_priority(of("priority", kind, number))
    assert str(refusal.value) == f"priority is {number}; it takes 1 (high) to 3 (low), or 0 for normal"


def test_a_timeout_in_the_past_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_deadline(of("timeout", "int64_param", -1), 100.0, None)
    assert str(refusal.value) == "timeout is -1 microseconds; the least is 0, which means none"


@pytest.mark.parametrize(
    ("parameter", "what"),
    [
        (InferParameter(string_param="1"), "string_param"),
        (InferParameter(double_param=1.0), "double_param"),
        (InferParameter(bool_param=True), "bool_param"),
        (InferParameter(), "parameter without a value"),
    ],
)
def test_what_is_no_whole_number_is_refused(parameter: InferParameter, what: str) -> None:
    with pytest.raises(InvalidRequestError) as of_timeout:
        read_deadline({"timeout": parameter}, 100.0, None)
    with pytest.raises(InvalidRequestError) as of_priority:
        read_priority({"priority": parameter})

    takes = f"is a {what}; it takes int64_param or uint64_param"
    assert str(of_timeout.value) == f"timeout {takes}, microseconds"
    assert str(of_priority.value) == f"priority {takes}, 1 (high) to 3 (low), or 0 for normal"
