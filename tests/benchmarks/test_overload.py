"""What is offered, and what the report makes of rounds that are written out here."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from benchmarks.open_loop import Message, Offered
from benchmarks.outcomes import Outcome, Tally, Window
from benchmarks.overload import messages, plan
from benchmarks.overload_report import (
    LOADS,
    SCENARIOS,
    Round,
    Row,
    Stream,
    foretold_table,
    groups_table,
    judge,
    loads_table,
    refusals_table,
    wanted_table,
)
from benchmarks.terms import OURS, RIVALS
from protos.encoder_pb2 import PRIORITY_LOW, EncodeRequest
from service.request import Priority, TokenSequence

WINDOW = Window(0.0, 1.0)
OVERLOADED = Row(OURS, "4x")


def make_offered(
    *, tokens: int = 1000, accepted: float = 0.9, refusal: float = 0.01, lag: float = 0.001, group: str = ""
) -> Offered:
    outcomes = (
        Outcome(0.0, accepted, True, tokens, 1.0, group),
        Outcome(0.0, refusal, False, 500, 1.0, group),
    )
    return Offered(Tally(outcomes, WINDOW), (lag,), (0.002,), {0.001: 0.0, 0.0025: 1.0, 1.0: 2.0}, 1.0, 1.5, 0.1)


def make_round(slices: dict[Row, Offered] | None = None, capacity: int = 1000) -> Round:
    rows = {Row(OURS, load): make_offered() for load in LOADS}
    return Round((make_offered(tokens=capacity),), rows | (slices or {}))


def missed(*rounds: Round) -> list[tuple[str, str]]:
    return [(str(v.wanted.row), v.wanted.name) for v in judge(rounds) if v.is_missed]


def test_everything_at_its_limit_is_held() -> None:
    assert missed(make_round({OVERLOADED: make_offered(tokens=950, accepted=0.999, refusal=0.02)})) == []
    assert len(judge([make_round()])) == 8


@pytest.mark.parametrize(
    ("slice_", "name"),
    [
        (make_offered(tokens=949), "goodput over capacity"),
        (make_offered(refusal=0.021), "p99 of refusals, s"),
    ],
)
def test_one_missed_figure_is_missed(slice_: Offered, name: str) -> None:
    assert missed(make_round({OVERLOADED: slice_})) == [("ours, 4x", name)]


def test_those_who_were_accepted_and_got_no_answer_in_time_count_among_the_accepted() -> None:
    """And their tokens are no goodput."""
    names = {name for _, name in missed(make_round({OVERLOADED: make_offered(accepted=1.01)}))}
    assert names == {"goodput over capacity", "p99 of the accepted, s"}


def test_goodput_is_over_the_capacity_of_its_own_round_and_the_median_counts() -> None:
    slow = make_round({OVERLOADED: make_offered(tokens=500)}, capacity=500)
    disturbed = make_round({OVERLOADED: make_offered(tokens=100)})
    assert missed(slow, make_round(), disturbed) == []
    assert ("ours, 4x", "goodput over capacity") in missed(slow, disturbed, disturbed)


def test_capacity_is_the_mean_of_before_and_after() -> None:
    assert Round((make_offered(tokens=800), make_offered(tokens=1200)), {}).capacity == 1000


def test_a_figure_without_its_row_or_without_refusals_is_not_measured_and_not_missed() -> None:
    assert all(not verdict.found and not verdict.is_missed for verdict in judge([Round((make_offered(),), {})]))
    none_refused = Tally((Outcome(0.0, 0.5, True, 1000, 1.0),), WINDOW)
    part = make_round({OVERLOADED: replace(make_offered(), tally=none_refused)})
    assert [v.found for v in judge([part]) if v.wanted.row == OVERLOADED and "refusals" in v.wanted.name] == [()]


def test_a_round_is_as_late_as_the_generator_was_in_its_worst_slice() -> None:
    assert make_round({OVERLOADED: make_offered(lag=0.3)}).lag_seconds == 0.3


def test_the_tables_show_every_row_that_was_measured() -> None:
    flood = Tally(
        (Outcome(0, 0.5, True, 600, 1.0, "other"), Outcome(0, 0.2, True, 400, 1.0, "flooding")),
        WINDOW,
    )
    rows = {Row(server, load): make_offered() for server in RIVALS for load in LOADS}
    rounds = [make_round(rows | {Row(OURS, "a flood"): replace(make_offered(), tally=flood)})]
    text = StringIO()
    console = Console(file=text, width=160)
    for table in (loads_table(rounds), refusals_table(rounds), groups_table(rounds), wanted_table(judge(rounds))):
        console.print(table)
    for row in rounds[0].slices:
        assert str(row) in text.getvalue()
    assert "<= 2.5" in text.getvalue()  # the bucket that holds the one refusal
    assert "60%" in text.getvalue()
    assert text.getvalue().count(" held") == 8


def test_what_was_foretold_stands_beside_what_was_measured() -> None:
    tally = Tally((Outcome(0.0, 0.25, True, 800, 1.0),), WINDOW)
    found = replace(make_round(), foretold={OVERLOADED: tally})
    text = StringIO()
    Console(file=text, width=160).print(foretold_table([found]))
    line = next(line for line in text.getvalue().splitlines() if "ours, 4x" in line)
    assert line.split()[2:] == ["1.000", "0.800", "900", "250", "900", "250"]
    assert "ours, 2x" not in text.getvalue()


def test_streams_are_sent_at_their_own_times_in_one_order() -> None:
    streams = (Stream(4.0, "a"), Stream(1.0, "b"))
    requests = [[Message(b"1", (1,), "a"), Message(b"2", (1,), "a")], [Message(b"3", (1,), "b")]]
    found = plan(streams, requests, 0, 50.0, Window(1.0, 20.0))
    groups = [message.group for message in found.messages]
    assert list(found.times) == sorted(found.times)
    assert groups.count("a") / groups.count("b") == pytest.approx(4, rel=0.15)  # 1,000 arrivals of "b": 3% deviation
    assert [m.data for m in found.messages if m.group == "a"][:3] == [b"1", b"2", b"1"]


def test_the_same_seed_is_the_same_plan() -> None:
    streams, requests, window = SCENARIOS["2x"], [[Message(b"1", (1,))]], Window(0.0, 5.0)
    assert plan(streams, requests, 7, 20.0, window) == plan(streams, requests, 7, 20.0, window)
    assert plan(streams, requests, 7, 20.0, window) != plan(streams, requests, 8, 20.0, window)


def test_callers_of_a_kind_say_who_they_are_and_how_urgent() -> None:
    sequences = [TokenSequence(*(np.arange(length),) * 3) for length in (3, 2)]
    (message,) = messages([sequences], Stream(1.0, "low", Priority.LOW))
    request = EncodeRequest.FromString(message.data)
    assert list(request.lengths) == [3, 2]
    assert request.priority == PRIORITY_LOW
    assert (message.lengths, message.group, message.metadata) == ((3, 2), "low", (("mhsa-tenant", "low"),))
