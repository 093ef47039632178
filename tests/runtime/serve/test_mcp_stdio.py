"""MCP on stdin and stdout: lines, permits, what is not protocol, and the end.

Source: tool-dispatch D33, D41; job-queue R108, R110, R111.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from callyard.functions.registry import Registry
from callyard.serve.gateway import Caller, ToolRequest
from callyard.serve.mcp_server import McpGate
from callyard.serve.mcp_stdio import Ends, StdioSession
from tests.runtime.serve.mcp_world import WAIT_S, Script, ScriptedGateway, add_scripts, until

META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
INITIALIZE = {
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


class Peer:
    """The client's ends of both pipes."""

    def __init__(self, gateway: ScriptedGateway, writes: int, reader: asyncio.StreamReader) -> None:
        self.gateway = gateway
        self.serving: asyncio.Task[None]
        self.transport: asyncio.BaseTransport
        self._writes = writes
        self._reader = reader
        self._ids = 0

    def send_raw(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._writes, data) :]

    def send(self, message: Mapping[str, Any]) -> None:
        self.send_raw(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def request(self, method: str, modern: bool = True, **params: Any) -> int:
        self._ids += 1
        self.send({"id": self._ids, "method": method, "params": params | ({"_meta": META} if modern else {})})
        return self._ids

    def call(self, name: str, **arguments: Any) -> int:
        return self.request("tools/call", name=name, arguments=arguments)

    async def receive(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            return json.loads(await self._reader.readline())

    def stop_reading(self) -> None:
        self.transport.close()

    def close(self) -> None:
        if self._writes >= 0:
            os.close(self._writes)
            self._writes = -1


@asynccontextmanager
async def stdio(
    scripts: Mapping[str, Script] | None = None, *, jobs_max: int = 4, line_bytes_max: int = 65_536
) -> AsyncIterator[Peer]:
    gateway = ScriptedGateway(Registry(), jobs_max=jobs_max)
    add_scripts(gateway, scripts or {})
    gate = McpGate(gateway)
    (reads, to_server), (from_server, writes) = os.pipe(), os.pipe()
    reader = asyncio.StreamReader(limit=2**24)
    loop = asyncio.get_running_loop()
    source = os.fdopen(from_server, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    peer = Peer(gateway, to_server, reader)
    peer.transport = transport
    session = StdioSession(gate, Ends(reads, writes), Caller(), line_bytes_max=line_bytes_max)
    peer.serving = asyncio.ensure_future(session.run())
    try:
        yield peer
    finally:
        peer.close()
        async with asyncio.timeout(WAIT_S):
            await peer.serving
        gate.close()
        transport.close()
        os.close(reads)
        os.close(writes)
        assert not gateway.statistics().permits
        await gateway.aclose()


async def ok(request: ToolRequest) -> str:
    return "ok"


@pytest.mark.requirement("D33")
async def test_both_revisions_are_served_and_the_first_request_decides() -> None:
    async with stdio({"ok": ok}) as peer:
        peer.call("ok")
        answer = await peer.receive()
        assert answer["result"]["content"] == [{"type": "text", "text": "ok"}]
        peer.send({"id": 9, **INITIALIZE})
        assert (await peer.receive())["error"]["code"] == -32022
    async with stdio({"ok": ok}) as peer:
        peer.send({"id": 0, **INITIALIZE})
        assert (await peer.receive())["result"]["protocolVersion"] == "2025-11-25"
        peer.send({"method": "notifications/initialized"})
        peer.request("tools/call", modern=False, name="ok", arguments={})
        assert (await peer.receive())["result"]["content"] == [{"type": "text", "text": "ok"}]


@pytest.mark.requirement("D33")
@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"no json\n", -32700),
        (b'{"jsonrpc":"2.0","id":1,\n', -32700),
        (b"\xff\xfe\n", -32700),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]\n', -32600),
        (b'{"id":1,"method":"ping"}\n', -32600),
        (b'"text"\n', -32600),
        (b"[" * 5_000 + b"]" * 5_000 + b"\n", -32700),
        (b"x" * 100_000 + b"\n", -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"tools/list"}\n', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"tools/list"}\n', -32600),
        (b'{"jsonrpc":"2.0","id":{"a":1},"method":"tools/list"}\n', -32600),
    ],
)
async def test_a_malformed_line_is_answered_and_ends_nothing(line: bytes, code: int) -> None:
    async with stdio({"ok": ok}) as peer:
        await asyncio.to_thread(peer.send_raw, b"\n\r\n" + line)  # more than the pipe holds
        problem = await peer.receive()
        assert (problem["id"], problem["error"]["code"]) == (None, code)
        peer.call("ok")
        assert (await peer.receive())["result"]["content"]


