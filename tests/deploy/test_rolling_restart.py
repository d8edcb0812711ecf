"""Servers stop and start while clients call: no call fails, and a new server gets its share.

Loopback has as many addresses as a cluster: pods listen on one port at 127.0.0.1, 127.0.0.2, ..., and a name server
says which are ready, as a headless Service's does. A pod that is replaced comes back under another address.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from deploy.process import free_ports
from service.client import AsyncEncoderClient
from tests.deploy.name_server import NameServer
from tests.deploy.nginx import run_nginx
from tests.integration.server_process import TestedServer

NUM_CALLERS = 8
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
AGE_SECONDS = 2


class Load:
    """Callers who call without a pause; every failure is kept."""

    def __init__(self, client: AsyncEncoderClient) -> None:
        self._client = client
        self.num_answered = 0
        self.failures: list[BaseException] = []

    async def call_until(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            try:
                await self._client.encode([[1, 2, 3], [4, 5]], timeout=60)
                self.num_answered += 1
            except Exception as error:  # whatever it is, the test reports it
                self.failures.append(error)
                await asyncio.sleep(0.01)

    async def more(self, count: int) -> None:
        """Wait for so many calls to end from now on."""
        wanted = self.num_answered + len(self.failures) + count
        async with asyncio.timeout(60):
            while self.num_answered + len(self.failures) < wanted:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def load(target: str, *, watch_health: bool = False) -> AsyncIterator[Load]:
    """Callers at work on `target`."""
    is_over = asyncio.Event()
    async with AsyncEncoderClient(target, watch_health=watch_health) as client:
        found = Load(client)
        callers = [asyncio.create_task(found.call_until(is_over)) for _ in range(NUM_CALLERS)]
        try:
            yield found
        finally:
            is_over.set()
            await asyncio.gather(*callers)


def answered(server: TestedServer) -> float:
    return server.metric("mhsa_requests_total", method="Encode", code="OK")


@pytest.fixture
def start(tiny_bundle: Path) -> Iterator[Callable[..., TestedServer]]:
    """Starts a server at an address and port, serving when it returns; all are stopped at the end."""
    with ExitStack() as stack:

        def serving(host: str, port: int) -> TestedServer:
            flags = ["--drain-seconds", "0.5", "--max-connection-age-seconds", str(AGE_SECONDS)]
            server = stack.enter_context(TestedServer(tiny_bundle.parents[1], *flags, host=host, grpc_port=port))
            server.wait_until_serving()
            return server

        yield serving


Start = Callable[[str, int], TestedServer]


async def stop(server: TestedServer) -> None:
    """SIGTERM, and wait until it has drained and left."""
    assert await asyncio.to_thread(server.stop) == 0


async def restart_each(servers: list[TestedServer], start: Start, found: Load) -> None:
    """One after the other, on its own port."""
    for server in servers:
        await found.more(100)
        await stop(server)
        await found.more(100)
        again = await asyncio.to_thread(start, server.host, server.grpc_port)
        while not await asyncio.to_thread(answered, again):
            await found.more(10)


async def test_no_call_fails_while_each_of_two_servers_restarts(start: Start) -> None:
    first, second = free_ports(2)
    target = f"ipv4:127.0.0.1:{first},127.0.0.1:{second}"
    servers = [await asyncio.to_thread(start, "127.0.0.1", port) for port in (first, second)]
    # Nothing but health says that a server whose address never changes is back, and not ready yet.
    async with load(target, watch_health=True) as found:
        await restart_each(servers, start, found)
    assert found.failures == []


async def test_who_watches_health_leaves_a_server_that_drains(tiny_bundle: Path) -> None:
    models = tiny_bundle.parents[1]
    with TestedServer(models) as stays, TestedServer(models, "--drain-seconds", "600") as leaves:
        target = f"ipv4:{stays.wait_until_serving()},{leaves.wait_until_serving()}"
        async with load(target, watch_health=True) as found:
            while not await asyncio.to_thread(answered, leaves):
                await found.more(10)
            leaves.terminate()
            leaves.wait_for_log("draining")
            await found.more(100)  # those on their way, and the news
            before = await asyncio.to_thread(answered, leaves)
            await found.more(200)
            assert await asyncio.to_thread(answered, leaves) == before
        leaves.terminate()  # a second signal cuts the drain short
    assert found.failures == []


async def test_no_call_fails_behind_an_nginx_that_is_told_who_is_there(start: Start, tmp_path: Path) -> None:
    servers = [await asyncio.to_thread(start, "127.0.0.1", port) for port in free_ports(2)]
    targets = [server.target for server in servers]
    with run_nginx(tmp_path, targets) as nginx:
        async with load(nginx.target) as found:
            for server in servers:
                await found.more(100)
                await asyncio.to_thread(nginx.use, [other for other in targets if other != server.target])
                await stop(server)
                again = await asyncio.to_thread(start, "127.0.0.1", server.grpc_port)
                await asyncio.to_thread(nginx.use, targets)
                while not await asyncio.to_thread(answered, again):
                    await found.more(10)
    assert found.failures == []


@only_linux
@pytest.mark.parametrize("surge", [1, 0])
async def test_no_call_fails_while_every_pod_is_replaced_by_one_with_another_address(start: Start, surge: int) -> None:
    """As a Deployment does it: with a surge for CPUs, without one for GPUs."""
    (port,) = free_ports(1)
    old = [await asyncio.to_thread(start, host, port) for host in ("127.0.0.1", "127.0.0.2")]
    with NameServer([pod.host for pod in old]) as names:
        async with load(names.target(port)) as found:
            await found.more(100)
            for pod, host in zip(old, ("127.0.0.3", "127.0.0.4"), strict=True):
                if surge:
                    new = await asyncio.to_thread(start, host, port)
                    names.addresses.append(host)
                names.addresses.remove(pod.host)
                await stop(pod)
                await found.more(100)
                if not surge:
                    new = await asyncio.to_thread(start, host, port)
                    names.addresses.append(host)
            while not await asyncio.to_thread(answered, new):
                await found.more(10)
    assert found.failures == []


@only_linux
async def test_a_server_that_is_added_gets_its_share_within_the_age_of_a_connection(start: Start) -> None:
    (port,) = free_ports(1)
    servers = [await asyncio.to_thread(start, host, port) for host in ("127.0.0.1", "127.0.0.2")]
    with NameServer([server.host for server in servers]) as names:
        async with load(names.target(port)) as found:
            await found.more(100)
            servers.append(await asyncio.to_thread(start, "127.0.0.3", port))
            names.addresses.append("127.0.0.3")
            async with asyncio.timeout(30 * AGE_SECONDS):  # 4 s where nothing else runs
                while not await asyncio.to_thread(answered, servers[2]):
                    await found.more(1)
            async with asyncio.timeout(60):
                # Connections end and begin all the while, so one may be missing from a window.
                while min(shares := await tallied(servers, found)) <= 0.25 * sum(shares):
                    pass
    assert found.failures == []


async def tallied(servers: list[TestedServer], found: Load) -> list[float]:
    """How many of the next calls each answers."""
    before = [await asyncio.to_thread(answered, server) for server in servers]
    await found.more(600)
    after = [await asyncio.to_thread(answered, server) for server in servers]
    return [now - then for now, then in zip(after, before, strict=True)]
