"""What comes after the encoder, in one server, through both APIs, against plain transformers and torch code.

A sentence-transformers directory of Transformer > Pooling > Dense > Normalize, with prompts; a classifier of three
labels; and a reranker, which scores pairs by their token types.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertForSequenceClassification, BertModel, DistilBertForSequenceClassification

from export.steps import export_checkpoint
from service.client import EncoderClient
from tests.checkpoints import PAD, VOCABULARY, write_checkpoint
from tests.integration.server_process import TestedServer

LENGTHS = (5, 1, 17, 40)
# What the gate of the export holds the same graphs to.
TOLERANCE = 1e-5
PROMPTS = {"query": "query: ", "passage": "passage: "}
LABELS = {0: "bad", 1: "so so", 2: "good"}
# With the usual 0.3 rounding alone can reach the gate: tests/export/test_classifier.py.
SMALL: dict[str, Any] = {"initializer_range": 0.2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("heads")
    write_checkpoint("bert", directory / "embedder", **SMALL)
    _add_sentence_transformers_files(directory / "embedder")
    write_checkpoint("distilbert", directory / "classifier", head="ForSequenceClassification", id2label=LABELS, **SMALL)
    write_checkpoint("bert", directory / "reranker", head="ForSequenceClassification", num_labels=1, **SMALL)
    return directory


def _add_sentence_transformers_files(checkpoint: Path) -> None:
    """As sentence-transformers 5 saves them: mean, 32 to 8 components and Tanh, length 1."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    dense = {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    files: dict[str, Any] = {
        "modules.json": modules,
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": "query"},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": dense,
    }
    for name, content in files.items():
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text(json.dumps(content))
    save_file(_dense_weights(), checkpoint / "2_Dense" / "model.safetensors")


def _dense_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "linear.weight": 0.1 * torch.randn(8, 32, generator=generator),
        "linear.bias": torch.randn(8, generator=generator),
    }


@pytest.fixture(scope="module")
def served(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    output = tmp_path_factory.mktemp("heads") / "models"
    for checkpoint in sorted(checkpoints.iterdir()):
        export_checkpoint(checkpoint, output)
    with TestedServer(output) as server:
        server.wait_until_serving()
        yield server
        assert server.stop() == 0, server.log()


@pytest.fixture(scope="module")
def client(served: TestedServer) -> Iterator[EncoderClient]:
    with EncoderClient(served.target) as client:
        yield client


def _batch() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """ids, mask and token types (B, S), padded on the right."""
    rng = np.random.default_rng(4)
    mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int64)
    types = (np.arange(max(LENGTHS)) >= np.array(LENGTHS)[:, None] // 2).astype(np.int64) * mask
    return np.where(mask, rng.integers(5, VOCABULARY, mask.shape), PAD), mask, types


def _ragged(rows: NDArray[np.int64]) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(rows, LENGTHS, strict=True)]


def _infer(target: str, model: str, output: str, **arrays: NDArray[np.int64]) -> NDArray[np.float32]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    with triton.InferenceServerClient(target) as client:
        answer = client.infer(model, inputs, outputs=[triton.InferRequestedOutput(output)])
    found: NDArray[np.float32] = answer.as_numpy(output)
    return found


def _expected_embedding(checkpoints: Path) -> NDArray[np.float32]:
    """sentence-transformers' own four steps, written out."""
    ids, mask, _ = (torch.from_numpy(array) for array in _batch())
    model, weights = BertModel.from_pretrained(checkpoints / "embedder"), _dense_weights()
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    dense = torch.tanh(mean @ weights["linear.weight"].T + weights["linear.bias"])
    vectors: NDArray[np.float32] = torch.nn.functional.normalize(dense, dim=1).numpy()
    return vectors


def test_a_dense_layer_is_served_through_both_apis(
    served: TestedServer, client: EncoderClient, checkpoints: Path
) -> None:
    ids, mask, _ = _batch()
    expected = _expected_embedding(checkpoints)

    typed = client.encode(_ragged(ids), model="embedder")
    inferred = _infer(served.target, "embedder", "sentence_embedding", input_ids=ids, attention_mask=mask)

    np.testing.assert_allclose(typed, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(inferred, expected, rtol=0, atol=TOLERANCE)


def test_a_classifiers_logits_are_served_through_both_apis(
    served: TestedServer, client: EncoderClient, checkpoints: Path
) -> None:
    ids, mask, _ = _batch()
    model = DistilBertForSequenceClassification.from_pretrained(checkpoints / "classifier")
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()

    typed = client.classify(_ragged(ids), model="classifier")
    inferred = _infer(served.target, "classifier", "logits", input_ids=ids, attention_mask=mask)

    assert typed.shape == (4, 3)
    np.testing.assert_allclose(typed, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(inferred, expected, rtol=0, atol=TOLERANCE)


def test_a_reranker_scores_pairs(served: TestedServer, client: EncoderClient, checkpoints: Path) -> None:
    ids, mask, types = _batch()
    model = BertForSequenceClassification.from_pretrained(checkpoints / "reranker")
    with torch.no_grad():
        expected = model(*(torch.from_numpy(array) for array in (ids, mask, types))).logits.numpy()

    typed = client.classify(_ragged(ids), token_type_ids=_ragged(types), model="reranker")
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    inferred = _infer(served.target, "reranker", "logits", **tensors)

    assert typed.shape == (4, 1)
    np.testing.assert_allclose(typed, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(inferred, expected, rtol=0, atol=TOLERANCE)


def test_models_say_what_they_answer_with(client: EncoderClient) -> None:
    embedder, classifier = client.model("embedder"), client.model("classifier")

    assert (embedder.task, embedder.hidden_size, embedder.output_size) == ("embedding", 32, 8)
    assert (dict(embedder.prompts), embedder.default_prompt) == (PROMPTS, "query")
    assert (classifier.task, classifier.hidden_size, classifier.output_size) == ("classification", 32, 3)
    assert list(classifier.labels) == ["bad", "so so", "good"]


def test_the_leading_dimensions_are_those_of_the_dense_layer(client: EncoderClient, checkpoints: Path) -> None:
    leading = _expected_embedding(checkpoints)[:, :3]
    leading /= np.linalg.norm(leading, axis=1, keepdims=True)

    found = client.encode(_ragged(_batch()[0]), dimensions=3, model="embedder")

    np.testing.assert_allclose(found, leading, rtol=0, atol=TOLERANCE)
    with pytest.raises(grpc.RpcError) as refusal:
        client.encode([[5]], dimensions=9, model="embedder")
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