async def test_a_line_may_come_in_pieces_and_several_at_once() -> None:
    async with stdio({"ok": ok}) as peer:
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}).encode()
        for at in range(0, len(body), 50):
            peer.send_raw(body[at : at + 50])
            await asyncio.sleep(0)
        peer.send_raw(b"\r\n" + body.replace(b'"id": 1', b'"id": 2') + b"\n")
        assert {(await peer.receive())["id"], (await peer.receive())["id"]} == {1, 2}


@pytest.mark.requirement("R110")
async def test_control_messages_give_their_permit_back_and_calls_hold_theirs() -> None:
    """M = 1, and the call has not begun: the next line stays unread until it has."""
    begin = asyncio.Event()
    async with stdio({"ok": ok}, jobs_max=1) as peer:
        for _ in range(5):
            peer.request("tools/list")
            await peer.receive()
            peer.send({"method": "notifications/something"})
        held = []
        call = type(peer.gateway).call

        async def waits(self: ScriptedGateway, request: ToolRequest, permit: Any) -> Any:
            held.append(permit)
            await begin.wait()
            return await call(self, request, permit)

        peer.gateway.call = waits.__get__(peer.gateway)  # type: ignore[method-assign]
        peer.call("ok")
        await until(lambda: held)
        peer.request("tools/list")
        await until(lambda: peer.gateway.statistics().waiting)
        assert peer.gateway.statistics().permits == 1
        begin.set()
        answers = [await peer.receive(), await peer.receive()]
        assert "content" in answers[0]["result"]
        assert "tools" in answers[1]["result"]
        await until(lambda: not peer.gateway.statistics().permits)


@pytest.mark.requirement("R110")
async def test_who_says_nothing_holds_no_permit() -> None:
    async with stdio({"ok": ok}, jobs_max=1) as peer:
        peer.request("tools/list")
        await peer.receive()
        await until(lambda: not peer.gateway.statistics().permits)
        permit = await asyncio.wait_for(peer.gateway.admit("another gate"), WAIT_S)
        permit.release()


@pytest.mark.requirement("R110")
async def test_what_the_sdk_refuses_gives_its_permit_back() -> None:
    async with stdio({"ok": ok}, jobs_max=1) as peer:
        for method, params in (
            ("no/such", {"_meta": META}),
            ("tools/call", {"_meta": META, "name": 5}),
            ("tools/list", {"_meta": {"io.modelcontextprotocol/protocolVersion": "2099-01-01"}}),
        ):
            peer.send({"id": 7, "method": method, "params": params})
            assert "error" in await peer.receive()
            await until(lambda: not peer.gateway.statistics().permits)


@pytest.mark.requirement("R111")
async def test_a_client_that_goes_while_it_waits_for_its_turn_is_noticed() -> None:
    async with stdio({"ok": ok}, jobs_max=1) as peer:
        permit = await peer.gateway.admit("another gate")
        peer.call("ok")
        await until(lambda: peer.gateway.statistics().waiting)
        peer.close()
        async with asyncio.timeout(WAIT_S):
            await peer.serving
        assert not peer.gateway.statistics().waiting
        assert not peer.gateway.requests
        permit.release()


