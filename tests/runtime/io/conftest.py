from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from callyard.ids import TaskId, Tenant
from callyard.worker.io.port import IoFailure, IoScope, Provider, Reply

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from aiohttp.test_utils import TestServer  # noqa: E402

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[TestServer]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers on the loopback address, each with one handler for every path."""
    servers: list[TestServer] = []

    async def start(handler: Handler) -> TestServer:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", handler)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()


async def perform(
    provider: Provider,
    operation: str,
    request: Any,
    body: bytes | None = None,
    names: tuple[str, ...] | None = None,
) -> Reply:
    scope = IoScope(task_id=TaskId("t"), tenant=Tenant("x"), names=names)
    return await provider.perform(operation, msgspec.json.encode(request), body, scope)


async def refusal(awaitable: Awaitable[Reply]) -> IoFailure:
    with pytest.raises(IoFailure) as caught:
        await awaitable
    return caught.value
