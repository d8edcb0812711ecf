"""int8 for the CPU: the products with constant weights become products of integers; all else stays in fp32.

Attention, norms, softmax, embeddings, pooling and heads on pooled vectors are not touched. What is done to a product,
and why, is in rounding.py; the nodes are in integers.py.

If the whole graph misses its cosine on the calibration batches, products are taken back to fp32, those first that harm
most (sensitivity.py) and twice as many each time, until it holds or half of them are back. So the time is bounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from export.errors import ExportError
from export.integers import Group, write_integers
from export.products import (
    Activation,
    Product,
    collect_activations,
    feeds_of,
    find_products,
    group_products,
    open_beside,
)
from export.quality import cosines_of
from export.rounding import Migration, choose_migration
from export.sensitivity import rank_groups, run_judged
from service.bundle import Task
from service.packing import PackedBatch, pack
from service.request import Float32Array, TokenSequence

# Held-out text is a little harder than the text that was calibrated on; the gate asks for 0.99.
CALIBRATION_COSINE = 0.992
_BATCH = 8


@dataclass(frozen=True, slots=True)
class QuantizedProduct:
    """A product of integers: the share of its energy that rounding takes, and the strength of the migration."""

    name: str
    error: float
    strength: float
    is_one_sided: bool


@dataclass(frozen=True, slots=True)
class QuantizationRecord:
    """What was made of integers, what was taken back, and the smallest cosine with fp32 on the calibration batches."""

    products: tuple[QuantizedProduct, ...]
    kept_in_fp32: tuple[str, ...]
    calibration_tokens: int
    calibration_cosine: float


def calibration_batches(sequences: Sequence[TokenSequence]) -> list[PackedBatch]:
    """Sequences in batches that are small enough to keep everything that happens in them."""
    return [pack(sequences[start : start + _BATCH]) for start in range(0, len(sequences), _BATCH)]


def quantize(
    fp32_graph: Path,
    int8_graph: Path,
    batches: Sequence[PackedBatch],
    *,
    task: Task = "embedding",
    min_cosine: float = CALIBRATION_COSINE,
) -> QuantizationRecord:
    """Write `int8_graph`, with its weights beside it in `<int8_graph>.data`. Raises `ExportError`.

    The same graph and batches give the same file.
    """
    groups, activations = choose_groups(fp32_graph, batches)
    expected = _answer(fp32_graph, batches, task)
    kept = 0
    while True:
        write_integers(fp32_graph, int8_graph, groups[kept:], activations)
        cosine = float(cosines_of(_answer(int8_graph, batches, task), expected).min())
        if cosine >= min_cosine or 2 * max(kept, 1) > len(groups) // 2:
            break
        if kept == 0:
            groups = rank_groups(fp32_graph, groups, batches[0], task)
        kept = 2 * kept or 1
    return QuantizationRecord(
        products=tuple(_record(group, product) for group in groups[kept:] for product in group.products),
        kept_in_fp32=tuple(product.label for group in groups[:kept] for product in group.products),
        calibration_tokens=sum(batch.num_tokens for batch in batches),
        calibration_cosine=cosine,
    )


def _record(group: Group, product: Product) -> QuantizedProduct:
    migration = group.migration
    return QuantizedProduct(product.label, migration.error, migration.strength, migration.lowest is not None)


def choose_groups(fp32_graph: Path, batches: Sequence[PackedBatch]) -> tuple[list[Group], dict[str, Activation]]:
    """Every product of tokens with its migration. Raises `ExportError`."""
    graph = onnx.load(fp32_graph).graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    products = find_products(graph)
    names = {product.activation for product in products}
    activations = collect_activations(fp32_graph, names, batches) if names else {}
    products = [product for product in products if product.activation in activations]
    if not products:
        raise ExportError(f"{fp32_graph.name}: no product of tokens with a constant weight; int8 would change nothing")
    groups = [Group(members, _migrate(members, activations, initializers)) for members in group_products(products)]
    return groups, activations


def _migrate(
    members: Sequence[Product], activations: dict[str, Activation], initializers: dict[str, onnx.TensorProto]
) -> Migration:
    names = sorted({product.activation for product in members})
    bounds = {activations[name].lowest for name in names}
    pairs = [(names.index(product.activation), product.read_weight(initializers)) for product in members]
    rows = [activations[name].rows for name in names]
    return choose_migration(rows, pairs, bounds.pop() if len(bounds) == 1 else None)


def _answer(path: Path, batches: Sequence[PackedBatch], task: Task) -> Float32Array:
    graph = onnx.load(path, load_external_data=False)
    session = open_beside(graph, path.parent)
    return np.concatenate([run_judged(session, feeds_of(graph.graph, batch), batch, task) for batch in batches])
