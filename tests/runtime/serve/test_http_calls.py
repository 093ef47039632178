"""Calls over HTTP: each way in, each end, what goes back when a client goes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callyard import aelicit
from callyard.dispatch.outcomes import DispatchError, DispatchResult, Ok
from callyard.errors import KIND_RULES, ErrorKind, ToolError, fail
from callyard.functions.contents import CONTENT_TAG
from callyard.functions.registry import Registry
from callyard.host.jobs import Permit
from callyard.ids import CallId, Tenant
from callyard.serve.gateway import Gateway, ToolRequest
from callyard.serve.kept import KeptResults

from .http_world import on_both_loops, request_bytes, served, token, until


class Tools(Registry):
    """What the tests call, and what they see of it."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0
        self.now = 0
        self.peak = 0
        self.cancelled = 0
        self.release = asyncio.Event()
        add_tools(self)


def add_tools(tools: Tools) -> None:
    @tools.tool(idempotent=True)
    async def add(a: int, b: int = 1) -> int:
        "Adds."
        tools.ran += 1
        return a + b

    @tools.tool(idempotent=True)
    async def hold(n: int = 0) -> int:
        tools.now += 1
        tools.peak = max(tools.peak, tools.now)
        try:
            await tools.release.wait()
        except asyncio.CancelledError:
            tools.cancelled += 1
            raise
        finally:
            tools.now -= 1
        return n

    @tools.tool()
    async def charge(cents: int) -> int:
        tools.ran += 1
        return cents

    @tools.tool()
    async def leak() -> None:
        raise ValueError("/srv/secret/path is on host db7")

    @tools.tool()
    async def answer() -> None:
        raise ToolError("no such ship")

    @tools.tool()
    async def confirm() -> str:
        return (await aelicit("Sure?")).action

    @tools.tool()
    async def long(n: int) -> str:
        return "x" * n


ADD = request_bytes("POST", "/tools/add", {"a": 1})


@pytest.mark.requirement("D33", "D36")
async def test_what_is_offered_as_something_else_is_no_tool() -> None:
    registry = Tools()
    ran: list[str] = []

    @registry.prompt
    def greet(who: str) -> str:
        ran.append(who)
        return f"hello {who}"

    async with served(registry) as world:
        reply = await world.ask("POST", "/tools/greet", {"who": "x"})
        assert (reply.status, reply.json["error"]["kind"]) == (404, "not_found")
        batch = [{"jsonrpc": "2.0", "id": n, "method": "greet", "params": {"who": "x"}} for n in range(3)]
        batch.append({"jsonrpc": "2.0", "id": 3, "method": "add", "params": {"a": 1}})
        answers = (await world.ask("POST", "/rpc", batch)).json
        assert [one.get("error", {}).get("code") for one in answers] == [-32601, -32601, -32601, None]
    assert ran == []


def instead(answer: Callable[[ToolRequest], DispatchResult]) -> Callable[[Gateway], None]:
    """A gateway that answers calls by itself."""

    def wrap(gateway: Gateway) -> None:
        async def call(request: ToolRequest, permit: Permit) -> DispatchResult:
            return answer(request)

        gateway.call = call  # type: ignore[method-assign]

    return wrap


@on_both_loops
@pytest.mark.requirement("D36")
async def test_one_call_by_each_way() -> None:
    async with served(Tools()) as world:
        reply = await world.ask("POST", "/tools/add", {"a": 1, "b": 2})
        assert (reply.status, reply.json, reply.headers["content-type"]) == (200, 3, "application/json")
        assert await world.rpc("add", {"a": 1, "b": 2}) == {"jsonrpc": "2.0", "id": 1, "result": 3}
        assert (await world.rpc("rpc.tools.call", {"name": "add", "arguments": {"a": 4}}))["result"] == 5


