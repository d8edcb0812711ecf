"""The worst number of a batch: the right one is found, and told with its input."""

import numpy as np
import pytest

from export.worst import describe_worst
from service.request import TokenSequence

# Three sequences of 2, 3 and 70 tokens; the second has a hole before its last token.
SEQUENCES = [
    TokenSequence(np.array([5, 6]), np.array([0, 1]), np.zeros(2, np.int64)),
    TokenSequence(np.array([7, 8, 9]), np.array([0, 1, 4]), np.zeros(3, np.int64)),
    TokenSequence(np.arange(100, 170), np.arange(70), np.zeros(70, np.int64)),
]


def _rows(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.ones((count, 4), np.float32)


def test_a_token_is_told_with_its_sequence_and_column() -> None:
    found = _rows(75)
    found[1, 0] = 1.25
    found[4, 3] = 1.5  # the third of the second sequence

    assert describe_worst(found, _rows(75), SEQUENCES) == (
        "worst in sequence 1 of 3, token 2 of 3 in column 4, component 3: found 1.5, expected 1; "
        "its token_ids are [7 8 9]"
    )


@pytest.mark.parametrize(("row", "where"), [(0, "sequence 0 of 3, token 0"), (74, "sequence 2 of 3, token 69")])
def test_the_first_and_the_last_token_are_found(row: int, where: str) -> None:
    found = _rows(75)
    found[row, 2] = 0

    assert f"worst in {where} of " in describe_worst(found, _rows(75), SEQUENCES)


def test_a_pooled_vector_is_told_with_its_sequence() -> None:
    found = _rows(3)
    found[0, 1] = -1

    assert describe_worst(found, _rows(3), SEQUENCES) == (
        "worst in sequence 0 of 3, component 1: found -1, expected 1; its token_ids are [5 6]"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_the_worst(value: float) -> None:
    found = _rows(3)
    found[0, 1] = 1e30
    found[1, 2] = value

    assert f"sequence 1 of 3, component 2: found {value}, expected 1" in describe_worst(found, _rows(3), SEQUENCES)


def test_of_a_long_sequence_the_first_64_ids_are_listed() -> None:
    found = _rows(3)
    found[2, 0] = 0

    ids = " ".join(str(100 + index) for index in range(64))
    assert describe_worst(found, _rows(3), SEQUENCES).endswith(f"its token_ids are [{ids} and 6 more]")
