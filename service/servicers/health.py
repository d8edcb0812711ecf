"""grpc.health.v1: Check and Watch, on two levels.

The services answer whether to send them work. The empty name, which probes of liveness ask for, answers whether the
process is worth keeping: it is while an engine is being tried again, and a restart would throw away what may come back
by itself. A dead engine ends the process, and both say NOT_SERVING until it has.

grpcio-health-checking's own asyncio servicer starts with "" = SERVING, and when one of two watchers of a service
leaves, the other is never told again; its messages are used here, its servicer is not.
"""

import asyncio
from collections.abc import Iterable

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer as HealthServicerBase

# What a probe asks for when it names no service.
PROCESS = ""
_SERVING, _NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class HealthServicer(HealthServicerBase):  # type: ignore[misc]  # grpc_health ships no types
    """One status for all services named and one for the process, both NOT_SERVING at first."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._is_serving = False
        self._is_healthy = True
        self._changed = asyncio.Event()

    def set_serving(self, is_serving: bool) -> None:
        """Whether the server is loaded and stays; tells every watcher."""
        self._is_serving = is_serving
        self._tell()

    def set_healthy(self, is_healthy: bool) -> None:
        """Whether its engines work: without, the services are NOT_SERVING though the process lives."""
        self._is_healthy = is_healthy
        self._tell()

    async def Check(
        self, request: HealthCheckRequest, context: ServicerContext[HealthCheckRequest, HealthCheckResponse]
    ) -> HealthCheckResponse:
        if (status := self._status_of(request.service)) == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:128]!r}")
        return HealthCheckResponse(status=status)

    async def Watch(
        self, request: HealthCheckRequest, context: ServicerContext[HealthCheckRequest, HealthCheckResponse]
    ) -> None:
        sent = None
        while True:
            changed = self._changed  # before the status is read: what changes from here on is seen in the next turn
            if (status := self._status_of(request.service)) != sent:
                await context.write(HealthCheckResponse(status=status))
                sent = status
            await changed.wait()

    def _status_of(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service == PROCESS:
            return _SERVING if self._is_serving else _NOT_SERVING
        if service in self._services:
            return _SERVING if self._is_serving and self._is_healthy else _NOT_SERVING
        return HealthCheckResponse.SERVICE_UNKNOWN

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
