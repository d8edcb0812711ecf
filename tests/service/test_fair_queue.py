"""The queue's order of turns: classes that age, callers who share; through the scheduler, as the batcher meets them."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from service.fair_queue import AGEING_BATCHES, CREDIT_QUANTA, MAX_CALLERS
from service.request import Priority, Request
from service.scheduler import Scheduler
from tests.service.test_scheduler import request, scheduler, taken

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


def served(queue: Scheduler, num_batches: int, keep: Callable[[], None] = lambda: None) -> Counter[str]:
    """Tokens that each caller was served; `keep` is called before each batch."""
    tokens: Counter[str] = Counter()
    for _ in range(num_batches):
        keep()
        for one, place in taken(queue):
            tokens[one.caller] += one.sequences[place].num_tokens
    return tokens


class TestAgeing:
    @pytest.mark.parametrize("priority", [LOW, NORMAL])
    def test_a_class_that_was_passed_over_so_often_starts_the_next_batch(self, priority: Priority) -> None:
        queue = scheduler(budget=5)
        queue.put(request(*[5] * 100, priority=HIGH), 0.0)
        queue.put(request(5, priority=priority), 0.0)
        started = [taken(queue)[0][0].priority for _ in range(AGEING_BATCHES + 1)]
        assert started == [HIGH] * AGEING_BATCHES + [priority]

    def test_two_classes_that_age_hold_each_other_up_by_one_batch(self) -> None:
        queue = scheduler(budget=5)
        for priority in Priority:
            queue.put(request(*[5] * 200, priority=priority), 0.0)
        started = [taken(queue)[0][0].priority for _ in range(150)]
        for priority in (NORMAL, LOW):
            turns = [n for n, one in enumerate(started) if one == priority]
            gaps = [later - earlier for earlier, later in pairwise(turns)]
            assert max(gaps) <= AGEING_BATCHES + 2
            assert turns[0] <= AGEING_BATCHES + 1
        assert started.count(HIGH) / len(started) > 0.85

    def test_company_in_the_batches_of_others_is_no_turn(self) -> None:
        queue = scheduler(budget=6)
        queue.put(request(*[4] * 40, priority=HIGH), 0.0)
        long, *short = request(6, priority=LOW), *(request(2, priority=LOW) for _ in range(50))
        for one in (long, *short):
            queue.put(one, 0.0)
        batches = [taken(queue) for _ in range(AGEING_BATCHES + 1)]
        assert all(len(batch) == 2 for batch in batches[:-1])  # high with short company
        assert batches[-1] == [(long, 0)]


class TestCallers:
    def test_two_who_always_have_work_waiting_get_the_same(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[5] * 400, caller="one"), 0.0)
        queue.put(request(*[5] * 400, caller="two"), 0.0)
        tokens = served(queue, 100)
        assert abs(tokens["one"] - tokens["two"]) <= 2 * 10

    def test_who_asks_for_long_sequences_gets_no_more_than_who_asks_for_short_ones(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[10] * 400, caller="long"), 0.0)
        queue.put(request(*[1] * 4000, caller="short"), 0.0)
        tokens = served(queue, 100)
        assert abs(tokens["long"] - tokens["short"]) <= 2 * 10

    def test_weights_count(self) -> None:
        queue = scheduler(budget=10, weights={"gold": 3.0})
        queue.put(request(*[5] * 900, caller="gold"), 0.0)
        queue.put(request(*[5] * 900, caller="other"), 0.0)
        tokens = served(queue, 120)
        assert tokens["gold"] / tokens["other"] == pytest.approx(3.0, rel=0.1)

    def test_who_floods_does_not_keep_one_waiting_who_comes_now_and_then(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[5] * 1000, caller="flood"), 0.0)
        served(queue, 50)
        single = request(5, arrival=100.0, caller="single")
        queue.put(single, 100.0)
        assert (single, 0) in taken(queue, 100.0)

    def test_one_who_comes_back_as_soon_as_it_is_served_keeps_its_half(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[5] * 1000, caller="flood"), 0.0)
        waiting: list[Request] = []

        def keep() -> None:
            if not waiting or not waiting[-1].is_queued:
                waiting.append(request(5, arrival=1.0 + len(waiting), caller="closed"))
                queue.put(waiting[-1], waiting[-1].arrival)

        tokens = served(queue, 100, keep)
        assert tokens["closed"] >= 0.45 * tokens.total()

    def test_what_was_left_unused_is_made_up_for_only_so_far(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[5] * 1000, caller="steady"), 0.0)
        served(queue, 100)
        queue.put(request(*[5] * 1000, arrival=1.0, caller="back"), 1.0)
        tokens = served(queue, CREDIT_QUANTA + 4)
        assert tokens["steady"] > 0

    def test_among_callers_who_are_about_even_urgency_decides(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(5, 5, 5, caller="one"), 0.0)
        urgent = request(5, deadline=6.5, caller="two")
        queue.put(urgent, 0.0)
        assert taken(queue)[0] == (urgent, 0)

    def test_shares_are_between_callers_of_one_priority(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[5] * 20, caller="one", priority=HIGH), 0.0)
        queue.put(request(*[5] * 20, caller="two", priority=LOW), 0.0)
        assert served(queue, 10) == {"one": 100}

    def test_nobody_is_owed_anything_once_nothing_waits(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[10] * 9, caller="one"), 0.0)
        served(queue, 9)
        queue.put(request(10, arrival=1.0, caller="one"), 1.0)
        queue.put(request(10, arrival=2.0, caller="two"), 2.0)
        assert taken(queue, 2.0)[0][0].caller == "one"

    def test_callers_beyond_the_tracked_share_one_lane_and_all_are_served(self) -> None:
        queue = scheduler(budget=10)
        requests = [request(5, caller=f"caller {n}") for n in range(MAX_CALLERS + 50)]
        for one in requests:
            queue.put(one, 0.0)
        assert len({one.caller for one in requests}) == MAX_CALLERS + 1
        done = [one for _ in range(MAX_CALLERS) for one, _ in taken(queue)]
        assert set(map(id, done)) == set(map(id, requests))

    def test_callers_who_are_gone_are_forgotten(self) -> None:
        queue = scheduler(budget=10)
        queue.put(request(*[5] * 3000, caller="steady"), 0.0)
        for n in range(3 * MAX_CALLERS):
            passing = request(5, caller=f"caller {n}")
            queue.put(passing, 0.0)
            while passing.is_queued:
                taken(queue)
            assert passing.caller == f"caller {n}"
        assert len(queue._queue._lanes[NORMAL]) <= MAX_CALLERS

    def test_a_caller_who_leaves_the_queue_frees_its_share_of_a_lane(self) -> None:
        queue = scheduler(budget=10)
        for _ in range(1000):
            gone = request(1, caller="one")
            queue.put(gone, 0.0)
            queue.put(request(1, caller="two"), 0.0)
            queue.end(gone)
        assert len(queue._queue._lanes[NORMAL]["one"].entries) <= 65
        assert queue.used.sequences == 1000
