"""How a session of 2025-11-25 answers over HTTP: one JSON body, or a stream once something comes first. Source: D33."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import httpx2
import msgspec
import pytest
from mcp.client.streamable_http import create_mcp_http_client

from callyard.serve import mcp_sessions
from callyard.serve.gateway import ToolRequest
from tests.runtime.serve.mcp_world import WAIT_S, World, serving, until
from tests.runtime.serve.test_mcp_http import opened

pytestmark = pytest.mark.requirement("D33")


def call(tool: str, **meta: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": {}, "_meta": meta}
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}


def events_of(reply: httpx2.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]


async def post(world: World, headers: dict[str, str], body: Any, **options: Any) -> httpx2.Response:
    async with create_mcp_http_client(headers=headers) as http:
        return await http.post(world.url, json=body, **options)


async def test_an_answer_that_comes_alone_is_json() -> None:
    async def ok(request: ToolRequest) -> str:
        return "ok"

    async with serving(scripts={"ok": ok}) as world:
        headers = await opened(world)
        reply = await post(world, headers, call("ok", progressToken="p"))
        unknown = await post(world, headers, call("other"))
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["mcp-session-id"] == headers["mcp-session-id"]
    assert (reply.json()["id"], reply.json()["result"]["content"][0]["text"]) == (7, "ok")
    assert unknown.json()["error"]["code"] == -32602


async def test_what_comes_before_the_answer_starts_a_stream() -> None:
    async def tell(request: ToolRequest) -> str:
        assert request.on_progress is not None
        for done in (1, 2, 3):
            request.on_progress(done, 3, "")
        return "told"

    async with serving(scripts={"tell": tell}) as world:
        events = events_of(await post(world, await opened(world), call("tell", progressToken="p")))
    *told, answer = events
    steps = [event["params"]["progress"] for event in told]
    assert steps
    assert steps == sorted(set(steps))
    assert {event["method"] for event in told} == {"notifications/progress"}
    assert answer["result"]["content"][0]["text"] == "told"


async def test_an_answer_that_takes_long_comes_by_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_sessions, "STREAM_AFTER_S", 0.01)
    may_end = asyncio.Event()

    async def slow(request: ToolRequest) -> str:
        await may_end.wait()
        return "late"

    async with serving(scripts={"slow": slow}) as world:
        headers = await opened(world)
        async with (
            create_mcp_http_client(headers=headers) as http,
            http.stream("POST", world.url, json=call("slow")) as reply,
        ):
            assert reply.headers["content-type"].startswith("text/event-stream")  # before the answer is there
            may_end.set()
            await reply.aread()
        assert [event["id"] for event in events_of(reply)] == [7]
        assert (await post(world, headers, {"jsonrpc": "2.0", "id": 8, "method": "ping"})).json()["id"] == 8


async def test_a_session_that_ends_answers_what_is_open() -> None:
    async def waits(request: ToolRequest) -> None:
        await asyncio.Event().wait()

    async with serving(scripts={"waits": waits}) as world:
        headers = await opened(world)
        asked = asyncio.ensure_future(post(world, headers, call("waits")))
        await until(lambda: world.gateway.requests)
        async with create_mcp_http_client(headers=headers) as http:
            await http.delete(world.url)
        reply = await asked
        await until(lambda: world.gateway.ended == ["waits"])
    assert reply.status_code == 500
    assert "Session terminated" in reply.json()["error"]["message"]


async def test_what_wants_no_answer_may_come_while_the_session_ends(caplog: pytest.LogCaptureFixture) -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 99}}
    async with serving() as world:
        for _ in range(10):
            headers = await opened(world)
            async with create_mcp_http_client(headers=headers) as http:
                replies = await asyncio.gather(
                    *(http.post(world.url, json=note) for _ in range(4)),
                    http.delete(world.url),
                    *(http.post(world.url, json=note) for _ in range(2)),
                )
            assert {reply.status_code for reply in replies} <= {200, 202, 404}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"accept": "application/json"}, None, 406),
        ({}, b"{", 400),
        ({}, b'{"jsonrpc":"2.0","id":1}', 400),
        ({}, b'{"jsonrpc":"2.0","method":"notifications/initialized"}', 202),
    ],
)
async def test_what_is_no_request_is_answered_as_the_sdk_does(
    headers: dict[str, str], content: bytes | None, status: int
) -> None:
    async with serving() as world:
        session = await opened(world)
        ping = content or b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
        async with create_mcp_http_client(headers=session | headers) as http:
            assert (await http.post(world.url, content=ping)).status_code == status


async def test_who_has_no_session_is_refused_and_opens_none() -> None:
    async with serving(app_options={"sessions_max": 1}) as world:
        headers = {"accept": "application/json, text/event-stream"}
        for method in ("ping", "tools/list", "tools/call"):
            reply = await post(world, headers, {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"name": "ok"}})
            assert (reply.status_code, "Missing session ID" in reply.text) == (400, True), method
        await opened(world)  # there is room


@pytest.mark.parametrize("again", [{"id": 7}, {"id": "7"}, {"id": 7, "method": "initialize"}])
async def test_an_id_is_in_use_until_its_answer(again: dict[str, Any]) -> None:
    may_end = asyncio.Event()

    async def waits(request: ToolRequest) -> str:
        await may_end.wait()
        return f"call {len(world.gateway.requests)}"

    async with serving(scripts={"waits": waits}) as world:
        headers = await opened(world)
        first = asyncio.ensure_future(post(world, headers, call("waits")))
        await until(lambda: world.gateway.requests)
        async with asyncio.timeout(WAIT_S):
            second = await post(world, headers, call("waits") | again)
        may_end.set()
        assert (second.status_code, second.json()["error"]["code"]) == (400, -32600)
        assert "is in use" in second.json()["error"]["message"]
        assert (await first).json()["result"]["content"][0]["text"] == "call 1"
        assert (await post(world, headers, call("waits"))).status_code == 200  # free again


async def test_what_comes_late_answers_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_sessions, "STREAM_AFTER_S", 0.01)
    may_settle = asyncio.Event()

    async def waits(request: ToolRequest) -> None:
        await asyncio.Event().wait()

    async def ok(request: ToolRequest) -> str:
        return "ok"

    async with serving(scripts={"waits": waits, "ok": ok}) as world:
        make = world.gate.calls.make

        async def make_and_settle_late(ctx: Any, tool: str, *rest: Any) -> Any:
            try:
                return await make(ctx, tool, *rest)
            finally:
                if tool == "waits":
                    await may_settle.wait()

        monkeypatch.setattr(world.gate.calls, "make", make_and_settle_late)
        headers = await opened(world)
        async with create_mcp_http_client(headers=headers) as other:
            async with (
                create_mcp_http_client(headers=headers) as http,
                http.stream("POST", world.url, json=call("waits")),
            ):
                pass  # it goes away before the answer
            await until(lambda: world.gateway.ended == ["waits"])
            assert "is in use" in (await other.post(world.url, json=call("ok"))).text
            may_settle.set()
            async with asyncio.timeout(WAIT_S):
                while (reply := await other.post(world.url, json=call("ok"))).status_code == 400:
                    pass
            assert reply.json()["result"]["content"][0]["text"] == "ok"


async def test_nothing_is_left_of_requests_however_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_sessions, "STREAM_AFTER_S", 0.01)

    async def naps(request: ToolRequest) -> str:
        await asyncio.sleep(0.02)
        return "rested"

    async def ok(request: ToolRequest) -> str:
        return "ok"

    def left() -> int:
        return sum(isinstance(one, mcp_sessions._Answers) for one in gc.get_objects())

    async with serving(scripts={"naps": naps, "ok": ok}) as world:
        headers = await opened(world)
        async with create_mcp_http_client(headers=headers) as other:
            for number in range(0, 60, 3):
                assert (await other.post(world.url, json=call("ok") | {"id": number})).status_code == 200
                async with (
                    create_mcp_http_client(headers=headers) as http,
                    http.stream("POST", world.url, json=call("naps") | {"id": number + 1}),
                ):
                    pass
                asked = asyncio.ensure_future(other.post(world.url, json=call("naps") | {"id": number + 2}))
                stop = {"method": "notifications/cancelled", "params": {"requestId": number + 2}}
                await other.post(world.url, json={"jsonrpc": "2.0"} | stop)
                await asked
        await until(lambda: not left())
