"""The scheduler under a clock of numbers: what it takes, in which order, whom it refuses."""

from collections.abc import Mapping

import numpy as np
import pytest

from service.bounds import Bounds
from service.cost_model import CostModel, Sample
from service.cost_tracker import FEW_RUNS, WINDOW_RUNS, CostTracker
from service.errors import DeadlineError
from service.request import Priority, Request, TokenSequence
from service.scheduler import TRUST_SECONDS, Scheduler

# One second a token makes predictions easy to read; attention costs a hundredth of a second a pair of slots.
COST = CostModel(per_run=1.0, per_token=1.0, per_pair=0.01)
FREE_ATTENTION = CostModel(per_run=1.0, per_token=1.0, per_pair=0.0)
NO_BOUNDS = Bounds(10**6, 10**6, 10**6, 10**9)


def request(
    *lengths: int,
    arrival: float = 0.0,
    deadline: float | None = None,
    priority: Priority = Priority.NORMAL,
    caller: str = "",
    num_bytes: int = 0,
) -> Request:
    sequences = tuple(TokenSequence(*(np.zeros(length, np.int64),) * 3) for length in lengths)
    return Request(sequences, False, arrival, deadline, priority, caller, num_bytes)


def scheduler(
    cost: CostModel = FREE_ATTENTION,
    *,
    budget: int = 10,
    bounds: Bounds = NO_BOUNDS,
    runners: int = 1,
    max_wait: float = 0.0,
    weights: Mapping[str, float] | None = None,
) -> Scheduler:
    costs = CostTracker(cost, budget, runners)
    costs.token_seconds = cost.per_token  # without a run's fixed cost, so that sums of seconds are sums of tokens
    return Scheduler(costs, bounds, max_wait_seconds=max_wait, weights=weights)


def taken(queue: Scheduler, now: float = 0.0, num_idle: int = 1) -> list[tuple[Request, int]]:
    """One batch, run in no time."""
    decision = queue.take(now, num_idle)
    if decision.batch:
        queue.finish(decision)
    return [(entry.request, entry.place) for entry in decision.batch]


def test_an_empty_queue_gives_an_empty_batch() -> None:
    assert taken(scheduler()) == []


def test_requests_leave_in_the_order_of_arrival() -> None:
    queue = scheduler(budget=5)
    first, second = request(5, arrival=0.0), request(5, arrival=1.0)
    queue.put(second, 1.0)
    queue.put(first, 1.0)
    assert taken(queue) == [(first, 0)]
    assert taken(queue) == [(second, 0)]


def test_a_batch_is_filled_up_to_the_budget() -> None:
    queue = scheduler(budget=10)
    queue.put(request(4, 4, 4), 0.0)
    assert len(taken(queue)) == 2
    assert len(taken(queue)) == 1


def test_a_sequence_longer_than_the_budget_runs_alone() -> None:
    queue = scheduler(budget=10)
    giant = request(30)
    queue.put(giant, 0.0)
    queue.put(request(1), 0.0)
    assert taken(queue) == [(giant, 0)]


def test_like_lengths_go_together() -> None:
    queue = scheduler(budget=20)
    queue.put(request(8, 3, 9, 2), 0.0)
    assert [place for _, place in taken(queue)] == [0, 2, 1]


def test_a_short_sequence_does_not_join_where_it_would_cost_more_than_a_run_of_its_own() -> None:
    # Beside 30 tokens, 2 tokens cost 2 + 0.01 * 30^2 = 11 s; alone 1 + 2 + 0.04.
    queue = scheduler(COST, budget=100)
    queue.put(request(30, 2), 0.0)
    assert [place for _, place in taken(queue)] == [0]
    assert [place for _, place in taken(queue)] == [1]


def test_company_that_would_make_a_member_late_is_left_for_the_next_batch() -> None:
    queue = scheduler(budget=10)
    urgent, other = request(4, deadline=6.0), request(4)
    queue.put(urgent, 0.0)
    queue.put(other, 0.0)
    assert taken(queue) == [(urgent, 0)]  # 1 + 4 s alone, 1 + 8 s in company


