"""Ways to int8, for `python -m benchmarks.int8`: ours, and those it was chosen over, in as little code as they take.

Those of ONNX Runtime's own quantizer are given what it calls `per_channel`, a scale for each column of a weight, and
`reduce_range`, 7 bits for a weight: with more than that they saturate on a CPU without VNNI.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.helper import make_node
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

from export.integers import Group, write_integers
from export.products import feeds_of
from export.quantize import calibration_batches, choose_groups, quantize
from export.rounding import Migration, RoundedWeight, round_weight
from export.sensitivity import rank_groups
from service.packing import pack
from service.request import Float32Array, TokenSequence

# Writes an int8 graph (second) of an fp32 graph (first), calibrated on sequences.
Candidate = Callable[[Path, Path, Sequence[TokenSequence]], object]

OURS = "ours: rows, migration, pairs"
_LIBRARY: dict[str, Any] = {
    "op_types_to_quantize": ["MatMul"],
    "per_channel": True,
    "reduce_range": True,
    "weight_type": QuantType.QInt8,
    "extra_options": {"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
}


def _dynamic(source: Path, path: Path, _sequences: Sequence[TokenSequence]) -> None:
    """One scale for the whole batch, measured as it comes."""
    quantize_dynamic(source, path, **_LIBRARY)


_FLOAT_OUTPUTS = {"OpTypesToExcludeOutputQuantization": ["MatMul"]}


def _static(method: CalibrationMethod, **options: Any) -> Candidate:
    """One scale for every batch, measured beforehand."""

    def make(source: Path, path: Path, sequences: Sequence[TokenSequence]) -> None:
        settings = _LIBRARY | {"extra_options": _LIBRARY["extra_options"] | options}
        quantize_static(
            source,
            path,
            _Feeds(source, sequences),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            calibrate_method=method,
            **settings,
        )

    return make


class _Feeds(CalibrationDataReader):  # type: ignore[misc]  # it has no types
    def __init__(self, source: Path, sequences: Sequence[TokenSequence]) -> None:
        graph = onnx.load(source, load_external_data=False).graph
        # In one batch: the library's histograms fail on batches of different shapes.
        self._feeds: Iterator[dict[str, object]] = iter([feeds_of(graph, pack(sequences))])

    def get_next(self) -> dict[str, object] | None:
        return next(self._feeds, None)


def _static_migrated(source: Path, path: Path, sequences: Sequence[TokenSequence]) -> None:
    """Static scales on a graph in which the channels' range has been moved to the weights."""
    migrated = path.parent / "migrated" / "fp32.onnx"
    migrated.parent.mkdir()
    model = onnx.load(source)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = {node.output[0]: node for node in model.graph.node}
    groups, _ = choose_groups(source, calibration_batches(sequences))
    for group in groups:
        for product in group.products:
            factors, moved = group.migration.factors, f"{product.output}/moved"
            model.graph.initializer.append(numpy_helper.from_array(factors, f"{moved}/factors"))
            weight = product.read_weight(initializers) / factors[:, None]
            initializers[product.weight].CopyFrom(numpy_helper.from_array(weight, product.weight))
            node = nodes[product.output]
            index = list(model.graph.node).index(node)
            model.graph.node.insert(index, make_node("Mul", [product.activation, f"{moved}/factors"], [moved]))
            model.graph.node[index + 1].input[0] = moved
    onnx.save(model, migrated, save_as_external_data=True, location=f"{migrated.name}.data")
    _static(CalibrationMethod.MinMax, **_FLOAT_OUTPUTS)(migrated, path, sequences)


def _blocks(source: Path, path: Path, _sequences: Sequence[TokenSequence]) -> None:
    """A scale for each block of 128 along K, also of the activation, which the operator rounds itself."""
    config = DefaultWeightOnlyQuantConfig(block_size=128, is_symmetric=True, accuracy_level=4, bits=8)
    quantizer = MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path), use_external_data_format=True)


def _rows(is_migrated: bool, weights: Callable[[Float32Array, Migration], RoundedWeight], kept: int = 0) -> Candidate:
    """Scales for each row, as ours; without migration, with other weights, or with the worst groups left in fp32."""

    def make(source: Path, path: Path, sequences: Sequence[TokenSequence]) -> None:
        batches = calibration_batches(sequences)
        groups, activations = choose_groups(source, batches)
        if kept:
            groups = rank_groups(source, groups, batches[0], "embedding")
        if not is_migrated:
            groups = [Group(group.products, _without_factors(group.migration)) for group in groups]
        write_integers(source, path, groups[kept:], activations, weights)

    return make


def _without_factors(migration: Migration) -> Migration:
    return dataclasses.replace(migration, factors=np.ones_like(migration.factors), strength=0.0)


def _bits(largest: int) -> Callable[[Float32Array, Migration], RoundedWeight]:
    """Weights up to `largest` each, whatever their neighbours: 64 is safe everywhere, 127 only with VNNI."""

    def round_all(weight: Float32Array, migration: Migration) -> RoundedWeight:
        moved = weight / migration.factors[:, None]
        scales = np.maximum(np.abs(moved).max(0) / largest, 1e-12).astype(np.float32)
        integers = np.rint(moved / scales).astype(np.int8)
        offset = None
        if migration.lowest is not None:
            offset = ((migration.lowest * migration.factors) @ (integers * scales)).astype(np.float32)
        return RoundedWeight(integers, scales, offset)

    return round_all


CANDIDATES: dict[str, Candidate] = {
    OURS: lambda source, path, sequences: quantize(source, path, calibration_batches(sequences)),
    "rows, migration, 4 worst in fp32": _rows(True, round_weight, kept=4),
    "rows, migration, 7 bits": _rows(True, _bits(64)),
    "rows, migration, 8 bits (saturates)": _rows(True, _bits(127)),
    "rows, pairs": _rows(False, round_weight),
    "dynamic, per tensor": _dynamic,
    "static, min-max, outputs too": _static(CalibrationMethod.MinMax),
    "static, min-max": _static(CalibrationMethod.MinMax, **_FLOAT_OUTPUTS),
    "static, min-max, migration": _static_migrated,
    "static, percentile 99.99": _static(CalibrationMethod.Percentile, CalibPercentile=99.99, **_FLOAT_OUTPUTS),
    "static, entropy": _static(CalibrationMethod.Entropy, **_FLOAT_OUTPUTS),
    "blocks of 128 (MatMulNBits)": _blocks,
}
