"""The load generator: what it sends, and what it makes of a server's metrics."""

from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import numpy as np
import pytest

from benchmarks.load import Address, Shape, batches_between, run_callers, scrape, serialise
from benchmarks.measurement import Batches
from benchmarks.traces import Batch
from protos.encoder_pb2 import EncodeRequest, EncodeStreamRequest
from service.request import TokenSequence

PAGE = b"""\
# TYPE mhsa_batch_tokens histogram
mhsa_batch_tokens_bucket{le="+Inf",model="m",version="1"} 4.0
mhsa_batch_tokens_count{model="m",version="1"} 4.0
mhsa_batch_tokens_sum{model="m",version="1"} 136.0
# TYPE mhsa_compute_seconds histogram
mhsa_compute_seconds_bucket{le="+Inf",model="m",version="1"} 4.0
mhsa_compute_seconds_count{model="m",version="1"} 4.0
mhsa_compute_seconds_sum{model="m",version="1"} 0.5
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # http.server's name
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Nothing."""


@pytest.fixture
def metrics_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def make_sequences(*lengths: int) -> Batch:
    return [TokenSequence(*(np.arange(length),) * 3) for length in lengths]


def test_a_request_holds_as_many_sequences_as_the_shape_says() -> None:
    requests = serialise(Shape(4, 2), make_sequences(3, 1, 2))
    messages = [[EncodeRequest.FromString(message) for message in request] for request in requests]
    assert [[list(message.lengths) for message in request] for request in messages] == [[[3, 1]], [[2]]]
    assert np.frombuffer(messages[0][0].token_ids, "<i4").tolist() == [0, 1, 2, 0]


def test_a_split_request_is_one_call_for_each_sequence() -> None:
    (request,) = serialise(Shape(4, 2, is_split=True), make_sequences(3, 1))
    assert [list(EncodeRequest.FromString(message).lengths) for message in request] == [[3], [1]]


def test_a_stream_carries_requests_with_an_id() -> None:
    ((message,),) = serialise(Shape(1, is_stream=True), make_sequences(3))
    assert EncodeStreamRequest.FromString(message).id
    assert list(EncodeStreamRequest.FromString(message).request.lengths) == [3]


async def test_callers_share_the_requests_and_each_is_sent_once() -> None:
    sent: list[bytes] = []

    async def exchange(messages: Sequence[bytes]) -> None:
        sent.extend(messages)

    latencies = await run_callers([exchange, exchange], [[b"a"], [b"b", b"c"], [b"d"]])
    assert sorted(sent) == [b"a", b"b", b"c", b"d"]
    assert len(latencies) == 3


async def test_an_unanswered_request_ends_the_slice() -> None:
    async def exchange(messages: Sequence[bytes]) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await run_callers([exchange], [[b"a"]])


def test_a_scrape_has_the_sums_and_counts_of_the_batch_histograms(metrics_port: int) -> None:
    assert scrape(Address(pid=0, grpc_port=0, metrics_port=metrics_port)) == {
        "mhsa_batch_tokens_count": 4.0,
        "mhsa_batch_tokens_sum": 136.0,
    }


def test_means_are_of_the_batches_between_two_scrapes() -> None:
    names = ("mhsa_batch_fill_ratio", "mhsa_batch_sequences", "mhsa_batch_tokens")
    before = {f"{name}_{part}": 10.0 for name in names for part in ("sum", "count")}
    after = {f"{name}_count": 14.0 for name in names} | {
        "mhsa_batch_fill_ratio_sum": 13.0,
        "mhsa_batch_sequences_sum": 26.0,
        "mhsa_batch_tokens_sum": 410.0,
    }
    assert batches_between(before, after) == Batches(fill=0.75, sequences=4.0, tokens=100.0)
