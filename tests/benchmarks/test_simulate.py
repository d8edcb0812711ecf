from pathlib import Path

import pytest

from benchmarks.arrivals import Arrival, TraceError, read_trace, write_trace
from benchmarks.cases import Point
from benchmarks.plots import plot
from benchmarks.simulate import main, points_table
from service.request import Priority

TRACE = [
    Arrival(0.0, (3, 4), 1.0, Priority.LOW, "a"),
    *(Arrival(0.05 * number, (20, 60, 7), 1.0) for number in range(1, 40)),
    Arrival(2.5, (9,)),
]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", TRACE)
    assert read_trace(tmp_path / "trace.jsonl") == TRACE


def test_what_a_line_leaves_out_is_what_most_callers_say(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"at": 0.5, "lengths": [3]}\n\n')
    assert read_trace(tmp_path / "trace.jsonl") == [Arrival(0.5, (3,), None, Priority.NORMAL, "")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no requests"),
        ('{"at": 0, "lengths": [3]}\nnonsense\n', "line 2: not a request"),
        ('{"at": 0}\n', "line 1: not a request of a trace: 'lengths'"),
        ('{"at": 0, "lengths": []}\n', "line 1: lengths are"),
        ('{"at": 0, "lengths": [0]}\n', "line 1: lengths are"),
        ('{"at": 0, "lengths": [3], "priority": 9}\n', "9 is not a valid Priority"),
        ('{"at": 0, "lengths": [3], "colour": 9}\n', "colour"),
        ('[3]\n', "line 1: not a request"),
        ('{"at": 1, "lengths": [3]}\n{"at": 0, "lengths": [3]}\n', "not in the order"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(TraceError, match=reason):
        read_trace(tmp_path / "trace.jsonl")


def test_a_missing_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(tmp_path / "none.jsonl"), "--output", str(tmp_path)]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_recorded_trace_is_answered_with_tables_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "trace.jsonl", TRACE)
    assert main(["--trace", str(tmp_path / "trace.jsonl"), "--output", str(tmp_path), "--replicas", "2"]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"one-cpu.png", "one-gpu.png", "2-cpu-replicas.png"}
    printed = capsys.readouterr().out
    for line in ("ours", "FIFO, 2 s", "round-robin", "least loaded"):
        assert line in printed


def test_a_picture_and_a_table_have_every_point(tmp_path: Path) -> None:
    points = [Point("ours", load, load, 0.5, 0.4, 0.1, 0.0, 0.1, 0.9) for load in (0.5, 1.0)]
    plot("title", points, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    assert points_table("title", points).row_count == 2
