"""The HTTP gate of a whole server, with real executors: one process from the port to the function and back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from callyard.errors import UsageError
from callyard.serve.config import Address, ServeConfig
from callyard.serve.http_app import serve_http
from callyard.serve.listener import Listener
from callyard.serve.server import Server
from callyard.worker.worker import Worker

from .http_world import Peer, request_bytes, token, until

SOURCE = """
import os, time
from callyard import File, ToolError, function, progress

@function(idempotent=True)
def add(a: int, b: int = 1) -> int:
    return a + b

@function(idempotent=True)
def spin(mark: str) -> None:
    while True:
        with open(mark, "a") as file:
            file.write("x")
        time.sleep(0.005)

@function
def report() -> File:
    return File(b"a,b", "text/csv", name="report.csv")

@function
def steps() -> str:
    progress(1, 2, "half")
    return "done"

@function
def charge(mark: str) -> None:
    with open(mark, "a") as file:
        file.write("x")
    os._exit(3)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(SOURCE)
    return path


class Client:
    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    async def connect(self) -> Peer:
        return Peer(*await asyncio.open_connection("127.0.0.1", self.listener.port))

    async def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        peer = await self.connect()
        await peer.send(request_bytes(method, path, body, {"connection": "close", **(headers or {})}))
        async with asyncio.timeout(60):
            reply = await peer.reply()
        await peer.close()
        return reply


@asynccontextmanager
async def running(target: Path, **settings: Any) -> AsyncIterator[tuple[Server, Client]]:
    given = {"http": Address("127.0.0.1", 0), "state_dir": target.parent / "state", **settings}
    config = ServeConfig(**given)
    server = Server(target, config, given={"executor_count": 1, "spare_executors": 0}, environ={})
    async with server:
        serving = asyncio.ensure_future(server.run(serve_http))
        await until(lambda: serving.done() or "http" in server.listeners)
        if serving.done():
            await serving
        try:
            yield server, Client(server.listeners["http"])
        finally:
            server.request_stop()
            async with asyncio.timeout(60):
                await serving


@pytest.mark.requirement("D36", "D24", "D46")
async def test_one_process_from_the_port_to_the_function(target: Path) -> None:
    async with running(target) as (server, client):
        assert (await client.ask("POST", "/tools/add", {"a": 2})).json == 3
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "add", "params": {"a": "2"}}
        assert (await client.ask("POST", "/rpc", rpc)).json["error"]["code"] == -32602
        report = await client.ask("POST", "/tools/report", {})
        assert (report.body, report.headers["content-type"]) == (b"a,b", "text/csv")
        assert report.headers["content-disposition"] == 'attachment; filename="report.csv"'
        events = (await client.ask("POST", "/tools/steps", {}, {"accept": "text/event-stream"})).body
        assert b'event: progress\ndata: {"done":1' in events
        assert events.endswith(b'event: result\ndata: "done"\n\n')
        document = (await client.ask("GET", "/openapi.json")).json
        assert set(document["paths"]) == {f"/tools/{name}" for name in ("add", "spin", "report", "steps", "charge")}
        listener = server.listeners["http"]
    assert listener.connections == 0
    assert server.gateway.statistics().permits == 0


