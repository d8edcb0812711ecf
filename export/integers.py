"""Writes products of integers in the place of products of floats.

The nodes are written by hand, because ONNX Runtime's own quantizer knows no scale for each row: its dynamic one
measures the whole batch, so that an answer depends on batch mates.

    x -> Mul factors -> Abs -> ReduceMax -> a scale for each row (T,)
                     -> QuantizeLinear by rows -> MatMulIntegerToFloat -> Mul by the rows' scales -> as before

Behind a GELU it is Add in the place of Abs. What is rounded for one product is not rounded again for the next.
A row that is NaN has the scale NaN, and so NaN comes out again: the server tells a failed sequence by it. A row of
zeros has the scale 0, which makes 0 of any integer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.helper import make_node

from export.products import Activation, Product
from export.rounding import SYMMETRIC_ZERO, Migration, RoundedWeight, round_weight
from service.request import Float32Array

_DOMAIN = "com.microsoft"
# From a weight (K, N) and its activation's migration.
RoundWeight = Callable[[Float32Array, Migration], RoundedWeight]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Products that have one migration, because they share an activation or a weight."""

    products: Sequence[Product]
    migration: Migration


def write_integers(
    source: Path,
    path: Path,
    groups: Sequence[Group],
    activations: Mapping[str, Activation],
    round_weight: RoundWeight = round_weight,
) -> None:
    """Write a copy of a graph with the products of these groups in integers; its weights go to `<path>.data`."""
    model = onnx.load(source)
    _Rewriter(model.graph, activations, round_weight).rewrite(groups)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)  # onnx appends
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
    onnx.checker.check_model(path)


class _Rewriter:
    def __init__(
        self, graph: onnx.GraphProto, activations: Mapping[str, Activation], round_weight: RoundWeight
    ) -> None:
        self._graph = graph
        self._activations = activations
        self._round_weight = round_weight
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        # Of an activation: its integers (T, K) and the scales of its rows (T, 1).
        self._rounded: dict[str, tuple[str, str]] = {}
        # By a product's output: its old bias and the one with the product's offset in it.
        self._new_biases: dict[str, tuple[str, str]] = {}

    def rewrite(self, groups: Sequence[Group]) -> None:
        chosen = {product.output: (product, group.migration) for group in groups for product in group.products}
        self._add_zeros()
        for node in self._graph.node:
            if node.output[0] in chosen:
                self._add_product(*chosen[node.output[0]])
            else:
                self._nodes.append(self._with_new_bias(node))
        used = {name for node in self._nodes for name in node.input}
        initializers = [tensor for name, tensor in self._initializers.items() if name in used]
        nodes = list(self._nodes)
        del self._graph.node[:], self._graph.initializer[:], self._graph.value_info[:]
        self._graph.node.extend(nodes)
        self._graph.initializer.extend(initializers)

    def _add(self, operator: str, inputs: Sequence[str], output: str, domain: str = "", **settings: Any) -> str:
        name = f"int8/{output}"
        self._nodes.append(make_node(operator, inputs, [name], name=name, domain=domain, **settings))
        return name

    def _constant(self, name: str, value: "NDArray[Any] | np.generic") -> str:
        name = f"int8/{name}"
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def _add_zeros(self) -> None:
        """What stands for 0, once for each token: QuantizeLinear wants as many of them as scales."""
        shape = self._add("Shape", ["unpad_index"], "tokens")
        zero = numpy_helper.from_array(np.array([SYMMETRIC_ZERO], np.uint8))
        self._add("ConstantOfShape", [shape], "zeros", value=zero)

    def _add_rounded(self, name: str, migration: Migration) -> tuple[str, str]:
        """The integers of an activation and the scales of its rows."""
        if name in self._rounded:
            return self._rounded[name]
        rows = name
        if self._activations[name].num_axes != 2:
            shape = self._constant(f"rows/{len(migration.factors)}", np.array([-1, len(migration.factors)]))
            rows = self._add("Reshape", [name, shape], f"{name}/rows")
        moved = rows
        if migration.strength:
            moved = self._add("Mul", [rows, self._constant(f"{name}/factors", migration.factors)], f"{name}/moved")
        zeros = []
        if migration.lowest is None:
            sizes = self._add("Abs", [moved], f"{name}/sizes")
            zeros = ["int8/zeros"]
        else:
            start = self._constant(f"{name}/start", -np.float32(migration.lowest) * migration.factors)
            moved = sizes = self._add("Add", [moved, start], f"{name}/sizes")
        last = self._constant("last", np.array([-1]))
        largest = self._add("ReduceMax", [sizes, last], f"{name}/largest", keepdims=1)  # (T, 1)
        step = self._constant(f"step/{migration.steps}", np.float32(1 / migration.steps))
        steps = self._add("Mul", [largest, step], f"{name}/steps")
        # ONNX Runtime's maximum passes over a NaN. The sum does not; 0 x NaN is NaN.
        total = self._add("ReduceSum", [sizes, last], f"{name}/total", keepdims=1)  # (T, 1)
        nothing = self._add("Mul", [total, self._constant("nothing", np.float32(0))], f"{name}/nothing")
        scales = self._add("Add", [steps, nothing], f"{name}/scales")
        flat = self._add("Reshape", [scales, self._constant("flat", np.array([-1]))], f"{name}/flat")  # (T,)
        integers = self._add("QuantizeLinear", [moved, flat, *zeros], f"{name}/integers", axis=0)
        self._rounded[name] = integers, scales
        return self._rounded[name]

    def _add_product(self, product: Product, migration: Migration) -> None:
        integers, scales = self._add_rounded(product.activation, migration)
        weight = self._round_weight(product.read_weight(self._initializers), migration)
        inputs = [
            integers,
            self._constant(f"{product.content}/weight", weight.integers),
            self._constant("one", np.float32(1)),
            self._constant(f"{product.content}/scales", weight.scales),
            self._constant(f"zero/{migration.zero}", np.uint8(migration.zero)),
        ]
        name = product.output
        found = self._add("MatMulIntegerToFloat", inputs, f"{name}/unscaled", domain=_DOMAIN)
        found = self._add("Mul", [found, scales], f"{name}/scaled")
        if self._activations[product.activation].num_axes != 2:
            shape = self._constant(f"slots/{len(weight.scales)}", np.array([1, -1, len(weight.scales)]))
            found = self._add("Reshape", [found, shape], f"{name}/shaped")
        bias = self._bias(product, weight.offset)
        if bias is not None and (product.is_gemm or product.bias is None):
            found = self._add("Add", [found, bias], f"{name}/shifted")
        self._nodes[-1].output[0] = name

    def _bias(self, product: Product, offset: Float32Array | None) -> str | None:
        """What is added to a product: its bias, with the product's offset in it."""
        if offset is None or product.bias is None:
            return product.bias if offset is None else self._constant(f"{product.output}/bias", offset)
        bias = numpy_helper.to_array(self._initializers[product.bias])
        new = self._constant(f"{product.output}/bias", bias + offset)
        self._new_biases[product.output] = product.bias, new
        return new

    def _with_new_bias(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The node; if it adds the bias to a product that has an offset, with the new bias."""
        found = next((self._new_biases[name] for name in node.input if name in self._new_biases), None)
        if found is None:
            return node
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [found[1] if name == found[0] else name for name in node.input]
        return copy
