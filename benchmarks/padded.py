"""The padded graph: the same weights, the same fused operator, computed on every slot of (B, S).

Exported through the very seam that the packed graph goes through. The only difference is `Slots`: rows are slots
already, so padding and unpadding are reshapes, which cost nothing, where the packed graph has gathers. Run as a process
of its own, because no process that measures should have torch in it.
"""

import argparse
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from export.attention import Packing
from export.checkpoint import Checkpoint, read_checkpoint
from export.graph import OPSET
from export.heads import Head
from export.sentence_transformers import choose_embedding


class Slots(Packing):
    """B x S rows for B x S slots. Of the two indices only the shape is used."""

    def pad(self, rows: Tensor) -> Tensor:
        return rows.view(*self.pad_index.shape, -1)  # (B, S, E)

    def unpad(self, slots: Tensor) -> Tensor:
        return slots.flatten(0, 1)  # (B * S, E)


class PaddedModel(nn.Module):
    """token_ids, position_ids, token_type_ids (B, S), lengths (B,) -> sentence_embedding (B, E)."""

    def __init__(self, encoder: nn.Module, head: Head) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, lengths: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        slots = Slots(token_ids, token_ids, lengths)
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids.flatten()}
        rows = self.encoder(token_ids.flatten(), position_ids.flatten(), packing=slots, **types)  # (B * S, E)
        pooled: Tensor = self.head(rows, slots, token_ids.flatten())
        return pooled


def export_padded(checkpoint: Checkpoint, path: Path) -> None:
    """Write the padded graph and its weights beside it."""
    model = PaddedModel(checkpoint.encoder, choose_embedding(checkpoint)).eval()
    inputs = _example_inputs(has_token_types=checkpoint.type_vocab_size > 0)
    with torch.no_grad():
        program = torch.onnx.export(
            model,
            kwargs=inputs,
            input_names=list(inputs),
            output_names=["sentence_embedding"],
            dynamic_shapes={
                name: {0: "sequences"} if tensor.ndim == 1 else {0: "sequences", 1: "longest"}
                for name, tensor in inputs.items()
            },
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # dynamo=True always returns one
    program.save(path, external_data=True)


def _example_inputs(*, has_token_types: bool) -> dict[str, Tensor]:
    # One tensor each: given twice, it would become one input. B and S are primes, so that no axis is taken for another.
    names = ("token_ids", "position_ids", "token_type_ids") if has_token_types else ("token_ids", "position_ids")
    inputs = {name: torch.zeros(3, 7, dtype=torch.int64) for name in names}  # (B, S)
    return inputs | {"lengths": torch.ones(3, dtype=torch.int32)}


def main() -> None:
    """`python -m benchmarks.padded CHECKPOINT GRAPH`."""
    parser = argparse.ArgumentParser(prog="benchmarks.padded", description="Export a checkpoint as a padded graph.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("graph", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the exporter's, about its own insides
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    export_padded(read_checkpoint(options.checkpoint), options.graph)


if __name__ == "__main__":
    main()