@pytest.mark.requirement("D23", "D36")
@pytest.mark.parametrize("kind", list(ErrorKind))
async def test_every_row_of_the_table(kind: ErrorKind) -> None:
    failure = fail(kind, "it did not work", attempts=2, retry_after_ms=1_200)
    rule = KIND_RULES[kind]
    async with served(Tools(), wrap=instead(lambda _: DispatchError(CallId("c-1"), failure))) as world:
        reply = await world.ask("POST", "/tools/add", {"a": 1})
        assert reply.status == rule.http_status
        envelope = reply.json["error"]
        assert (envelope["kind"], envelope["outcome"], envelope["attempts"]) == (kind, rule.outcome, 2)
        assert envelope["jsonrpc_code"] == rule.jsonrpc_code
        error = (await world.rpc("add", {"a": 1}))["error"]
        assert (error["code"], error["data"]["kind"], error["data"]["outcome"]) == (
            rule.jsonrpc_code,
            kind,
            rule.outcome,
        )
        if kind not in (ErrorKind.INTERNAL, ErrorKind.RESOURCE_LIMIT):
            assert error["data"]["retry_after_ms"] == 1_200
            assert reply.headers["retry-after"] == "2"


@pytest.mark.requirement("D57")
async def test_a_call_that_waited_too_long_in_the_queue_may_come_again() -> None:
    failure = fail(ErrorKind.DEADLINE, "waited", limit="queue_wait_ms_max", retry_after_ms=1_000)
    async with served(Tools(), wrap=instead(lambda _: DispatchError(CallId("c-1"), failure))) as world:
        reply = await world.ask("POST", "/tools/add", {"a": 1})
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.requirement("D24")
async def test_an_unexpected_exception_shows_its_class_only() -> None:
    async with served(Tools()) as world:
        reply = await world.ask("POST", "/tools/leak", {})
        told = json.dumps(await world.rpc("leak")) + reply.body.decode()
        assert reply.status == 500
        assert "ValueError" in told
        assert "secret" not in told
        assert "db7" not in told
        assert reply.json["error"]["details"]["reference"] == reply.headers["x-callyard-call-id"]
        shown = await world.ask("POST", "/tools/answer")
        assert (shown.status, shown.json["error"]["message"]) == (400, "no such ship")


@pytest.mark.requirement("D38")
async def test_a_client_that_cannot_be_asked_is_no_fault_of_the_server() -> None:
    async with served(Tools()) as world:
        reply = await world.ask("POST", "/tools/confirm", {})
        error = reply.json["error"]
        assert (reply.status, error["kind"], error["outcome"]) == (403, "denied", "ran")
        assert "nobody to ask" in error["message"]
        assert "denied" in json.dumps(await world.rpc("confirm"))


@pytest.mark.requirement("D24")
async def test_a_fault_of_the_gate_itself_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def explode(_: ToolRequest) -> DispatchResult:
        raise RuntimeError("/srv/secret")

    with caplog.at_level(logging.CRITICAL, logger="callyard.serve.http"):
        async with served(Tools(), wrap=instead(explode)) as world:
            for path in ("/tools/add", "/rpc"):
                body: Any = {"jsonrpc": "2.0", "id": 1, "method": "add", "params": {"a": 1}}
                reply = await world.ask("POST", path, body if path == "/rpc" else {"a": 1})
                assert reply.status == 500
                assert b"secret" not in reply.body
                assert b"reference" in reply.body


@pytest.mark.requirement("D36", "D26")
@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (b'{"a":1,"a":2}', ""),
        (b'{"a":NaN}', ""),
        (b'{"a":"one"}', "/a"),
        (b'{"b":1}', "/a"),
        (b"[1]", ""),
        (b"5", ""),
        (b"{", ""),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", ""),
    ],
)
async def test_arguments_that_do_not_fit(body: bytes, pointer: str) -> None:
    async with served(Tools()) as world:
        reply = await world.ask("POST", "/tools/add", body)
        assert reply.status == 422, reply.body
        assert reply.json["error"]["kind"] == "schema"
        assert pointer in reply.json["error"]["details"].get("pointer", "")