def test_company_that_would_be_late_itself_in_this_batch_is_left_for_another_runner() -> None:
    queue = scheduler(budget=10, runners=2)
    tight, first = request(2, deadline=5.0), request(6, arrival=-2.0)
    queue.put(tight, 0.0)
    queue.put(first, 0.0)
    assert taken(queue, 0.0) == [(first, 0)]  # together they take 1 + 8 s
    assert taken(queue, 0.0) == [(tight, 0)]


def test_a_deadline_that_comes_soon_goes_first() -> None:
    queue = scheduler(budget=5)
    early, urgent = request(5, arrival=0.0), request(5, arrival=0.1, deadline=6.2)
    queue.put(early, 0.1)
    queue.put(urgent, 0.1)
    assert taken(queue, 0.1) == [(urgent, 0)]


def test_of_two_deadlines_the_one_with_less_slack_goes_first() -> None:
    queue = scheduler(budget=5, runners=2)
    sooner, longer = request(2, deadline=3.8), request(5, deadline=6.5)
    queue.put(sooner, 0.0)
    queue.put(longer, 0.0)
    assert taken(queue) == [(longer, 0)]  # it must start at 6.5 - 5 - 1, the other at 3.8 - 2 - 1


def test_a_distant_deadline_does_not_pass_anybody() -> None:
    queue = scheduler(budget=5)
    early, patient = request(5, arrival=0.0), request(5, arrival=0.1, deadline=1000.0)
    queue.put(early, 0.1)
    queue.put(patient, 0.1)
    assert taken(queue, 0.1) == [(early, 0)]


def test_requests_of_like_size_end_one_after_the_other() -> None:
    queue = scheduler(budget=10)
    first, second = request(4, 4, arrival=0.0), request(4, 4, arrival=0.1)
    queue.put(first, 0.1)
    queue.put(second, 0.1)
    assert taken(queue, 0.1) == [(first, 0), (first, 1)]
    assert taken(queue, 0.1) == [(second, 0), (second, 1)]


@pytest.mark.parametrize("times_slower", [1.0, 3.0, 6.0])
def test_a_giant_lets_others_pass_also_on_a_machine_slower_than_predicted(times_slower: float) -> None:
    queue = scheduler(budget=5)
    queue.put(request(*[5] * 100, arrival=0.0), 0.0)
    now, waits = 0.0, []
    for _ in range(40):
        now += times_slower * FREE_ATTENTION.seconds(1, 5, 5)
        taken(queue, now)
        queue.put(small := request(5, arrival=now), now)
        waits.append(next(n for n in range(5) if small in [one for one, _ in taken(queue, now)]))
    assert max(waits) <= 1


@pytest.mark.parametrize("num_batches_done", [0, 1, 7, 50])
def test_a_small_request_waits_for_at_most_one_batch_of_a_giant_one(num_batches_done: int) -> None:
    queue = scheduler(budget=5)
    queue.put(request(*[5] * 100, arrival=0.0), 0.0)
    now = 0.0
    for _ in range(num_batches_done):
        taken(queue, now)
        now += FREE_ATTENTION.seconds(1, 5, 5)
    small = request(5, arrival=now)
    queue.put(small, now)
    following = [taken(queue, now)[0][0] for _ in range(3)]
    assert small in following[:2]


def test_work_is_shared_among_idle_runners() -> None:
    queue = scheduler(budget=100, runners=2)
    queue.put(request(*[10] * 8), 0.0)
    assert len(taken(queue, num_idle=2)) == 4
    assert len(taken(queue, num_idle=1)) == 4


def test_a_batch_has_the_machine_to_itself_if_all_runners_are_idle_and_nothing_else_waits() -> None:
    queue = scheduler(budget=10, runners=2)
    queue.put(request(10, 10), 0.0)
    decisions = [queue.take(0.0, num_idle) for num_idle in (2, 1)]
    queue.put(request(5), 0.0)
    for decision in decisions:
        queue.finish(decision)
    assert [decision.is_alone for decision in (*decisions, queue.take(0.0, 2))] == [False, False, True]


def test_short_sequences_fill_a_large_budget() -> None:
    queue = scheduler(budget=2000)
    queue.put(request(*[8] * 1000), 0.0)
    assert len(taken(queue)) == 250


