"""MCP over HTTP, by the SDK's own client, on both revisions. Source: tool-dispatch D33, D34, D41."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
import msgspec
import pytest
from mcp.client.streamable_http import create_mcp_http_client
from mcp.shared.exceptions import MCPError

from callyard.errors import ErrorKind
from callyard.functions.registry import Registry
from callyard.serve.gateway import ToolRequest
from callyard.serve.kept import KeptResults
from tests.runtime.serve.mcp_world import ACME, LEGACY, MODERN, Failed, World, serving, until

both = pytest.mark.parametrize("mode", [LEGACY, MODERN])


def tools() -> Registry:
    registry = Registry()

    @registry.tool(pure=True)
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @registry.tool
    async def read_name(name: str) -> dict[str, str]:
        return {"name": name}

    return registry


def text_of(result: types.CallToolResult) -> str:
    block = result.content[0]
    assert isinstance(block, types.TextContent)
    return block.text


@both
@pytest.mark.requirement("D33")
async def test_tools_are_listed_and_called(mode: str) -> None:
    async with serving(tools()) as world, world.client(mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        result = await client.call_tool("add", {"a": 2, "b": 3})
        named = await client.call_tool("read_name", {"name": "Ada"})
    assert list(listed) == ["add", "read_name"]
    assert listed["add"].description == "Add two numbers."
    assert (text_of(result), result.structured_content, result.is_error) == ("5", {"result": 5}, False)
    assert named.structured_content == {"name": "Ada"}


@both
@pytest.mark.requirement("D34")
async def test_promises_are_annotations(mode: str) -> None:
    async with serving(tools()) as world, world.client(mode) as client:
        add, read_name = (await client.list_tools()).tools
    assert add.annotations == types.ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True)
    assert read_name.annotations == types.ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=False
    )


@both
@pytest.mark.requirement("D33")
async def test_an_unknown_tool_is_a_protocol_error(mode: str) -> None:
    async with serving(tools()) as world, world.client(mode) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("ad", {})
    assert caught.value.error.code == -32602
    assert "did you mean 'add'" in caught.value.error.message


@both
@pytest.mark.requirement("D33")
async def test_a_name_that_the_token_does_not_see_is_unknown_and_not_suggested(mode: str) -> None:
    async with serving(tools()) as world, world.client(mode, "read") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["read_name"]
        with pytest.raises(MCPError) as caught:
            await client.call_tool("add", {"a": 1, "b": 2})
    assert caught.value.error.code == -32602
    assert caught.value.error.message == "Unknown tool: add"


@both
@pytest.mark.requirement("D33")
async def test_a_misfit_tells_the_model_what_to_correct(mode: str) -> None:
    async with serving(tools()) as world, world.client(mode) as client:
        result = await client.call_tool("add", {"a": "two", "b": 3})
    assert result.is_error
    assert isinstance(result.structured_content, dict)
    assert (result.structured_content["kind"], result.structured_content["outcome"]) == ("schema", "not_run")
    assert "/a" in text_of(result)
    assert "Correct the arguments" in text_of(result)


@pytest.mark.requirement("D33")
@pytest.mark.parametrize(
    ("kind", "details", "advice"),
    [
        (ErrorKind.TIMEOUT, {}, "find out before calling again"),
        (ErrorKind.TRANSIENT, {"retry_after_ms": 250}, "may be made again. Wait 250 ms"),
        (ErrorKind.BUDGET_EXCEEDED, {}, "stop calling tools"),
    ],
)
async def test_a_failure_says_what_to_do(kind: ErrorKind, details: Mapping[str, Any], advice: str) -> None:
    async def fails(request: ToolRequest) -> None:
        raise Failed(kind, "it did not work", **details)

    async with serving(scripts={"fails": fails}) as world, world.client(MODERN) as client:
        result = await client.call_tool("fails", {})
    assert result.is_error
    assert advice in text_of(result)


@both
@pytest.mark.requirement("D33")
async def test_arguments_are_judged_as_they_were_sent(mode: str) -> None:
    """A parser would keep the last of two keys and say nothing."""
    body = '{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"add","arguments":{"a":1,"a":2,"b":3}%s}}'
    meta = (
        ',"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",'
        '"io.modelcontextprotocol/clientCapabilities":{}}'
    )
    async with serving(tools()) as world:
        headers = await opened(world) if mode == LEGACY else modern_headers("tools/call", "add")
        async with create_mcp_http_client(headers=headers) as http:
            reply = await http.post(world.url, content=body % ("" if mode == LEGACY else meta))
    assert '"kind":"schema"' in reply.text
    assert "isError" in reply.text


@both
@pytest.mark.requirement("D33")
async def test_an_id_is_a_text_or_a_whole_number_and_comes_back_as_it_was(mode: str) -> None:
    body = '{"jsonrpc":"2.0","id":%s,"method":"tools/call","params":{"name":"add","arguments":{"a":1,"b":3}%s}}'
    meta = (
        ',"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",'
        '"io.modelcontextprotocol/clientCapabilities":{}}'
    )
    async with serving(tools()) as world:
        headers = await opened(world) if mode == LEGACY else modern_headers("tools/call", "add")
        headers |= {"content-type": "application/json"}
        async with create_mcp_http_client(headers=headers) as http:
            for number in ("1.5", "1e400", "true", "null", "[1]", "{}", "9" * 5_000):
                refused = await http.post(world.url, content=body % (number, "" if mode == LEGACY else meta))
                assert refused.status_code == 400, number
                assert refused.json()["id"] is None
                assert refused.json()["error"]["code"] in (-32600, -32700)
            assert not world.gateway.requests
            for number in ("0", "-7", '""', f'"{"x" * 100_000}"', "9" * 400):
                reply = await http.post(world.url, content=body % (number, "" if mode == LEGACY else meta))
                assert reply.status_code == 200
                assert f'"id":{number},' in reply.text.replace('": ', '":'), number[:20]
                assert '"isError":false' in reply.text
            assert len(world.gateway.requests) == 5


def modern_headers(method: str, name: str = "") -> dict[str, str]:
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": MODERN,
        "mcp-method": method,
    }
    return headers | ({"mcp-name": name} if name else {})


async def opened(world: World, token: str = "none") -> dict[str, str]:
    """The headers of a session of 2025-11-25."""
    headers = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "authorization": f"Bearer {token}",
    }
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    async with create_mcp_http_client(headers=headers) as http:
        reply = await http.post(world.url, json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    assert reply.status_code == 200, reply.text
    return headers | {"mcp-session-id": reply.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}


@both
@pytest.mark.requirement("D34")
async def test_key_owner_deadline_and_trace_travel_in_meta(mode: str) -> None:
    async def ok(request: ToolRequest) -> str:
        return "ok"

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    meta: Any = {
        "callyard/idempotencyKey": "order-7",
        "callyard/owner": "cart-1",
        "callyard/deadlineMs": 1_500,
        "callyard/timeoutMs": 900,
        "traceparent": trace,
        "com.example/shown": {"a": 1},
        "com.example/hidden": 2,
    }
    async with serving(scripts={"ok": ok}, meta=["com.example/shown"]) as world, world.client(mode, "one") as client:
        await client.call_tool("ok", {}, meta=meta)
        (request,) = world.gateway.requests
        await client.call_tool("ok", {})
        plain = world.gateway.requests[-1]
    assert (request.key, request.owner, request.deadline_ms, request.timeout_ms) == ("order-7", "cart-1", 1_500, 900)
    assert request.trace["traceparent"] == trace or mode == LEGACY  # the client's own span takes its place there
    assert request.meta == {"com.example/shown": {"a": 1}}
    assert request.caller == ACME
    assert (plain.key, plain.owner) == (None, None)  # no owner is implied


@both
@pytest.mark.requirement("D34")
async def test_meta_of_another_type_is_refused(mode: str) -> None:
    async def ok(request: ToolRequest) -> str:
        return "ok"

    async with serving(scripts={"ok": ok}) as world, world.client(mode) as client:
        with pytest.raises(MCPError, match="callyard/deadlineMs must be a whole number"):
            await client.call_tool("ok", {}, meta={"callyard/deadlineMs": "soon"})  # type: ignore[typeddict-unknown-key]
    assert not world.gateway.requests


@pytest.mark.requirement("D34")
async def test_an_owner_can_be_the_session() -> None:
    async def ok(request: ToolRequest) -> str:
        return "ok"

    async with (
        serving(scripts={"ok": ok}, owner_by_session=True) as world,
        world.client(LEGACY) as one,
        world.client(LEGACY) as two,
    ):
        for client in (one, one, two):
            await client.call_tool("ok", {})
    first, again, other = (request.owner for request in world.gateway.requests)
    assert first is not None
    assert first == again != other


@both
@pytest.mark.requirement("D33")
async def test_progress_rises_strictly_and_does_not_flood(mode: str) -> None:
    async def works(request: ToolRequest) -> str:
        assert request.on_progress is not None
        for done in (1, 1, 0.5, *range(2, 2_001)):
            request.on_progress(done, 2_000, f"step {done}")
        return "done"

    seen: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async with serving(scripts={"works": works}) as world, world.client(mode) as client:
        await client.call_tool("works", {}, progress_callback=on_progress)
        await until(lambda: seen and seen[-1] == 2_000)
    assert seen == sorted(set(seen))
    assert seen[0] == 1
    assert len(seen) < 50


@both
@pytest.mark.requirement("D33")
async def test_log_messages_go_to_who_asked_for_them(mode: str) -> None:
    async def logs(request: ToolRequest) -> str:
        assert request.on_log is not None
        request.on_log("debug", "detail", {})
        request.on_log("warning", "careful", {"left": 3})
        return "done"

    seen: list[types.LoggingMessageNotificationParams] = []

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        seen.append(params)

    async with serving(scripts={"logs": logs}) as world:
        async with world.client(mode, logging_callback=on_log, log_level="warning") as client:
            await client.call_tool("logs", {})
            await until(lambda: len(seen) == 1)
        async with world.client(mode, logging_callback=on_log) as client:
            await client.call_tool("logs", {})
            if mode == LEGACY:  # a server decides until it is told
                await until(lambda: len(seen) == 2)
    assert [(one.level, one.logger, one.data) for one in seen[:1]] == [
        ("warning", "logs", {"message": "careful", "left": 3})
    ]
    assert len(seen) == (2 if mode == LEGACY else 1)


@pytest.mark.requirement("D41")
async def test_a_cancel_message_stops_the_call() -> None:
    hang = asyncio.Event()

    async def hangs(request: ToolRequest) -> None:
        await hang.wait()

    async with serving(scripts={"hangs": hangs}) as world, world.client(LEGACY) as client:
        calling = asyncio.ensure_future(client.call_tool("hangs", {}))
        await until(lambda: world.gateway.requests)
        calling.cancel()  # the SDK's client tells the server
        await until(lambda: world.gateway.ended)
        assert world.gateway.cancelled == [world.gateway.requests[0].call_id]
        assert not world.gateway.lost
        assert len((await client.list_tools()).tools) == 1  # the session goes on


@both
@pytest.mark.requirement("D41")
async def test_a_closed_stream_is_a_lost_connection(mode: str) -> None:
    hang = asyncio.Event()

    async def hangs(request: ToolRequest) -> None:
        await hang.wait()

    async with serving(scripts={"hangs": hangs}) as world:
        headers = await opened(world) if mode == LEGACY else modern_headers("tools/call", "hangs")
        params: dict[str, Any] = {"name": "hangs", "arguments": {}}
        if mode != LEGACY:
            params["_meta"] = {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": {},
            }
        async with create_mcp_http_client(headers=headers) as http:
            body = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": params}
            calling = asyncio.ensure_future(http.post(world.url, json=body))
            await until(lambda: world.gateway.requests)
            calling.cancel()
            await until(lambda: world.gateway.ended)
    assert world.gateway.lost == ["hangs"]
    assert not world.gateway.cancelled


@both
@pytest.mark.requirement("D33")
async def test_functions_that_change_are_told(mode: str) -> None:
    heard: list[str] = []

    async def on_message(message: Any) -> None:
        heard.append(getattr(message, "method", ""))

    async with serving(tools()) as world, world.client(mode, message_handler=on_message) as client:
        if mode == LEGACY:
            await client.list_tools()
            await until(lambda: world.gate._connections)
            await asyncio.sleep(0.05)  # until the client's GET stands; there is nothing to see of it from here
            events = None
        else:
            events = client.listen(tools_list_changed=True, prompts_list_changed=True)
        if events is None:
            async with asyncio.timeout(20):
                while "notifications/tools/list_changed" not in heard:
                    world.gateway.tell_changed()
                    await asyncio.sleep(0.02)
        else:
            async with events as subscription:
                world.gateway.tell_changed()
                async with asyncio.timeout(20):
                    first = await anext(aiter(subscription))
                heard.append(type(first).__name__)
    assert any("ools" in one for one in heard)


@pytest.mark.requirement("D33")
async def test_a_session_is_its_tokens_own() -> None:
    async with serving(tools()) as world:
        headers = await opened(world, "one")
        body = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        async with create_mcp_http_client() as http:
            mine = await http.post(world.url, json=body, headers=headers)
            theirs = await http.post(world.url, json=body, headers=headers | {"authorization": "Bearer two"})
            deleted = await http.delete(world.url, headers=headers)
            gone = await http.post(world.url, json=body, headers=headers)
    assert (mine.status_code, theirs.status_code, deleted.status_code, gone.status_code) == (200, 404, 200, 404)


@pytest.mark.requirement("D33")
async def test_sessions_have_a_cap() -> None:
    async with serving(tools(), app_options={"sessions_max": 1}) as world:
        await opened(world)
        with pytest.raises(AssertionError, match="Too many open sessions"):
            await opened(world)


@pytest.mark.requirement("D33", "D44")
async def test_one_token_leaves_others_a_session() -> None:
    async with serving(tools(), app_options={"sessions_max": 8}) as world:
        first = await opened(world, "one")
        await opened(world, "one")
        with pytest.raises(AssertionError, match="Too many open sessions of this token"):
            await opened(world, "one")
        await opened(world, "two")
        async with create_mcp_http_client() as http:
            await http.delete(world.url, headers=first)
        await opened(world, "one")


@pytest.mark.requirement("D33", "D55")
async def test_two_keys_of_one_call_are_refused() -> None:
    key = '"callyard/idempotencyKey"'
    body = (
        '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"add","arguments":{"a":1,"b":2},'
        f'"_meta":{{{key}:"one",{key}:"two"}}}}}}'
    )
    async with serving(tools()) as world, create_mcp_http_client() as http:
        headers = await opened(world) | {"content-type": "application/json"}
        refused = await http.post(world.url, content=body, headers=headers)
        taken = await http.post(world.url, content=body.replace(f',{key}:"two"', ""), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, -32600)
        assert "stands twice" in refused.json()["error"]["message"]
        assert (taken.status_code, len(world.gateway.requests)) == (200, 1)


@pytest.mark.requirement("D33")
async def test_long_lists_have_pages() -> None:
    registry = Registry()
    for number in range(250):
        registry.add_tool(f"tool_{number:03}", lambda arguments: None, input_schema={"type": "object"})
    async with serving(registry) as world, world.client(MODERN) as client:
        names: list[str] = []
        cursor = None
        for _ in range(3):
            page = await client.list_tools(cursor=cursor)
            names += [tool.name for tool in page.tools]
            cursor = page.next_cursor
        with pytest.raises(MCPError, match="unknown cursor"):
            await client.list_tools(cursor="-1")
    assert cursor is None
    assert names == [f"tool_{number:03}" for number in range(250)]


@both
async def test_permits_are_back_at_rest(mode: str) -> None:
    async def fails(request: ToolRequest) -> None:
        raise Failed(ErrorKind.TOOL_ERROR, "no")

    async with serving(tools(), {"fails": fails}, jobs_max=2) as world, world.client(mode) as client:
        await asyncio.gather(*(client.call_tool("fails", {}) for _ in range(20)))
        await asyncio.gather(*(client.list_tools() for _ in range(20)))
        with pytest.raises(MCPError):
            await client.call_tool("nobody", {})
        await until(lambda: not world.gateway.statistics().permits)


@pytest.mark.requirement("D33")
async def test_a_listener_holds_no_permit() -> None:
    async with (
        serving(tools(), jobs_max=1) as world,
        world.client(MODERN) as client,
        client.listen(tools_list_changed=True),
    ):
        result = await client.call_tool("add", {"a": 1, "b": 1})
    assert result.structured_content == {"result": 2}


def test_the_arguments_of_a_body_are_found_as_they_stand() -> None:
    from callyard.serve.mcp_server import raw_arguments

    assert raw_arguments(b'{"params":{"name":"a","arguments":{"x": 1.50}}}') == b'{"x": 1.50}'
    for other in (b"", b"[]", b'{"params":null}', b'{"params":{"arguments":null}}', b'{"params":{}}', b"{"):
        assert raw_arguments(other) is None
    assert msgspec.json.decode(raw_arguments(b'{"params":{"arguments":{}}}') or b"0") == {}


# --- prompts, resources, large results ------------------------------------------------------------------------------


def readable() -> Registry:
    registry = Registry()

    @registry.prompt(complete={"city": ["paris", "park", "berlin"]})
    async def greet(city: str, times: int = 1) -> str:
        """Greet a city."""
        return f"Hello {city}, {times + 1} times"

    @registry.resource("config://app", mime_type="application/json")
    async def config() -> dict[str, int]:
        return {"limit": 3}

    @registry.resource("user://{name}/card")
    async def card(name: str) -> str | None:
        return f"card of {name}" if name != "nobody" else None

    @registry.resource("image://dot", mime_type="image/png")
    async def dot() -> bytes:
        return b"\x89PNG\r\n\x1a\n"

    return registry


@both
@pytest.mark.requirement("D33")
async def test_prompts_are_listed_completed_and_made(mode: str) -> None:
    async with serving(readable()) as world, world.client(mode) as client:
        (listed,) = (await client.list_prompts()).prompts
        made = await client.get_prompt("greet", {"city": "Berlin", "times": "2"})
        completed = await client.complete(types.PromptReference(name="greet"), {"name": "city", "value": "PAR"})
        with pytest.raises(MCPError) as unknown:
            await client.get_prompt("great")
        with pytest.raises(MCPError) as misfit:
            await client.get_prompt("greet", {"city": "Berlin", "times": "many"})
    assert [(one.name, one.required) for one in listed.arguments or []] == [("city", True), ("times", False)]
    assert made.messages[0].content == types.TextContent(text="Hello Berlin, 3 times")
    assert completed.completion.values == ["paris", "park"]
    assert (unknown.value.error.code, unknown.value.error.message) == (
        -32602,
        "Unknown prompt: great; did you mean 'greet'?",
    )
    assert misfit.value.error.code == -32602
    assert misfit.value.error.data["kind"] == "schema"


@both
@pytest.mark.requirement("D33")
async def test_resources_are_listed_and_read(mode: str) -> None:
    async with serving(readable()) as world, world.client(mode) as client:
        listed = [str(one.uri) for one in (await client.list_resources()).resources]
        templates = [one.uri_template for one in (await client.list_resource_templates()).resource_templates]
        config = (await client.read_resource("config://app")).contents
        card = (await client.read_resource("user://Ada%20L/card")).contents
        dot = (await client.read_resource("image://dot")).contents
        for missing in ("user://nobody/card", "config://other", "callyard://kept/none"):
            with pytest.raises(MCPError) as caught:
                await client.read_resource(missing)
            assert caught.value.error.code == (-32002 if mode == LEGACY else -32602)
            assert caught.value.error.data == {"uri": missing}
    assert (listed, templates) == (["config://app", "image://dot"], ["user://{name}/card"])
    assert config == [types.TextResourceContents(uri="config://app", mime_type="application/json", text='{"limit":3}')]
    assert isinstance(card[0], types.TextResourceContents)
    assert card[0].text == "card of Ada L"
    assert isinstance(dot[0], types.BlobResourceContents)
    assert dot[0].mime_type == "image/png"


@pytest.mark.requirement("D33")
async def test_a_large_result_is_a_preview_and_a_link_that_its_caller_reads(tmp_path: Path) -> None:
    async def large(request: ToolRequest) -> list[int]:
        return list(range(5_000))

    kept = KeptResults(tmp_path / "kept", max_result_bytes=1_000, kept_ms=60_000, bytes_max=1_000_000)
    await kept.open()
    async with (
        serving(scripts={"large": large}, kept=kept) as world,
        world.client(MODERN, "one") as mine,
        world.client(MODERN, "two") as theirs,
    ):
        result = await mine.call_tool("large", {})
        text, link = result.content
        assert isinstance(text, types.TextContent)
        assert isinstance(link, types.ResourceLink)
        assert len(text.text) < 2_000
        assert "[0,1,2,3" in text.text
        (whole,) = (await mine.read_resource(str(link.uri))).contents
        assert isinstance(whole, types.TextResourceContents)
        assert msgspec.json.decode(whole.text) == list(range(5_000))
        assert link.size == len(whole.text)
        with pytest.raises(MCPError, match="Resource not found"):
            await theirs.read_resource(str(link.uri))
    await kept.close()


@pytest.mark.filterwarnings("ignore:resources/")
@pytest.mark.requirement("D33")
async def test_who_subscribed_hears_that_a_resource_may_have_changed() -> None:
    heard: list[str] = []

    async def on_message(message: Any) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            heard.append(str(message.params.uri))

    async with serving(readable()) as world, world.client(LEGACY, message_handler=on_message) as client:
        await client.subscribe_resource("config://app")
        await client.subscribe_resource("image://dot")
        await client.unsubscribe_resource("image://dot")
        async with asyncio.timeout(20):
            while not heard:  # until the client's own stream stands
                world.gateway.tell_changed()
                await asyncio.sleep(0.02)
    assert set(heard) == {"config://app"}


@both
@pytest.mark.requirement("D33")
async def test_many_clients_at_once_each_get_their_own_answers(mode: str) -> None:
    async def calls(world: World, number: int) -> list[Any]:
        async with world.client(mode) as client:
            results = await asyncio.gather(*(client.call_tool("add", {"a": number, "b": n}) for n in range(10)))
        return [result.structured_content["result"] for result in results if result.structured_content]

    async with serving(tools(), jobs_max=4) as world:
        answers = await asyncio.gather(*(calls(world, number * 100) for number in range(8)))
        await until(lambda: not world.gateway.statistics().permits)
    assert answers == [[number * 100 + n for n in range(10)] for number in range(8)]


@both
@pytest.mark.requirement("D34")
async def test_one_key_is_one_run(mode: str) -> None:
    runs: list[int] = []
    registry = Registry()

    @registry.tool
    async def charge(cents: int) -> int:
        runs.append(cents)
        return len(runs)

    meta: Any = {"callyard/idempotencyKey": "order-7"}
    async with serving(registry) as world, world.gateway.dispatcher, world.client(mode) as client:
        first = await client.call_tool("charge", {"cents": 5}, meta=meta)
        second = await client.call_tool("charge", {"cents": 5}, meta=meta)
        other = await client.call_tool("charge", {"cents": 6}, meta=meta)
    assert (first.structured_content, second.structured_content) == ({"result": 1}, {"result": 1})
    assert (second.meta or {})["callyard/deduplicated"] is True
    assert other.is_error
    assert "conflict" in str(other.structured_content)
    assert runs == [5]
