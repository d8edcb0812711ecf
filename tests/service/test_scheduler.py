"""The scheduler under a clock of numbers: what it takes, in which order, and that nothing is lost."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.cost_model import CostModel
from service.errors import DeadlineError, QueueFullError
from service.request import Encoding, Request, TokenSequence
from service.scheduler import LOOKAHEAD, PATIENCE_SECONDS, SPREAD, Entry, Scheduler

# One second a token makes predictions easy to read; attention costs a hundredth of a second a pair of slots.
COST = CostModel(per_run=1.0, per_token=1.0, per_pair=0.01)
FREE_ATTENTION = CostModel(per_run=1.0, per_token=1.0, per_pair=0.0)


def request(*lengths: int, arrival: float = 0.0, deadline: float | None = None) -> Request:
    sequences = tuple(TokenSequence(*(np.zeros(length, np.int64),) * 3) for length in lengths)
    return Request(sequences, wants_tokens=False, arrival=arrival, deadline=deadline)


def scheduler(cost: CostModel = FREE_ATTENTION, *, budget: int = 10, bound: int = 1000, runners: int = 1) -> Scheduler:
    return Scheduler(cost, max_batch_tokens=budget, max_queued_tokens=bound, num_runners=runners)


def taken(queue: Scheduler, now: float = 0.0, num_idle: int = 1) -> list[tuple[Request, int]]:
    return [(entry.request, entry.place) for entry in queue.take(now, num_idle).batch]


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


def test_a_deadline_that_comes_soon_goes_first() -> None:
    queue = scheduler(budget=5)
    early, urgent = request(5, arrival=0.0), request(5, arrival=0.1, deadline=6.2)
    queue.put(early, 0.1)
    queue.put(urgent, 0.1)
    assert taken(queue, 0.1) == [(urgent, 0)]


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


@pytest.mark.parametrize("num_batches_done", [0, 1, 7, 50])
def test_a_small_request_waits_for_at_most_one_batch_of_a_giant_one(num_batches_done: int) -> None:
    queue = scheduler(budget=5, bound=10_000)
    giant = request(*[5] * 100, arrival=0.0)
    queue.put(giant, 0.0)
    now = 0.0
    for _ in range(num_batches_done):
        queue.take(now)
        now += FREE_ATTENTION.seconds(1, 5, 5)
    small = request(5, arrival=now)
    queue.put(small, now)
    following = [taken(queue, now)[0][0] for _ in range(3)]
    assert small in following[:2]


def test_work_is_shared_among_idle_runners() -> None:
    queue = scheduler(budget=100)
    queue.put(request(*[10] * 8), 0.0)
    assert len(taken(queue, num_idle=2)) == 4
    assert len(taken(queue, num_idle=1)) == 4


def test_a_full_queue_refuses_and_says_when_there_is_room() -> None:
    queue = scheduler(bound=10, runners=2)
    queue.put(request(8), 0.0)
    with pytest.raises(QueueFullError, match=r"8 tokens wait, the request has 6, the limit is 10") as caught:
        queue.put(request(6), 0.0)
    assert caught.value.retry_seconds == 2.0  # 4 tokens too many, 1 s each, 2 runners
    assert (queue.num_queued_tokens, queue.num_queued_sequences) == (8, 1)


def test_those_who_are_refused_are_told_to_come_back_one_after_the_other() -> None:
    queue = scheduler(bound=10)
    queue.put(request(10), 0.0)
    told: list[float] = []
    for _ in range(5):
        with pytest.raises(QueueFullError) as caught:
            queue.put(request(3), 0.0)
        told.append(caught.value.retry_seconds)
    assert told == [3.0, 6.0, 9.0, 10.0, 10.0]  # at most the time of a full queue


def test_a_hopeless_deadline_is_refused_at_once() -> None:
    queue = scheduler()
    with pytest.raises(DeadlineError, match=r"5\.000 s away; the request would be done in 9\.000 s"):
        queue.put(request(8, arrival=0.0, deadline=5.0), 0.0)
    assert queue.num_queued_tokens == 0


def test_a_deadline_is_hopeless_behind_work_that_is_more_urgent() -> None:
    queue = scheduler(runners=2)
    for _ in range(10):
        queue.put(request(5, arrival=-1.0), 0.0)
    with pytest.raises(DeadlineError, match=r"done in 28\.500 s"):  # (50 ahead + 5) / 2 runners + a run's 1 s
        queue.put(request(5, deadline=28.0), 0.0)


def test_a_deadline_is_not_hopeless_behind_work_that_can_wait() -> None:
    queue = scheduler()
    queue.put(request(*[5] * 100, arrival=0.0), 0.0)
    urgent = request(5, deadline=6.5)
    queue.put(urgent, 0.0)
    assert taken(queue)[0] == (urgent, 0)


def test_short_sequences_fill_a_large_budget() -> None:
    queue = scheduler(budget=2000, bound=100_000)
    queue.put(request(*[8] * 1000), 0.0)
    assert len(taken(queue)) == 250


def test_an_expired_request_is_never_taken() -> None:
    queue = scheduler()
    late, good = request(2, 2, deadline=7.0), request(3)
    queue.put(late, 0.0)
    queue.put(good, 0.0)
    decision = queue.take(7.0)
    assert decision.expired == [late]
    assert [entry.request for entry in decision.batch] == [good]
    assert queue.num_queued_tokens == 0


def test_a_removed_request_frees_its_share_at_once_and_is_never_taken() -> None:
    queue = scheduler(bound=10)
    gone, stays = request(5, 5), request(10)
    queue.put(gone, 0.0)
    queue.remove(gone)
    queue.put(stays, 0.0)
    assert taken(queue) == [(stays, 0)]
    assert queue.num_queued_sequences == 0


def test_removing_twice_or_after_the_end_changes_nothing() -> None:
    queue = scheduler()
    done = request(3)
    queue.put(done, 0.0)
    queue.take(0.0)
    queue.remove(done)
    queue.remove(done)
    assert (queue.num_queued_tokens, queue.num_queued_sequences) == (0, 0)


def test_removed_requests_do_not_pile_up() -> None:
    queue = scheduler(bound=10)
    for _ in range(1000):
        gone = request(1)
        queue.put(gone, 0.0)
        queue.remove(gone)
    assert len(queue._queue) <= LOOKAHEAD + 1


def test_clear_gives_back_everyone_who_waits() -> None:
    queue = scheduler()
    first, second = request(1, 1), request(1)
    queue.put(first, 0.0)
    queue.put(second, 0.0)
    assert queue.clear() == [first, second]
    assert taken(queue) == []
    assert queue.num_queued_sequences == 0


def test_ten_thousand_dead_before_the_living_are_passed() -> None:
    queue = scheduler(bound=100_000, budget=10)
    dead, living = request(*[1] * 10_000, arrival=0.0), request(2, arrival=50_000.0)
    queue.put(dead, 0.0)
    queue.put(living, 0.0)
    queue.remove(dead)
    assert taken(queue) == [(living, 0)]


@dataclass
class Waiting:
    request: Request
    left: set[int] = field(default_factory=set)
    passed: int = 0


class AnyInterleaving(RuleBasedStateMachine):
    """put, take, cancel and the clock in any order, against a plain model of what waits."""

    BUDGET, BOUND = 12, 60

    def __init__(self) -> None:
        super().__init__()
        self.queue = Scheduler(COST, max_batch_tokens=self.BUDGET, max_queued_tokens=self.BOUND, num_runners=2)
        self.now = 0.0
        self.waiting: list[Waiting] = []

    @rule(
        lengths=strategies.lists(strategies.integers(1, 15), min_size=1, max_size=6),
        patience=strategies.none() | strategies.floats(0.1, 200.0),
    )
    def put(self, lengths: list[int], patience: float | None) -> None:
        new = request(*lengths, arrival=self.now, deadline=None if patience is None else self.now + patience)
        tokens = self.tokens()
        try:
            self.queue.put(new, self.now)
        except QueueFullError:
            assert tokens + sum(lengths) > self.BOUND
        except DeadlineError:
            assert patience is not None
        else:
            assert tokens + sum(lengths) <= self.BOUND
            self.waiting.append(Waiting(new, set(range(len(lengths)))))

    @rule(seconds=strategies.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule(data=strategies.data())
    def cancel(self, data: strategies.DataObject) -> None:
        gone = data.draw(strategies.sampled_from(self.waiting))
        self.queue.remove(gone.request)
        self.waiting.remove(gone)

    @rule(num_idle=strategies.integers(1, 2))
    def take(self, num_idle: int) -> None:
        decision = self.queue.take(self.now, num_idle)
        expired = [w for w in self.waiting if w.request in decision.expired]
        assert len(expired) == len(decision.expired)
        for late in expired:
            assert late.request.deadline is not None
            assert late.request.deadline <= self.now
            self.waiting.remove(late)
        assert bool(decision.batch) == bool(self.waiting), "work-conserving: a runner goes hungry only if nothing waits"
        self.check_batch(decision.batch)

    def check_batch(self, batch: list[Entry]) -> None:
        lengths = [entry.sequence.num_tokens for entry in batch]
        assert sum(lengths) <= self.BUDGET or len(lengths) == 1
        for entry in batch:
            (owner,) = [w for w in self.waiting if w.request is entry.request]
            owner.left.remove(entry.place)  # a KeyError is a sequence taken twice
            assert entry.request.deadline is None or entry.request.deadline > self.now
        if batch:
            self.check_nobody_starves(batch[0])
        self.waiting = [w for w in self.waiting if w.left]

    def check_nobody_starves(self, head: Entry) -> None:
        """Once its patience and its own earlier work have passed, nobody who came later starts a batch before it."""
        for other in self.waiting:
            work = sum(COST.share(sequence.num_tokens) for sequence in other.request.sequences)
            if other.left and other.request.arrival + PATIENCE_SECONDS + SPREAD * work < head.request.arrival:
                raise AssertionError("a later request started a batch before one whose patience had run out")

    def tokens(self) -> int:
        return sum(w.request.sequences[place].num_tokens for w in self.waiting for place in w.left)

    @invariant()
    def counts_are_right(self) -> None:
        assert self.queue.num_queued_tokens == self.tokens()
        assert self.queue.num_queued_sequences == sum(len(w.left) for w in self.waiting)

    @invariant()
    def the_dead_are_counted(self) -> None:
        assert self.queue._num_dead == sum(not entry.request.is_queued for entry in self.queue._queue)

    def teardown(self) -> None:
        """Everything that still waits is handed out, once, in finitely many batches."""
        for _ in range(self.queue.num_queued_sequences):
            self.take(1)
        assert self.waiting == []


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_request_settles_once_when_its_last_sequence_does() -> None:
    both = request(1, 1)
    settled: list[bool] = []
    both.on_settled = lambda: settled.append(True)
    answer = Encoding(np.zeros(1, np.float32), None)
    both.complete(1, answer, 0.0, 1.0)
    assert settled == []
    both.complete(0, answer, 0.0, 1.0)
    both.fail(DeadlineError("late"))
    assert settled == [True]
    assert both.error is None