def test_what_a_run_is_predicted_to_take_is_told() -> None:
    queue = scheduler(COST, budget=10)
    queue.put(request(3, 3), 0.0)
    assert queue.take(0.0).seconds == pytest.approx(1 + 6 + 0.01 * 2 * 9)


class TestPriority:
    def test_a_higher_priority_goes_first_whatever_the_deadlines(self) -> None:
        queue = scheduler(budget=5)
        low, normal, high = (request(5, priority=p, deadline=20.0 + p) for p in reversed(Priority))
        for one in (low, normal, high):
            queue.put(one, 0.0)
        assert [taken(queue)[0][0] for _ in range(3)] == [high, normal, low]

    def test_lower_priorities_fill_what_higher_ones_leave(self) -> None:
        queue = scheduler(budget=10)
        low, high = request(5, priority=Priority.LOW), request(5, priority=Priority.HIGH)
        queue.put(low, 0.0)
        queue.put(high, 0.0)
        assert taken(queue) == [(high, 0), (low, 0)]

    def test_a_deadline_is_not_hopeless_behind_lower_priorities(self) -> None:
        queue = scheduler(budget=5)
        queue.put(request(*[5] * 20, priority=Priority.LOW, deadline=102.0), 0.0)
        queue.put(request(5, priority=Priority.HIGH, deadline=7.0), 0.0)

    def test_a_deadline_is_hopeless_behind_higher_priorities(self) -> None:
        queue = scheduler(budget=5)
        queue.put(request(*[5] * 20, priority=Priority.HIGH), 0.0)
        with pytest.raises(DeadlineError, match="done in 156000 ms"):
            queue.put(request(5, deadline=100.0), 0.0)


