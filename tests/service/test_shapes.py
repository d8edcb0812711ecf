"""Batches to measure with."""

import numpy as np

from service.shapes import Shape, batch_of


def test_a_batch_has_the_shape() -> None:
    batch = batch_of(Shape(3, 7))
    assert batch.lengths.tolist() == [7, 7, 7]
    assert batch.num_tokens == Shape(3, 7).num_tokens == 21


def test_only_ids_and_positions_that_every_model_has_are_in_it() -> None:
    batch = batch_of(Shape(2, 5))
    assert not batch.token_ids.any()
    assert not batch.token_type_ids.any()
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4] * 2


def test_a_model_of_vectors_is_given_vectors() -> None:
    batch = batch_of(Shape(2, 5), input_size=7)
    assert batch.embeddings is not None
    assert batch.embeddings.shape == (10, 7)
    assert batch.embeddings.dtype == np.float32


def test_a_shape_reads_as_sequences_times_tokens() -> None:
    assert str(Shape(8, 16)) == "8 x 16"
