"""Fixtures for the exporter's tests: a copy of the tiny checkpoint that a test may spoil, and a ragged batch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from export.attention import Packing
from service.packing import PackedBatch, pack
from service.request import TokenSequence

# Primes, one token, the longest last but one: nothing lines up by accident.
LENGTHS = (5, 1, 3, 11, 2)


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, in a directory called tiny."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoints" / "tiny"))


@pytest.fixture
def batch() -> PackedBatch:
    """Five ragged sequences over a vocabulary of 50."""
    rng = np.random.default_rng(1)
    return pack(
        [TokenSequence(rng.integers(0, 50, size), np.arange(size), rng.integers(0, 2, size)) for size in LENGTHS]
    )


@pytest.fixture
def packing(batch: PackedBatch) -> Packing:
    """The batch's index maps, for PyTorch."""
    arrays = (batch.pad_index, batch.unpad_index, batch.lengths, batch.position_ids)
    return Packing(*(torch.from_numpy(array) for array in arrays))
