"""The packed forward and its export to ONNX.

Inputs are those of `service.packing.PackedBatch`, outputs token_embeddings (T, E) and sentence_embedding (B, N). The
graph leaves here with plain operators plus the fused attention; ONNX Runtime fuses the rest as suits the device when it
loads it, for which opset 20's Gelu is needed.

Query, key and value are three products and three gathers, because nothing simpler to run was found. As parts of whole
runs on one thread of ONNX Runtime 1.32, on batches from 1 x 12 to 4 x 128, with equal bits: one product of width 3E
with one gather and a split took 0.97 to 1.02 times as long (MiniLM-L6, and 4 layers of width 768; in int8 0.97 to
1.05), rows of (T, E) with Gemm in place of (1, T, E) with MatMul and Add 0.98 to 1.01 times. The products are at the
core's peak.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules.common import reshape_reshape_rule
from torch import Tensor, nn

from export.attention import OPERATOR, OPERATOR_DOMAIN, Packing
from export.errors import ExportError
from export.heads import Head
from service.engine import first_line

OPSET = 20
OUTPUTS = ("token_embeddings", "sentence_embedding")

_TOKENS, _SEQUENCES, _LONGEST = "tokens", "sequences", "longest"
_VECTORS = "embeddings"  # (T, input_size), in place of token_ids
_AXES = {
    "token_ids": (_TOKENS,),
    "position_ids": (_TOKENS,),
    "pad_index": (_SEQUENCES, _LONGEST),
    "unpad_index": (_TOKENS,),
    "lengths": (_SEQUENCES,),
    "token_type_ids": (_TOKENS,),
}
# Different primes for every axis, so that the exporter cannot take two of them for one or one for a constant.
_EXAMPLE_TOKENS, _EXAMPLE_SEQUENCES, _EXAMPLE_LONGEST = 13, 3, 7


class PackedModel(nn.Module):
    """An encoder with its head, on a packed batch.

    `encoder(token_ids, position_ids, packing=...)` maps (T,) to (T, E); it takes `token_type_ids` if `has_token_types`.
    Where `input_size` is not 0 its first argument is vectors, (T, input_size).
    """

    def __init__(self, encoder: nn.Module, head: Head, *, has_token_types: bool, input_size: int = 0) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.has_token_types = has_token_types
        self.input_size = input_size

    def forward(
        self,
        *,
        token_ids: Tensor | None = None,
        embeddings: Tensor | None = None,
        position_ids: Tensor,
        pad_index: Tensor,
        unpad_index: Tensor,
        lengths: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        packing = Packing(pad_index, unpad_index, lengths, position_ids)
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        inputs = token_ids if embeddings is None else embeddings
        rows = self.encoder(inputs, position_ids, packing=packing, **types)  # (T, E)
        return rows, self.head(rows, packing, inputs)


def export_graph(model: PackedModel, path: Path) -> None:
    """Write `path` and its weights beside it, in `<path>.data`."""
    program = _trace(model.eval())
    rewrite(program.model, RewriteRuleSet(_RULES, commute=True))
    _strip_metadata(program)
    program.save(path, external_data=True)


# transformers splits rows into heads, the seam joins them again: two Reshape nodes in a row where one will do.
# torch's rsqrt becomes a Reciprocal, and ONNX Runtime knows an RMS norm by its division. Fused it takes 2 to 3% off a
# whole Qwen3-like model in fp32 and 10% in int8 (width 1024, 8 to 512 tokens, one thread, ONNX Runtime 1.32).
_RULES = [
    reshape_reshape_rule,
    RewriteRule(lambda op, x, y: op.Mul(x, op.Reciprocal(y)), lambda op, x, y: op.Div(x, y), name="MulReciprocal"),
]


def _trace(model: PackedModel) -> torch.onnx.ONNXProgram:
    axes = _input_axes(has_token_types=model.has_token_types, input_size=model.input_size)
    inputs = _example_inputs(axes)
    try:
        with _silenced_exporter(), torch.no_grad():
            program = torch.onnx.export(
                model,
                kwargs=inputs,
                input_names=list(inputs),
                output_names=list(OUTPUTS),
                dynamic_shapes={
                    name: {i: axis for i, axis in enumerate(axes[name]) if isinstance(axis, str)} for name in inputs
                },
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # whatever the model's own code raises, wrapped by the exporter or not
        cause = error.__cause__ or error
        # The one torch operator of attention; the exporter has no form of it that is dynamic in every dimension.
        hint = "; attention must go through export.attention.attend" if "scaled_dot_product" in str(error) else ""
        raise ExportError(
            f"torch {torch.__version__} cannot export this model: {type(cause).__name__}: {first_line(cause)}{hint}"
        ) from error
    if program is None:
        raise ExportError(f"torch {torch.__version__} exported nothing; install the version in constraints.txt")
    return program


def check_graph(path: Path, *, num_layers: int, has_token_types: bool, input_size: int = 0) -> int:
    """The number of fused attention nodes in the file. Raises `ExportError` if anything about it is not as promised."""
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path, load_external_data=False).graph
    expected = _input_axes(has_token_types=has_token_types, input_size=input_size)
    found = {value.name: _axes_of(value) for value in graph.input}
    if found != expected:
        raise ExportError(f"{path.name}: its inputs are {found}, expected {expected}; an axis was made constant")
    outputs = {value.name: _axes_of(value)[:1] for value in graph.output}
    if outputs != {"token_embeddings": (_TOKENS,), "sentence_embedding": (_SEQUENCES,)}:
        raise ExportError(f"{path.name}: its outputs are {outputs}, which are not one row per token and per sequence")
    return count_fused(path, num_layers)


def count_fused(path: Path, num_layers: int) -> int:
    """The number of fused attention nodes in a graph file. Raises `ExportError` unless there is one per layer.

    A model that does its attention outside the seam has fewer, and the rest of it shows as Softmax.
    """
    model = onnx.load(path, load_external_data=False)
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    counts = Counter((node.domain, node.op_type) for node in _with_bodies(nodes))
    num_fused, num_softmax = counts[OPERATOR_DOMAIN, OPERATOR], counts["", "Softmax"]
    if num_fused != num_layers or num_softmax:
        raise ExportError(
            f"{path.name}: {num_fused} fused attention nodes and {num_softmax} Softmax for {num_layers} layers; "
            "expected one fused node per layer and no Softmax: this model does not do its attention through the seam"
        )
    return num_fused


def _with_bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those in the bodies of If, Loop and Scan."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _with_bodies(body.node)


def write_poisoned(path: Path, destination: Path) -> int:
    """Write a copy of a graph whose token embedding has one more row, of NaN. Returns the token id of that row."""
    model = onnx.load(path)
    embedding = _token_embedding(model.graph)
    table = numpy_helper.to_array(embedding)  # (vocabulary, E)
    poisoned = np.concatenate([table, np.full_like(table[:1], np.nan)])
    embedding.CopyFrom(numpy_helper.from_array(poisoned, embedding.name))
    onnx.save(model, destination, save_as_external_data=True, location=f"{destination.name}.data")
    return len(table)


_SAME_VALUES = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def _token_embedding(graph: onnx.GraphProto) -> onnx.TensorProto:
    """What the first Gather takes rows from by token_ids, or by another shape of them.

    Not by what is computed from them: where positions count tokens, position embeddings are looked up by that.
    """
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    ids = {"token_ids"}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[1] in ids and node.input[0] in initializers:
            return initializers[node.input[0]]
        if node.op_type in _SAME_VALUES and node.input[0] in ids:
            ids |= set(node.output)
    raise ExportError("the exported graph looks no token ids up in a table; report it with the checkpoint's name")


def _strip_metadata(program: torch.onnx.ONNXProgram) -> None:
    """Drop what the exporter notes on every node and value: stack traces, with paths of the machine that exported."""
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for values in (program.model.graph.inputs, program.model.graph.initializers.values()):
        for value in values:
            value.metadata_props.clear()
    program.model.metadata_props.clear()
    program.model.graph.metadata_props.clear()


def _input_axes(*, has_token_types: bool, input_size: int) -> dict[str, tuple[str | int, ...]]:
    """The axes of each input that the graph has; a number is one that never changes."""
    axes: dict[str, tuple[str | int, ...]] = {_VECTORS: (_TOKENS, input_size)} if input_size else {}
    left_out = {"token_ids" if input_size else "", "" if has_token_types else "token_type_ids"}
    return axes | {name: names for name, names in _AXES.items() if name not in left_out}


def _example_inputs(axes: dict[str, tuple[str | int, ...]]) -> dict[str, Tensor]:
    sizes = {_TOKENS: _EXAMPLE_TOKENS, _SEQUENCES: _EXAMPLE_SEQUENCES, _LONGEST: _EXAMPLE_LONGEST}
    types = {_VECTORS: torch.float32, "lengths": torch.int32}
    inputs = {
        name: torch.zeros(
            [sizes[axis] if isinstance(axis, str) else axis for axis in names], dtype=types.get(name, torch.int64)
        )
        for name, names in axes.items()
    }
    inputs["lengths"] += 1
    return inputs


def _axes_of(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    return tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)


@contextmanager
def _silenced_exporter() -> Iterator[None]:
    """Drop the exporter's warnings: they are about its own insides. Its errors pass, and the file is checked after."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
