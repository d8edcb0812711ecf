"""The runs that a model is measured with: so many sequences, all of one length, of whatever its input is."""

from typing import NamedTuple

import numpy as np

from service.packing import PackedBatch, pack
from service.request import TokenSequence


class Shape(NamedTuple):
    """Of one run."""

    num_sequences: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.length}"


def batch_of(shape: Shape, input_size: int = 0) -> PackedBatch:
    """Token id 0 and type 0 exist in every vocabulary; a model with an `input_size` is given vectors.

    What the ids or vectors are changes no time.
    """
    columns = np.arange(shape.length)
    if input_size:
        sequence = TokenSequence.of_vectors(np.zeros((shape.length, input_size), np.float32), columns)
    else:
        sequence = TokenSequence(np.zeros_like(columns), columns, np.zeros_like(columns))
    return pack([sequence] * shape.num_sequences)
