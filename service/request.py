"""What the queue holds. A request is one caller's call; its unit of work is the sequence.

A request of n sequences resolves when its last sequence does, in whatever batches they ran. What the scheduler notes on
it is touched under the batcher's lock; everything else by the event loop's thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from service.errors import RequestError

if TYPE_CHECKING:
    from service.tracing import RequestSpan

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


class Priority(IntEnum):
    """How urgent a request is to its caller. The numbers are Triton's, where 1 is the most urgent."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request to one model may hold; checked before the queue, and published to clients."""

    vocab_size: int
    type_vocab_size: int
    hidden_size: int
    output_size: int
    max_sequence_tokens: int
    max_request_sequences: int
    max_request_tokens: int
    max_request_bytes: int
    max_message_bytes: int
    # Of a vector, in a model that is fed with vectors in place of token ids; 0 in others.
    input_size: int = 0
    # Whether what a sequence is answered with are logits.
    is_classifier: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One sequence of real tokens, padding already gone.

    Shapes: each (L,), int64, L >= 1. `position_ids` is the column that each token had in the caller's layout, so that
    left padding and masks with holes stay exact. A model that is fed with vectors gets `embeddings` (L, input_size);
    token ids and types are then 0, and nothing reads them.
    """

    token_ids: Int64Array
    position_ids: Int64Array
    token_type_ids: Int64Array
    embeddings: Float32Array | None = field(default=None, kw_only=True)

    @classmethod
    def of_vectors(cls, embeddings: Float32Array, position_ids: Int64Array) -> "TokenSequence":
        """A sequence for a model that is fed with vectors, one a token."""
        zeros = np.zeros_like(position_ids)
        return cls(zeros, position_ids, zeros, embeddings=embeddings)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """What the engine made of one sequence: `pooled` (output_size,) and, where asked for, `tokens` (L, E)."""

    pooled: Float32Array
    tokens: Float32Array | None


@dataclass(slots=True, eq=False)
class Request:
    """One caller's sequences and what has become of them. Times are monotonic seconds.

    `caller` is who shares the server fairly with others; all without a name are one. `num_bytes` is what the request
    holds in memory while it is in flight: its message and its answer. `span` is None unless it is traced.

    `is_admitted`, `is_queued`, `num_queued_sequences` and `num_queued_tokens` are the scheduler's own notes.
    """

    sequences: tuple[TokenSequence, ...]
    wants_tokens: bool
    arrival: float
    deadline: float | None
    priority: Priority = Priority.NORMAL
    caller: str = ""
    num_bytes: int = 0
    span: "RequestSpan | None" = None
    on_settled: Callable[[], None] = lambda: None
    encodings: list[Encoding | None] = field(init=False)
    error: RequestError | None = field(init=False, default=None)
    is_settled: bool = field(init=False, default=False)
    num_pending: int = field(init=False)
    num_tokens: int = field(init=False)
    is_admitted: bool = field(init=False, default=False)
    is_queued: bool = field(init=False, default=False)
    num_queued_sequences: int = field(init=False, default=0)
    num_queued_tokens: int = field(init=False, default=0)
    first_started: float | None = field(init=False, default=None)
    last_finished: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.encodings = [None] * len(self.sequences)
        self.num_pending = len(self.sequences)
        self.num_tokens = sum(sequence.num_tokens for sequence in self.sequences)

    def complete(self, place: int, encoding: Encoding, started: float, finished: float) -> None:
        """Store the answer of the sequence at `place`; the last settles the request. Nothing once settled."""
        if self.is_settled:
            return
        self.encodings[place] = encoding
        self.num_pending -= 1
        self.first_started = started if self.first_started is None else min(self.first_started, started)
        self.last_finished = finished if self.last_finished is None else max(self.last_finished, finished)
        if self.num_pending == 0:
            self._settle(None)

    def fail(self, error: RequestError) -> None:
        """Settle the request with an error. Nothing happens once settled."""
        if not self.is_settled:
            self._settle(error)

    def _settle(self, error: RequestError | None) -> None:
        self.is_settled = True
        self.error = error
        self.on_settled()
