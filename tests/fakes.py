"""Stand-ins for what a test does not want to run: a batcher that computes on the spot, the model around it.

The fake's vectors are a function of each token's id, position and type, so an answer shows at once when rows, masks,
positions or the order of sequences are mixed up.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from service.batcher import Batcher
from service.bundle import GraphFacts, Manifest
from service.errors import DeadlineError
from service.repository import BundlePath, Model, Repository
from service.request import Encoding, Float32Array, Limits, Request, TokenSequence

HIDDEN_SIZE = 6
LIMITS = Limits(
    vocab_size=1000,
    type_vocab_size=2,
    hidden_size=HIDDEN_SIZE,
    output_size=HIDDEN_SIZE,
    max_sequence_tokens=16,
    max_request_sequences=8,
    max_request_tokens=64,
    max_request_bytes=1024 * 1024,
    max_message_bytes=1024 * 1024,
)
MANIFEST = Manifest(
    name="fake",
    family="bert",
    task="embedding",
    input="token_ids",
    input_size=0,
    hidden_size=HIDDEN_SIZE,
    output_size=HIDDEN_SIZE,
    num_layers=2,
    num_heads=2,
    vocab_size=LIMITS.vocab_size,
    type_vocab_size=LIMITS.type_vocab_size,
    pad_token_id=0,
    max_sequence_tokens=LIMITS.max_sequence_tokens,
    pooling="mean",
    normalize=False,
    labels=[],
    prompts={},
    default_prompt="",
    graphs={
        "fp32": GraphFacts("model.fp32.onnx", 20, 2, 2, token_tolerance=1e-4, pooled_tolerance=1e-4, kept_in_fp32=[])
    },
    versions={},
)


def token_vectors(
    ids: Sequence[int], positions: Sequence[int] | None = None, types: Sequence[int] | None = None
) -> Float32Array:
    """(L, E): each token's own, by default at positions 0, 1, 2, ... and of type 0."""
    positions = range(len(ids)) if positions is None else positions
    types = [0] * len(ids) if types is None else types
    return np.array(
        [[i + 0.5, p - 3, t, i * p, 1, -i] for i, p, t in zip(ids, positions, types, strict=True)], np.float32
    )


def pooled_vector(
    ids: Sequence[int], positions: Sequence[int] | None = None, types: Sequence[int] | None = None
) -> Float32Array:
    """(E,): the sum over the tokens; all its numbers are exact in float32."""
    pooled: Float32Array = token_vectors(ids, positions, types).sum(axis=0)
    return pooled


class FakeBatcher:
    """Answers at once, unless told to fail (`error`) or to hold the sequences that begin with a certain id (`hold`)."""

    def __init__(self) -> None:
        self.is_alive = True
        self.is_healthy = True
        self.error: BaseException | None = None
        self.requests: list[Request] = []
        self.num_cancelled = 0
        self._held: dict[int, asyncio.Event] = {}
        self._arrivals = asyncio.Condition()

    def hold(self, first_id: int) -> asyncio.Event:
        """Requests that begin with this id wait until the event is set."""
        return self._held.setdefault(first_id, asyncio.Event())

    async def wait_for_requests(self, count: int) -> None:
        """Until so many requests have come in all."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: len(self.requests) >= count)

    async def submit(self, request: Request) -> None:
        """As the real one: ends with full encodings, or raises."""
        async with self._arrivals:
            self.requests.append(request)
            self._arrivals.notify_all()
        try:
            async with asyncio.timeout_at(request.deadline):
                await self._release(request)
        except TimeoutError:
            raise DeadlineError("the deadline passed in the fake") from None
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        now = time.monotonic()
        for index, sequence in enumerate(request.sequences):
            request.complete(index, _encode(sequence, request.wants_tokens), now, now)

    async def _release(self, request: Request) -> None:
        if held := self._held.get(int(request.sequences[0].token_ids[0])):
            await held.wait()


def fake_model(
    batcher: FakeBatcher | Batcher, *, name: str = "fake", version: str = "1", limits: Limits = LIMITS
) -> Model:
    """A model as the repository holds it, with whatever batcher, as a rule the fake."""
    return Model(name, version, MANIFEST, "d" * 64, "FakeExecutionProvider", "fp32", limits, cast("Batcher", batcher))


LABELS = ["a", "b", "c", "d", "e", "f"]


def fake_classifier(batcher: FakeBatcher, *, version: str = "1") -> Model:
    """The same, with what it answers called the logits of six labels; it has prompts, too."""
    limits = dataclasses.replace(LIMITS, output_size=len(LABELS), is_classifier=True)
    prompts = {"query": "query: "}
    manifest = dataclasses.replace(
        MANIFEST, task="classification", labels=LABELS, prompts=prompts, default_prompt="query"
    )
    return dataclasses.replace(
        fake_model(batcher, name="classifier", version=version, limits=limits), manifest=manifest
    )


def fake_repository(*models: Model, loading: Sequence[tuple[str, int]] = ()) -> Repository:
    """A real repository that holds these models, and others that never finish loading."""
    served = [BundlePath(model.name, int(model.version), Path()) for model in models]
    repository = Repository([*served, *(BundlePath(name, version, Path()) for name, version in loading)])
    for model in models:
        repository.add(model)
    return repository


def _encode(sequence: TokenSequence, wants_tokens: bool) -> Encoding:
    columns = [a.tolist() for a in (sequence.token_ids, sequence.position_ids, sequence.token_type_ids)]
    return Encoding(pooled_vector(*columns), token_vectors(*columns) if wants_tokens else None)