class TestDeadlines:
    def test_a_hopeless_one_is_refused_at_once(self) -> None:
        queue = scheduler()
        with pytest.raises(DeadlineError, match="5000 ms away, and the request would be done in 9000 ms"):
            queue.put(request(8, deadline=5.0), 0.0)
        assert (queue.used.tokens, queue.used.requests) == (0, 0)

    def test_a_miss_by_less_than_a_millisecond_reads_as_one(self) -> None:
        with pytest.raises(DeadlineError, match="8999 ms away, and the request would be done in 9000 ms"):
            scheduler().put(request(8, deadline=8.9999), 0.0)

    def test_it_is_hopeless_behind_work_that_is_more_urgent(self) -> None:
        queue = scheduler(runners=2)
        for _ in range(10):
            queue.put(request(5, arrival=-1.0), 0.0)
        # 50 tokens ahead for two runners, and the margin, then 5 on one of them, and a run's own second.
        with pytest.raises(DeadlineError, match="done in 43500 ms"):
            queue.put(request(5, deadline=30.0), 0.0)

    def test_it_is_not_hopeless_behind_work_that_can_wait(self) -> None:
        queue = scheduler()
        queue.put(request(*[5] * 100, arrival=0.0), 0.0)
        urgent = request(5, deadline=6.5)
        queue.put(urgent, 0.0)
        assert taken(queue)[0] == (urgent, 0)

    def test_the_run_that_is_on_counts(self) -> None:
        queue = scheduler()
        queue.put(request(9), 0.0)
        running = queue.take(0.0)  # ends at 10
        with pytest.raises(DeadlineError, match="done in 8000 ms"):
            queue.put(request(3, deadline=13.0), 6.0)
        queue.finish(running)
        queue.put(request(3, deadline=13.0), 6.0)

    @pytest.mark.parametrize(("now", "company"), [(0.0, "alike"), (5.0, "urgent")])
    def test_company_is_alike_as_long_as_all_in_sight_can_afford_it(self, now: float, company: str) -> None:
        queue = scheduler(budget=10)
        # In order all is done after 14 s, and four batches of 10 tokens are kept in reserve: 54 s.
        first, urgent, alike = (request(length, deadline=57.0) for length in (5, 4, 5))
        for one in (first, urgent, alike):
            queue.put(one, 0.0)
        assert taken(queue, now)[1] == ({"alike": alike, "urgent": urgent}[company], 0)

    def test_an_expired_request_is_never_taken(self) -> None:
        queue = scheduler()
        late, good = request(2, 2, deadline=7.0), request(3)
        queue.put(late, 0.0)
        queue.put(good, 0.0)
        decision = queue.take(7.0)
        assert decision.expired == [late]
        assert [entry.request for entry in decision.batch] == [good]
        assert queue.used.tokens == 0

    def test_one_that_cannot_be_met_any_more_is_not_run_where_others_wait(self) -> None:
        queue = scheduler()
        late, good = request(5, deadline=7.0), request(3)
        queue.put(late, 0.0)
        queue.put(good, 0.0)
        decision = queue.take(2.0)  # 1 + 5 s from now is 8
        assert decision.expired == [late]
        assert [entry.request for entry in decision.batch] == [good]

    def test_one_that_cannot_be_met_any_more_is_tried_where_nobody_else_waits(self) -> None:
        queue = scheduler()
        late = request(5, deadline=7.0)
        queue.put(late, 0.0)
        assert taken(queue, 2.0) == [(late, 0)]

    def test_a_prediction_that_lets_nothing_run_is_put_to_the_test(self) -> None:
        queue = scheduler()
        for now in (0.0, TRUST_SECONDS - 0.1):
            with pytest.raises(DeadlineError):
                queue.put(request(8, arrival=now, deadline=now + 5.0), now)
        probe = request(8, arrival=TRUST_SECONDS, deadline=TRUST_SECONDS + 5.0)
        queue.put(probe, TRUST_SECONDS)
        assert taken(queue, TRUST_SECONDS) == [(probe, 0)]
        with pytest.raises(DeadlineError):
            queue.put(request(8, deadline=TRUST_SECONDS + 5.0), TRUST_SECONDS)

    def test_the_last_of_many_hopeless_is_tried_or_the_prediction_would_never_be_corrected(self) -> None:
        queue = scheduler(budget=5)
        for n in range(3):
            queue.put(request(5, arrival=0.1 * n, deadline=22.0), 0.0)
        decision = queue.take(17.0)  # 1 + 5 s from now is 23
        assert (len(decision.expired), len(decision.batch)) == (2, 1)

    def test_runs_alone_that_were_faster_than_a_right_model_allows_correct_it(self) -> None:
        queue = scheduler(runners=2)
        for _ in range(WINDOW_RUNS):
            queue.observe(Sample(1, 9, 9, 1.0), is_alone=True)  # predicted 10 s, so 5 s at best
        assert queue.costs.cost.seconds(1, 9, 9) == pytest.approx(2.0)

    def test_runs_alone_that_a_right_model_allows_do_not(self) -> None:
        queue = scheduler(runners=2)
        for _ in range(WINDOW_RUNS):
            queue.observe(Sample(1, 9, 9, 6.0), is_alone=True)
        assert queue.costs.cost.seconds(1, 9, 9) == pytest.approx(10.0)

    def test_an_idle_machine_is_predicted_by_runs_that_had_it_to_themselves(self) -> None:
        queue = scheduler(runners=2)
        with pytest.raises(DeadlineError, match="done in 5000 ms"):
            queue.put(request(9, deadline=4.0), 0.0)
        for _ in range(9):
            queue.observe(Sample(1, 9, 9, 8.0), is_alone=True)
        with pytest.raises(DeadlineError, match="done in 8000 ms"):
            queue.put(request(9, deadline=7.0), 0.0)

    def test_a_few_runs_of_those_let_in_correct_a_model_that_lets_nothing_run(self) -> None:
        queue, now = scheduler(), 0.0
        for _ in range(FEW_RUNS):
            with pytest.raises(DeadlineError):
                queue.put(request(9, arrival=now, deadline=now + 5.0), now)
            now += TRUST_SECONDS
            queue.put(request(9, arrival=now, deadline=now + 5.0), now)
            decision = queue.take(now)
            queue.observe(Sample(1, 9, 9, 1.0), is_alone=True)
            queue.finish(decision)
        queue.put(request(9, arrival=now, deadline=now + 5.0), now)
        assert queue.costs.cost.seconds(1, 9, 9) == pytest.approx(1.0)