@pytest.mark.requirement("D41")
async def test_a_cancelled_call_stops_and_is_not_answered() -> None:
    hang = asyncio.Event()

    async def hangs(request: ToolRequest) -> None:
        await hang.wait()

    async with stdio({"hangs": hangs, "ok": ok}) as peer:
        cancelled = peer.call("hangs")
        await until(lambda: peer.gateway.requests)
        peer.send({"method": "notifications/cancelled", "params": {"requestId": cancelled, "_meta": META}})
        await until(lambda: peer.gateway.ended)
        assert peer.gateway.cancelled == [peer.gateway.requests[0].call_id]
        peer.call("ok")
        assert (await peer.receive())["id"] != cancelled
        await until(lambda: not peer.gateway.statistics().permits)


@pytest.mark.requirement("D41")
async def test_the_end_of_input_is_a_lost_connection() -> None:
    hang = asyncio.Event()

    async def hangs(request: ToolRequest) -> None:
        await hang.wait()

    async with stdio({"hangs": hangs}) as peer:
        peer.call("hangs")
        await until(lambda: peer.gateway.requests)
        peer.close()
        async with asyncio.timeout(WAIT_S):
            await peer.serving
        assert peer.gateway.lost == ["hangs"]


@pytest.mark.requirement("D41")
async def test_a_client_that_takes_no_answers_has_gone() -> None:
    """Also while it holds its other end open, and goes on to ask."""
    hang = asyncio.Event()

    async def hangs(request: ToolRequest) -> None:
        await hang.wait()

    async with stdio({"hangs": hangs, "ok": ok}) as peer:
        peer.call("hangs")
        await until(lambda: peer.gateway.requests)
        peer.stop_reading()
        peer.call("ok")
        async with asyncio.timeout(WAIT_S):
            await peer.serving
        assert peer.gateway.lost == ["hangs"]


@pytest.mark.requirement("D33", "D55")
async def test_two_keys_of_one_call_are_refused() -> None:
    key = '"callyard/idempotencyKey"'
    async with stdio({"ok": ok}) as peer:
        line = (
            '{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"ok","arguments":{},"_meta":'
            f'{{{key}:"one",{key}:"two",{json.dumps(META)[1:]}}}}}\n'
        )
        peer.send_raw(line.encode())
        refused = await peer.receive()
        assert (refused["id"], refused["error"]["code"]) == (7, -32600)
        assert "stands twice" in refused["error"]["message"]
        peer.send_raw(line.replace(f'{key}:"one",', "").encode())
        assert (await peer.receive())["result"]["content"]
        assert [request.key for request in peer.gateway.requests] == ["two"]


async def test_an_id_in_use_is_refused() -> None:
    hang = asyncio.Event()

    async def waits(request: ToolRequest) -> str:
        await hang.wait()
        return "first"

    async with stdio({"waits": waits}) as peer:
        for _ in range(2):
            params = {"name": "waits", "arguments": {}, "_meta": META}
            peer.send({"id": "same", "method": "tools/call", "params": params})
        assert "in use" in (await peer.receive())["error"]["message"]
        hang.set()
        assert (await peer.receive())["result"]["content"][0]["text"] == "first"


async def test_a_client_that_does_not_read_holds_up_only_itself() -> None:
    async def large(request: ToolRequest) -> str:
        return "x" * 3_000_000

    async with stdio({"large": large}) as peer:
        peer.call("large")
        await until(lambda: peer.gateway.ended)
        for _ in range(100):  # the loop turns while the pipe is full
            await asyncio.sleep(0)
        answer = await peer.receive()
        assert len(answer["result"]["content"][0]["text"]) == 3_000_000


@pytest.mark.requirement("D33")
def test_prints_never_reach_the_protocols_stdout() -> None:
    code = """
import os, subprocess, sys
from callyard.serve.mcp_stdio import taken_stdio
with taken_stdio() as ends:
    print("printed")
    sys.stdout.flush()
    os.write(1, b"written\\n")
    subprocess.run(["echo", "from a child"], check=True)
    assert sys.stdin.read() == ""
    os.write(ends.writes, b"protocol: " + os.read(ends.reads, 100))
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], input=b"request\n", capture_output=True, timeout=60, check=True)
    assert done.stdout == b"protocol: request\nafter\n"
    assert sorted(done.stderr.split(b"\n")) == [b"", b"from a child", b"printed", b"written"]
