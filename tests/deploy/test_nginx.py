"""deploy/nginx/nginx.conf before two servers: what clients see through it is what they would see without it."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import trustme
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status

from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceStub
from service.client import EncoderClient
from service.config import Settings
from service.errors import QueueFullError
from service.request import Request
from tests.deploy.nginx import CONFIG, run_nginx
from tests.integration.server_process import TestedServer, write_certificate
from tests.wire import Wire, encode_request, receive, running, send

Servers = tuple[TestedServer, TestedServer]
MAX_REQUEST_BYTES = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def servers(tiny_bundle: Path) -> Iterator[Servers]:
    models = tiny_bundle.parents[1]
    # Room for one message above every default on the way.
    limits = ["--max-request-bytes", str(MAX_REQUEST_BYTES), "--max-request-tokens", "65536"]
    with TestedServer(models, *limits) as first, TestedServer(models, *limits) as second:
        first.wait_until_serving()
        second.wait_until_serving()
        yield first, second


@pytest.fixture(scope="module")
def target(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """nginx before both."""
    with run_nginx(tmp_path_factory.mktemp("nginx"), [server.target for server in servers]) as nginx:
        yield nginx.target


@pytest.fixture(scope="module")
def channel(target: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(target, [("grpc.max_receive_message_length", -1)]) as opened:
        yield opened


def test_both_apis_answer_as_without_it(servers: Servers, target: str) -> None:
    ids = [[1, 2, 3], [4, 5, 6]]
    with EncoderClient(servers[0].target) as direct, EncoderClient(target) as client:
        wanted = direct.encode(ids)
        np.testing.assert_array_equal(client.encode(ids), wanted)
        assert [rows.shape for rows in client.encode_tokens(ids)] == [(3, 32), (3, 32)]
    tensor = triton.InferInput("input_ids", [2, 3], "INT64")
    tensor.set_data_from_numpy(np.array(ids))
    outputs = [triton.InferRequestedOutput("sentence_embedding")]
    with triton.InferenceServerClient(target) as other:
        assert other.is_server_ready()
        assert other.is_model_ready("tiny")
        answer = other.infer("tiny", [tensor], outputs=outputs).as_numpy("sentence_embedding")
    np.testing.assert_array_equal(answer, wanted)


def test_the_calls_of_one_connection_go_to_both_servers(servers: Servers, channel: grpc.Channel) -> None:
    def answered() -> list[float]:
        return [server.metric("mhsa_requests_total", method="Encode", code="OK") for server in servers]

    before = answered()
    stub = EncoderServiceStub(channel)
    for _ in range(40):
        stub.Encode(encode_request([[1, 2]]), timeout=30)
    shares = [now - then for now, then in zip(answered(), before, strict=True)]
    assert sum(shares) == 40
    assert min(shares) >= 10


async def test_a_stream_is_answered_while_it_is_open(target: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stream = EncoderServiceStub(channel).EncodeStream(timeout=60)
        for k in range(50):
            await send(stream, f"m{k}", [[1, 2, 3]])
            assert (await receive(stream)).id == f"m{k}"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


def test_health_is_asked_and_watched_through_it(channel: grpc.Channel) -> None:
    request = HealthCheckRequest(service="mhsa.encoder.v1.EncoderService")
    assert HealthStub(channel).Check(request, timeout=30).status == HealthCheckResponse.SERVING
    watch = HealthStub(channel).Watch(request, timeout=30)
    assert next(watch).status == HealthCheckResponse.SERVING
    watch.cancel()


def test_messages_of_many_megabytes_pass_both_ways(channel: grpc.Channel) -> None:
    lengths = [50] * 1000
    ids = np.full(sum(lengths), 7, "<i4")
    names = "x" * (16 * 1024 * 1024)  # 16 MiB that are no work: a field that this server does not know
    request = pb.EncodeRequest(token_ids=ids.tobytes(), lengths=lengths, output=pb.OUTPUT_TOKENS)
    large = request.SerializeToString() + _unknown_field(names.encode())
    call = channel.unary_unary("/mhsa.encoder.v1.EncoderService/Encode", bytes, pb.EncodeResponse.FromString)
    answer = call(large, timeout=120)
    assert len(large) > 16 * 1024 * 1024
    assert len(answer.tokens) == sum(lengths) * 32 * 4  # 6.1 MiB


def _unknown_field(content: bytes) -> bytes:
    """A length-delimited field of number 1000, in protobuf's encoding."""
    size = len(content)
    out = bytearray([0xC2, 0x3E])
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(out) + bytes([size]) + content


