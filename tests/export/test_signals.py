"""Signals: the first one interrupts, its echo does not, and a shield keeps them off what cleans up."""

import signal
import threading
from collections.abc import Iterator

import pytest

from export.signals import SIGNALS, Interrupted, interruptible, shielded


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_interrupts_and_says_which_it_was(number: signal.Signals) -> None:
    with pytest.raises(Interrupted) as caught, interruptible():
        signal.raise_signal(number)
    assert caught.value.number == number


def test_what_follows_at_once_is_an_echo() -> None:
    with interruptible():
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_after_an_interrupt_signals_are_ignored() -> None:
    with pytest.raises(Interrupted), interruptible():
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)


def test_what_follows_later_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.5])
    monkeypatch.setattr("export.signals.time.monotonic", lambda: next(now))
    with interruptible():
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible(), shielded() as shield, shield.lowered():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_without_a_signal_the_handlers_are_as_they_were() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with interruptible(), shielded():
        assert before != [signal.getsignal(number) for number in SIGNALS]
    assert before == [signal.getsignal(number) for number in SIGNALS]


def test_a_raised_shield_keeps_a_signal_waiting_until_it_is_lowered() -> None:
    with interruptible(), shielded() as shield:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught, shield.lowered():
            pytest.fail("the block was entered")
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM


def test_a_signal_that_waits_at_the_end_is_dropped() -> None:
    with interruptible(), shielded() as shield:
        with shield.lowered():
            pass
        signal.raise_signal(signal.SIGINT)


def test_another_thread_goes_without() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[bool] = []

    def work() -> None:
        with interruptible(), shielded() as shield, shield.lowered():
            seen.append(before == [signal.getsignal(number) for number in SIGNALS])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
