"""Several graphs, one file of weights: what two precisions of a model have in common is stored once.

A tensor is known by its bytes. int8 leaves embeddings and norms as they are, and the table of token embeddings is most
of a small model. All graphs lie beside the file, because ONNX Runtime refuses weights outside a graph's directory.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx.external_data_helper import set_external_data

# Smaller ones stay in the graph, where a reader of the file sees them.
_SMALLEST_BYTES = 1024
# A page: each tensor can be mapped into memory by itself.
_ALIGNMENT = 4096


def share_weights(graphs: Sequence[Path], weights: Path) -> None:
    """Move the weights of graphs in one directory to `weights`, beside them, and remove the files that held them."""
    places: dict[bytes, int] = {}
    with weights.open("wb") as file:
        for path in graphs:
            model = onnx.load(path, load_external_data=False)
            before = {_location(tensor) for tensor in model.graph.initializer} - {None}
            model = onnx.load(path)
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) < _SMALLEST_BYTES:
                    continue
                key = hashlib.sha256(tensor.raw_data).digest()
                if key not in places:
                    places[key] = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                    file.write(tensor.raw_data)
                set_external_data(tensor, weights.name, offset=places[key], length=len(tensor.raw_data))
                tensor.ClearField("raw_data")
            path.write_bytes(model.SerializeToString())
            for name in before:
                (path.parent / str(name)).unlink()


def _location(tensor: onnx.TensorProto) -> str | None:
    """The file that holds a tensor, where it is not in the graph itself."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    return next(entry.value for entry in tensor.external_data if entry.key == "location")
