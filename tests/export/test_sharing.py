"""One file of weights for several graphs: nothing stored twice, nothing lost."""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.sharing import share_weights

RNG = np.random.default_rng(5)
COMMON, FIRST, SECOND = (RNG.standard_normal((40, 30)).astype(np.float32) for _ in range(3))
SMALL = np.arange(3, dtype=np.int64)


def write(path: Path, **tensors: NDArray[np.generic]) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Identity", [next(iter(tensors))], ["out"])],
        path.stem,
        [],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location=f"{path.name}.data")
    return path


def read(path: Path) -> dict[str, NDArray[np.generic]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_every_tensor_is_read_again_and_the_common_one_is_stored_once(tmp_path: Path) -> None:
    a = write(tmp_path / "a.onnx", common=COMMON, own=FIRST, small=SMALL)
    b = write(tmp_path / "b.onnx", other_name=COMMON, own=SECOND)
    share_weights([a, b], tmp_path / "weights")

    np.testing.assert_equal(read(a), {"common": COMMON, "own": FIRST, "small": SMALL})
    np.testing.assert_equal(read(b), {"other_name": COMMON, "own": SECOND})
    # Three tensors of 4,800 bytes, each from the start of a page of 4,096.
    assert (tmp_path / "weights").stat().st_size == 2 * 8192 + 4800
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.onnx", "b.onnx", "weights"]


def test_small_tensors_stay_in_the_graph(tmp_path: Path) -> None:
    path = write(tmp_path / "a.onnx", own=FIRST, small=SMALL)
    share_weights([path], tmp_path / "weights")
    found = {tensor.name: tensor for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    assert found["small"].data_location == TensorProto.DEFAULT
    assert found["own"].data_location == TensorProto.EXTERNAL


def test_the_same_graphs_give_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        share_weights([write(tmp_path / name / "a.onnx", own=FIRST, small=SMALL)], tmp_path / name / "weights")
        contents.append([(tmp_path / name / file).read_bytes() for file in ("a.onnx", "weights")])
    assert contents[0] == contents[1]
