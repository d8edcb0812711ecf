"""Predicted ends against deadlines, in numbers that are easy to add: a token takes a second."""

import math

import numpy as np

from service.lane import Entry
from service.punctuality import are_hurried, deadline_of, reserve_tokens
from service.request import Request, TokenSequence

RESERVE = 40


def entry(num_tokens: int, deadline: float | None) -> Entry:
    sequence = TokenSequence(*(np.zeros(num_tokens, np.int64),) * 3)
    return Entry(0.0, 0, Request((sequence,), False, 0.0, deadline), 0)


def hurried(*groups: list[Entry], now: float = 0.0) -> bool:
    return are_hurried(groups, now, 1.0, RESERVE)


def test_what_has_no_deadline_is_never_hurried() -> None:
    assert deadline_of(entry(3, None)) == math.inf
    assert not hurried([entry(10**6, None)])


def test_one_is_hurried_when_its_end_and_a_reserve_pass_its_deadline() -> None:
    assert not hurried([entry(3, RESERVE + 3.0)])
    assert hurried([entry(3, RESERVE + 2.9)])
    assert hurried([entry(3, RESERVE + 3.0)], now=0.1)


def test_all_that_goes_before_counts_also_of_other_groups() -> None:
    last = entry(3, RESERVE + 10.0)
    assert not hurried([entry(4, None)], [entry(3, None), last])
    assert hurried([entry(4, None)], [entry(4, None), last])


def test_the_reserve_is_two_full_batches_on_each_runner_and_four_at_least() -> None:
    assert [reserve_tokens(10, num_runners) for num_runners in (1, 2, 8)] == [40, 40, 160]
