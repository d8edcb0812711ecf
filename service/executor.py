"""Runs one batch to the end of each of its sequences: packs, runs, checks the numbers.

A batch that fails is run again in halves, down to single sequences, so that only the culprit fails. Numbers that are
not finite fail their own sequence: attention keeps sequences apart.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from service.cancellation import Cancellation
from service.cost_model import Sample
from service.engine import Outputs, first_line
from service.errors import EngineError, OutOfMemoryError, StoppedError
from service.lane import Entry
from service.metrics import ModelMetrics
from service.packing import PackedBatch, pack, unpack
from service.request import Encoding

if TYPE_CHECKING:
    from service.tracing import ModelTracing

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What is needed of an engine."""

    num_runners: int

    def run(
        self, batch: PackedBatch, *, wants_tokens: bool, alone: bool, cancellation: Cancellation | None
    ) -> Outputs: ...


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """One sequence's answer or error, and when its run began and ended."""

    entry: Entry
    started: float
    finished: float
    result: Encoding | EngineError


# Gets each run of the engine, and why it gave no answer.
OnRun = Callable[[Sample, EngineError | None], None]


class Executor:
    """Runs batches on an engine, from several threads at once. `on_run` is told of each run of the engine."""

    def __init__(
        self,
        engine: Runner,
        metrics: ModelMetrics,
        on_run: OnRun,
        tracing: "ModelTracing | None" = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._on_run = on_run
        self._tracing = tracing

    def run(self, batch: Sequence[Entry], *, alone: bool, cancellation: Cancellation) -> list[Ended]:
        """The end of every sequence; of each `StoppedError` where `cancellation` was set."""
        started = time.monotonic()
        try:
            results = self._encode_in_memory(batch, alone, cancellation)
        except EngineError as error:
            if len(batch) == 1 or cancellation.is_set:
                return [Ended(entry, started, time.monotonic(), error) for entry in batch]
            log.warning("a run of %d sequences failed, running its halves: %s", len(batch), first_line(error.__cause__))
            middle = len(batch) // 2
            return [
                end
                for half in (batch[:middle], batch[middle:])
                for end in self.run(half, alone=alone, cancellation=cancellation)
            ]
        finished = time.monotonic()
        for entry in batch:
            span = entry.request.span
            self._metrics.queue_seconds.observe(
                started - entry.request.arrival, None if span is None else span.exemplar
            )
        return [Ended(entry, started, finished, result) for entry, result in zip(batch, results, strict=True)]

    def _encode_in_memory(
        self, batch: Sequence[Entry], alone: bool, cancellation: Cancellation
    ) -> list[Encoding | EngineError]:
        try:
            return self._encode(batch, alone, cancellation)
        except MemoryError as error:
            raise OutOfMemoryError("the host has no memory left for the batch") from error

    def _encode(self, batch: Sequence[Entry], alone: bool, cancellation: Cancellation) -> list[Encoding | EngineError]:
        began = time.monotonic()
        packed = pack([entry.sequence for entry in batch])
        outputs, seconds = self._run(batch, packed, began, alone, cancellation)
        if outputs.token_embeddings is None:
            results = [self._checked(Encoding(pooled, None)) for pooled in outputs.sentence_embedding]
        else:
            results = [
                self._checked(Encoding(pooled, tokens if entry.request.wants_tokens else None))
                for entry, pooled, tokens in zip(
                    batch, outputs.sentence_embedding, unpack(packed, outputs.token_embeddings), strict=True
                )
            ]
        errors = [result for result in results if isinstance(result, EngineError)]
        # Without one good number the run has failed, whatever the engine says.
        self._tell(packed, seconds, errors[0] if len(errors) == len(results) else None)
        return results

    def _run(
        self, batch: Sequence[Entry], packed: PackedBatch, began: float, alone: bool, cancellation: Cancellation
    ) -> tuple[Outputs, float]:
        wants_tokens = any(entry.request.wants_tokens for entry in batch)
        started = time.monotonic()
        try:
            outputs = self._engine.run(packed, wants_tokens=wants_tokens, alone=alone, cancellation=cancellation)
        except EngineError as error:
            if not isinstance(error, StoppedError):
                self._metrics.engine_failures.inc()
            finished = time.monotonic()
            self._tell(packed, finished - started, error)
            self._trace(batch, packed, (began, started, finished), error)
            raise
        finished = time.monotonic()
        exemplar = self._trace(batch, packed, (began, started, finished), None)
        self._metrics.compute_seconds.observe(finished - started, exemplar)
        self._metrics.sequences.inc(packed.num_sequences)
        self._metrics.tokens.inc(packed.num_tokens)
        self._metrics.batch_sequences.observe(packed.num_sequences)
        self._metrics.batch_tokens.observe(packed.num_tokens)
        self._metrics.batch_fill.observe(packed.fill)
        return outputs, finished - started

    def _tell(self, packed: PackedBatch, seconds: float, error: EngineError | None) -> None:
        self._on_run(Sample(packed.num_sequences, packed.num_tokens, packed.longest, seconds), error)

    def _trace(
        self,
        batch: Sequence[Entry],
        packed: PackedBatch,
        times: tuple[float, float, float],
        error: EngineError | None,
    ) -> dict[str, str] | None:
        """Trace a run that has a traced request in it; the exemplar that leads to it."""
        if self._tracing is None:
            return None
        requests = dict.fromkeys(entry.request.span for entry in batch if entry.request.span is not None)
        if not requests:
            return None
        facts = {
            "sequences": packed.num_sequences,
            "tokens": packed.num_tokens,
            "longest": packed.longest,
            "fill": packed.fill,
        }
        return self._tracing.record_batch(requests, facts, times, None if error is None else error.reason)

    def _checked(self, encoding: Encoding) -> Encoding | EngineError:
        is_finite = np.isfinite(encoding.pooled).all() and (
            encoding.tokens is None or np.isfinite(encoding.tokens).all()
        )
        if is_finite:
            return encoding
        self._metrics.engine_failures.inc()
        return EngineError("the model gave numbers that are not finite")
