"""The served model's numbers against PyTorch's, through both APIs, with real clients and real text."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModel

from service.client import EncoderClient
from tests.integration.server_process import TestedServer

NAME = "all-MiniLM-L6-v2"
# The bound. PyTorch's own error against float64 is about 1e-6 on these vectors.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def texts() -> list[str]:
    paragraphs = [p.strip() for text in topics.values() for p in text.split("\n\n")]
    return [*[p for p in paragraphs if p][::97][:24], "a", "", "An ordinary sentence."]


@pytest.fixture(scope="module")
def token_ids(minilm_bundle: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(minilm_bundle / "tokenizer/tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def padded(rows: list[list[int]], *, left: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """input_ids and attention_mask, (B, S)."""
    longest = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), longest), np.int64)
    for b, row in enumerate(rows):
        columns = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[b, columns], mask[b, columns] = row, 1
    return ids, mask


class Expected:
    """Plain transformers code: mean over the mask, then length 1, as sentence-transformers does it."""

    def __init__(self, checkpoint: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()

    def hidden(
        self, ids: NDArray[np.int64], mask: NDArray[np.int64], types: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        kinds = np.zeros_like(ids) if types is None else types
        with torch.no_grad():
            out = self.model(*(torch.from_numpy(array) for array in (ids, mask, kinds))).last_hidden_state
        rows: NDArray[np.float32] = out.numpy()
        return rows

    def pooled(
        self, ids: NDArray[np.int64], mask: NDArray[np.int64], types: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        weights = mask[:, :, None].astype(np.float32)
        mean = (self.hidden(ids, mask, types) * weights).sum(1) / weights.sum(1)
        unit: NDArray[np.float32] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return unit


@pytest.fixture(scope="module")
def expected(minilm_checkpoint: Path) -> Expected:
    return Expected(minilm_checkpoint)


@pytest.fixture(scope="module")
def client(minilm_server: TestedServer) -> Iterator[EncoderClient]:
    with EncoderClient(minilm_server.target) as client:
        yield client


@pytest.fixture(scope="module")
def triton_client(minilm_server: TestedServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(minilm_server.target) as client:
        yield client


def infer(
    client: triton.InferenceServerClient, outputs: list[str], **arrays: NDArray[np.signedinteger[Any]]
) -> dict[str, NDArray[np.float32]]:
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), "INT64" if array.dtype == np.int64 else "INT32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    answer = client.infer(NAME, inputs, outputs=[triton.InferRequestedOutput(name) for name in outputs])
    return {name: answer.as_numpy(name) for name in outputs}


def test_pooled_vectors_equal_pytorchs(client: EncoderClient, expected: Expected, token_ids: list[list[int]]) -> None:
    np.testing.assert_allclose(client.encode(token_ids), expected.pooled(*padded(token_ids)), atol=TOLERANCE, rtol=0)


def test_token_vectors_equal_pytorchs(client: EncoderClient, expected: Expected, token_ids: list[list[int]]) -> None:
    hidden = expected.hidden(*padded(token_ids))
    for row, found in enumerate(client.encode_tokens(token_ids)):
        np.testing.assert_allclose(found, hidden[row, : len(token_ids[row])], atol=TOLERANCE, rtol=0)


def test_token_types_reach_the_model(client: EncoderClient, expected: Expected, token_ids: list[list[int]]) -> None:
    rows = token_ids[:4]
    kinds = [[int(k > len(row) // 2) for k in range(len(row))] for row in rows]
    types, _ = padded(kinds)
    np.testing.assert_allclose(
        client.encode(rows, token_type_ids=kinds), expected.pooled(*padded(rows), types), atol=TOLERANCE, rtol=0
    )


def test_fewer_dimensions_are_the_leading_ones_at_length_one(
    client: EncoderClient, expected: Expected, token_ids: list[list[int]]
) -> None:
    leading = expected.pooled(*padded(token_ids))[:, :100]
    leading /= np.linalg.norm(leading, axis=1, keepdims=True)
    np.testing.assert_allclose(client.encode(token_ids, dimensions=100), leading, atol=TOLERANCE, rtol=0)


def test_float16_vectors_are_the_float32_ones_rounded(client: EncoderClient, token_ids: list[list[int]]) -> None:
    # Half a unit in the last place of float16 at 0.25, the largest component's size; plus float32's own noise.
    np.testing.assert_allclose(
        client.encode(token_ids, vector_type="float16"), client.encode(token_ids), atol=2**-13 + 1e-6, rtol=0
    )


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_tritonclient_gets_pytorchs_numbers_whichever_side_is_padded(
    triton_client: triton.InferenceServerClient,
    expected: Expected,
    token_ids: list[list[int]],
    left: bool,
    dtype: type[np.signedinteger[Any]],
) -> None:
    ids, mask = padded(token_ids, left=left)
    found = infer(
        triton_client,
        ["sentence_embedding", "last_hidden_state"],
        input_ids=ids.astype(dtype),
        attention_mask=mask.astype(dtype),
    )
    np.testing.assert_allclose(found["sentence_embedding"], expected.pooled(ids, mask), atol=TOLERANCE, rtol=0)
    hidden = expected.hidden(ids, mask) * mask[:, :, None]
    np.testing.assert_allclose(found["last_hidden_state"], hidden, atol=TOLERANCE, rtol=0)


def test_a_mask_with_holes_is_exact(
    triton_client: triton.InferenceServerClient, expected: Expected, token_ids: list[list[int]]
) -> None:
    ids, mask = padded(token_ids)
    holes = np.random.default_rng(0).random(mask.shape) < 0.3
    holes[:, 0] = False
    mask[holes] = 0
    found = infer(triton_client, ["sentence_embedding", "last_hidden_state"], input_ids=ids, attention_mask=mask)
    np.testing.assert_allclose(found["sentence_embedding"], expected.pooled(ids, mask), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(
        found["last_hidden_state"], expected.hidden(ids, mask) * mask[:, :, None], atol=TOLERANCE, rtol=0
    )


def test_an_answer_does_not_depend_on_batch_mates(client: EncoderClient, token_ids: list[list[int]]) -> None:
    alone = np.concatenate([client.encode([row]) for row in token_ids])
    # The promise for fp32: matrix products of other heights may sum in another order.
    np.testing.assert_allclose(client.encode(token_ids), alone, atol=1e-6, rtol=0)


def test_the_model_describes_itself(client: EncoderClient, triton_client: triton.InferenceServerClient) -> None:
    model = client.model()
    assert (model.model, model.version, model.hidden_size, model.vocab_size) == (NAME, "1", 384, 30522)
    assert (model.pooling, model.normalized, model.precision) == ("mean", True, "fp32")
    assert (model.limits.max_sequence_tokens, model.type_vocab_size, model.pad_token_id) == (256, 2, 0)
    assert model.execution_provider == "CPUExecutionProvider"
    assert len(model.bundle_digest) == 64
    metadata = triton_client.get_model_metadata(NAME)
    assert [tensor.name for tensor in metadata.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert triton_client.is_server_ready()
    assert triton_client.is_model_ready(NAME)
