"""Any interleaving of put, cancel, expire, take, complete and fail, against a plain model of what should be there.

The model keeps every request's sequences in one of four places: waiting, running, ended, lost with its request. What is
promised is checked at each step; the promises over many steps (nobody starves, shares are fair) at each batch.
"""

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.bounds import Bounds
from service.cost_model import CostModel
from service.cost_tracker import CostTracker
from service.errors import DeadlineError, InvalidRequestError, QueueFullError
from service.fair_queue import AGEING_BATCHES
from service.lane import Entry
from service.request import Priority, Request
from service.scheduler import Scheduler, Taken
from service.urgency import PATIENCE_SECONDS, SPREAD
from tests.service.test_scheduler import request

COST = CostModel(per_run=1.0, per_token=1.0, per_pair=0.01)
BUDGET, NUM_RUNNERS = 12, 2
BOUNDS = Bounds(tokens=60, sequences=25, requests=12, bytes=100)


def unbounded() -> Scheduler:
    """For one runner; everybody comes in."""
    return Scheduler(CostTracker(COST, BUDGET, num_runners=1), Bounds(10**6, 10**6, 10**6, 1))


def load_of(one: Request) -> Bounds:
    return Bounds(one.num_tokens, len(one.sequences), 1, one.num_bytes)


def is_simple(one: Request) -> bool:
    """Whether nothing but its arrival tells how urgent it is."""
    return one.deadline is None and len(one.sequences) == 1


@dataclass(eq=False)
class Tracked:
    """A request as the outside knows it."""

    request: Request
    waiting: set[int]
    running: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(self.request.sequences[place].num_tokens for place in self.waiting)


def part(some: list[Tracked]) -> float:
    """The largest part of any bound that what waits of some requests takes."""
    load = Bounds(
        sum(one.num_waiting_tokens for one in some),
        sum(len(one.waiting) for one in some),
        len(some),
        sum(one.request.num_bytes for one in some),
    )
    return max(used / bound for used, bound in zip(load, BOUNDS, strict=True))


