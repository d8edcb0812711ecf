"""The worst vector of a batch that failed, with its input: what a developer needs to see it again.

The batches are the same in every run, so a batch's name, a sequence's index and the start of its input are enough.
"""

import numpy as np

from service.request import Float32Array, Int64Array, TokenSequence

# A line is for reading. The whole of a longer sequence is in grid.py's batch of that name.
_MAX_IDS = 64
_MAX_COMPONENTS = 4


def describe_worst(found: Float32Array, expected: Float32Array, sequences: list[TokenSequence]) -> str:
    """Where `found` is off by most, as one line; rows are those of all tokens (T, E) or of all sequences (B, E)."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(found - expected)
    errors[~np.isfinite(errors)] = np.inf
    row, component = (int(index) for index in np.unravel_index(int(errors.argmax()), errors.shape))
    index, token = (row, None) if len(found) == len(sequences) else _find_token(row, sequences)
    sequence = sequences[index]
    where = f"sequence {index} of {len(sequences)}"
    if token is not None:
        where += f", token {token} of {sequence.num_tokens} in column {sequence.position_ids[token]}"
    return (
        f"worst in {where}, component {component}: found {found[row, component]:.7g}, "
        f"expected {expected[row, component]:.7g}; {_describe_input(sequence, token or 0)}"
    )


def _describe_input(sequence: TokenSequence, token: int) -> str:
    if sequence.embeddings is None:
        return f"its token_ids are {_list_ids(sequence.token_ids)}"
    start = " ".join(f"{number:.7g}" for number in sequence.embeddings[token, :_MAX_COMPONENTS])
    return f"the vector of token {token} begins [{start}]"


def _find_token(row: int, sequences: list[TokenSequence]) -> tuple[int, int]:
    """The sequence of a row in the packed batch, and the row's index in it."""
    ends = np.cumsum([sequence.num_tokens for sequence in sequences])
    index = int(np.searchsorted(ends, row, side="right"))
    return index, row - int(ends[index]) + sequences[index].num_tokens


def _list_ids(ids: Int64Array) -> str:
    listed = " ".join(map(str, ids[:_MAX_IDS].tolist()))
    return f"[{listed}]" if len(ids) <= _MAX_IDS else f"[{listed} and {len(ids) - _MAX_IDS} more]"
