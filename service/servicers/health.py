"""grpc.health.v1: Check and Watch.

grpcio-health-checking's own asyncio servicer starts with "" = SERVING, and when one of two watchers of a service
leaves, the other is never told again; its messages are used here, its servicer is not.
"""

import asyncio
from collections.abc import Iterable

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer as HealthServicerBase

_SERVING, _NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class HealthServicer(HealthServicerBase):  # type: ignore[misc]  # grpc_health ships no types
    """One status for all services named, NOT_SERVING at first."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._status = _NOT_SERVING
        self._changed = asyncio.Condition()

    async def set_serving(self, is_serving: bool) -> None:
        """Change the status and tell every watcher."""
        async with self._changed:
            self._status = _SERVING if is_serving else _NOT_SERVING
            self._changed.notify_all()

    async def Check(
        self, request: HealthCheckRequest, context: ServicerContext[HealthCheckRequest, HealthCheckResponse]
    ) -> HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:128]!r}")
        return HealthCheckResponse(status=self._status)

    async def Watch(
        self, request: HealthCheckRequest, context: ServicerContext[HealthCheckRequest, HealthCheckResponse]
    ) -> None:
        sent = None
        while True:
            if (status := self._status_of(request.service)) != sent:
                await context.write(HealthCheckResponse(status=status))
                sent = status
            async with self._changed:
                if self._status_of(request.service) == sent:
                    await self._changed.wait()

    def _status_of(self, service: str) -> HealthCheckResponse.ServingStatus:
        return self._status if service in self._services else HealthCheckResponse.SERVICE_UNKNOWN
