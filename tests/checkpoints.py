"""Tiny checkpoints of every family: random weights, a tokenizer of characters, in the layout that transformers saves.

`write_checkpoint("roberta", directory)` for one; FAMILIES for all that are supported. Weights are large enough that
attention is far from uniform.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 200
PAD = 1

# The usual 0.02 leaves attention of this width all but uniform. With 0.3 PyTorch's own float32 is up to 1e-5 off on
# some texts, which is all that parity allows.
_WEIGHTS = 0.2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": _WEIGHTS,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


@dataclass(frozen=True, slots=True)
class Maker:
    """The class names of a family in transformers, without their endings, and what its configuration is given."""

    name: str
    sizes: dict[str, Any] = field(default_factory=lambda: _SIZES)
    heads: tuple[str, ...] = ("ForMaskedLM", "ForSequenceClassification")

    def configure(self, **changes: Any) -> PreTrainedConfig:
        """A configuration of 2 layers of width 32."""
        config_class: Callable[..., PreTrainedConfig] = getattr(transformers, f"{self.name}Config")
        return config_class(**(self.sizes | changes))

    def build(self, head: str = "Model", **changes: Any) -> PreTrainedModel:
        """A model with random weights; `head` is the class name's ending."""
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, f"{self.name}{head}")(self.configure(**changes))
        with torch.no_grad():  # norms and biases start as ones and zeros, behind which a mistake could hide
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.train(False)
        return model


FAMILIES: dict[str, Maker] = {
    "bert": Maker("Bert"),
    "roberta": Maker("Roberta", _SIZES | {"type_vocab_size": 1}),
    "xlm-roberta": Maker("XLMRoberta", _SIZES | {"type_vocab_size": 1}),
    "camembert": Maker("Camembert", _SIZES | {"type_vocab_size": 1}),
    "distilbert": Maker(
        "DistilBert",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 64,
            "initializer_range": _WEIGHTS,
            "pad_token_id": PAD,
        },
    ),
    "electra": Maker(
        "Electra",
        _SIZES | {"embedding_size": 16},
        heads=("ForMaskedLM", "ForPreTraining", "ForSequenceClassification"),
    ),
    "mpnet": Maker("MPNet"),
    "deberta-v2": Maker(
        "DebertaV2",
        _SIZES
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    "albert": Maker(
        "Albert", _SIZES | {"embedding_size": 16}, heads=("ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
    ),
    "gpt2": Maker(
        "GPT2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "initializer_range": _WEIGHTS,
            "pad_token_id": PAD,
        },
        heads=("LMHeadModel", "ForSequenceClassification", "DoubleHeadsModel"),
    ),
    "nomic_bert": Maker("NomicBert"),
    "jina_embeddings_v3": Maker("JinaEmbeddingsV3", _SIZES | {"type_vocab_size": 1}),
    "eurobert": Maker("EuroBert", _SIZES | {"num_key_value_heads": 2, "mask_token_id": 4}),
    # A global layer between two with windows of 4 columns either way.
    "modernbert": Maker(
        "ModernBert",
        _SIZES
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "local_attention": 8,
            "cls_token_id": 2,
            "sep_token_id": 3,
        },
    ),
    # The head size is not the width by the number of heads.
    "qwen3": Maker(
        "Qwen3",
        _SIZES | {"num_key_value_heads": 2, "head_dim": 12},
        heads=("ForCausalLM", "ForSequenceClassification"),
    ),
}


def write_checkpoint(family: str, directory: Path, *, head: str = "Model", **changes: Any) -> PreTrainedModel:
    """Write model and tokenizer; returns the model that was written."""
    model = FAMILIES[family].build(head, **changes)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


def write_tokenizer(directory: Path, size: int = VOCABULARY) -> None:
    """One id per character, `size` ids in all; id 1 is the pad token."""
    pieces = ["[UNK]", "[PAD]", "[BOS]", "[EOS]", "[MASK]", *string.printable]
    pieces += [f"[unused{index}]" for index in range(size - len(pieces))]
    tokenizer = Tokenizer(WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer_class: Any = PreTrainedTokenizerFast  # untyped
    tokenizer_class(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(directory)
