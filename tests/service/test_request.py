"""How a request settles: once, with its last sequence or its first error."""

import numpy as np

from service.errors import EngineError, UnavailableError
from service.request import Encoding, Request, TokenSequence


class Settled:
    """Counts how often a request said that it was settled."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def request(*lengths: int) -> tuple[Request, Settled]:
    settled = Settled()
    sequences = tuple(TokenSequence(*(np.zeros(length, np.int64),) * 3) for length in lengths)
    return Request(sequences, wants_tokens=False, arrival=0.0, deadline=None, on_settled=settled), settled


def encoding(value: float) -> Encoding:
    return Encoding(np.array([value], np.float32), None)


def test_tokens_are_counted_over_all_sequences() -> None:
    assert request(3, 1, 4)[0].num_tokens == 8


def test_a_request_settles_with_its_last_sequence() -> None:
    two, settled = request(1, 1)
    two.complete(1, encoding(1.0), started=1.0, finished=2.0)
    assert (two.is_settled, settled.count) == (False, 0)
    two.complete(0, encoding(0.0), started=1.0, finished=2.0)
    assert (two.is_settled, settled.count, two.error) == (True, 1, None)


def test_answers_stand_in_the_order_of_the_request_and_not_of_the_runs() -> None:
    three, _ = request(1, 1, 1)
    answers = [encoding(float(place)) for place in range(3)]
    for place in (1, 2, 0):
        three.complete(place, answers[place], started=1.0, finished=2.0)
    assert three.encodings == answers


def test_the_times_span_all_runs_in_whatever_order_they_come_back() -> None:
    three, _ = request(1, 1, 1)
    three.complete(0, encoding(0.0), started=5.0, finished=6.0)
    three.complete(1, encoding(1.0), started=3.0, finished=9.0)
    three.complete(2, encoding(2.0), started=4.0, finished=5.0)
    assert (three.first_started, three.last_finished) == (3.0, 9.0)


def test_an_error_settles_the_whole_request() -> None:
    two, settled = request(1, 1)
    error = EngineError("it broke")
    two.fail(error)
    assert (two.is_settled, two.error, settled.count) == (True, error, 1)


def test_an_answer_after_the_error_changes_nothing() -> None:
    one, settled = request(1)
    one.fail(EngineError("it broke"))
    one.complete(0, encoding(0.0), started=1.0, finished=2.0)
    assert (one.encodings, one.first_started, settled.count) == ([None], None, 1)


def test_an_error_after_the_answer_changes_nothing() -> None:
    one, settled = request(1)
    one.complete(0, encoding(0.0), started=1.0, finished=2.0)
    one.fail(UnavailableError("too late"))
    assert (one.error, settled.count) == (None, 1)


def test_only_the_first_error_counts() -> None:
    one, settled = request(1)
    first = EngineError("it broke")
    one.fail(first)
    one.fail(UnavailableError("too late"))
    assert (one.error, settled.count) == (first, 1)
