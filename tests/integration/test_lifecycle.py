"""From start to exit: what a caller, a probe and an operator see of a real process."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from deploy.process import free_ports
from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceStub
from service.client import EncoderClient
from tests.integration.server_process import TestedServer, write_certificate


def message(num_sequences: int, length: int) -> pb.EncodeRequest:
    ids = np.full(num_sequences * length, 7, "<i4")
    return pb.EncodeRequest(token_ids=ids.tobytes(), lengths=[length] * num_sequences)


def health(channel: grpc.Channel) -> "HealthCheckResponse.ServingStatus":
    return HealthStub(channel).Check(HealthCheckRequest(), timeout=10).status


def code_of(stub: EncoderServiceStub) -> grpc.StatusCode:
    try:
        stub.Encode(message(1, 5), timeout=10)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def test_sigterm_finishes_what_was_accepted_and_exits_0(minilm_bundle: Path) -> None:
    with TestedServer(minilm_bundle.parents[1], "--drain-seconds", "0.5") as server:
        address = server.wait_until_serving()
        with grpc.insecure_channel(address) as channel, ThreadPoolExecutor() as pool:
            stub = EncoderServiceStub(channel)
            calls = [pool.submit(stub.Encode, message(100, 64), timeout=60) for _ in range(4)]
            while server.metric("mhsa_requests_in_flight", method="Encode") < 4:
                time.sleep(0.01)
            server.terminate()
            assert [call.result().dimensions for call in calls] == [384] * 4
            assert server.wait(60) == 0


async def test_callers_who_never_pause_see_only_unavailable_when_the_server_leaves(tiny_bundle: Path) -> None:
    codes: Counter[grpc.StatusCode] = Counter()

    async def call_again_and_again(channel: grpc.aio.Channel, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            try:
                await EncoderServiceStub(channel).Encode(message(1, 20))
                codes[grpc.StatusCode.OK] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code()] += 1
                await asyncio.sleep(0.01)

    is_over = asyncio.Event()
    with TestedServer(tiny_bundle.parents[1], "--drain-seconds", "0.2") as server:
        target = server.wait_until_serving()
        channels = [grpc.aio.insecure_channel(target, [("mhsa.number", number)]) for number in range(16)]
        callers = [asyncio.create_task(call_again_and_again(channels[k % 16], is_over)) for k in range(64)]
        while codes[grpc.StatusCode.OK] < 200:
            await asyncio.sleep(0.01)
        server.terminate()
        assert await asyncio.to_thread(server.wait, 30) == 0
        is_over.set()
        await asyncio.gather(*callers)
        await asyncio.gather(*(channel.close() for channel in channels))
    assert codes.keys() == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def test_the_drain_is_announced_before_anything_is_refused(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--drain-seconds", "1.5") as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            stub = EncoderServiceStub(channel)
            server.terminate()
            while health(channel) == HealthCheckResponse.SERVING:
                time.sleep(0.01)
            assert stub.Encode(message(1, 5), timeout=10).dimensions == 32, "not ready, and still serving"
            while (code := code_of(stub)) == grpc.StatusCode.OK:
                time.sleep(0.01)
            assert code == grpc.StatusCode.UNAVAILABLE
        assert server.wait(60) == 0


def test_idle_streams_and_watchers_do_not_hold_the_exit(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--grace-seconds", "60") as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            closed = threading.Event()

            def never_ending() -> Iterator[pb.EncodeStreamRequest]:
                yield pb.EncodeStreamRequest(id="a", request=message(1, 5))
                closed.wait(60)

            stream = EncoderServiceStub(channel).EncodeStream(never_ending())
            assert next(stream).id == "a"
            watch = HealthStub(channel).Watch(HealthCheckRequest())
            assert next(watch).status == HealthCheckResponse.SERVING
            server.terminate()
            assert next(watch).status == HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as ended:
                next(stream)
            assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
            assert server.wait(10) == 0
            closed.set()


def test_a_second_signal_cuts_the_drain_short(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--drain-seconds", "600") as server:
        server.wait_until_serving()
        server.terminate()
        server.wait_for_log("draining")
        server.send(signal.SIGINT)
        assert server.wait(10) == 0


def test_sigterm_while_a_model_loads_exits_at_once(minilm_bundle: Path) -> None:
    with TestedServer(minilm_bundle.parents[1]) as server:
        server.wait_until_listening()
        server.terminate()
        assert server.wait(10) == 0


def test_nothing_is_served_before_the_model_is_verified_and_warm(minilm_bundle: Path) -> None:
    with (
        TestedServer(minilm_bundle.parents[1]) as server,
        grpc.insecure_channel(server.wait_until_listening()) as channel,
    ):
        grpc.channel_ready_future(channel).result(10)
        assert health(channel) == HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            EncoderServiceStub(channel).Encode(message(1, 5), timeout=10)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "is loading" in (refused.value.details() or "")
        server.wait_until_serving()
        assert EncoderServiceStub(channel).Encode(message(1, 5), timeout=10).dimensions == 384


def test_versions_are_served_side_by_side_and_the_highest_is_the_default(tiny_bundle: Path, tmp_path: Path) -> None:
    for name, version in (("a", "9"), ("a", "10"), ("b", "1")):
        shutil.copytree(tiny_bundle, tmp_path / name / version)
    with TestedServer(tmp_path) as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            stub = EncoderServiceStub(channel)
            assert stub.GetModel(pb.GetModelRequest(model="a")).version == "10"
            assert stub.GetModel(pb.GetModelRequest(model="a", version="9")).version == "9"
            with pytest.raises(grpc.RpcError, match="names no model"):
                stub.GetModel(pb.GetModelRequest())
        assert server.metric("mhsa_model_info") == 3


def test_health_by_http_is_that_of_the_services(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--drain-seconds", "600") as server:
        server.wait_until_serving()
        url = f"http://{server.host}:{server.metrics_port}/health"
        with urllib.request.urlopen(url, timeout=60) as response:
            assert response.status == 200
        server.terminate()
        server.wait_for_log("not serving")
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(url, timeout=60)
        refused.value.close()
        server.terminate()


def test_each_step_of_a_life_is_a_line_and_in_json_an_object(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--log-format", "json") as server:
        server.wait_until_serving()
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log().splitlines()]
    events = [line["event"] for line in lines if "event" in line]
    loading = ["loading", "calibrated", "loaded"]
    assert events == ["starting", "listening", *loading, "serving", "leaving", "draining", "stopped"]
    assert all(line.keys() >= {"ts", "level", "logger", "message"} for line in lines)
    loaded = lines[[line.get("event") for line in lines].index("loaded")]
    assert (loaded["model"], loaded["version"], loaded["precision"]) == ("tiny", "1", "fp32")


def test_in_json_a_start_that_is_refused_is_an_object_too(tmp_path: Path) -> None:
    with TestedServer(tmp_path, "--log-format", "json") as server:
        line = json.loads(server.refusal())
    assert (line["level"], line["event"]) == ("critical", "refused")
    assert "make one with mhsa-export" in line["message"]


def test_a_directory_without_bundles_is_refused(tmp_path: Path) -> None:
    with TestedServer(tmp_path) as server:
        assert "make one with mhsa-export" in server.refusal()


def test_a_damaged_bundle_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny_bundle, tmp_path / "tiny" / "1")
    with (damaged / "model.fp32.onnx").open("ab") as file:
        file.write(b"x")
    with TestedServer(tmp_path) as server:
        assert "model.fp32.onnx: sha256 is" in server.refusal()


def test_a_taken_port_is_refused_before_any_model_is_loaded(tiny_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with TestedServer(tiny_bundle.parents[1], "--grpc-port", port) as server:
            assert f"--grpc-port {port} on 127.0.0.1: taken" in server.refusal()
        with TestedServer(tiny_bundle.parents[1], "--metrics-port", port) as server:
            assert f"--metrics-port {port} on 127.0.0.1: Address already in use" in server.refusal()


def test_two_servers_never_share_a_port(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1]) as first:
        port = first.wait_until_listening().rpartition(":")[2]
        with TestedServer(tiny_bundle.parents[1], "--grpc-port", port) as second:
            assert "taken" in second.refusal()


def test_cuda_that_cannot_run_stops_the_start(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1], "--device", "cuda") as server:
        assert "device cuda:" in server.refusal()


def test_auto_says_loudly_what_it_took(tiny_bundle: Path) -> None:
    with TestedServer(tiny_bundle.parents[1]) as server:
        assert server.wait_for_log("WARNING.*device auto: took CPUExecutionProvider")


def test_only_holders_of_a_token_are_served(tiny_bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first\nsecond\n")
    with TestedServer(tiny_bundle.parents[1], "--auth-token-file", str(tokens)) as server:
        with grpc.insecure_channel(server.wait_until_serving()) as channel:
            stub = EncoderServiceStub(channel)
            assert stub.Encode(message(1, 5), metadata=(("authorization", "Bearer second"),)).dimensions == 32
            with pytest.raises(grpc.RpcError) as refused:
                stub.Encode(message(1, 5), metadata=(("authorization", "Bearer third"),))
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert health(channel) == HealthCheckResponse.SERVING, "probes have no token"


def test_tls_is_served_to_those_who_trust_the_certificate_renewed_or_not(tiny_bundle: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    expiry, later = (datetime(year, 1, 2, 3, 4, 5, tzinfo=UTC) for year in (2037, 2038))
    certificate, key = write_certificate(authority, tmp_path / "tls", not_after=expiry)
    with TestedServer(tiny_bundle.parents[1], "--tls-cert", str(certificate), "--tls-key", str(key)) as server:
        server.wait_for_log("serving tiny/1")
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with EncoderClient(server.target, credentials=credentials) as client:
            assert client.encode([[1, 2, 3]]).shape == (1, 32)
        assert server.metric("mhsa_tls_certificate_expiry_timestamp_seconds") == expiry.timestamp()
        for new, old in zip(
            write_certificate(authority, tmp_path / "renewed", not_after=later), (certificate, key), strict=True
        ):
            os.replace(new, old)
        with EncoderClient(server.target, credentials=credentials) as client:
            assert client.encode([[1, 2, 3]]).shape == (1, 32)
        assert server.metric("mhsa_tls_certificate_expiry_timestamp_seconds") == later.timestamp()


def test_a_certificate_that_cannot_be_read_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with TestedServer(tiny_bundle.parents[1], "--tls-cert", missing, "--tls-key", missing) as server:
        assert f"--tls-key {missing}: No such file or directory" in server.refusal()


def test_a_certificate_and_a_key_that_do_not_belong_together_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, _ = write_certificate(authority, tmp_path / "one")
    _, key = write_certificate(authority, tmp_path / "another")
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    for cert, other in ((certificate, key), (junk, key), (certificate, junk)):
        with TestedServer(tiny_bundle.parents[1], "--tls-cert", str(cert), "--tls-key", str(other)) as server:
            assert f"--tls-cert {cert}, --tls-key {other}: not a pair" in server.refusal()


def test_an_idle_server_burns_no_cpu(minilm_server: TestedServer) -> None:
    process = psutil.Process(minilm_server.pid)
    before = process.cpu_times()
    time.sleep(2)  # the one thing that must be waited for: nothing happening
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5  # threads that spin take 2 s and more


def test_memory_does_not_grow_with_every_new_shape(minilm_server: TestedServer) -> None:
    """ONNX Runtime's arena keeps its high-water mark; the token budget is what bounds it."""
    rng = np.random.default_rng(3)

    def run(count: int) -> int:
        with EncoderClient(minilm_server.target) as client:
            for _ in range(count):
                lengths = rng.integers(1, 257, rng.integers(1, 9))
                client.encode([rng.integers(0, 30522, length) for length in lengths])
        return int(psutil.Process(minilm_server.pid).memory_info().rss)

    settled = run(60)
    assert run(60) < 1.1 * settled


