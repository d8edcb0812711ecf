from math import isnan

from benchmarks.outcomes import Outcome, Tally, Window, percentile_or_nan

WINDOW = Window(1.0, 5.0)


def make(at: float, seconds: float, *, is_ok: bool = True, timeout: float | None = 1.0, group: str = "") -> Outcome:
    return Outcome(at, seconds, is_ok, 100, timeout, group)


def kind(outcome: Outcome) -> tuple[bool, bool, bool]:
    return outcome.is_in_time, outcome.is_refused, outcome.is_late


def test_a_request_is_in_time_or_refused_or_late() -> None:
    assert kind(make(0, 1.0)) == (True, False, False)
    assert kind(make(0, 0.9, is_ok=False)) == (False, True, False)
    assert kind(make(0, 1.0, is_ok=False)) == (False, False, True)
    assert kind(make(0, 1.1)) == (False, False, True)


def test_without_a_deadline_every_answer_is_in_time_and_every_error_a_refusal() -> None:
    assert kind(make(0, 100.0, timeout=None)) == (True, False, False)
    assert kind(make(0, 100.0, is_ok=False, timeout=None)) == (False, True, False)


def test_goodput_is_of_answers_that_came_in_time_and_within_the_window() -> None:
    tally = Tally(
        (
            make(0.5, 0.4),  # came before it
            make(0.5, 0.9),  # came within it, though asked before
            make(3.0, 0.5),
            make(3.0, 1.5),  # late
            make(3.0, 0.1, is_ok=False),
            make(4.5, 0.6),  # came after it
        ),
        WINDOW,
    )
    assert tally.goodput() == 2 * 100 / 4


def test_waits_and_portions_are_of_those_who_asked_within_the_window() -> None:
    tally = Tally((make(0.5, 0.9), make(2.0, 0.2), make(2.0, 1.2), make(2.0, 0.01, is_ok=False)), WINDOW)
    assert tally.accepted_seconds() == [0.2, 1.2]
    assert tally.refusal_seconds() == [0.01]
    assert tally.portion(lambda outcome: outcome.is_late) == 1 / 3


def test_groups_share_the_goodput() -> None:
    tally = Tally((make(2, 0.1, group="a"), make(2, 0.1, group="a"), make(2, 0.1, group="b")), WINDOW)
    assert tally.share("b") == 1 / 3
    assert tally.accepted_seconds("a") == [0.1, 0.1]
    assert isnan(Tally((), WINDOW).share("a"))


def test_the_percentile_of_nothing_is_not_a_number() -> None:
    assert isnan(percentile_or_nan([], 99))
    assert percentile_or_nan([1.0, 3.0], 50) == 2.0