@pytest.mark.requirement("D36")
@pytest.mark.parametrize("name", ["http", "admin"])
async def test_an_address_that_is_taken_is_told_before_anything_starts(
    target: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_: Worker) -> None:
        raise AssertionError("executors were started for nothing")

    monkeypatch.setattr(Worker, "start", start)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        addresses = {"http": Address("127.0.0.1", 0), name: Address("127.0.0.1", port)}
        config = ServeConfig(state_dir=target.parent / "state").with_settings(**addresses)
        server = Server(target, config, environ={})
        with pytest.raises(UsageError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            await server.start()
        assert all(one.fileno() == -1 for bound in server.bound.values() for one in bound)


@pytest.mark.requirement("D36")
async def test_nobody_connects_before_the_server_is_ready(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    start = Worker.start

    async def look_and_start(worker: Worker) -> None:
        port = server.bound["http"][0].getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        asked.append(port)
        await start(worker)

    monkeypatch.setattr(Worker, "start", look_and_start)
    config = ServeConfig(state_dir=target.parent / "state", http=Address("127.0.0.1", 0))
    server = Server(target, config, given={"executor_count": 1, "spare_executors": 0}, environ={})
    async with server:
        serving = asyncio.ensure_future(server.run(serve_http))
        await until(lambda: "http" in server.listeners)
        assert [server.listeners["http"].port] == asked
        assert (await Client(server.listeners["http"]).ask("POST", "/tools/add", {"a": 2})).json == 3
        server.request_stop()
        async with asyncio.timeout(60):
            await serving


@pytest.mark.requirement("D41", "D56", "R111")
async def test_what_a_lost_client_asked_for_stops_in_its_executor(target: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with running(target) as (server, client):
        peer = await client.connect()
        await peer.send(request_bytes("POST", "/tools/spin", {"mark": str(mark)}))
        await until(mark.exists)
        await peer.close()
        await until(lambda: server.gateway.statistics().calls == 0)
        written = mark.stat().st_size
        assert (await client.ask("POST", "/tools/add", {"a": 1})).json == 2  # on the executor that it had
        assert mark.stat().st_size == written


@pytest.mark.requirement("D55", "D36")
async def test_an_unknown_outcome_is_found_and_resolved_over_http(target: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tokens = {"a": token("cy_a", "a", claims={"keys": True})}
    mine = {"Authorization": "Bearer cy_a"}
    async with running(target, tokens=tokens) as (_, client):
        keyed = {**mine, "Idempotency-Key": "order-7"}
        for _ in range(2):
            reply = await client.ask("POST", "/tools/charge", {"mark": str(mark)}, keyed)
            assert (reply.status, reply.json["error"]["outcome"]) == (502, "unknown")
        assert mark.read_text() == "x"
        listed = (await client.ask("GET", "/keys?unknown=1", headers=mine)).json["keys"]
        assert [(one["tool"], one["key"]) for one in listed] == [("charge", "order-7")]
        said = {"tool": "charge", "key": "order-7", "result": None}
        assert (await client.ask("POST", "/keys/resolve", said, mine)).status == 200
        reply = await client.ask("POST", "/tools/charge", {"mark": str(mark)}, keyed)
        assert (reply.status, reply.json, mark.read_text()) == (200, None, "x")


def mcp_call(tool: str, arguments: dict[str, Any], **meta: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of a call by 2026-07-28."""
    prefix = "io.modelcontextprotocol/"
    meta |= {f"{prefix}protocolVersion": "2026-07-28", f"{prefix}clientCapabilities": {}}
    body = {
        "jsonrpc": "2.0",
        "id": 7,
        "method": "tools/call",
        "params": {"name": tool, "arguments": arguments, "_meta": meta},
    }
    headers = {"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": tool}
    return body, headers | {"Accept": "application/json, text/event-stream"}


TELLING = {"progressToken": 1}


@pytest.mark.parametrize("meta", [{}, TELLING], ids=["quiet", "telling"])
@pytest.mark.requirement("D33", "D41", "D56")
async def test_what_a_lost_mcp_client_asked_for_stops_in_its_executor(
    target: Path, tmp_path: Path, meta: dict[str, Any]
) -> None:
    mark = tmp_path / "mark"
    async with running(target) as (server, client):
        peer = await client.connect()
        body, headers = mcp_call("spin", {"mark": str(mark)}, **meta)
        await peer.send(request_bytes("POST", "/mcp", body, headers))
        await until(mark.exists)
        await peer.close()
        await until(lambda: server.gateway.statistics().calls == 0)
        written = mark.stat().st_size
        assert (await client.ask("POST", "/tools/add", {"a": 1})).json == 2
        assert mark.stat().st_size == written
    assert server.gateway.statistics().permits == 0


@pytest.mark.requirement("D33")
async def test_a_call_that_can_tell_nothing_is_answered_like_any_other(target: Path) -> None:
    async with running(target) as (_, client):
        for tool, arguments in (
            ("add", {"a": 1}),
            ("add", {"a": "x"}),
            ("nobody", {}),
            ("charge", {"mark": "/dev/null"}),
        ):
            quiet, telling = [
                await client.ask("POST", "/mcp", *mcp_call(tool, arguments, **meta)) for meta in ({}, TELLING)
            ]
            assert (quiet.status, quiet.headers["content-type"]) == (telling.status, telling.headers["content-type"])
            assert set(quiet.json) == set(telling.json) >= {"id"}
        reply = await client.ask("POST", "/mcp", *mcp_call("steps", {}, **TELLING))
        assert reply.headers["content-type"].startswith("text/event-stream")
        body, headers = mcp_call("add", {"a": 1})
        reply = await client.ask("POST", "/mcp", body, headers | {"Accept": "application/json"})
        assert reply.status == 406, "as the SDK answers it"


@pytest.mark.requirement("D33", "D36")
async def test_mcp_is_there_behind_the_same_guard(target: Path) -> None:
    initialize = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    accept = {"accept": "application/json, text/event-stream"}
    async with running(target) as (server, client):
        reply = await client.ask("POST", "/mcp", initialize, accept)
        assert reply.status == 200
        assert b"protocolVersion" in reply.body
        assert (await client.ask("POST", "/mcp", initialize, {**accept, "host": "evil.example"})).status == 421
        assert (await client.ask("POST", "/mcp", initialize, {**accept, "origin": "http://evil.example"})).status == 403
        stream = await client.connect()  # one that has no end of its own holds up no stop
        session = {"mcp-session-id": reply.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
        await stream.send(request_bytes("GET", "/mcp", headers={"accept": "text/event-stream", **session}))
        assert (await stream.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert server.gateway.statistics().permits == 0
    await stream.ended()
    await stream.close()


@pytest.mark.requirement("D36")
async def test_an_address_that_is_taken_ends_the_server(target: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(UsageError, match="cannot listen on"):
        async with running(target, http=Address("127.0.0.1", port)):
            pytest.fail("it listens twice")
    taken.close()
    with contextlib.suppress(asyncio.CancelledError):
        await taken.wait_closed()
