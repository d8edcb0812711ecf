import numpy as np
import pytest

from benchmarks.traces import (
    PART_MULTIPLE,
    Batch,
    Trace,
    by_budget,
    by_count,
    by_length,
    mixed_trace,
    round_up,
    short_trace,
)
from service.request import TokenSequence


def make_sequences(*lengths: int) -> Batch:
    return [TokenSequence(*(np.arange(length),) * 3) for length in lengths]


def lengths_of(batches: list[Batch]) -> list[list[int]]:
    return [[sequence.num_tokens for sequence in batch] for batch in batches]


def test_a_batch_takes_as_many_sequences_as_the_budget_allows() -> None:
    assert lengths_of(by_budget(make_sequences(3, 5, 1, 8, 2), 8)) == [[3, 5], [1], [8], [2]]


def test_a_sequence_longer_than_the_budget_runs_alone() -> None:
    assert lengths_of(by_budget(make_sequences(3, 9, 3), 8)) == [[3], [9], [3]]


def test_batches_by_count_keep_the_order_and_the_rest() -> None:
    assert lengths_of(by_count(make_sequences(1, 2, 3, 4, 5), 2)) == [[1, 2], [3, 4], [5]]


def test_sorting_keeps_every_sequence() -> None:
    assert lengths_of([by_length(make_sequences(3, 1, 2))]) == [[1, 2, 3]]


def test_a_trace_is_the_same_in_every_run() -> None:
    first, second = mixed_trace(64, 2), mixed_trace(64, 2)
    for one, other in zip(first.sequences, second.sequences, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize(
    ("trace", "longest", "mean"),
    # Means of 4,160 clipped draws from a lognormal(3.9, 0.8) and a normal(20, 6), give or take three standard errors.
    [(mixed_trace(64, 64), 256, (60, 70)), (short_trace(64, 64), 32, (19, 20.5))],
)
def test_lengths_are_those_that_the_trace_promises(trace: Trace, longest: int, mean: tuple[float, float]) -> None:
    lengths = [sequence.num_tokens for sequence in trace.sequences]
    assert min(lengths) >= 4
    assert max(lengths) <= longest
    assert mean[0] < sum(lengths) / len(lengths) < mean[1]


def test_rounds_have_parts_of_their_own() -> None:
    trace = short_trace(64, 3)
    parts = [trace.part(number) for number in range(4)]
    assert [len(part) for part in parts] == [64] * 4
    assert len({id(sequence) for part in parts for sequence in part}) == 256


@pytest.mark.parametrize(("size", "rounded"), [(1, 64), (95, 64), (97, 128), (640, 640)])
def test_part_sizes_divide_into_every_load_shape(size: float, rounded: int) -> None:
    assert round_up(size) == rounded
    assert rounded % PART_MULTIPLE == 0