def test_who_speaks_no_tls_to_its_port_leaves_no_line_in_the_log(tiny_bundle: Path, tmp_path: Path) -> None:
    """Nor one of gRPC's C++, which is no JSON."""
    certificate, key = write_certificate(trustme.CA(), tmp_path / "tls")
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with TestedServer(tiny_bundle.parents[1], *tls, "--log-format", "json") as server:
        server.wait_for_log("listening: gRPC")
        with socket.create_connection((server.host, server.grpc_port), 60) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while scanner.recv(1024):
                    pass
        server.stop()
        for line in server.log().splitlines():
            json.loads(line)


def test_a_server_whose_log_nobody_reads_serves_and_ends(tiny_bundle: Path) -> None:
    """Its stderr is a pipe that is full from the start."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    grpc_port, metrics_port = free_ports(2)
    command = [sys.executable, "-m", "service", "--models", str(tiny_bundle.parents[1]), "--host", "127.0.0.1"]
    command += ["--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port), "--drain-seconds", "0"]
    with subprocess.Popen(command, stderr=writing) as server:
        try:
            os.close(writing)
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                watch = HealthStub(channel).Watch(HealthCheckRequest(), timeout=120, wait_for_ready=True)
                assert any(answer.status == HealthCheckResponse.SERVING for answer in watch)
                watch.cancel()
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()
            os.close(reading)