@pytest.mark.requirement("D36", "D57")
async def test_headers_say_what_a_call_is() -> None:
    seen: list[ToolRequest] = []

    def answer(request: ToolRequest) -> DispatchResult:
        seen.append(request)
        return Ok(CallId("c-1"), b"1")

    headers = {
        "Idempotency-Key": '"order-7"',
        "X-Callyard-Owner": "ada",
        "X-Callyard-Deadline-Ms": "5000",
        "X-Callyard-Timeout-Ms": "400",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "X-Plan": "gold",
        "X-Other": "no",
    }
    async with served(Tools(), wrap=instead(answer), headers=("x-plan",)) as world:
        await world.ask("POST", "/tools/add", {"a": 1}, headers)
        one = seen[0]
        assert (one.key, one.owner, one.deadline_ms, one.timeout_ms) == ("order-7", "ada", 5_000, 400)
        assert dict(one.trace) == {"traceparent": headers["traceparent"]}
        assert dict(one.headers) == {"x-plan": "gold"}
        assert one.received_at_ms is not None
        batch = [
            {"jsonrpc": "2.0", "id": 1, "method": "add", "callyard": {"owner": "bob", "idempotency_key": "k"}},
            {"jsonrpc": "2.0", "id": 2, "method": "add"},
        ]
        await world.ask("POST", "/rpc", batch, {"X-Callyard-Owner": "ada"})
        assert [(request.owner, request.key) for request in seen[1:]] == [("bob", "k"), ("ada", None)]
        refused = await world.ask("POST", "/rpc", batch, {"Idempotency-Key": "k"})
        assert refused.status == 422
        for wrong in ("soon", "-1", "1.5", "9" * 13):
            reply = await world.ask("POST", "/tools/add", {"a": 1}, {"X-Callyard-Deadline-Ms": wrong})
            assert reply.status == 422
        for empty in ("Idempotency-Key", "X-Callyard-Owner"):
            peer = await world.connect()
            await peer.send(ADD.replace(b"content-type", empty.encode() + b": \r\ncontent-type"))
            assert (await peer.reply()).status == 422
        assert len(seen) == 3


@on_both_loops
@pytest.mark.requirement("D36")
async def test_one_key_is_one_effect() -> None:
    tools = Tools()
    async with served(tools) as world:
        first = await world.ask("POST", "/tools/charge", {"cents": 5}, {"Idempotency-Key": "order-7"})
        again = await world.ask("POST", "/tools/charge", {"cents": 5}, {"Idempotency-Key": "order-7"})
        other = await world.ask("POST", "/tools/charge", {"cents": 6}, {"Idempotency-Key": "order-7"})
        assert (first.json, again.json, tools.ran) == (5, 5, 1)
        assert again.headers["x-callyard-deduplicated"] == "true"
        assert again.headers["x-callyard-call-id"] == first.headers["x-callyard-call-id"]
        assert other.status == 409


# --- JSON-RPC -------------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D36")
async def test_a_batch_is_answered_in_order_and_notifications_are_not() -> None:
    tools = Tools()
    async with served(tools) as world:
        batch = [
            {"jsonrpc": "2.0", "id": n, "method": "add", "params": {"a": n}}
            if n % 3
            else {"jsonrpc": "2.0", "method": "add", "params": {"a": n}}
            for n in range(30)
        ]
        batch.insert(7, {"foo": "boo"})
        reply = await world.ask("POST", "/rpc", batch)
        answers = reply.json
        assert reply.status == 200
        assert [answer["id"] for answer in answers if answer["id"] is not None] == [n for n in range(30) if n % 3]
        assert [answer["result"] for answer in answers if "result" in answer] == [n + 1 for n in range(30) if n % 3]
        assert [answer["error"]["code"] for answer in answers if "error" in answer] == [-32600]
        assert tools.ran == 30
        told = {"jsonrpc": "2.0", "method": "add", "params": {"a": 1}}
        for body in (told, [told, told]):
            silent = await world.ask("POST", "/rpc", body)
            assert (silent.status, silent.body) == (204, b"")
        assert tools.ran == 33


