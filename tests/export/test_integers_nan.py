"""A NaN in one place of a row must come out of int8 again: ONNX Runtime's maximum passes over it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export.steps import export_checkpoint
from service.engine import Engine
from service.packing import pack
from tests.checkpoints import write_checkpoint
from tests.graphs import sequence


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nan")
    write_checkpoint("bert", directory / "tiny", initializer_range=0.1)
    return export_checkpoint(
        directory / "tiny", directory / "models", pooling="mean", normalize=False, precisions=("fp32", "int8")
    )[0]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("place", [0, 5, 63])
def test_one_nan_in_a_row_is_seen(bundle: Path, precision: str, place: int) -> None:
    path = bundle / f"model.{precision}.onnx"
    model = onnx.load(path)
    spoilt = 0
    for tensor in model.graph.initializer:
        if tensor.name.endswith("intermediate.dense.bias"):
            values = numpy_helper.to_array(tensor).copy()
            values[place] = np.nan
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
            spoilt += 1
    assert spoilt == 2
    spoilt_path = path.with_name(f"spoilt-{place}-{path.name}")
    onnx.save(model, spoilt_path)
    found = Engine(spoilt_path).run(pack([sequence(7, 8, 9)])).sentence_embedding
    assert np.isnan(found).all()
