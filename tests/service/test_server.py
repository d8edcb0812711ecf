"""The wiring, in this process: what only shows when the parts meet."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos import encoder_pb2 as pb
from protos.encoder_pb2_grpc import EncoderServiceStub
from service import preparing
from service.config import Settings
from service.engine import Engine, Outputs
from service.errors import EngineError, StartupError
from service.server import Server, serve
from service.supervisor import MAX_FAULTS

HELLO = pb.EncodeRequest(token_ids=np.array([1, 2, 3], "<i4").tobytes(), lengths=[3])


def settings(bundle: Path, **others: object) -> Settings:
    fixed = {"host": "127.0.0.1", "grpc_port": 0, "metrics_port": 0, "drain_seconds": 0.0}
    return Settings(models=bundle.parents[1], **(fixed | others))  # type: ignore[arg-type]  # checked by Settings' tests


async def test_a_dead_engine_ends_the_process_with_an_error(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(settings(tiny_bundle))
    process = asyncio.create_task(serve(server))
    async with asyncio.timeout(30):
        while not server.repository.is_ready:
            await asyncio.sleep(0.01)
    monkeypatch.setattr(Engine, "run", lambda *_, **__: 1 // 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await EncoderServiceStub(channel).Encode(HELLO, timeout=10)
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert "division" not in (failed.value.details() or ""), "the exception's text stays in the log"
    assert await process == 1
    await server.stop()


async def test_an_engine_that_does_not_work_is_told_by_the_services_and_not_by_the_process(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(settings(tiny_bundle))
    await server.start()
    await server.load()

    def fail(*_: object, **__: object) -> Outputs:
        raise EngineError("broken")

    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        health, stub = HealthStub(channel), EncoderServiceStub(channel)
        watch = health.Watch(HealthCheckRequest(service="mhsa.encoder.v1.EncoderService"))
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        with monkeypatch.context() as broken:
            broken.setattr(Engine, "run", fail)
            failed = [await stub.Encode(HELLO, timeout=10).code() for _ in range(MAX_FAULTS)]
            assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
            process = await health.Check(HealthCheckRequest())
            refused = await stub.Encode(HELLO, timeout=10).code()
        assert (await watch.read()).status == HealthCheckResponse.SERVING  # it has passed its test
        watch.cancel()
        answer = await stub.Encode(HELLO, timeout=10)
    await server.stop()

    assert failed == [grpc.StatusCode.INTERNAL] * MAX_FAULTS
    assert process.status == HealthCheckResponse.SERVING
    assert refused == grpc.StatusCode.UNAVAILABLE
    assert len(answer.pooled) == 32 * 4


async def test_a_server_with_an_engine_that_does_not_work_drains_for_the_others(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(settings(tiny_bundle))
    process = asyncio.create_task(serve(server))
    async with asyncio.timeout(30):
        while not server.repository.is_ready:
            await asyncio.sleep(0.01)
    (model,) = server.repository.models
    monkeypatch.setattr(model.batcher, "is_healthy", False)
    os.kill(os.getpid(), signal.SIGINT)
    assert await process == 0
    assert server.repository.is_draining
    await server.stop()


async def test_sigint_ends_it_well(tiny_bundle: Path) -> None:
    server = Server(settings(tiny_bundle))
    process = asyncio.create_task(serve(server))
    await asyncio.sleep(0)  # the handlers are set before anything is awaited
    os.kill(os.getpid(), signal.SIGINT)
    assert await process == 0
    await server.stop()


async def test_the_end_does_not_wait_for_a_collector_that_does_not_answer(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.server._TRACES_SECONDS", 0.01)
    server, is_answered = Server(settings(tiny_bundle)), threading.Event()
    tracing = SimpleNamespace(close=is_answered.wait)
    server.instruments = replace(server.instruments, tracing=tracing)  # type: ignore[arg-type]  # only closed here
    await server.flush()
    assert not is_answered.is_set()
    is_answered.set()  # lets the thread that still waits end


async def test_a_model_that_fails_to_load_stops_the_start(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "differences", lambda *_, **__: (0.5, 0.5))
    server = Server(settings(tiny_bundle))
    with pytest.raises(StartupError, match=r"differ from PyTorch's by 5\.0e-01"):
        await serve(server)
    await server.stop()


async def test_a_loaded_server_is_serving_and_warm(tiny_bundle: Path) -> None:
    server = Server(settings(tiny_bundle))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        before = await HealthStub(channel).Check(HealthCheckRequest())
        await server.load()
        after = await HealthStub(channel).Check(HealthCheckRequest())
        answer = await EncoderServiceStub(channel).Encode(HELLO)
    await server.stop()
    assert (before.status, after.status) == (HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING)
    assert len(answer.pooled) == 32 * 4


async def test_a_model_is_counted_as_ready_from_its_load_to_the_drain(tiny_bundle: Path) -> None:
    server = Server(settings(tiny_bundle))
    await server.start()
    await server.load()
    labels = {"model": tiny_bundle.parent.name, "version": "1"}
    loaded = server.metrics.registry.get_sample_value("mhsa_model_ready", labels)
    await server.announce_end()
    ending = server.metrics.registry.get_sample_value("mhsa_model_ready", labels)
    await server.stop()
    assert (loaded, ending) == (1, 0)
