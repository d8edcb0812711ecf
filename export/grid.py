"""The batches that an exported graph is held to. They hold what has broken exports before.

One token, the longest sequence, lengths that are prime, batches of one, all equal, one long among many short, left
padding and masks with holes (through position ids), the last columns where the longest sequence is too long to compare
whole, and English text.
"""

from collections.abc import Callable
from pydoc_data.topics import topics

import numpy as np

from export.checkpoint import Subject
from service.request import Int64Array, TokenSequence

SEED = 20240607
UNEVEN = "one long, many short"
# Eager attention holds sequences x heads x longest^2 scores, three times over: with 12 heads one sequence of 8,192
# tokens takes 9 GiB, and twelve with one such among them 108. At these limits it is 0.6 GiB and 0.4. Past them nothing
# is new but the positions, which "last columns" checks.
MAX_TOKENS_ALONE = 2048
MAX_TOKENS_IN_COMPANY = 512
_TEXT_TOKENS = 64


def make_grid(subject: Subject) -> dict[str, list[TokenSequence]]:
    """The batches to compare on, each of sequences within the model's limit."""
    longest = subject.max_sequence_tokens
    rng = np.random.default_rng(SEED)
    lengths = {
        "one token": [1],
        "one sequence": [37],
        "longest": [min(longest, MAX_TOKENS_ALONE)],
        "ones and twos": [1, 2, 1, 1, 2],
        "primes": [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31],
        "all equal": [16] * 8,
        UNEVEN: [3, 1, 4, 1, 5, min(longest, MAX_TOKENS_IN_COMPANY), 9, 2, 6, 5, 3, 5],
    }
    grid = {
        name: [random_sequence(rng, subject, np.arange(min(size, longest))) for size in sizes]
        for name, sizes in lengths.items()
    }
    columns = np.arange(min(24, longest))
    left_padded = [columns[-size:] for size in (1, 5, 24, 11)]
    with_holes = [np.sort(rng.choice(columns, max(1, len(columns) // part), replace=False)) for part in (2, 3, 5, 12)]
    grid["left padded"] = [random_sequence(rng, subject, positions) for positions in left_padded]
    grid["masks with holes"] = [random_sequence(rng, subject, positions) for positions in with_holes]
    if longest > MAX_TOKENS_ALONE and not subject.input_size:  # who is fed with vectors need not know positions
        last_columns = np.arange(longest - 24, longest)
        grid["last columns"] = [random_sequence(rng, subject, last_columns[-size:]) for size in (1, 24, 7)]
    if subject.tokenize is not None:
        grid["English text"] = english_sequences(subject.tokenize, 12, min(longest, _TEXT_TOKENS))
    return grid


def english_sequences(tokenize: Callable[[str], list[int]], count: int, max_tokens: int) -> list[TokenSequence]:
    """Paragraphs of Python's own language reference, cut to `max_tokens`."""
    paragraphs = [part for text in topics.values() for part in text.split("\n\n") if len(part) > 60]
    chosen = paragraphs[:: len(paragraphs) // count][:count]
    ids = [np.array(tokenize(paragraph)[:max_tokens], np.int64) for paragraph in chosen]
    return [TokenSequence(row, np.arange(len(row)), np.zeros(len(row), np.int64)) for row in ids]


def random_sequence(rng: np.random.Generator, subject: Subject, positions: Int64Array) -> TokenSequence:
    """Token ids and types drawn evenly; or vectors of components of order 1, as a norm leaves them."""
    size = len(positions)
    if subject.input_size:
        return TokenSequence.of_vectors(rng.standard_normal((size, subject.input_size), np.float32), positions)
    types = rng.integers(0, max(subject.type_vocab_size, 1), size)
    return TokenSequence(rng.integers(0, subject.vocab_size, size), positions, types)