def test_a_message_above_the_servers_limit_is_refused_by_the_server(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/mhsa.encoder.v1.EncoderService/Encode", bytes, bytes)
    with pytest.raises(grpc.RpcError) as refused:
        call(b"x" * (MAX_REQUEST_BYTES + 1), timeout=60)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_REQUEST_BYTES) in (refused.value.details() or "")


@pytest.fixture
async def wires(tmp_path: Path) -> AsyncIterator[tuple[Wire, Wire, grpc.aio.Channel]]:
    """Two servers whose batchers do what a test says, and a channel to the nginx before them."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(running()) for _ in range(2)]
        nginx = stack.enter_context(run_nginx(tmp_path, [first.target, second.target]))
        yield first, second, await stack.enter_async_context(grpc.aio.insecure_channel(nginx.target))


Behind = tuple[Wire, Wire, grpc.aio.Channel]


async def test_a_refusal_keeps_its_details_and_its_time_to_come_back(wires: Behind) -> None:
    first, second, channel = wires
    first.batcher.error = second.batcher.error = QueueFullError("2000 tokens wait; the limit is 1500", 0.25)
    call = EncoderServiceStub(channel).Encode(encode_request([[1]]), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details() == "2000 tokens wait; the limit is 1500"
    metadata = dict(refused.value.trailing_metadata())
    assert metadata["grpc-retry-pushback-ms"] == "250"
    (detail,) = (await rpc_status.aio.from_call(call)).details
    assert RetryInfo.FromString(detail.value).retry_delay.ToMilliseconds() == 250


async def test_a_bad_request_says_what_is_bad(wires: Behind) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await EncoderServiceStub(wires[2]).Encode(encode_request([[1, 5000]]), timeout=30)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "5000" in (refused.value.details() or "")


async def arrived(first: Wire, second: Wire) -> Request:
    """The only request, once one of the servers has it."""
    async with asyncio.timeout(60):
        while not (requests := first.batcher.requests + second.batcher.requests):
            await asyncio.sleep(0.01)
    (request,) = requests
    return request


async def test_the_server_knows_the_callers_deadline(wires: Behind) -> None:
    first, second, channel = wires
    for wire in (first, second):
        wire.batcher.hold(1)
    call = EncoderServiceStub(channel).Encode(encode_request([[1]]), timeout=60)
    request = await arrived(first, second)
    call.cancel()
    assert request.deadline is not None
    assert 0 < request.deadline - request.arrival < 1.1 * 60  # on the wire gRPC rounds it up by a few percent


async def test_a_caller_who_leaves_is_known_to_have_left(wires: Behind) -> None:
    first, second, channel = wires
    for wire in (first, second):
        wire.batcher.hold(1)
    call = EncoderServiceStub(channel).Encode(encode_request([[1]]), timeout=60)
    await arrived(first, second)
    call.cancel()
    async with asyncio.timeout(30):
        while not first.batcher.num_cancelled + second.batcher.num_cancelled:
            await asyncio.sleep(0.01)


async def test_answers_of_a_stream_overtake(wires: Behind) -> None:
    first, second, channel = wires
    held = [wire.batcher.hold(1) for wire in (first, second)]
    stream = EncoderServiceStub(channel).EncodeStream(timeout=60)
    await send(stream, "slow", [[1]])
    await send(stream, "quick", [[2]])
    assert (await receive(stream)).id == "quick"
    for event in held:
        event.set()
    assert (await receive(stream)).id == "slow"
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


def test_a_server_that_is_gone_costs_no_call(tiny_bundle: Path, tmp_path: Path) -> None:
    models = tiny_bundle.parents[1]
    with TestedServer(models) as first, TestedServer(models) as second:
        addresses = [first.wait_until_serving(), second.wait_until_serving()]
        with run_nginx(tmp_path, addresses) as nginx, grpc.insecure_channel(nginx.target) as channel:
            stub = EncoderServiceStub(channel)
            for k in range(40):
                if k == 10:
                    first.stop()
                assert stub.Encode(encode_request([[1, 2]]), timeout=30).dimensions == 32


def test_calls_in_flight_at_a_server_that_is_killed_are_answered_by_the_other(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    """By our client's retries: nginx answers 502 for what it had sent."""
    models = tiny_bundle.parents[1]
    with TestedServer(models) as first, TestedServer(models) as second:
        addresses = [first.wait_until_serving(), second.wait_until_serving()]
        with (
            run_nginx(tmp_path, addresses) as nginx,
            EncoderClient(nginx.target) as client,
            ThreadPoolExecutor(8) as pool,
        ):
            client.encode([[1, 2]])  # the description of the model is known from here on
            first.send(signal.SIGSTOP)
            calls = [pool.submit(client.encode, [[1, 2]], timeout=60) for _ in range(8)]
            wait(calls, return_when=FIRST_COMPLETED)  # by turns: some of the rest are where no answer will come from
            first.send(signal.SIGKILL)
            for call in calls:
                assert call.result().shape == (1, 32)


