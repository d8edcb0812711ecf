"""Models that are no Hugging Face checkpoints, exported and served: both APIs against each sequence alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from numpy.typing import NDArray

from export.steps import export_checkpoint
from service.bundle import read_bundle
from service.client import EncoderClient
from tests.integration.server_process import TestedServer
from tests.own_models import INPUT_SIZE, OWN_MODELS, VOCABULARY, WIDTH, alone, write_own

LENGTHS = (7, 1, 40, 13)
# The export's own gate.
TOLERANCE = 1e-5


def _name(kind: str) -> str:
    return kind.replace(", ", "-")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of each kind."""
    output = tmp_path_factory.mktemp("own") / "models"
    for kind in OWN_MODELS:
        source = write_own(kind, tmp_path_factory.mktemp(_name(kind)))
        export_checkpoint(source.path, output, name=_name(kind), module=source.module, pooling="mean", normalize=False)
    return output


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[TestedServer]:
    """Serving all of them."""
    with TestedServer(models) as running:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0, running.log()


def _sequences(kind: str) -> list[NDArray[np.int64 | np.float32]]:
    rng = np.random.default_rng(0)
    if kind == "mhsa_encoder":
        return [rng.integers(0, VOCABULARY, length) for length in LENGTHS]
    width = INPUT_SIZE if kind == "module" else WIDTH
    return [rng.standard_normal((length, width), np.float32) for length in LENGTHS]


def _expected(kind: str) -> list[NDArray[np.float32]]:
    return [alone(kind, torch.from_numpy(sequence)).numpy() for sequence in _sequences(kind)]


@pytest.mark.parametrize("kind", OWN_MODELS)
def test_there_is_one_fused_node_a_layer(models: Path, kind: str) -> None:
    manifest = read_bundle(models / _name(kind) / "1").manifest

    facts = manifest.graphs["fp32"]
    assert facts.fused_attention_nodes == facts.optimized_attention_nodes == OWN_MODELS[kind].num_layers


@pytest.mark.parametrize("kind", OWN_MODELS)
def test_the_typed_api_answers_each_sequence_as_if_alone(server: TestedServer, kind: str) -> None:
    with EncoderClient(server.target) as client:
        tokens = client.encode_tokens(_sequences(kind), model=_name(kind))
        pooled = client.encode(_sequences(kind), model=_name(kind))

    expected = _expected(kind)
    np.testing.assert_allclose(np.concatenate(tokens), np.concatenate(expected), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(pooled, [rows.mean(0) for rows in expected], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", OWN_MODELS)
def test_the_open_inference_protocol_answers_each_sequence_as_if_alone(server: TestedServer, kind: str) -> None:
    sequences = _sequences(kind)
    shape = (len(LENGTHS), max(LENGTHS), *sequences[0].shape[1:])
    padded, mask = np.zeros(shape, sequences[0].dtype), np.zeros(shape[:2], np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    name, datatype = ("input_ids", "INT64") if kind == "mhsa_encoder" else ("inputs_embeds", "FP32")
    inputs = [triton.InferInput(name, shape, datatype), triton.InferInput("attention_mask", mask.shape, "INT64")]
    for tensor, array in zip(inputs, (padded, mask), strict=True):
        tensor.set_data_from_numpy(array)

    with triton.InferenceServerClient(server.target) as client:
        answer = client.infer(_name(kind), inputs)

    expected = _expected(kind)
    tokens, pooled = answer.as_numpy("last_hidden_state")[mask == 1], answer.as_numpy("sentence_embedding")
    np.testing.assert_allclose(tokens, np.concatenate(expected), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(pooled, [rows.mean(0) for rows in expected], rtol=0, atol=TOLERANCE)
