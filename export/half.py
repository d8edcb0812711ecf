"""fp16 for CUDA, made from the fp32 graph; what fp16 cannot hold stays in fp32.

fp16 ends at 65504, and an infinity in one layer is a NaN in the next. So a probe runs the fp32 graph on real batches
and notes the largest number on every edge; a node that comes near the end of the range keeps fp32, with casts around.
Pooling and what follows it always do: they are sums over a whole sequence, and their cost is nothing.

The conversion itself is ONNX Runtime's own. Between two nodes that keep fp32 it leaves a cast to fp16 and one back,
which would make the large number infinite after all: those are taken out.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from export.products import feeds_of, open_beside
from service.engine import TOKENS
from service.packing import PackedBatch

# Half of fp16's largest: other inputs than the probe's must have room too.
MAX_PROBED = 65504 / 2
# What hides a key is a constant near float32's end; it becomes fp16's end, which hides the key as well.
_SMALLEST_MASK = 1e30


def write_half(graph: Path, destination: Path, batches: Sequence[PackedBatch]) -> list[str]:
    """Write an fp16 copy of an fp32 graph; returns the nodes that keep fp32 because their numbers are too large."""
    largest = probe(graph, batches)
    model = onnx.load(graph)
    # Not ">= MAX_PROBED": a NaN is not fit for fp16 either.
    too_large = {name for name, value in largest.items() if not value < MAX_PROBED}
    kept = [node.name for node in model.graph.node if too_large & {*node.input, *node.output}]
    blocked = sorted({*kept, *_names_after(model.graph, TOKENS)})
    converted = convert_float_to_float16(model, keep_io_types=True, node_block_list=blocked)
    _join_kept(converted.graph)
    # The converter leaves types on edges that they no longer have, and casts of outputs behind nodes that need them.
    del converted.graph.value_info[:]
    sorted_model = onnx_ir.from_proto(converted)
    sorted_model.graph.sort()
    onnx_ir.save(sorted_model, destination, external_data=f"{destination.name}.data")
    return kept


def probe(graph: Path, batches: Sequence[PackedBatch]) -> dict[str, float]:
    """The largest absolute number on each float edge of a graph, masks aside, over all batches."""
    model = onnx.load(graph, load_external_data=False)
    edges = _float_edges(model.graph)
    _add_maxima(model.graph, edges)
    session = open_beside(model, graph.parent)
    found = [session.run([_maximum(name) for name in edges], feeds_of(model.graph, batch)) for batch in batches]
    return {name: float(np.max([values[place] for values in found])) for place, name in enumerate(edges)}


def _float_edges(graph: onnx.GraphProto) -> list[str]:
    values = (*graph.value_info, *graph.output)
    return [value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT]


def _add_maxima(graph: onnx.GraphProto, edges: Iterable[str]) -> None:
    """One number for each edge as an output: the edges themselves would be gigabytes."""
    for name, value in (("probe_mask", _SMALLEST_MASK), ("probe_zero", 0.0)):
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    for name in edges:
        size, is_mask, number = (f"{name}.{part}" for part in ("size", "is_mask", "number"))
        graph.node.extend(
            [
                helper.make_node("Abs", [name], [size]),
                helper.make_node("Greater", [size, "probe_mask"], [is_mask]),
                helper.make_node("Where", [is_mask, "probe_zero", size], [number]),
                helper.make_node("ReduceMax", [number], [_maximum(name)], keepdims=0),
            ]
        )
        graph.output.append(helper.make_tensor_value_info(_maximum(name), TensorProto.FLOAT, []))


def _maximum(name: str) -> str:
    return f"{name}.maximum"


def _join_kept(graph: onnx.GraphProto) -> None:
    """Give a cast to fp32 of a cast to fp16 what the first one was given, if that was fp32."""
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    targets = {name: helper.get_attribute_value(node.attribute[0]) for name, node in casts.items()}
    floats = set(_float_edges(graph))
    originals = {
        name: casts[node.input[0]].input[0]
        for name, node in casts.items()
        if targets[name] == TensorProto.FLOAT
        and targets.get(node.input[0]) == TensorProto.FLOAT16
        and casts[node.input[0]].input[0] in floats
    }
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = originals.get(name, name)
    wanted = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in [node for node in graph.node if node.op_type == "Cast" and node.output[0] not in wanted]:
        graph.node.remove(node)


def _names_after(graph: onnx.GraphProto, edge: str) -> list[str]:
    """The nodes that need an edge, directly or not. Nodes stand in the order in which they run."""
    reached, names = {edge}, []
    for node in graph.node:
        if reached & set(node.input):
            reached |= set(node.output)
            names.append(node.name)
    return names
