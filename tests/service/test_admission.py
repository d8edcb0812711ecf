"""The bounds: who is refused, who gives way, when to come back; through the scheduler, as the batcher meets them."""

import pytest

from service.admission import FLAGS
from service.bounds import Bounds
from service.config import setting_rows
from service.errors import InvalidRequestError, QueueFullError
from service.request import Priority, Request
from service.scheduler import Scheduler
from tests.service.test_scheduler import request, scheduler, taken

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


def bounded(tokens: int = 1000, sequences: int = 1000, requests: int = 1000, num_bytes: int = 1000) -> Scheduler:
    return scheduler(bounds=Bounds(tokens, sequences, requests, num_bytes))


def displaced(queue: Scheduler, new: Request, now: float = 0.0) -> list[Request]:
    return [one.request for one in queue.put(new, now)]


@pytest.mark.parametrize(
    ("queue", "text"),
    [
        (bounded(tokens=10), r"8 tokens wait, the request has 6, the limit is 10 \(--max-queued-tokens\)"),
        (bounded(sequences=3), r"2 sequences wait, the request has 2, the limit is 3 \(--max-queued-sequences\)"),
        (
            bounded(requests=1),
            r"1 requests are in flight, the request has 1, the limit is 1 \(--max-requests-in-flight\)",
        ),
        (
            bounded(num_bytes=50),
            r"30 bytes are in flight, the request has 30, the limit is 50 \(--max-bytes-in-flight\)",
        ),
    ],
    ids=["tokens", "sequences", "requests", "bytes"],
)
def test_each_bound_refuses_with_what_is_there_what_came_the_limit_and_its_setting(queue: Scheduler, text: str) -> None:
    queue.put(request(4, 4, num_bytes=30), 0.0)
    with pytest.raises(QueueFullError, match=text) as caught:
        queue.put(request(3, 3, num_bytes=30), 0.0)
    assert caught.value.retry_seconds > 0
    assert queue.used == (8, 2, 1, 30), "the refused request changed nothing"


def test_a_refusal_names_settings_that_there_are() -> None:
    assert set(FLAGS) <= {row.flag for row in setting_rows()}


def test_it_is_known_how_much_of_each_bound_is_used() -> None:
    queue = bounded(tokens=10, sequences=8, requests=4, num_bytes=40)
    queue.put(request(4, 4, num_bytes=30), 0.0)
    assert queue.used == (8, 2, 1, 30)
    assert queue.bounds == (10, 8, 4, 40)


