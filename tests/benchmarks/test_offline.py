import numpy as np

from benchmarks.measurement import Batches
from benchmarks.offline import describe, fill
from benchmarks.traces import Batch
from service.request import TokenSequence


def make_batch(*lengths: int) -> Batch:
    return [TokenSequence(*(np.arange(length),) * 3) for length in lengths]


def test_fill_is_real_tokens_over_the_slots_that_padding_computes() -> None:
    assert fill(make_batch(8, 2, 2)) == 0.5
    assert fill(make_batch(7)) == 1.0


def test_batches_are_described_by_their_means() -> None:
    assert describe([make_batch(8, 2, 2), make_batch(4)]) == Batches(fill=0.75, sequences=2.0, tokens=8.0)