@on_both_loops
@pytest.mark.requirement("R110", "D36")
async def test_a_batch_of_a_hundred_never_holds_more_than_its_turn() -> None:
    """At saturation, M = 4: and health answers meanwhile."""
    tools = Tools()
    async with served(
        tools, jobs_max=4, dispatcher={"slots": 2}, queue_wait_ms_max=60_000, connections_max=50
    ) as world:
        batch = [{"jsonrpc": "2.0", "id": n, "method": "hold", "params": {"n": n}} for n in range(100)]
        peer = await world.connect()
        await peer.send(request_bytes("POST", "/rpc", batch))
        await until(lambda: tools.now == 2)
        statistics = world.gateway.statistics()
        assert statistics.permits <= 4
        assert statistics.calls <= 4 + 2
        assert statistics.waiting <= 1
        assert (await world.ask("GET", "/healthz")).status == 200
        tools.release.set()
        reply = await peer.reply()
        assert [answer["result"] for answer in reply.json] == list(range(100))
        assert world.gateway.jobs.status().peak <= 4
        assert tools.peak <= 2


@pytest.mark.requirement("R125")
async def test_a_batch_leaves_others_their_turn() -> None:
    """One connection has one place in the line, however long its batch is."""
    tools = Tools()
    async with served(tools, jobs_max=1, dispatcher={"slots": 1}, queue_wait_ms_max=60_000) as world:
        flood = await world.connect()
        await flood.send(
            request_bytes("POST", "/rpc", [{"jsonrpc": "2.0", "id": n, "method": "hold"} for n in range(100)])
        )
        await until(lambda: tools.now == 1 and world.gateway.statistics().waiting == 1)
        other = await world.connect()
        await other.send(request_bytes("POST", "/tools/add", {"a": 1}))
        await until(lambda: world.gateway.statistics().waiting == 2)
        order: list[str] = []
        done = asyncio.gather(_note(order, "batch", flood.reply()), _note(order, "other", other.reply()))
        tools.release.set()
        await done
        assert order == ["other", "batch"]


async def _note(order: list[str], name: str, waiting: Any) -> None:
    assert (await waiting).status == 200
    order.append(name)


@pytest.mark.requirement("D36")
async def test_methods_of_our_own() -> None:
    async with served(Tools()) as world:
        listed = (await world.rpc("rpc.tools.list"))["result"]["tools"]
        assert [tool["name"] for tool in listed][:2] == ["add", "hold"]
        assert (await world.rpc("rpc.discover"))["result"]["openrpc"]
        assert (await world.rpc("rpc.calls.cancel", {"call_id": "none"}))["result"] == {"cancelled": False}
        assert (await world.rpc("rpc.calls.cancel"))["error"]["code"] == -32602
        assert (await world.rpc("rpc.tools.call", {"nome": 1}))["error"]["code"] == -32602
        assert (await world.rpc("rpc.other"))["error"]["code"] == -32601
        assert (await world.rpc("subtract"))["error"]["code"] == -32601


# --- who may what ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D36", "D47")
async def test_a_token_says_who_calls_and_what_it_sees() -> None:
    tokens = {"a": token("cy_a", "a", tools=["add", "long"]), "b": token("cy_b", "b", tenant="other")}
    async with served(Tools(), tokens=tokens) as world:
        mine = {"Authorization": "Bearer cy_a"}
        assert (await world.ask("POST", "/tools/add", {"a": 1}, mine)).json == 2
        hidden = await world.ask("POST", "/tools/charge", {"cents": 1}, mine)
        assert (hidden.status, hidden.json["error"]["kind"]) == (404, "not_found")
        assert [tool["name"] for tool in (await world.ask("GET", "/tools", headers=mine)).json["tools"]] == [
            "add",
            "long",
        ]
        assert set((await world.ask("GET", "/openapi.json", headers=mine)).json["paths"]) == {
            "/tools/add",
            "/tools/long",
        }
        without = await world.ask("GET", "/tools")
        assert (without.status, without.headers["www-authenticate"]) == (401, 'Bearer realm="callyard"')
        wrong = await world.ask("POST", "/rpc", {}, {"Authorization": "Bearer cy_c"})
        assert (wrong.status, wrong.headers["www-authenticate"]) == (
            401,
            'Bearer realm="callyard", error="invalid_token"',
        )
        assert wrong.json["error"]["data"]["kind"] == "denied"
        assert (await world.ask("GET", "/healthz")).status == 200


