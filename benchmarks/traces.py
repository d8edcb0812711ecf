"""What is encoded: two traces of random sequences, the same in every run, and the ways to make batches of them.

A trace is cut into parts of equal size, one for each round. In a round every contender encodes the very same part, from
its first sequence to its last: their times compare without the noise of different lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from service.request import TokenSequence

_SEED = 0
# Ordinary words of BERT's vocabulary; which ones changes no time.
_FIRST_ID, _LAST_ID = 1000, 20000
# A request of 16 sequences from each of 4 callers: every load shape's requests divide a part without a rest.
PART_MULTIPLE = 64

Batch = Sequence[TokenSequence]
_Lengths = Callable[[np.random.Generator, int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


@dataclass(frozen=True, slots=True)
class Trace:
    """Sequences in order of arrival: a part to warm up with, then one part per round."""

    name: str
    sequences: tuple[TokenSequence, ...]
    part_size: int

    def part(self, number: int) -> Batch:
        """The part of a round, counted from 1; 0 is the one to warm up with."""
        return self.sequences[number * self.part_size : (number + 1) * self.part_size]


def mixed_trace(part_size: int, num_rounds: int) -> Trace:
    """Lengths like those of real text: most are short, a few are very long; 4 to 256 tokens."""
    return _make("mixed", lambda rng, count: rng.lognormal(3.9, 0.8, count).clip(4, 256), part_size, num_rounds)


def short_trace(part_size: int, num_rounds: int) -> Trace:
    """Lengths like those of search queries: 4 to 32 tokens."""
    return _make("short", lambda rng, count: rng.normal(20, 6, count).clip(4, 32), part_size, num_rounds)


def round_up(size: float) -> int:
    """The nearest possible part size, at least the smallest."""
    return max(1, round(size / PART_MULTIPLE)) * PART_MULTIPLE


def by_budget(sequences: Batch, max_tokens: int) -> list[Batch]:
    """Consecutive sequences, as many in each batch as `max_tokens` allows; at least one."""
    batches: list[list[TokenSequence]] = []
    room = 0
    for sequence in sequences:
        if sequence.num_tokens > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(sequence)
        room -= sequence.num_tokens
    return list(batches)


def by_count(sequences: Batch, size: int) -> list[Batch]:
    """Consecutive sequences, `size` in each batch; the last may have fewer."""
    remaining = iter(sequences)
    return list(iter(lambda: list(islice(remaining, size)), []))


def by_length(sequences: Batch) -> Batch:
    """The same sequences, shortest first."""
    return sorted(sequences, key=lambda sequence: sequence.num_tokens)


def _make(name: str, draw: _Lengths, part_size: int, num_rounds: int) -> Trace:
    rng = np.random.default_rng(_SEED)
    lengths = draw(rng, part_size * (num_rounds + 1)).astype(int)
    return Trace(name, tuple(_sequence(rng, length) for length in lengths), part_size)


def _sequence(rng: np.random.Generator, length: int) -> TokenSequence:
    return TokenSequence(rng.integers(_FIRST_ID, _LAST_ID, length), np.arange(length), np.zeros(length, np.int64))
