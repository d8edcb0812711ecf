"""Which products may be rounded, and which had better not: what each alone does to the answer.

The error that rounding makes in a product says little of it. On MiniLM the attention's output projection has the
largest relative error and harms least, because it is added to a residual many times its size. So the error is carried
through: in one fp32 graph every product gets an input that is added to it, and run after run, one group's products are
given the error that rounding would make, the others nothing.
"""

from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto
from onnx.helper import make_node, make_tensor_value_info
from onnxruntime import InferenceSession

from export.integers import Group
from export.products import feeds_of, open_beside
from export.quality import cosines_of, judged_vectors
from export.rounding import round_product
from service.bundle import Task
from service.engine import POOLED, TOKENS, Outputs
from service.packing import PackedBatch
from service.request import Float32Array

_NO_ERROR = np.zeros(1, np.float32)


def rank_groups(fp32_graph: Path, groups: Sequence[Group], batch: PackedBatch, task: Task) -> list[Group]:
    """The groups; those first that turn the answers to a batch most when they alone are rounded."""
    model = onnx.load(fp32_graph)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    weights = {product.output: product.read_weight(initializers) for group in groups for product in group.products}
    feeds = feeds_of(model.graph, batch) | {_error(output): _NO_ERROR for output in weights}
    names = sorted({product.activation for group in groups for product in group.products})
    session = open_beside(_with_errors(fp32_graph, weights, names), fp32_graph.parent)
    activations = dict(zip(names, session.run(names, feeds), strict=True))
    expected = run_judged(session, feeds, batch, task)
    losses = []
    for group in groups:
        errors = {
            _error(product.output): _rounding_error(activations[product.activation], weights[product.output], group)
            for product in group.products
        }
        losses.append(1 - cosines_of(run_judged(session, feeds | errors, batch, task), expected).mean())
    return [groups[index] for index in np.argsort(losses, kind="stable")[::-1]]


def run_judged(session: InferenceSession, feeds: dict[str, object], batch: PackedBatch, task: Task) -> Float32Array:
    """A session's answers to a batch, as they are judged."""
    return judged_vectors(Outputs(*session.run([POOLED, TOKENS], feeds)), batch, task)


def _with_errors(path: Path, outputs: Container[str], activations: Iterable[str]) -> onnx.ModelProto:
    """The graph with an error to be added to each product, and with activations among its outputs."""
    model = onnx.load(path, load_external_data=False)
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        output = node.output[0]
        if output in outputs:
            node.output[0] = f"{output}/exact"
            nodes.append(make_node("Add", [node.output[0], _error(output)], [output]))
            model.graph.input.append(make_tensor_value_info(_error(output), TensorProto.FLOAT, None))
    changed = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(changed)
    model.graph.output.extend(make_tensor_value_info(name, TensorProto.FLOAT, None) for name in activations)
    return model


def _error(output: str) -> str:
    return f"{output}/error"


def _rounding_error(value: Float32Array, weight: Float32Array, group: Group) -> Float32Array:
    rows = value.reshape(-1, value.shape[-1])
    error: Float32Array = round_product(rows, weight, group.migration) - rows @ weight
    return error.reshape(*value.shape[:-1], -1)
