"""Packing against loops, and as a property: whatever goes in comes out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.packing import PackedBatch, pack, unpack
from service.request import TokenSequence

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def sequences(lengths: list[int], seed: int = 0) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    return [TokenSequence(*(rng.integers(0, 1000, length) for _ in range(3))) for length in lengths]


def slots(batch: PackedBatch) -> list[tuple[int, int]]:
    """(sequence, column) of each token, in the order of packing, by counting."""
    return [(i, column) for i, length in enumerate(batch.lengths) for column in range(length)]


def test_three_sequences_are_laid_out_as_drawn() -> None:
    batch = pack(
        [
            TokenSequence(np.array([11, 12]), np.array([0, 1]), np.array([0, 1])),
            TokenSequence(np.array([21]), np.array([5]), np.array([1])),
            TokenSequence(np.array([31, 32, 33]), np.array([2, 3, 7]), np.array([0, 0, 1])),
        ]
    )
    assert batch.token_ids.tolist() == [11, 12, 21, 31, 32, 33]
    assert batch.position_ids.tolist() == [0, 1, 5, 2, 3, 7]
    assert batch.token_type_ids.tolist() == [0, 1, 1, 0, 0, 1]
    assert batch.pad_index.tolist() == [[0, 1, 0], [2, 2, 2], [3, 4, 5]]
    assert batch.unpad_index.tolist() == [0, 1, 3, 6, 7, 8]
    assert batch.lengths.tolist() == [2, 1, 3]


def test_vectors_stand_back_to_back_in_place_of_token_ids() -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((1, 3), np.float32)
    batch = pack([TokenSequence.of_vectors(first, np.arange(2)), TokenSequence.of_vectors(second, np.array([4]))])

    assert batch.embeddings is not None
    assert batch.embeddings.tolist() == [[0, 1, 2], [3, 4, 5], [1, 1, 1]]
    assert batch.position_ids.tolist() == [0, 1, 4]
    assert (batch.num_tokens, batch.token_ids.tolist()) == (3, [0, 0, 0])


def test_a_batch_of_token_ids_has_no_vectors() -> None:
    assert pack(sequences([2, 1])).embeddings is None


def test_sizes_and_fill_are_counted() -> None:
    batch = pack(sequences([2, 1, 3]))
    assert (batch.num_sequences, batch.num_tokens, batch.longest) == (3, 6, 3)
    assert batch.fill == pytest.approx(6 / 9)


def test_a_batch_without_holes_is_full() -> None:
    assert pack(sequences([4, 4])).fill == 1.0


@given(LENGTHS)
def test_the_dtypes_are_those_of_the_graph(lengths: list[int]) -> None:
    batch = pack(sequences(lengths))
    for array in (batch.token_ids, batch.position_ids, batch.token_type_ids, batch.pad_index, batch.unpad_index):
        assert array.dtype == np.int64
    assert batch.lengths.dtype == np.int32


@given(LENGTHS)
def test_tokens_keep_their_order(lengths: list[int]) -> None:
    given_sequences = sequences(lengths)
    batch = pack(given_sequences)
    assert batch.token_ids.tolist() == [t for s in given_sequences for t in s.token_ids.tolist()]
    assert batch.position_ids.tolist() == [t for s in given_sequences for t in s.position_ids.tolist()]
    assert batch.token_type_ids.tolist() == [t for s in given_sequences for t in s.token_type_ids.tolist()]


@given(LENGTHS)
def test_the_two_index_maps_undo_each_other(lengths: list[int]) -> None:
    batch = pack(sequences(lengths))
    assert batch.pad_index.flatten()[batch.unpad_index].tolist() == list(range(batch.num_tokens))


@given(LENGTHS)
def test_each_token_has_the_slot_of_its_sequence_and_column(lengths: list[int]) -> None:
    batch = pack(sequences(lengths))
    assert batch.unpad_index.tolist() == [i * max(lengths) + column for i, column in slots(batch)]


@given(LENGTHS)
def test_unused_slots_point_at_their_own_sequence(lengths: list[int]) -> None:
    batch = pack(sequences(lengths))
    used = set(slots(batch))
    unused = [slot for slot in np.ndindex(batch.pad_index.shape) if slot not in used]
    assert len(unused) == len(lengths) * max(lengths) - sum(lengths)
    assert all(batch.pad_index[slot] == batch.pad_index[slot[0], 0] for slot in unused)


@given(LENGTHS)
def test_unpacking_gives_each_sequence_its_own_rows(lengths: list[int]) -> None:
    given_sequences = sequences(lengths)
    batch = pack(given_sequences)
    rows = np.stack([batch.token_ids, batch.position_ids], axis=1).astype(np.float32)  # (T, 2)
    unpacked = unpack(batch, rows)
    assert len(unpacked) == len(lengths)
    for part, sequence in zip(unpacked, given_sequences, strict=True):
        assert part.tolist() == [[t, p] for t, p in zip(sequence.token_ids, sequence.position_ids, strict=True)]
