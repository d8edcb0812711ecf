"""Traces as a collector gets them from a real process, and the way there from its metrics."""

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceStub
from tests.integration.server_process import TestedServer
from tests.tracing import CALLER, SAMPLED, TRACE

ENCODE = "mhsa.encoder.v1.EncoderService/Encode"
REQUEST = pb.EncodeRequest(token_ids=np.full(20, 7, "<i4").tobytes(), lengths=[20])


class Collector(TraceServiceServicer):
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self._lock = threading.Lock()

    def Export(  # noqa: N802  # gRPC's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        with self._lock:
            for of_resource in request.resource_spans:
                self.services |= {
                    a.value.string_value for a in of_resource.resource.attributes if a.key == "service.name"
                }
                self.spans += [span for of_scope in of_resource.scope_spans for span in of_scope.spans]
        return ExportTraceServiceResponse()

    def one(self, name: str) -> Span:
        """The only span of a name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """And its endpoint."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # generated without types
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def attributes(span: Span) -> Mapping[str, object]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def test_a_collector_gets_the_whole_way_of_a_request(tiny_bundle: Path, collector: tuple[Collector, str]) -> None:
    got, endpoint = collector
    with TestedServer(tiny_bundle.parents[1], "--otlp-endpoint", endpoint) as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            EncoderServiceStub(channel).Encode(REQUEST, metadata=SAMPLED)
        assert server.stop() == 0, "what is left is sent before the process ends"

    assert got.services == {"mhsa-serve"}
    request, queue, run, batch, compute = (got.one(name) for name in (ENCODE, "queue", "run", "batch", "compute"))
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, CALLER)
    assert {queue.parent_span_id, run.parent_span_id} == {request.span_id}
    assert [link.span_id for link in run.links] == [batch.span_id]
    assert [link.span_id for link in batch.links] == [request.span_id]
    assert compute.parent_span_id == batch.span_id
    assert attributes(request).items() >= {"mhsa.model": "tiny", "mhsa.sequences": 1, "mhsa.tokens": 20}.items()
    assert attributes(batch).items() >= {"mhsa.batch.sequences": 1, "mhsa.batch.fill": 1.0}.items()
    assert queue.end_time_unix_nano == run.start_time_unix_nano
    assert batch.start_time_unix_nano <= compute.start_time_unix_nano <= compute.end_time_unix_nano


def test_a_scrape_for_openmetrics_leads_to_the_trace(tiny_bundle: Path, collector: tuple[Collector, str]) -> None:
    with TestedServer(tiny_bundle.parents[1], "--otlp-endpoint", collector[1]) as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            EncoderServiceStub(channel).Encode(REQUEST, metadata=SAMPLED)
        text = scrape(server, "application/openmetrics-text; version=1.0.0")
        plain = scrape(server, "text/plain")

    families = {f.name: f for f in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]  # its own
    for name in ("mhsa_request_duration_seconds", "mhsa_queue_wait_seconds", "mhsa_compute_seconds"):
        exemplars = [sample.exemplar for sample in families[name].samples if sample.exemplar is not None]
        assert exemplars, name
        assert exemplars[0].labels["trace_id"] == TRACE or name == "mhsa_compute_seconds"
    assert "trace_id" not in plain
    assert names(plain) == names(text), "the format changes no metric's name"


def test_a_collector_that_is_not_there_keeps_nobody_waiting(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--otlp-endpoint", "http://127.0.0.1:1") as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            assert EncoderServiceStub(channel).Encode(REQUEST, metadata=SAMPLED, timeout=30).dimensions == 32
        assert server.stop() == 0


def test_without_an_endpoint_opentelemetry_is_not_even_imported() -> None:
    code = "import sys, service.server; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_opentelemetry_the_line_says_what_to_install(tiny_bundle: Path) -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None; from service.__main__ import main; main()"
    flags = ["--models", str(tiny_bundle.parents[1]), "--otlp-endpoint", "http://127.0.0.1:1"]
    done = subprocess.run([sys.executable, "-c", hidden, *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["mhsa-serve: --otlp-endpoint: OpenTelemetry is not installed; install mhsa-serve[otel]"],
    )


def scrape(server: TestedServer, accept: str) -> str:
    """/metrics, in the format that is asked for."""
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as response:
        assert response.headers["Content-Type"].startswith(accept.partition(";")[0])
        return str(response.read().decode())


def names(text: str) -> set[str]:
    """Of every series; `_created` and the process' own come and go with the format."""
    found = {line.partition("{")[0].split()[0] for line in text.splitlines() if line.startswith("mhsa_")}
    return {name for name in found if not name.endswith("_created")}
