"""One family of each kind that a server could trip over, in one server, through both APIs, against transformers.

Positions that count tokens, no token types, causal attention with the last token, windows beside whole layers, and
fewer heads for keys than for queries. The other families differ inside the graph alone: tests/export/families.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from numpy.typing import NDArray
from transformers import PreTrainedModel

from export.steps import export_checkpoint
from service.bundle import Pooling
from service.client import EncoderClient
from tests.checkpoints import PAD, VOCABULARY, write_checkpoint
from tests.integration.server_process import TestedServer

POOLINGS: dict[str, Pooling] = {
    "roberta": "mean",
    "distilbert": "cls",
    "gpt2": "last",
    "modernbert": "mean",
    "qwen3": "last",
}
LENGTHS = (5, 1, 17, 40)
# What the gate of the export holds the same graphs to.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    """The models of the bundles in `served`, with transformers' eager attention."""
    directory = tmp_path_factory.getbasetemp() / "families"
    found = {family: write_checkpoint(family, directory / family) for family in POOLINGS}
    for model in found.values():
        model.set_attn_implementation("eager")
    return found


@pytest.fixture(scope="module")
def served(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    directory = tmp_path_factory.getbasetemp() / "families"
    output = tmp_path_factory.mktemp("families") / "models"
    for family, pooling in POOLINGS.items():
        export_checkpoint(directory / family, output, pooling=pooling, normalize=False)
    with TestedServer(output) as server:
        server.wait_until_serving()
        yield server
        assert server.stop() == 0, server.log()


def _batch(*, left: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids and mask, (B, S)."""
    mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int64)
    mask = mask[:, ::-1] if left else mask
    ids = np.random.default_rng(4).integers(5, VOCABULARY, mask.shape)
    return np.where(mask, ids, PAD), np.ascontiguousarray(mask)


def _expected(
    model: PreTrainedModel, ids: NDArray[np.int64], mask: NDArray[np.int64], pooling: Pooling
) -> NDArray[np.float32]:
    with torch.no_grad():
        hidden = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).last_hidden_state.numpy()
    how = {"mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "last": lambda rows: rows[-1]}
    pooled: NDArray[np.float32] = np.stack(
        [how[pooling](rows[seen == 1]) for rows, seen in zip(hidden, mask, strict=True)]
    )
    return pooled


@pytest.mark.parametrize("family", POOLINGS)
def test_the_typed_api_answers_as_transformers_does(
    served: TestedServer, models: dict[str, PreTrainedModel], family: str
) -> None:
    ids, mask = _batch(left=False)

    with EncoderClient(served.target) as client:
        found = client.encode([row[seen == 1] for row, seen in zip(ids, mask, strict=True)], model=family)

    np.testing.assert_allclose(found, _expected(models[family], ids, mask, POOLINGS[family]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", POOLINGS)
def test_the_open_inference_protocol_answers_as_transformers_does(
    served: TestedServer, models: dict[str, PreTrainedModel], family: str, left: bool
) -> None:
    ids, mask = _batch(left=left)
    inputs = [triton.InferInput(name, list(ids.shape), "INT64") for name in ("input_ids", "attention_mask")]
    for tensor, array in zip(inputs, (ids, mask), strict=True):
        tensor.set_data_from_numpy(array)

    with triton.InferenceServerClient(served.target) as client:
        answer = client.infer(family, inputs, outputs=[triton.InferRequestedOutput("sentence_embedding")])

    expected = _expected(models[family], ids, mask, POOLINGS[family])
    np.testing.assert_allclose(answer.as_numpy("sentence_embedding"), expected, atol=TOLERANCE, rtol=0)
