from benchmarks.contenders import rotated
from benchmarks.measurement import Batches, Slice


def measure(_number: int) -> Slice:
    return Slice(1, 1, 1.0, 1.0, 0.0, Batches(1.0, 1.0, 1.0))


def test_each_round_starts_one_row_further() -> None:
    rows = dict.fromkeys(("a", "b", "c"), measure)
    assert [[name for name, _ in rotated(rows, number)] for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_a_trace_without_chosen_rows_runs_none() -> None:
    assert list(rotated({}, 1)) == []