# --- calls under way ------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D41")
async def test_a_call_is_shown_and_cancelled_by_its_tenant_only() -> None:
    tools = Tools()
    tokens = {"a": token("cy_a", "a"), "b": token("cy_b", "b", tenant="other")}
    mine, other = {"Authorization": "Bearer cy_a"}, {"Authorization": "Bearer cy_b"}
    async with served(tools, tokens=tokens) as world:
        peer = await world.connect()
        await peer.send(request_bytes("POST", "/tools/hold", {}, mine))
        await until(lambda: tools.now == 1)
        call_id = next(iter(world.gateway._inside))
        path = f"/calls/{call_id}"
        assert (await world.ask("GET", path, headers=other)).status == 404
        assert (await world.ask("DELETE", path, headers=other)).status == 404
        shown = await world.ask("GET", path, headers=mine)
        assert (shown.status, shown.json["tool"]) == (200, "hold")
        assert tools.cancelled == 0
        assert (await world.ask("DELETE", path, headers=mine)).status == 202
        reply = await peer.reply()
        assert (reply.status, reply.json["error"]["kind"]) == (499, "cancelled")
        assert tools.cancelled == 1
        assert (await world.ask("GET", path, headers=mine)).status == 404


@on_both_loops
@pytest.mark.requirement("D41", "R111")
@pytest.mark.parametrize("path", ["/tools/hold", "/rpc", "batch", "stream"])
async def test_a_client_that_goes_cancels_its_call(path: str) -> None:
    tools = Tools()
    async with served(tools) as world:
        peer = await world.connect()
        one = {"jsonrpc": "2.0", "id": 1, "method": "hold"}
        match path:
            case "/rpc":
                await peer.send(request_bytes("POST", "/rpc", one))
            case "batch":
                await peer.send(request_bytes("POST", "/rpc", [one, one]))
            case "stream":
                await peer.send(request_bytes("POST", "/tools/hold", {}, {"accept": "text/event-stream"}))
            case _:
                await peer.send(request_bytes("POST", path, {}))
        count = 2 if path == "batch" else 1
        await until(lambda: tools.now == count)
        await peer.close()
        await until(lambda: tools.cancelled == count)
        await until(lambda: world.listener.connections == 0)
        assert world.listener.statistics().vanished == 1


@on_both_loops
@pytest.mark.requirement("R111", "R110")
async def test_a_client_that_goes_while_it_waits_for_a_permit_leaves_the_line() -> None:
    """M = 1, held: its reading is paused, and a part of its body lies unread."""
    tools = Tools()
    async with served(tools, jobs_max=1, queue_wait_ms_max=60_000) as world:
        permit = await world.gateway.admit("somebody")
        with socket.create_connection(("127.0.0.1", world.listener.port)) as waiter:
            whole = request_bytes("POST", "/tools/add", b'{"a": 1, "b": ' + b" " * 3_000_000 + b"1}")
            waiter.sendall(whole[:1_000])
            await until(lambda: world.gateway.statistics().waiting == 1)
            waiter.sendall(whole[1_000:50_000])
            connections = world.listener.connections
            waiter.shutdown(socket.SHUT_WR)  # behind what nobody reads
            await until(lambda: world.gateway.statistics().waiting == 0)
            await until(lambda: world.listener.connections == connections - 1)
        permit.release()
        assert world.gateway.statistics().permits == 0
        assert tools.ran == 0


@pytest.mark.requirement("D57", "R110")
async def test_the_wait_for_a_permit_has_an_end() -> None:
    tools = Tools()
    async with served(tools, jobs_max=1, dispatcher={"slots": 1}, queue_wait_ms_max=100) as world:
        permit = await world.gateway.admit("somebody")
        for path in ("/tools/add", "/rpc"):
            reply = await world.ask("POST", path, {"a": 1})
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert b"queue_wait_ms_max" in reply.body
        permit.release()
        assert (await world.ask("POST", "/tools/add", {"a": 1})).status == 200


