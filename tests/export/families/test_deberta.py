"""DeBERTa's distances; that its rows are transformers' own is tested with all families' in test_encoder.py."""

import dataclasses

import pytest
from transformers import DebertaV2Model

from export.attention import Packing
from export.families.deberta import DistancesOf
from tests.checkpoints import FAMILIES


@pytest.fixture
def distances_of() -> DistancesOf:
    """8 buckets on each side, of which 0 to 4 hold one distance each; the embeddings have 16 rows, 8 is distance 0."""
    model = FAMILIES["deberta-v2"].build()
    assert isinstance(model, DebertaV2Model)
    return DistancesOf(model.encoder)


def _cut(packing: Packing, length: int) -> Packing:
    """Every sequence cut to `length` slots at most."""
    return dataclasses.replace(
        packing, pad_index=packing.pad_index[:, :length], lengths=packing.lengths.clamp(max=length)
    )


def test_no_product_is_asked_for_with_distances_that_the_batch_has_not(
    distances_of: DistancesOf, packing: Packing
) -> None:
    near, pairs = distances_of(_cut(packing, 4))

    assert near.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert near[pairs[0]].tolist() == [[8, 7, 6, 5], [9, 8, 7, 6], [10, 9, 8, 7], [11, 10, 9, 8]]


def test_batches_of_single_tokens_ask_for_one_more_distance(distances_of: DistancesOf, packing: Packing) -> None:
    near, pairs = distances_of(_cut(packing, 1))

    assert near.tolist() == [8, 9]
    assert pairs.flatten().tolist() == [0] * 5


def test_what_stands_in_unused_slots_asks_for_nothing(distances_of: DistancesOf, packing: Packing) -> None:
    short = _cut(packing, 4)
    poisoned = dataclasses.replace(short, pad_index=short.pad_index.masked_fill(~short.is_real(), 19))

    assert distances_of(poisoned).near.tolist() == distances_of(short).near.tolist()
