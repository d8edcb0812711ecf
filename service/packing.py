"""A packed batch: sequences back to back, with the two index maps that attention needs. Pure numpy.

For B sequences with T tokens in all, the longest of S: everything in the model but attention runs on T rows.
Attention alone sees (B, S), through `pad_index` on the way in and `unpad_index` on the way out. Unused slots point at
their own sequence's first row. Their keys are masked by `lengths` and their queries are dropped, so a finite number
there changes nothing; but a masked NaN is still 0 x NaN, and so a sequence can spoil no answer but its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.request import Float32Array, Int64Array, TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The packed graph's inputs.

    Shapes: token_ids, position_ids, token_type_ids, unpad_index (T,) int64; pad_index (B, S) int64; lengths (B,) int32;
    and, for a model that is fed with vectors, embeddings (T, input_size) float32 in place of the token ids.
    """

    token_ids: Int64Array
    position_ids: Int64Array
    token_type_ids: Int64Array
    pad_index: Int64Array
    unpad_index: Int64Array
    lengths: NDArray[np.int32]
    embeddings: Float32Array | None = None

    @property
    def num_sequences(self) -> int:
        return int(self.pad_index.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def longest(self) -> int:
        return int(self.pad_index.shape[1])

    @property
    def fill(self) -> float:
        """Real tokens over the B x S slots that a padding server would compute."""
        return self.num_tokens / (self.num_sequences * self.longest)


def pack(sequences: Sequence[TokenSequence]) -> PackedBatch:
    """Pack one or more sequences, each of one or more tokens, in the order given."""
    lengths = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)  # (B,)
    starts = np.cumsum(lengths) - lengths  # (B,)
    columns = np.arange(lengths.max())  # (S,)
    is_real = columns < lengths[:, None]  # (B, S)
    return PackedBatch(
        token_ids=np.concatenate([sequence.token_ids for sequence in sequences]),
        position_ids=np.concatenate([sequence.position_ids for sequence in sequences]),
        token_type_ids=np.concatenate([sequence.token_type_ids for sequence in sequences]),
        pad_index=starts[:, None] + np.where(is_real, columns, 0),
        unpad_index=np.flatnonzero(is_real),
        lengths=lengths.astype(np.int32),
        embeddings=_pack_vectors(sequences),
    )


def _pack_vectors(sequences: Sequence[TokenSequence]) -> Float32Array | None:
    """(T, input_size). All sequences are for one model, so either all have vectors or none has."""
    vectors = [sequence.embeddings for sequence in sequences if sequence.embeddings is not None]
    return np.concatenate(vectors) if vectors else None


def unpack(batch: PackedBatch, rows: Float32Array) -> list[Float32Array]:
    """Cut per-token rows (T, E) into one (L, E) view per sequence."""
    return np.split(rows, np.cumsum(batch.lengths)[:-1])
