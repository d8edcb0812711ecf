"""fp16: what it cannot hold is found by a probe, kept in fp32 and named."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.half import probe, write_half
from service.engine import Engine
from service.packing import pack
from tests.graphs import TABLE, lookup_graph, sequence

BATCH = pack([sequence(3, 1, 4), sequence(1), sequence(5, 9, 2, 6)])
FLAT = [3, 1, 4, 1, 5, 9, 2, 6]


def scaled(path: Path, factor: float) -> Path:
    """The table's rows, multiplied and divided again in the middle; a mask as large as float32 goes along."""
    model = onnx.load(lookup_graph(path))
    lookup, *rest = model.graph.node
    lookup.output[0] = "rows"
    del model.graph.node[:]
    model.graph.node.extend(
        [
            lookup,
            helper.make_node("Mul", ["rows", "factor"], ["large"], name="grow"),
            helper.make_node("Div", ["large", "factor"], ["small"], name="shrink"),
            helper.make_node("Max", ["small", "mask"], ["token_embeddings"], name="mask"),
            *rest,
        ]
    )
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"node_{number}"
    constants = {"factor": np.float32(factor), "mask": np.finfo(np.float32).min}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("rows", "large", "small")
    )
    onnx.save(model, path)
    return path


def halved(array: NDArray[np.float32]) -> NDArray[np.float32]:
    return array.astype(np.float16).astype(np.float32)


def types_of(path: Path) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}


def test_the_probe_finds_the_largest_number_of_each_edge(tmp_path: Path) -> None:
    found = probe(scaled(tmp_path / "g.onnx", 1e6), [BATCH, pack([sequence(0)])])
    largest = float(np.abs(TABLE[[0, *FLAT]]).max())
    assert found["rows"] == found["small"] == largest
    assert found["large"] == largest * 1e6


def test_a_mask_is_no_large_number(tmp_path: Path) -> None:
    model = onnx.load(scaled(tmp_path / "g.onnx", 2.0))
    model.graph.node[-1].input[0] = "token_embeddings"
    helper_node = next(node for node in model.graph.node if node.name == "mask")
    helper_node.op_type = "Min"
    onnx.save(model, tmp_path / "g.onnx")
    assert probe(tmp_path / "g.onnx", [BATCH])["token_embeddings"] == 0.0


def test_numbers_that_fit_become_fp16(tmp_path: Path) -> None:
    graph = scaled(tmp_path / "g.onnx", 2.0)
    assert write_half(graph, tmp_path / "half.onnx", [BATCH]) == []
    assert types_of(tmp_path / "half.onnx")["table"] == TensorProto.FLOAT16
    found = Engine(tmp_path / "half.onnx").run(BATCH, wants_tokens=True).token_embeddings
    np.testing.assert_array_equal(found, halved(TABLE[FLAT]))


def test_what_would_overflow_stays_in_fp32_and_is_named(tmp_path: Path) -> None:
    graph = scaled(tmp_path / "g.onnx", 1e6)
    assert write_half(graph, tmp_path / "half.onnx", [BATCH]) == ["grow", "shrink"]
    assert types_of(tmp_path / "half.onnx")["factor"] == TensorProto.FLOAT
    found = Engine(tmp_path / "half.onnx").run(BATCH, wants_tokens=True).token_embeddings
    assert found is not None
    # Multiplied and divided in float32, rounded to fp16 before and after: at most one unit in fp16's last place.
    np.testing.assert_allclose(found, TABLE[FLAT], rtol=2**-10)


@pytest.mark.parametrize("name", ["token_ids", "sentence_embedding"])
def test_inputs_and_outputs_keep_their_types(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    write_half(tiny_bundle / "model.fp32.onnx", tmp_path / "half.onnx", [BATCH])
    before, after = (
        {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        for graph in (
            onnx.load(path, load_external_data=False).graph
            for path in (tiny_bundle / "model.fp32.onnx", tmp_path / "half.onnx")
        )
    )
    assert after[name] == before[name]


def test_a_whole_model_in_fp16_is_near_the_one_in_fp32_and_half_as_large(tiny_bundle: Path, tmp_path: Path) -> None:
    assert write_half(tiny_bundle / "model.fp32.onnx", tmp_path / "half.onnx", [BATCH]) == []
    onnx.checker.check_model(tmp_path / "half.onnx", full_check=True)
    expected, found = (
        Engine(path).run(BATCH).sentence_embedding for path in (tiny_bundle / "model.fp32.onnx", tmp_path / "half.onnx")
    )
    # fp16 has 11 bits: numbers of order 1 are off by 5e-4 in each of two layers.
    np.testing.assert_allclose(found, expected, atol=5e-3)
    assert not np.array_equal(found, expected)
    sizes = [(tiny_bundle / "model.onnx.data").stat().st_size, (tmp_path / "half.onnx.data").stat().st_size]
    assert sizes[1] < 0.6 * sizes[0]
