"""Packed graphs small enough to know every number of: pure onnx, no PyTorch, a few kilobytes.

`lookup_graph` is an embedding table, so the right answer is read off the table. `attention_graph` puts ONNX Runtime's
fused operator behind the table, in the place where an exported model has it.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from service.request import TokenSequence

VOCAB_SIZE, HIDDEN_SIZE, NUM_HEADS = 11, 4, 2
# Eighths: exact in float32, however they are added up.
TABLE: NDArray[np.float32] = (np.random.default_rng(7).integers(-16, 16, (VOCAB_SIZE, HIDDEN_SIZE)) / 8).astype(
    np.float32
)

_LOOKUP = [helper.make_node("Gather", ["table", "token_ids"], ["token_embeddings"])]
_ATTENTION = [
    helper.make_node("Gather", ["table", "token_ids"], ["rows"]),  # (T, E)
    helper.make_node("Gather", ["rows", "pad_index"], ["padded"]),  # (B, S, E)
    helper.make_node(
        "MultiHeadAttention",
        ["padded", "padded", "padded", "", "lengths"],
        ["attended"],
        domain="com.microsoft",
        num_heads=NUM_HEADS,
    ),
    helper.make_node("Reshape", ["attended", "flat"], ["slots"]),  # (B*S, E)
    helper.make_node("Gather", ["slots", "unpad_index"], ["token_embeddings"]),
]
# The vector of a sequence is that of its first token.
_POOLING = [
    helper.make_node("Gather", ["pad_index", "first"], ["first_rows"], axis=1),  # (B,)
    helper.make_node("Gather", ["token_embeddings", "first_rows"], ["sentence_embedding"]),
]


def sequence(*token_ids: int) -> TokenSequence:
    """At positions 0, 1, 2, ..., of type 0."""
    columns = np.arange(len(token_ids))
    return TokenSequence(np.array(token_ids, np.int64), columns, np.zeros_like(columns))


def lookup_graph(path: Path, *, has_token_types: bool = True) -> Path:
    """Write a graph whose token_embeddings are TABLE[token_ids]; the other inputs are there and are not looked at."""
    return _write(path, _LOOKUP, has_token_types)


def attention_graph(path: Path) -> Path:
    """Write a graph of one fused self-attention over TABLE[token_ids], without projections."""
    return _write(path, _ATTENTION, has_token_types=True)


def _write(path: Path, nodes: list[onnx.NodeProto], has_token_types: bool) -> Path:
    inputs: dict[str, tuple[int, tuple[str, ...]]] = {
        "token_ids": (TensorProto.INT64, ("T",)),
        "position_ids": (TensorProto.INT64, ("T",)),
        "pad_index": (TensorProto.INT64, ("B", "S")),
        "unpad_index": (TensorProto.INT64, ("T",)),
        "lengths": (TensorProto.INT32, ("B",)),
    }
    if has_token_types:
        inputs["token_type_ids"] = (TensorProto.INT64, ("T",))
    graph = helper.make_graph(
        [*nodes, *_POOLING],
        "tiny",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [
            helper.make_tensor_value_info("token_embeddings", TensorProto.FLOAT, ("T", HIDDEN_SIZE)),
            helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ("B", HIDDEN_SIZE)),
        ],
        [
            numpy_helper.from_array(TABLE, "table"),
            numpy_helper.from_array(np.array([-1, HIDDEN_SIZE]), "flat"),
            numpy_helper.from_array(np.array(0), "first"),
        ],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path
