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
    servicer = HealthServicer(["", "a.Service"])
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
        await servicer.set_serving(True)
        assert (await stays.read()).status == SERVING
        await servicer.set_serving(False)
        assert (await stays.read()).status == NOT_SERVING
        stays.cancel()
