"""A cancellation, set before and after something is attached."""

from service.cancellation import Cancellation


def test_what_is_attached_is_stopped_once_when_it_is_set() -> None:
    stopped: list[str] = []
    cancellation = Cancellation()
    cancellation.attach(lambda: stopped.append("first"))
    cancellation.attach(lambda: stopped.append("second"))
    assert not cancellation.is_set
    cancellation.set()
    cancellation.set()
    assert cancellation.is_set
    assert stopped == ["first", "second"]


def test_what_is_attached_later_is_stopped_at_once() -> None:
    stopped: list[str] = []
    cancellation = Cancellation()
    cancellation.set()
    cancellation.attach(lambda: stopped.append("late"))
    assert stopped == ["late"]
