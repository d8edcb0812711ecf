"""The products of a graph that can be made of integers, and what goes into them on calibration batches.

A product is known by what it works on: one row for each token, in every batch. One that makes a row for each pooled
vector, or works on slots, is none of them.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from service.packing import PackedBatch
from service.request import Float32Array

# Of an activation, spread over all calibration batches. More of them change no decision.
_SAMPLED_ROWS = 512
# What no value behind these operators is below; GELU's two forms have their lowest point within 1e-4 of each other.
_LOWEST = {"Gelu": -0.1701, "Relu": 0.0}


@dataclass(frozen=True, slots=True)
class Product:
    """A MatMul or Gemm with a constant weight.

    `weight` is the initializer's name; `content` its digest, which tells a weight that several layers share. `bias` is
    the initializer that is added next: by the Gemm itself, or by the only user of what a MatMul makes. `label` is the
    bias's name in the checkpoint, since the weight's is gone once it is turned; without one it is the output's.
    """

    output: str
    activation: str
    weight: str
    content: str
    is_transposed: bool
    is_gemm: bool
    bias: str | None
    label: str

    def read_weight(self, initializers: dict[str, onnx.TensorProto]) -> Float32Array:
        """The weight as it is multiplied, (K, N)."""
        weight = numpy_helper.to_array(initializers[self.weight])
        return weight.T if self.is_transposed else weight


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """Sampled rows (R, K) of an activation, how many axes it has, and what no value of it can be below, if anything."""

    rows: Float32Array
    num_axes: int
    lowest: float | None


def find_products(graph: onnx.GraphProto) -> list[Product]:
    """All products of an activation with a constant matrix, in the order of the graph."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            users[name].append(node)
    return [
        _describe(node, initializers, users)
        for node in graph.node
        if _is_product(node) and _is_matrix(initializers.get(node.input[1]))
    ]


def collect_activations(path: Path, names: Iterable[str], batches: Sequence[PackedBatch]) -> dict[str, Activation]:
    """What the named activations are on calibration batches; those that are not one row for each token are left out."""
    model = onnx.load(path, load_external_data=False)
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    names = sorted(set(names))
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = open_beside(model, path.parent)
    every = -(-sum(batch.num_tokens for batch in batches) // _SAMPLED_ROWS)
    found: dict[str, list[Float32Array]] = {name: [] for name in names}
    axes: dict[str, int] = {}
    for batch in batches:
        for name, value in zip(names, session.run(names, feeds_of(model.graph, batch)), strict=True):
            if name in found and value.shape[:-1] in ((batch.num_tokens,), (1, batch.num_tokens)):
                axes[name] = value.ndim
                found[name].append(value.reshape(-1, value.shape[-1])[::every].copy())  # a view would keep all of it
            else:
                found.pop(name, None)
    return {
        name: Activation(np.concatenate(rows), axes[name], _LOWEST.get(makers.get(name, "")))
        for name, rows in found.items()
    }


def feeds_of(graph: onnx.GraphProto, batch: PackedBatch) -> dict[str, object]:
    """The inputs that a graph declares, of a batch."""
    return {value.name: getattr(batch, value.name) for value in graph.input}


def group_products(products: Iterable[Product]) -> list[list[Product]]:
    """Those that must be treated alike: they have an activation or a weight in common, or are tied through others."""
    groups: list[list[Product]] = []
    for product in products:
        tied = [group for group in groups if any(_is_tied(product, other) for other in group)]
        groups = [group for group in groups if group not in tied]
        groups.append([*(other for group in tied for other in group), product])
    return groups


def _is_tied(one: Product, other: Product) -> bool:
    return one.activation == other.activation or one.content == other.content


def _is_product(node: onnx.NodeProto) -> bool:
    if node.op_type == "MatMul":
        return True
    settings = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    is_plain = settings.get("alpha", 1.0) == settings.get("beta", 1.0) == 1.0 and not settings.get("transA", 0)
    return node.op_type == "Gemm" and is_plain


def _is_matrix(tensor: onnx.TensorProto | None) -> bool:
    return tensor is not None and len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT


def _describe(
    node: onnx.NodeProto, initializers: dict[str, onnx.TensorProto], users: dict[str, list[onnx.NodeProto]]
) -> Product:
    vectors = {name for name, tensor in initializers.items() if len(tensor.dims) == 1}
    next_nodes = users[node.output[0]]
    bias = None
    if node.op_type == "Gemm":
        bias = node.input[2] if len(node.input) > 2 else None
    elif len(next_nodes) == 1 and next_nodes[0].op_type == "Add":
        bias = next((name for name in next_nodes[0].input if name in vectors), None)
    # Equal biases, as of untrained models, are one initializer under one of their names.
    is_named = len(users[bias or ""]) == 1
    settings = {attribute.name: attribute.i for attribute in node.attribute}
    weight = initializers[node.input[1]]
    is_transposed = bool(settings.get("transB", 0))
    return Product(
        output=node.output[0],
        activation=node.input[0],
        weight=node.input[1],
        content=hashlib.sha256(repr((is_transposed, *weight.dims)).encode() + weight.raw_data).hexdigest()[:16],
        is_transposed=is_transposed,
        is_gemm=node.op_type == "Gemm",
        bias=bias,
        label=bias.removesuffix(".bias") if bias is not None and is_named else node.output[0],
    )


def open_beside(model: onnx.ModelProto, weights: Path) -> ort.InferenceSession:
    """Open a graph that is not on disk, whose weights are, in a directory."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