# --- streams --------------------------------------------------------------------------------------------------------


def read_events(body: bytes) -> list[tuple[str, Any]]:
    events = []
    for block in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


@on_both_loops
@pytest.mark.requirement("D36")
async def test_progress_and_logs_come_as_events() -> None:
    go = asyncio.Event()

    def wrap(gateway: Gateway) -> None:
        async def call(request: ToolRequest, permit: Permit) -> DispatchResult:
            assert request.on_log is not None
            assert request.on_progress is not None
            request.on_log("info", "began", {"n": 1})
            request.on_progress(1, 4, "")
            request.on_progress(2, 4, "half")
            await go.wait()
            for n in range(300):
                request.on_log("info", f"line {n}", {})
            return Ok(CallId("c-1"), b'{"done":true}')

        gateway.call = call  # type: ignore[method-assign]

    async with served(Tools(), wrap=wrap) as world:
        peer = await world.connect()
        await peer.send(request_bytes("POST", "/tools/add", {"a": 1}, {"accept": "text/event-stream"}))
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head
        chunks = peer.chunks()
        body = b""
        while b"progress" not in body:
            body += await anext(chunks)
        go.set()
        body += b"".join([chunk async for chunk in chunks])
        events = read_events(body)
        assert events[0][0] == "start"
        assert events[1:3] == [
            ("log", {"level": "info", "message": "began", "fields": {"n": 1}}),
            ("progress", {"done": 2, "total": 4, "message": "half"}),
        ]
        assert events[3] == ("dropped", {"logs": 44})
        assert len(events) == 4 + 256 + 1
        assert events[-1] == ("result", {"done": True})


@pytest.mark.requirement("D36", "D23")
async def test_a_failure_is_the_last_event() -> None:
    async with served(Tools()) as world:
        reply = await world.ask("POST", "/tools/answer", {}, {"accept": "text/event-stream"})
        name, data = read_events(reply.body)[-1]
        assert (reply.status, name, data["kind"], data["message"]) == (200, "error", "tool_error", "no such ship")


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D36")
@pytest.mark.parametrize(
    ("block", "body", "content_type"),
    [
        (
            {"type": "image", "data": "iVBORw==", "mime_type": "image/png", "name": "a\r\nb.png"},
            b"\x89PNG",
            "image/png",
        ),
        ({"type": "file", "text": "<script>", "mime_type": "text/html"}, b"<script>", "text/html"),
        (
            {"type": "file", "data": "AAE=", "mime_type": "x/y\r\nset-cookie: a"},
            b"\x00\x01",
            "application/octet-stream",
        ),
        (
            {"type": "file", "data": "AAE=", "mime_type": "text/html\r\n;\r\ncharset=x"},
            b"\x00\x01",
            "application/octet-stream",
        ),
    ],
)
async def test_a_content_comes_as_its_own_bytes(block: dict[str, Any], body: bytes, content_type: str) -> None:
    output = json.dumps({CONTENT_TAG: [block]}, separators=(",", ":")).encode()
    async with served(Tools(), wrap=instead(lambda _: Ok(CallId("c-1"), output))) as world:
        reply = await world.ask("POST", "/tools/add", {"a": 1})
        assert (reply.body, reply.headers["content-type"].partition(";")[0]) == (body, content_type)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in reply.headers["content-security-policy"]
        assert "set-cookie" not in reply.headers
        assert (await world.rpc("add", {"a": 1}))["result"] == json.loads(output)


