"""Health over the wire."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from service.servicers.health import HealthServicer

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def health() -> AsyncIterator[tuple[HealthServicer, HealthStub]]:
    servicer = HealthServicer(["a.Service"])
    server = grpc.aio.server()
    add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, HealthStub(channel)
    await server.stop(0)


async def test_nothing_serves_at_first() -> None:
    async with health() as (_, stub):
        for service in ("", "a.Service"):
            assert (await stub.Check(HealthCheckRequest(service=service))).status == NOT_SERVING


async def status_of(stub: HealthStub, service: str) -> HealthCheckResponse.ServingStatus:
    return (await stub.Check(HealthCheckRequest(service=service))).status


async def test_an_engine_that_does_not_work_takes_the_services_away_and_leaves_the_process_alive() -> None:
    async with health() as (servicer, stub):
        servicer.set_serving(True)
        servicer.set_healthy(False)
        assert [await status_of(stub, name) for name in ("a.Service", "")] == [NOT_SERVING, SERVING]
        servicer.set_healthy(True)
        assert [await status_of(stub, name) for name in ("a.Service", "")] == [SERVING, SERVING]


async def test_while_it_loads_and_when_it_leaves_nothing_serves_however_healthy() -> None:
    async with health() as (servicer, stub):
        for is_serving in (False, True, False):
            servicer.set_serving(is_serving)
            for is_healthy in (False, True):
                servicer.set_healthy(is_healthy)
                assert (await status_of(stub, "a.Service") == SERVING) is (is_serving and is_healthy)
                assert (await status_of(stub, "") == SERVING) is is_serving


async def test_a_watcher_is_told_of_its_own_service_and_not_twice() -> None:
    async with health() as (servicer, stub):
        process, service = (stub.Watch(HealthCheckRequest(service=name)) for name in ("", "a.Service"))
        assert [(await watch.read()).status for watch in (process, service)] == [NOT_SERVING, NOT_SERVING]
        servicer.set_serving(True)
        assert [(await watch.read()).status for watch in (process, service)] == [SERVING, SERVING]
        for is_healthy in (False, True):
            servicer.set_healthy(is_healthy)
            assert (await service.read()).status == (SERVING if is_healthy else NOT_SERVING)
        servicer.set_serving(False)
        assert (await process.read()).status == NOT_SERVING  # and nothing of the engine in between
        for watch in (process, service):
            watch.cancel()


async def test_an_unknown_service_is_not_found() -> None:
    async with health() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match=r"no service 'b\.Service'"):
            await stub.Check(HealthCheckRequest(service="b.Service"))


async def test_a_watcher_of_an_unknown_service_is_told_so() -> None:
    async with health() as (_, stub):
        watch = stub.Watch(HealthCheckRequest(service="b.Service"))
        assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watcher_is_still_told_after_another_has_left() -> None:
    async with health() as (servicer, stub):
        leaves, stays = (stub.Watch(HealthCheckRequest()) for _ in range(2))
        assert [(await watch.read()).status for watch in (leaves, stays)] == [NOT_SERVING, NOT_SERVING]
        leaves.cancel()
        servicer.set_serving(True)
        assert (await stays.read()).status == SERVING
        servicer.set_serving(False)
        assert (await stays.read()).status == NOT_SERVING
        stays.cancel()