class TestWaiting:
    def test_a_batch_waits_for_company_until_the_oldest_has_waited_long_enough(self) -> None:
        queue = scheduler(budget=10, max_wait=0.5)
        queue.put(request(3, arrival=1.0), 1.0)
        queue.put(request(3, arrival=1.2), 1.2)
        decision = queue.take(1.2)
        assert (decision.batch, decision.wake_at) == ([], 1.5)
        assert len(taken(queue, 1.5)) == 2

    def test_a_full_batch_does_not_wait(self) -> None:
        queue = scheduler(budget=10, max_wait=0.5)
        queue.put(request(6, 6), 0.0)
        assert len(taken(queue, 0.0)) == 1

    def test_as_much_as_waits_does_not_start_at_once_only_because_it_all_fits(self) -> None:
        queue = scheduler(budget=100, max_wait=0.5)
        queue.put(request(20, 20), 0.0)
        assert queue.take(0.0).wake_at == 0.5

    def test_nobody_waits_for_company_once_nobody_comes_any_more(self) -> None:
        queue = scheduler(budget=100, max_wait=0.5)
        queue.put(request(20), 0.0)
        queue.stop_waiting()
        assert len(taken(queue)) == 1

    def test_a_batch_does_not_wait_past_the_moment_that_a_deadline_allows(self) -> None:
        queue = scheduler(budget=10, max_wait=100.0)
        queue.put(request(3, deadline=20.0), 0.0)
        assert queue.take(0.0).wake_at == 20.0 - 2 * 4.0
        assert len(taken(queue, 12.0)) == 1


class TestMemory:
    @staticmethod
    def after_a_failure(*lengths: int, most_tokens: int = 0) -> Scheduler:
        queue = scheduler(budget=40)
        failed = request(*lengths)
        queue.put(failed, 0.0)
        decision = queue.take(0.0)
        queue.finish(decision)
        queue.note_out_of_memory(decision, most_tokens, 0.0)
        queue.end(failed)
        queue.put(request(*[5] * 20), 0.0)
        return queue

    def test_after_a_run_without_memory_runs_of_such_lengths_get_what_was_possible(self) -> None:
        assert len(taken(self.after_a_failure(*[5] * 8, most_tokens=10))) == 2

    def test_they_get_half_where_nothing_of_it_was_possible(self) -> None:
        assert len(taken(self.after_a_failure(*[5] * 8))) == 4

    def test_other_lengths_keep_their_budget(self) -> None:
        assert len(taken(self.after_a_failure(16, 16))) == 8

    def test_one_sequence_that_fails_alone_says_nothing_of_others(self) -> None:
        assert len(taken(self.after_a_failure(5))) == 8


def test_a_removed_request_frees_its_share_at_once_and_is_never_taken() -> None:
    queue = scheduler(bounds=Bounds(10, 10, 1, 100))
    gone, stays = request(5, 5, num_bytes=100), request(10, num_bytes=100)
    queue.put(gone, 0.0)
    queue.end(gone)
    queue.put(stays, 0.0)
    assert taken(queue) == [(stays, 0)]
    assert queue.used.sequences == 0


def test_ending_twice_or_after_the_run_changes_nothing() -> None:
    queue = scheduler()
    done = request(3, num_bytes=7)
    queue.put(done, 0.0)
    taken(queue)
    assert (queue.used.requests, queue.used.bytes) == (1, 7)
    queue.end(done)
    queue.end(done)
    assert (queue.used.tokens, queue.used.requests, queue.used.bytes) == (0, 0, 0)


def test_clear_gives_back_everyone_who_waits() -> None:
    queue = scheduler()
    first, second = request(1, 1), request(1, priority=Priority.LOW, caller="a")
    queue.put(first, 0.0)
    queue.put(second, 0.0)
    assert queue.clear() == [first, second]
    assert taken(queue) == []
    assert queue.used.sequences == 0


def test_ten_thousand_dead_before_the_living_are_passed() -> None:
    queue = scheduler(budget=10)
    dead, living = request(*[1] * 10_000, arrival=0.0), request(2, arrival=50_000.0)
    queue.put(dead, 0.0)
    queue.put(living, 0.0)
    queue.end(dead)
    assert taken(queue) == [(living, 0)]
