"""The batches of the gate."""

import numpy as np
import pytest
from torch import nn

from export.checkpoint import Subject
from export.grid import english_sequences, make_grid


def _subject(max_sequence_tokens: int) -> Subject:
    return Subject(
        encoder=nn.Identity(),
        num_layers=1,
        vocab_size=50,
        type_vocab_size=2,
        pad_token_id=0,
        max_sequence_tokens=max_sequence_tokens,
        tokenize=lambda text: [len(word) for word in text.split()],
    )


def test_the_grid_holds_what_has_broken_exports_before() -> None:
    lengths = {name: [s.num_tokens for s in sequences] for name, sequences in make_grid(_subject(256)).items()}

    assert lengths["one token"] == [1]
    assert lengths["longest"] == [256]
    assert lengths["primes"] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31]
    assert len(set(lengths["all equal"])) == 1
    assert max(lengths["one long, many short"]) == 256
    assert sorted(lengths["one long, many short"])[-2] == 9
    assert len(lengths["English text"]) == 12


def test_positions_are_left_padded_and_have_holes() -> None:
    grid = make_grid(_subject(256))

    assert all(sequence.position_ids[-1] == 23 for sequence in grid["left padded"])
    assert any(np.any(np.diff(sequence.position_ids) > 1) for sequence in grid["masks with holes"])
    assert all(np.all(np.diff(s.position_ids) > 0) for sequences in grid.values() for s in sequences)


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 512])
def test_nothing_exceeds_the_models_limits(limit: int) -> None:
    for sequences in make_grid(_subject(limit)).values():
        for sequence in sequences:
            assert 1 <= sequence.num_tokens <= limit
            assert sequence.position_ids.max() < limit
            assert 0 <= sequence.token_ids.min() <= sequence.token_ids.max() < 50
            assert set(sequence.token_type_ids) <= {0, 1}


@pytest.mark.parametrize(("limit", "alone", "in_company"), [(600, 600, 512), (2048, 2048, 512), (8192, 2048, 512)])
def test_lengths_are_bounded_for_eager_attention(limit: int, alone: int, in_company: int) -> None:
    longest = {name: max(s.num_tokens for s in sequences) for name, sequences in make_grid(_subject(limit)).items()}

    assert longest.pop("longest") == alone
    assert max(longest.values()) == in_company


def test_the_last_columns_of_longer_models_are_used() -> None:
    sequences = make_grid(_subject(8192))["last columns"]

    assert {int(sequence.position_ids[-1]) for sequence in sequences} == {8191}
    assert min(int(sequence.position_ids[0]) for sequence in sequences) == 8192 - 24
    assert "last columns" not in make_grid(_subject(2048))


def test_the_grid_is_the_same_every_time() -> None:
    first, second = make_grid(_subject(64)), make_grid(_subject(64))

    for name, sequences in first.items():
        for one, other in zip(sequences, second[name], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)


def test_english_text_is_cut_to_the_limit() -> None:
    sequences = english_sequences(lambda text: list(range(len(text))), 4, 10)

    assert [sequence.token_ids.tolist() for sequence in sequences] == [list(range(10))] * 4