@pytest.mark.requirement("D36")
async def test_a_large_result_is_kept_for_its_caller(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path / "kept", max_result_bytes=1_024, kept_ms=60_000, bytes_max=1 << 20)
    await kept.open()
    tokens = {"a": token("cy_a", "a"), "b": token("cy_b", "b", tenant="other")}
    mine, other = {"Authorization": "Bearer cy_a"}, {"Authorization": "Bearer cy_b"}
    async with served(Tools(), tokens=tokens, kept=kept, max_result_bytes=1_024) as world:
        reply = await world.ask("POST", "/tools/long", {"n": 5_000}, mine)
        short = reply.json["kept"]
        assert (short["size_bytes"], short["preview"][:3]) == (5_002, '"xx')
        assert reply.headers["content-location"] == short["uri"]
        assert (await world.ask("GET", short["uri"], headers=mine)).json == "x" * 5_000
        assert (await world.ask("GET", short["uri"], headers=other)).status == 404
        body = {"jsonrpc": "2.0", "id": 1, "method": "long", "params": {"n": 5_000}}
        assert (await world.ask("POST", "/rpc", body, mine)).json["result"]["kept"]["size_bytes"] == 5_002
    await kept.close()


# --- keys -----------------------------------------------------------------------------------------------------------


class FakeKeys:
    def __init__(self) -> None:
        self.resolved: list[tuple[Any, ...]] = []

    async def list_unknown(self, tenant: Tenant) -> list[dict[str, Any]]:
        return [{"tool": "charge", "key": "order-7", "tenant": tenant}]

    async def resolve(self, tenant: Tenant, tool: str, key: str, *, result: Any, retry: bool, by: str) -> bool:
        assert by == "token a"
        self.resolved.append((tenant, tool, key, result, retry))
        return key == "order-7"


@pytest.mark.requirement("D55")
async def test_unknown_outcomes_are_resolved_by_tokens_that_may() -> None:
    keys = FakeKeys()
    tokens = {"a": token("cy_a", "a", claims={"keys": True}), "b": token("cy_b", "b", claims={"keys": "yes"})}
    mine, other = {"Authorization": "Bearer cy_a"}, {"Authorization": "Bearer cy_b"}
    async with served(Tools(), tokens=tokens, keys=keys) as world:
        listed = await world.ask("GET", "/keys?unknown=1", headers=mine)
        assert listed.json == {"keys": [{"tool": "charge", "key": "order-7", "tenant": "acme"}]}
        assert (await world.ask("GET", "/keys", headers=mine)).status == 422
        assert (await world.ask("GET", "/keys?unknown=1", headers=other)).status == 403
        asked: dict[str, Any] = {"tool": "charge", "key": "order-7"}
        assert (await world.ask("POST", "/keys/resolve", {**asked, "retry": True}, other)).status == 403
        assert keys.resolved == []
        assert (await world.ask("POST", "/keys/resolve", {**asked, "result": None}, mine)).status == 200
        assert (await world.ask("POST", "/keys/resolve", {**asked, "retry": True}, mine)).status == 200
        assert (await world.ask("POST", "/keys/resolve", {**asked, "key": "x", "retry": True}, mine)).status == 404
        for wrong in (asked, {**asked, "result": 1, "retry": True}, {"tool": 1}, [1]):
            assert (await world.ask("POST", "/keys/resolve", wrong, mine)).status == 422
        assert keys.resolved == [
            ("acme", "charge", "order-7", None, False),
            ("acme", "charge", "order-7", None, True),
            ("acme", "charge", "x", None, True),
        ]


# --- the stop -------------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D46", "D23")
async def test_who_asks_while_it_stops_is_told_so() -> None:
    tools = Tools()
    async with served(tools) as world:
        peer = await world.connect()
        await peer.send(request_bytes("POST", "/tools/hold", {"n": 7}))
        await until(lambda: tools.now == 1)
        late = await world.connect()
        await late.send(request_bytes("GET", "/healthz"))
        assert (await late.reply()).status == 200
        world.gateway.seal()
        world.listener.stop_listening()
        await late.send(request_bytes("POST", "/tools/add", {"a": 1}))
        reply = await late.reply()
        assert (reply.status, reply.json["error"]["kind"]) == (503, "shutting_down")
        with pytest.raises(OSError):
            await world.connect()
        closing = asyncio.create_task(world.listener.close(drain_ms=20_000))
        tools.release.set()
        assert (await peer.reply()).json == 7
        await closing
        assert await peer.ended() == b""