class AnyInterleaving(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Scheduler(CostTracker(COST, BUDGET, NUM_RUNNERS), BOUNDS, weights={"heavy": 2.0})
        self.now = 0.0
        self.tracked: list[Tracked] = []
        self.runs: list[Taken] = []
        self.num_passed: defaultdict[Priority, int] = defaultdict(int)

    @rule(
        lengths=strategies.lists(strategies.integers(1, 15), min_size=1, max_size=6),
        # Many between what one sequence takes and what two together take: there company makes late.
        patience=strategies.none() | strategies.floats(2.0, 20.0) | strategies.floats(0.1, 200.0),
        priority=strategies.sampled_from(Priority),
        caller=strategies.sampled_from(["", "a", "b", "heavy"]),
        num_bytes=strategies.integers(0, 40),
    )
    def put(self, lengths: list[int], patience: float | None, priority: Priority, caller: str, num_bytes: int) -> None:
        deadline = None if patience is None else self.now + patience
        new = request(
            *lengths, arrival=self.now, deadline=deadline, priority=priority, caller=caller, num_bytes=num_bytes
        )
        before = self.load()
        try:
            displaced = self.queue.put(new, self.now)
        except QueueFullError:
            assert any(map(int.__gt__, self.load_with(new), BOUNDS))
        except DeadlineError:
            assert patience is not None
        except InvalidRequestError:
            assert sum(lengths) > BOUNDS.tokens
        else:
            self.check_displaced(new, [one.request for one in displaced], before)
            self.tracked.append(Tracked(new, set(range(len(lengths)))))
        assert not new.is_queued or new.is_admitted

    def check_displaced(self, new: Request, displaced: list[Request], before: Bounds) -> None:
        if displaced:
            assert any(map(int.__gt__, [a + b for a, b in zip(before, load_of(new), strict=True)], BOUNDS))
        for victim in displaced:
            assert victim.priority >= new.priority
            if victim.priority == new.priority:
                self.check_shares(new, victim)
            (one,) = [one for one in self.tracked if one.request is victim]
            assert one.waiting, "what does not wait cannot give way"
            self.forget(one)

    def check_shares(self, new: Request, victim: Request) -> None:
        """Among equals, only who is beyond its fair share gives way, and only to who is within its own."""
        equals = [one for one in self.tracked if one.waiting and one.request.priority == new.priority]
        weights = {caller: 2.0 if caller == "heavy" else 1.0 for caller in ["", "a", "b", "heavy"]}
        present = {one.request.caller for one in equals} | {new.caller}
        share = {caller: weights[caller] / sum(weights[other] for other in present) for caller in present}
        assert victim.caller != new.caller
        assert part([one for one in equals if one.request.caller == victim.caller]) > share[victim.caller]
        own = [one for one in equals if one.request.caller == new.caller]
        assert part([*own, Tracked(new, set(range(len(new.sequences))))]) <= share[new.caller]

    @rule(seconds=strategies.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.tracked)
    @rule(data=strategies.data())
    def cancel(self, data: strategies.DataObject) -> None:
        gone = data.draw(strategies.sampled_from(self.tracked))
        self.queue.end(gone.request)
        self.forget(gone)

    @precondition(lambda self: len(self.runs) < NUM_RUNNERS)
    @rule()
    def take(self) -> None:
        num_idle = NUM_RUNNERS - len(self.runs)
        decision = self.queue.take(self.now, num_idle)
        for late in decision.expired:
            (one,) = [one for one in self.tracked if one.request is late]
            assert late.deadline is not None
            assert late.deadline < self.now + COST.seconds(6, 90, 15), "it could have been met"
            self.queue.end(late)
            self.forget(one)
        is_waiting = any(one.waiting for one in self.tracked)
        assert bool(decision.batch) == is_waiting, "work-conserving: a runner goes hungry only if nothing waits"
        if decision.batch:
            self.check_batch(decision.batch)
            self.runs.append(decision)

    def check_batch(self, batch: list[Entry]) -> None:
        lengths = [entry.sequence.num_tokens for entry in batch]
        assert sum(lengths) <= BUDGET or len(lengths) == 1
        self.check_order(batch[0])
        self.check_deadlines(batch, lengths)
        for entry in batch:
            owner = self.owner(entry)
            assert owner is not None, "a request that has ended runs"
            owner.waiting.remove(entry.place)  # a KeyError is a sequence taken twice
            owner.running.add(entry.place)

    def check_deadlines(self, batch: list[Entry], lengths: list[int]) -> None:
        end = self.now + COST.seconds(len(lengths), sum(lengths), max(lengths))
        for entry, length in zip(batch, lengths, strict=True):
            deadline = entry.request.deadline
            if deadline is not None:
                assert deadline > self.now, "expired work runs"
                could_be_met = self.now + COST.seconds(1, length, length) <= deadline
                assert end <= deadline or not could_be_met, "the company made a member late"

    def check_order(self, head: Entry) -> None:
        """Priority, with ageing; then, of one caller, urgency."""
        waiting = [one for one in self.tracked if one.waiting]
        started = head.request.priority
        classes = {one.request.priority for one in waiting}
        aged = {priority for priority in classes if self.num_passed[priority] >= AGEING_BATCHES}
        assert started in aged if aged else started == min(classes)
        for priority in Priority:
            is_passed = priority in classes and priority != started
            self.num_passed[priority] = self.num_passed[priority] + 1 if is_passed else 0
            assert self.num_passed[priority] <= AGEING_BATCHES + 2, "a class starves"
        for other in waiting:
            if (other.request.priority, other.request.caller) == (started, head.request.caller):
                work = sum(COST.share(sequence.num_tokens) for sequence in other.request.sequences)
                moment = other.request.arrival + PATIENCE_SECONDS + SPREAD * work
                assert moment >= head.request.arrival, "a later request of the same caller passes one past its moment"
                if is_simple(head.request) and is_simple(other.request):
                    assert other.request.arrival >= head.request.arrival, "not in the order of arrival"

    @precondition(lambda self: self.runs)
    @rule(data=strategies.data())
    def complete(self, data: strategies.DataObject) -> None:
        run = data.draw(strategies.sampled_from(self.runs))
        self.runs.remove(run)
        self.queue.finish(run)
        for entry in run.batch:
            if (owner := self.owner(entry)) is not None:
                owner.running.remove(entry.place)
                owner.ended.add(entry.place)
                if len(owner.ended) == len(owner.request.sequences):
                    self.queue.end(owner.request)
                    self.forget(owner)

    @precondition(lambda self: self.runs)
    @rule(data=strategies.data(), is_memory=strategies.booleans())
    def fail(self, data: strategies.DataObject, is_memory: bool) -> None:
        run = data.draw(strategies.sampled_from(self.runs))
        self.runs.remove(run)
        self.queue.finish(run)
        if is_memory:
            self.queue.note_out_of_memory(run, 0, self.now)
        for entry in run.batch:
            self.queue.drop(entry.request)
            self.queue.end(entry.request)
            if (owner := self.owner(entry)) is not None:
                self.forget(owner)

    def owner(self, entry: Entry) -> Tracked | None:
        return next((one for one in self.tracked if one.request is entry.request), None)

    def forget(self, one: Tracked) -> None:
        self.tracked.remove(one)

    def load(self) -> Bounds:
        return Bounds(
            sum(one.num_waiting_tokens for one in self.tracked),
            sum(len(one.waiting) for one in self.tracked),
            len(self.tracked),
            sum(one.request.num_bytes for one in self.tracked),
        )

    def load_with(self, new: Request) -> list[int]:
        return [a + b for a, b in zip(self.load(), load_of(new), strict=True)]

    @invariant()
    def counts_are_right_and_within_bounds(self) -> None:
        assert self.queue.used == self.load()
        assert all(used <= bound for used, bound in zip(self.queue.used, BOUNDS, strict=True))

    @invariant()
    def lanes_add_up(self) -> None:
        for lanes in self.queue._queue._lanes.values():
            for lane in lanes.values():
                dead = [entry for entry in lane.entries if not entry.request.is_queued]
                living = [entry for entry in lane.entries if entry.request.is_queued]
                requests = {id(entry.request): entry.request for entry in living}.values()
                assert lane.num_dead == len(dead)
                assert lane.num_sequences == len(living)
                assert lane.num_tokens == sum(entry.sequence.num_tokens for entry in living)
                assert lane.num_requests == len(requests)
                assert lane.num_bytes == sum(one.num_bytes for one in requests)

    def teardown(self) -> None:
        """Everything that still waits is handed out, once, in finitely many batches; then every gauge is at 0."""
        for run in self.runs:
            self.queue.finish(run)
        self.runs = []
        for _ in range(self.queue.used.sequences):
            self.take()
            for run in self.runs:
                self.queue.finish(run)
            self.runs = []
        assert not any(one.waiting for one in self.tracked)
        for one in self.tracked:
            self.queue.end(one.request)
        self.tracked = []
        self.counts_are_right_and_within_bounds()
        assert self.queue._running == {}


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


class TwoFlood(RuleBasedStateMachine):
    """Two callers, whatever their requests are, who always have work waiting: neither gets far ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = unbounded()
        self.served = {"a": 0, "b": 0}

    @rule(
        caller=strategies.sampled_from(["a", "b"]),
        lengths=strategies.lists(strategies.integers(1, 15), min_size=1, max_size=8),
    )
    def put(self, caller: str, lengths: list[int]) -> None:
        self.queue.put(request(*lengths, caller=caller), 0.0)

    @rule()
    def take(self) -> None:
        for caller in self.served:
            self.queue.put(request(5, 5, 5, caller=caller), 0.0)
        decision = self.queue.take(0.0)
        self.queue.finish(decision)
        for entry in decision.batch:
            self.served[entry.request.caller] += entry.sequence.num_tokens

    @invariant()
    def neither_is_far_ahead(self) -> None:
        # A quantum, within which they count as even, and a batch on top, which may be one sequence of 15.
        assert abs(self.served["a"] - self.served["b"]) <= BUDGET + 15


TestTwoFlood = TwoFlood.TestCase
TestTwoFlood.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


class EveryClassFloods(RuleBasedStateMachine):
    """All three classes always have work waiting, of any lengths: the lower two wait, but not for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = unbounded()
        self.since_start = dict.fromkeys(Priority, 0)

    @rule(
        priority=strategies.sampled_from(Priority),
        lengths=strategies.lists(strategies.integers(1, 15), min_size=1, max_size=8),
    )
    def put(self, priority: Priority, lengths: list[int]) -> None:
        self.queue.put(request(*lengths, priority=priority), 0.0)

    @rule(num_batches=strategies.integers(1, 2 * AGEING_BATCHES))
    def take(self, num_batches: int) -> None:
        for _ in range(num_batches):
            for priority in Priority:
                self.queue.put(request(7, 7, priority=priority), 0.0)
            decision = self.queue.take(0.0)
            self.queue.finish(decision)
            for priority in Priority:
                self.since_start[priority] += 1
            self.since_start[decision.batch[0].request.priority] = 0

    @invariant()
    def nobody_starves(self) -> None:
        assert max(self.since_start.values()) <= AGEING_BATCHES + 2


TestEveryClassFloods = EveryClassFloods.TestCase
TestEveryClassFloods.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@given(strategies.lists(strategies.tuples(strategies.integers(1, 12), strategies.floats(1.0, 3.0)), min_size=2))
def test_no_company_makes_late_who_would_have_been_in_time(shapes: list[tuple[int, float]]) -> None:
    """Single sequences whose deadlines are one to three times as far as each alone takes."""
    queue = unbounded()
    for length, patience in shapes:
        with suppress(DeadlineError):
            queue.put(request(length, deadline=patience * COST.seconds(1, length, length)), 0.0)
    while batch := (decision := queue.take(0.0)).batch:
        queue.finish(decision)
        lengths = [entry.sequence.num_tokens for entry in batch]
        seconds = COST.seconds(len(lengths), sum(lengths), max(lengths))
        for entry, length in zip(batch, lengths, strict=True):
            assert entry.request.deadline is not None
            assert seconds <= max(entry.request.deadline, COST.seconds(1, length, length))


@given(strategies.lists(strategies.tuples(strategies.integers(1, 15), strategies.integers(0, 9)), min_size=2))
def test_what_only_arrival_tells_apart_starts_batches_in_the_order_of_arrival(shapes: list[tuple[int, int]]) -> None:
    queue = unbounded()
    for length, arrival in shapes:
        queue.put(request(length, arrival=float(arrival)), 10.0)
    heads: list[float] = []
    while batch := (decision := queue.take(10.0)).batch:
        queue.finish(decision)
        heads.append(batch[0].request.arrival)
    assert heads == sorted(heads)
