"""An MCP gate on a real socket, over a gateway whose tools are scripts of the test: they see the request itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from mcp import Client
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError, DispatchResult, Ok
from callyard.errors import CallFailure, ErrorKind, fail
from callyard.functions.ports import AskRefused
from callyard.functions.registry import Registry
from callyard.host.jobs import Permit
from callyard.ids import CallId, Tenant
from callyard.serve.gateway import Caller, Gateway, ToolRequest
from callyard.serve.mcp_server import McpApp, McpGate

WAIT_S = 20.0
LEGACY, MODERN = "legacy", "2026-07-28"
Script = Callable[[ToolRequest], Awaitable[Any]]

ACME = Caller(tenant=Tenant("acme"), token="one")
OTHER = Caller(tenant=Tenant("other"), token="two")
CALLERS = {"one": ACME, "two": OTHER, "none": Caller(), "read": Caller(token="read", tools=("read_*",))}


class Failed(Exception):
    def __init__(self, kind: ErrorKind, message: str, **details: Any) -> None:
        super().__init__(message)
        self.failure: CallFailure = fail(kind, message, attempts=1, **details)


class ScriptedGateway(Gateway):
    """Its calls run the scripts of the test; what has none goes on to the dispatcher."""

    def __init__(self, registry: Registry, **options: Any) -> None:
        super().__init__(Dispatcher(registry), **options)
        self.scripts: dict[str, Script] = {}
        self.requests: list[ToolRequest] = []
        self.lost: list[str] = []
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        self._tasks: dict[CallId, asyncio.Task[Any]] = {}

    async def call(self, request: ToolRequest, permit: Permit) -> DispatchResult:
        self.requests.append(request)
        script = self.scripts.get(request.tool)
        if script is None:
            return await super().call(request, permit)
        assert request.call_id is not None
        permit.release()  # its first attempt begins
        task = self._tasks[request.call_id] = asyncio.ensure_future(script(request))
        try:
            return Ok(request.call_id, msgspec.json.encode(await task))
        except Failed as failed:
            return DispatchError(request.call_id, failed.failure)
        except AskRefused as refused:  # as a function that does not catch it
            return DispatchError(request.call_id, fail(refused.kind, str(refused), attempts=1))
        except asyncio.CancelledError:
            if request.call_id in self.cancelled:
                return DispatchError(request.call_id, fail(ErrorKind.CANCELLED, "cancelled", attempts=1))
            self.lost.append(request.tool)
            task.cancel()
            raise
        finally:
            self.ended.append(request.tool)
            del self._tasks[request.call_id]

    def cancel(self, caller: Caller, call_id: CallId) -> bool:
        self.cancelled.append(call_id)
        task = self._tasks.get(call_id)
        return task is not None and task.cancel()

    async def aclose(self) -> None:
        await self.dispatcher.close(drain_deadline_ms=0)


def add_scripts(gateway: ScriptedGateway, scripts: Mapping[str, Script]) -> None:
    for name, script in scripts.items():
        if name not in gateway.registry:
            gateway.registry.add_tool(
                name,
                lambda arguments: None,
                description=f"The tool {name}.",
                input_schema={"type": "object", "additionalProperties": True},
            )
        gateway.scripts[name] = script


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


class World:
    def __init__(self, gateway: ScriptedGateway, gate: McpGate, url: str) -> None:
        self.gateway = gateway
        self.gate = gate
        self.url = url

    @asynccontextmanager
    async def client(self, mode: str, token: str = "none", **options: Any) -> AsyncIterator[Client]:
        async with (
            create_mcp_http_client(headers={"authorization": f"Bearer {token}"}) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode, **options) as client,
        ):
            yield client


@asynccontextmanager
async def serving(
    registry: Registry | None = None,
    scripts: Mapping[str, Script] | None = None,
    *,
    app_options: Mapping[str, Any] | None = None,
    jobs_max: int = 16,
    **gate_options: Any,
) -> AsyncIterator[World]:
    """As the HTTP gate does it: who calls is found by the token, and a POST has a permit."""
    gateway = ScriptedGateway(registry or Registry(), jobs_max=jobs_max)
    add_scripts(gateway, scripts or {})
    gate = McpGate(gateway, **gate_options)
    app = McpApp(gate, **(app_options or {}))

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        token = headers.get(b"authorization", b"Bearer none").decode().partition(" ")[2]
        state = scope.setdefault("state", {})
        state["caller"] = CALLERS[token]
        permit = None
        if scope["method"] == "POST":
            permit = state["permit"] = await gateway.admit(object())
        try:
            await app(scope, receive, send)
        finally:
            if permit is not None:
                permit.release()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(guarded, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        async with app.run():
            running = asyncio.ensure_future(server._serve([listener]))
            await until(lambda: server.started)
            try:
                yield World(gateway, gate, f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")
            finally:
                gate.close()
                server.should_exit = True
                await running
    await gateway.aclose()