@pytest.mark.parametrize(
    ("queue", "text"),
    [
        (bounded(tokens=5), r"6 tokens wait with it; the limit is 5 \(--max-queued-tokens\)"),
        (bounded(sequences=1), "2 sequences wait with it; the limit is 1"),
        (bounded(num_bytes=29), "30 bytes are in flight with it; the limit is 29"),
    ],
    ids=["tokens", "sequences", "bytes"],
)
def test_what_not_even_an_empty_queue_could_hold_is_not_told_to_come_back(queue: Scheduler, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        queue.put(request(3, 3, num_bytes=30), 0.0)


def test_what_runs_is_in_flight_and_does_not_wait() -> None:
    queue = bounded(tokens=10, requests=2)
    queue.put(request(10), 0.0)
    taken(queue)
    queue.put(request(10), 0.0)
    with pytest.raises(QueueFullError, match=r"requests are in flight|tokens wait"):
        queue.put(request(1), 0.0)


def test_a_refusal_says_when_there_is_room() -> None:
    queue = scheduler(bounds=Bounds(10, 1000, 1000, 1000), runners=2)
    queue.put(request(8), 0.0)
    with pytest.raises(QueueFullError) as caught:
        queue.put(request(6), 0.0)
    assert caught.value.retry_seconds == 2.0  # 4 tokens too many, 1 s each, 2 runners


def test_a_refusal_counts_what_runs_and_how_long_what_waits_may_wait_for_company() -> None:
    queue = scheduler(bounds=Bounds(1000, 1000, 2, 1000), max_wait=3.0)
    queue.put(request(9), 0.0)
    queue.take(3.0)  # until 13
    queue.put(request(4, arrival=4.0), 4.0)
    with pytest.raises(QueueFullError) as caught:
        queue.put(request(1), 5.0)
    assert caught.value.retry_seconds == 8.0 + 3.0 + 2.0  # and half of what waits


def test_those_who_are_refused_are_told_to_come_back_one_after_the_other() -> None:
    queue = bounded(tokens=10)
    queue.put(request(10), 0.0)
    told: list[float] = []
    for _ in range(5):
        with pytest.raises(QueueFullError) as caught:
            queue.put(request(3), 0.0)
        told.append(caught.value.retry_seconds)
    assert told == [3.0, 6.0, 9.0, 10.0, 10.0]  # at most the time of a full queue


class TestPriority:
    def test_a_higher_one_displaces_what_waits_of_a_lower_the_lowest_and_least_urgent_first(self) -> None:
        queue = bounded(tokens=12)
        normal, first_low, last_low = request(4), request(4, priority=LOW), request(4, priority=LOW, arrival=1.0)
        for one in (normal, first_low, last_low):
            queue.put(one, 1.0)
        assert displaced(queue, request(4, priority=HIGH)) == [last_low]
        assert displaced(queue, request(6, priority=HIGH)) == [first_low, normal]
        assert queue.used.tokens == 10

    def test_the_displaced_are_told_when_to_come_back(self) -> None:
        queue = bounded(tokens=4)
        queue.put(request(4, priority=LOW), 0.0)
        (one,) = queue.put(request(4, priority=HIGH), 0.0)
        assert one.error.retry_seconds == 4.0
        assert "given way" in str(one.error)

    def test_nobody_is_displaced_where_it_would_not_make_room_enough(self) -> None:
        queue = bounded(tokens=12)
        queue.put(request(8, priority=HIGH), 0.0)
        queue.put(request(4, priority=LOW), 0.0)
        with pytest.raises(QueueFullError):
            queue.put(request(6, priority=HIGH), 0.0)
        assert queue.used.tokens == 12

    def test_an_equal_or_higher_one_is_never_displaced(self) -> None:
        queue = bounded(tokens=8)
        queue.put(request(4, priority=HIGH), 0.0)
        queue.put(request(4), 0.0)
        with pytest.raises(QueueFullError):
            queue.put(request(4), 0.0)

    def test_the_displaced_are_in_flight_no_more(self) -> None:
        queue = bounded(requests=1, num_bytes=10)
        low = request(1, priority=LOW, num_bytes=10)
        queue.put(low, 0.0)
        assert displaced(queue, request(1, priority=HIGH, num_bytes=5)) == [low]
        queue.end(low)
        assert (queue.used.requests, queue.used.bytes) == (1, 5)


class TestFairShare:
    def test_who_fills_the_queue_gives_way_to_one_within_its_share(self) -> None:
        queue = bounded(tokens=20)
        flood = [request(4, caller="flood", arrival=float(n)) for n in range(5)]
        for one in flood:
            queue.put(one, 5.0)
        assert displaced(queue, request(4, caller="other")) == [flood[4]]
        assert displaced(queue, request(6, caller="other")) == [flood[3], flood[2]]

    def test_nobody_gives_way_to_one_beyond_its_own_share(self) -> None:
        queue = bounded(tokens=20)
        for _ in range(5):
            queue.put(request(4, caller="flood"), 0.0)
        with pytest.raises(QueueFullError):
            queue.put(request(4, 4, 4, caller="other"), 0.0)
        assert queue.used.tokens == 20

    def test_nobody_within_its_share_gives_way(self) -> None:
        queue = bounded(tokens=20)
        queue.put(request(10, caller="one"), 0.0)
        queue.put(request(10, caller="two"), 0.0)
        # With a third caller each has a right to 6 tokens: the two are beyond it, but only until one has given way.
        assert len(displaced(queue, request(4, caller="three"))) == 1
        queue.put(request(6, caller="one"), 0.0)
        with pytest.raises(QueueFullError):
            queue.put(request(4, caller="three"), 0.0)

    def test_a_caller_does_not_displace_its_own(self) -> None:
        queue = bounded(tokens=20)
        for _ in range(5):
            queue.put(request(4, caller="one"), 0.0)
        with pytest.raises(QueueFullError):
            queue.put(request(4, caller="one"), 0.0)

    def test_a_flood_of_many_small_requests_counts_by_the_bound_that_it_fills(self) -> None:
        queue = bounded(requests=4)
        flood = [request(1, caller="flood", arrival=float(n)) for n in range(4)]
        for one in flood:
            queue.put(one, 4.0)
        assert displaced(queue, request(100, caller="other")) == [flood[3]]

    def test_weights_count(self) -> None:
        queue = scheduler(bounds=Bounds(20, 100, 100, 100), weights={"gold": 4.0})
        queue.put(request(16, caller="gold"), 0.0)
        queue.put(request(4, caller="other"), 0.0)
        with pytest.raises(QueueFullError):  # five shares: gold has a right to 16
            queue.put(request(1, caller="other"), 0.0)
        with pytest.raises(QueueFullError):
            queue.put(request(4, caller="gold"), 0.0)
