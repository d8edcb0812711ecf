"""The module this project started from: 100 random (d_model, n_heads, length), float64 against what is served.

Every draw has weights, a graph and a ragged batch of its own, and is answered by the serving engine. Of the draws six
become whole bundles, and are asked for over the wire as well.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from export.graph import PackedModel, count_fused, export_graph
from export.heads import EmbeddingHead
from export.sources import Source, open_source
from export.steps import export_checkpoint
from service.client import EncoderClient
from service.engine import Engine
from service.packing import pack
from service.request import TokenSequence
from tests.integration.server_process import TestedServer

NUM_DRAWS, SERVED = 100, range(0, 96, 16)
# The bound.
TOLERANCE = 1e-5
MAX_LENGTH = 96


class TextbookAttention(nn.Module):
    """As in every tutorial: (B, S, E) -> (B, S, E), no mask."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_k = d_model // n_heads
        self.q_lin = nn.Linear(d_model, d_model)
        self.k_lin = nn.Linear(d_model, d_model)
        self.v_lin = nn.Linear(d_model, d_model)
        self.out_lin = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            lin(x).view(batch, length, self.n_heads, self.d_k).transpose(1, 2)
            for lin in (self.q_lin, self.k_lin, self.v_lin)
        )
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        joined: Tensor = self.out_lin((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return joined


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One module, and a batch: the drawn length, one token, and another length."""

    d_model: int
    n_heads: int
    module: TextbookAttention
    vectors: list[NDArray[np.float32]]

    def expected(self) -> list[NDArray[np.float64]]:
        """Each sequence alone, in float64."""
        wide = TextbookAttention(self.d_model, self.n_heads).double()
        wide.load_state_dict(self.module.state_dict())
        with torch.no_grad():
            return [wide(torch.from_numpy(rows).double().unsqueeze(0))[0].numpy() for rows in self.vectors]

    def settings(self) -> tuple[str, ...]:
        """What `--set` is told."""
        return ("model_type=mhsa", f"num_heads={self.n_heads}", "is_causal=false", f"max_sequence_tokens={MAX_LENGTH}")

    def save(self, directory: Path) -> Path:
        """Write the bare state dict."""
        path = directory / f"{self.d_model}-{self.n_heads}.safetensors"
        save_file(self.module.state_dict(), path)
        return path


def _draw(index: int) -> Draw:
    rng = np.random.default_rng(index)
    n_heads = int(rng.integers(1, 17))
    d_model = n_heads * int(rng.integers(1, 33))
    torch.manual_seed(index)
    lengths = [int(rng.integers(1, MAX_LENGTH + 1)), 1, int(rng.integers(1, MAX_LENGTH + 1))]
    vectors = [2 * rng.standard_normal((length, d_model), np.float32) for length in lengths]
    return Draw(d_model, n_heads, TextbookAttention(d_model, n_heads), vectors)


@pytest.fixture(scope="module")
def draws() -> list[Draw]:
    """The same in every run."""
    return [_draw(index) for index in range(NUM_DRAWS)]


@pytest.fixture
def fast_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter's table of operators, the same every time, takes half of an export to make: made once here."""
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))


def test_the_draws_are_of_many_shapes(draws: list[Draw]) -> None:
    assert len({(draw.d_model, draw.n_heads, len(draw.vectors[0])) for draw in draws}) == NUM_DRAWS
    assert {draw.n_heads for draw in draws} == set(range(1, 17))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("fast_export")
def test_a_hundred_draws_are_answered_as_the_textbook_does(draws: list[Draw], tmp_path: Path) -> None:
    errors = [_engine_error(draw, tmp_path) for draw in draws]

    assert len(errors) == NUM_DRAWS
    assert max(errors) <= TOLERANCE, f"draw {np.argmax(errors)}"


def _engine_error(draw: Draw, directory: Path) -> float:
    """From the bare state dict through reader, exporter and serving engine, with pooling; all in one ragged batch."""
    checkpoint = open_source(Source(draw.save(directory), draw.settings()))
    graph = directory / "model.onnx"
    head = EmbeddingHead("mean", normalize=False)
    model = PackedModel(checkpoint.encoder, head, has_token_types=False, input_size=checkpoint.input_size)
    export_graph(model, graph)
    assert count_fused(graph, 1) == 1
    batch = pack([TokenSequence.of_vectors(rows, np.arange(len(rows))) for rows in draw.vectors])
    found = Engine(graph, has_token_types=False).run(batch, wants_tokens=True)
    assert found.token_embeddings is not None
    expected = draw.expected()
    return max(
        float(np.abs(found.token_embeddings - np.concatenate(expected)).max()),
        float(np.abs(found.sentence_embedding - np.stack([rows.mean(0) for rows in expected])).max()),
    )


@pytest.fixture(scope="module")
def server(draws: list[Draw], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestedServer]:
    """One server of all bundles."""
    directory = tmp_path_factory.mktemp("seed")
    for index in SERVED:
        draw = draws[index]
        export_checkpoint(
            draw.save(directory),
            directory / "models",
            name=f"draw-{index}",
            settings=draw.settings(),
            pooling="mean",
            normalize=False,
        )
    with TestedServer(directory / "models") as running:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0, running.log()


@pytest.mark.parametrize("index", SERVED)
def test_the_typed_api_answers_as_the_textbook_does(server: TestedServer, draws: list[Draw], index: int) -> None:
    draw = draws[index]

    with EncoderClient(server.target) as client:
        tokens = client.encode_tokens(draw.vectors, model=f"draw-{index}")
        pooled = client.encode(draw.vectors, model=f"draw-{index}")

    for found, mean, expected in zip(tokens, pooled, draw.expected(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(mean, expected.mean(0), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("index", SERVED)
def test_the_open_inference_protocol_answers_as_the_textbook_does(
    server: TestedServer, draws: list[Draw], index: int, is_left: bool
) -> None:
    draw = draws[index]
    longest = max(map(len, draw.vectors))
    embeds = np.full((3, longest, draw.d_model), np.nan, np.float32)  # nothing looks at what is masked
    mask = np.zeros((3, longest), np.int64)
    for row, rows in enumerate(draw.vectors):
        columns = slice(longest - len(rows), longest) if is_left else slice(0, len(rows))
        embeds[row, columns], mask[row, columns] = rows, 1
    inputs = [
        triton.InferInput("inputs_embeds", embeds.shape, "FP32"),
        triton.InferInput("attention_mask", mask.shape, "INT64"),
    ]
    for tensor, array in zip(inputs, (embeds, mask), strict=True):
        tensor.set_data_from_numpy(array)

    with triton.InferenceServerClient(server.target) as client:
        answer = client.infer(f"draw-{index}", inputs)
        metadata = client.get_model_metadata(f"draw-{index}")

    expected = draw.expected()
    tokens, pooled = answer.as_numpy("last_hidden_state")[mask == 1], answer.as_numpy("sentence_embedding")
    np.testing.assert_allclose(tokens, np.concatenate(expected), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(pooled, [rows.mean(0) for rows in expected], rtol=0, atol=TOLERANCE)
    declared = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs}
    assert declared == {"inputs_embeds": ("FP32", [-1, -1, draw.d_model]), "attention_mask": ("INT64", [-1, -1])}


def test_the_server_says_what_its_models_are_fed_with(server: TestedServer, draws: list[Draw]) -> None:
    with EncoderClient(server.target) as client:
        described = client.model("draw-16")

    assert (described.input, described.input_size, described.vocab_size) == ("embeddings", draws[16].d_model, 0)