def test_tls_ends_at_the_proxy(servers: Servers, tmp_path: Path) -> None:
    authority = trustme.CA()
    write_certificate(authority, tmp_path / "tls")
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with run_nginx(tmp_path, [server.target for server in servers], tmp_path) as nginx:
        with EncoderClient(nginx.target, credentials=credentials) as client:
            assert client.encode([[1, 2, 3]]).shape == (1, 32)


def test_no_client_names_the_tenant_that_its_calls_count_for(tiny_bundle: Path, tmp_path: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--fairness", "tenant") as server:
        with run_nginx(tmp_path, [server.wait_until_serving()] * 2) as nginx, EncoderClient(server.target) as direct:
            assert direct.encode([[1]]).shape == (1, 32)
            with EncoderClient(nginx.target, tenant="no name") as client:
                assert client.encode([[1]]).shape == (1, 32), "a name that is none would be refused"


def test_a_client_certificate_names_the_tenant(tiny_bundle: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    write_certificate(authority, tmp_path / "tls")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    own = authority.issue_cert("acme.example", common_name="acme")
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()
    )
    with TestedServer(tiny_bundle.parents[1], "--fairness", "tenant") as server:
        with run_nginx(tmp_path, [server.wait_until_serving()] * 2, tmp_path) as nginx:
            with EncoderClient(nginx.target, credentials=credentials, tenant="globex") as client:
                with pytest.raises(grpc.RpcError, match="no model 'none'"):
                    client.encode([[1]], model="none")
        assert server.wait_for_log("caller=acme")


def test_no_server_at_all_is_unavailable(tmp_path: Path) -> None:
    with run_nginx(tmp_path, ["127.0.0.1:1", "127.0.0.1:2"]) as nginx, grpc.insecure_channel(nginx.target) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            EncoderServiceStub(channel).Encode(encode_request([[1]]), timeout=30)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_what_no_test_can_wait_for_is_set() -> None:
    found = dict(re.findall(r"^ *(\w+) ([^#\n]+);$", CONFIG.read_text(), re.MULTILINE))
    own = Settings(models=Path())
    waits = ("client_body_timeout", "grpc_read_timeout", "grpc_send_timeout", "keepalive_timeout")
    assert {found[name] for name in waits} == {"1h"}
    assert own.max_connection_age_seconds + own.max_connection_age_grace_seconds < 3600, "the servers end streams first"
    assert int(found["keepalive_requests"]) >= 1_000_000
    assert int(found["http2_max_concurrent_streams"]) > 128, "nginx's own; the servers have no limit"
    assert found["grpc_socket_keepalive"] == "on"
    assert found["worker_shutdown_timeout"] == "10s"


def test_a_server_that_is_gone_is_left_soon_and_tried_again_soon() -> None:
    text = CONFIG.read_text()
    found = dict(re.findall(r"^ *(\w+) ([^#\n]+);$", text, re.MULTILINE))
    servers = re.findall(r"^ *server 127\.0\.0\.1:\d+ (.+);$", text, re.MULTILINE)
    assert servers == ["fail_timeout=1s", "fail_timeout=1s"]
    assert found["grpc_connect_timeout"] == "1s"
    assert found["grpc_next_upstream"].split() == ["error", "timeout"]
    assert found["grpc_next_upstream_tries"] == str(len(servers)), "each once"
    assert found["zone"] == "mhsa 64k", "workers share what they know of servers"
