"""What the executor shows of a run where requests are traced; the batcher's tests are about everything else."""

import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Exemplar

from service.cancellation import Cancellation
from service.engine import Outputs
from service.errors import EngineError
from service.executor import Executor
from service.lane import Entry
from service.metrics import Metrics
from service.packing import PackedBatch
from service.request import Request, TokenSequence
from service.tracing import RequestSpan
from tests.tracing import Traces, attributes, context, linked, trace_id

CULPRIT = 666


class SummingEngine:
    """Answers each sequence with its first id; one id fails its run."""

    num_runners = 1

    def run(self, batch: PackedBatch, *, wants_tokens: bool, alone: bool, cancellation: Cancellation | None) -> Outputs:
        if CULPRIT in batch.token_ids:
            raise EngineError("the engine failed on this request")
        return Outputs(np.zeros((batch.num_sequences, 1), np.float32), None)


class Bench:
    """An executor whose runs are traced."""

    def __init__(self) -> None:
        self.traces = Traces()
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry).of_model("m", "1")
        tracing = self.traces.tracing.of_model("m", "1")
        self._executor = Executor(SummingEngine(), metrics, lambda _sample, _error: None, tracing)

    def run(self, *requests: Request) -> None:
        """All sequences of the requests in one batch."""
        batch = [Entry(0.0, 0, request, place) for request in requests for place in range(len(request.sequences))]
        self._executor.run(batch, alone=False, cancellation=Cancellation())

    def span(self) -> RequestSpan:
        span = self.traces.tracing.start_request(self.traces.tracing.extract(()), "Encode", "id")
        assert span is not None
        return span

    def exemplars(self, name: str) -> list[Exemplar]:
        """Those of a histogram's buckets."""
        samples = [sample for family in self.registry.collect() if family.name == name for sample in family.samples]
        return [sample.exemplar for sample in samples if sample.exemplar is not None]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def request(*ids: int, span: RequestSpan | None = None) -> Request:
    sequences = tuple(TokenSequence(np.array([i, i]), np.arange(2), np.zeros(2, np.int64)) for i in ids)
    return Request(sequences, wants_tokens=False, arrival=time.monotonic(), deadline=None, span=span)


def test_a_run_is_linked_to_the_traced_requests_in_it_once_each(bench: Bench) -> None:
    spans = [bench.span(), bench.span()]
    bench.run(request(1, 2, span=spans[0]), request(3), request(4, span=spans[1]))

    batch = bench.traces.one("batch")
    assert linked(batch) == {span.span_context.span_id for span in spans}
    assert len(batch.links) == 2
    assert attributes(batch).items() >= {"mhsa.batch.sequences": 4, "mhsa.batch.tokens": 8}.items()


def test_a_run_without_a_traced_request_is_not_traced(bench: Bench) -> None:
    bench.run(request(1))

    assert bench.traces.spans == ()
    assert bench.exemplars("mhsa_compute_seconds") == []


def test_a_run_that_is_repeated_in_halves_is_seen_as_that(bench: Bench) -> None:
    bench.run(request(1, span=bench.span()), request(CULPRIT, span=bench.span()))

    outcomes = [
        (attributes(batch)["mhsa.batch.sequences"], attributes(batch).get("error.type"))
        for batch in bench.traces.all("batch")
    ]
    assert outcomes == [(2, "engine"), (1, None), (1, "engine")]


def test_the_wait_leads_to_the_requests_trace_and_the_run_to_the_batchs(bench: Bench) -> None:
    span = bench.span()
    bench.run(request(1, span=span))

    (waited,) = bench.exemplars("mhsa_queue_wait_seconds")
    (computed,) = bench.exemplars("mhsa_compute_seconds")
    assert waited.labels == {"trace_id": span.trace_id}
    assert computed.labels == {"trace_id": trace_id(bench.traces.one("batch"))}
    assert context(bench.traces.one("batch")).trace_id != span.span_context.trace_id
