"""Tools of MCP servers behind a dispatcher: real servers of the official SDK, in this process and on stdio."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client, ClientSession, StdioServerParameters, stdio_client
from mcp.client._memory import InMemoryTransport
from mcp.server.lowlevel import Server

from callyard import Dispatcher, Registry, UsageError, add_mcp_tools
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import ErrorKind, Outcome
from callyard.functions.contents import CONTENT_TAG
from callyard.functions.function import Promises
from callyard.functions.json_schema import BadSchema
from callyard.policy.retry import RetryPolicy
from tests.runtime.dispatch import mcp_world_server

WAIT_S = 30.0
AT_ONCE = RetryPolicy(base_ms=1, jitter=0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def failure_of(result: DispatchResult) -> DispatchError:
    assert isinstance(result, DispatchError)
    return result


def lines(book: Path) -> list[str]:
    return book.read_text().split() if book.exists() else []


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "book.txt"


@asynccontextmanager
async def behind(session: Any, **options: Any) -> AsyncIterator[Dispatcher]:
    registry = Registry()
    await add_mcp_tools(registry, session, **options)
    async with Dispatcher(registry, retry=AT_ONCE) as dispatcher:
        yield dispatcher


def on_stdio(book: Path) -> StdioServerParameters:
    script = str(Path(mcp_world_server.__file__))
    return StdioServerParameters(command=sys.executable, args=[script, str(book)])


@pytest.mark.requirement("D53")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_tool_is_shown_and_called_as_its_server_has_it(book: Path, mode: str) -> None:
    async with (
        Client(mcp_world_server.build(book), mode=mode) as client,
        behind(client, prefix="w.") as dispatcher,
    ):
        assert dispatcher.registry.names() == [f"w.{name}" for name in (await names_of(client))]
        shown = dispatcher.registry.get("w.hang")
        assert shown.description == "Says that it was stopped, if it is."
        assert b'"seconds"' in bytes(shown.input_schema)
        assert (await dispatcher.dispatch("w.add", {"a": 2, "b": 3})).value == {"result": 5}
        assert (await dispatcher.dispatch("w.greet", {"name": "you"})).value == "hello you"
        misfit = failure_of(await dispatcher.dispatch("w.add", {"a": "2", "b": 3}))
        assert (misfit.kind, misfit.attempts) == (ErrorKind.SCHEMA, 0)
        contents = (await dispatcher.dispatch("w.picture")).value[CONTENT_TAG]
        assert [(block["type"], block.get("data")) for block in contents] == [("text", None), ("image", "AQID")]


async def names_of(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools()).tools]


@pytest.mark.requirement("D53")
async def test_hints_are_promises_only_when_the_server_is_trusted(book: Path) -> None:
    async with Client(mcp_world_server.build(book)) as client:
        plain, trusted = Registry(), Registry()
        await add_mcp_tools(plain, client)
        await add_mcp_tools(trusted, client, trust_hints=True, timeout_ms=700)
    for spec in plain:
        assert spec.promises == Promises(), spec.name
    hang, add, greet = (trusted.get(name).promises for name in ("hang", "add", "greet"))
    assert (hang.idempotent, hang.read_only, hang.destructive, hang.pure) == (True, False, False, False)
    assert (add.idempotent, add.read_only, add.pure) == (True, True, False)
    assert (greet.idempotent, greet.destructive) == (False, None)
    assert hang.timeout_ms == add.timeout_ms == greet.timeout_ms == 700


@pytest.mark.requirement("D53")
@pytest.mark.parametrize(("trusts", "runs"), [(False, 1), (True, 3)])
async def test_a_call_that_ran_out_of_time_is_stopped_and_again_only_for_the_trusted(
    book: Path, trusts: bool, runs: int
) -> None:
    async with (
        Client(on_stdio(book)) as client,
        behind(client, trust_hints=trusts, timeout_ms=1_000) as dispatcher,
    ):
        late = failure_of(await dispatcher.dispatch("hang", {"seconds": 600}))
        assert (late.kind, late.attempts, late.outcome) == (ErrorKind.TIMEOUT, runs, Outcome.UNKNOWN)
        await until(lambda: lines(book).count("stopped") == runs)
        assert lines(book).count("begun") == runs
        assert (await dispatcher.dispatch("add", {"a": 1, "b": 1})).ok


@pytest.mark.requirement("D53")
async def test_a_cancelled_call_is_cancelled_at_its_server(book: Path) -> None:
    async with Client(on_stdio(book)) as client, behind(client) as dispatcher:
        call = asyncio.ensure_future(dispatcher.dispatch("hang", {"seconds": 600}, call_id="mine"))
        await until(lambda: "begun" in lines(book))
        assert dispatcher.cancel("mine")  # type: ignore[arg-type]
        assert failure_of(await call).kind is ErrorKind.CANCELLED
        await until(lambda: "stopped" in lines(book))


@pytest.mark.requirement("D53")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_an_error_of_the_tool_is_its_answer(book: Path, mode: str) -> None:
    async with Client(mcp_world_server.build(book), mode=mode) as client, behind(client) as dispatcher:
        refused = failure_of(await dispatcher.dispatch("refuse", {"why": "no ferry today"}))
        assert (refused.kind, refused.outcome) == (ErrorKind.TOOL_ERROR, Outcome.RAN)
        assert "no ferry today" in refused.message


async def test_progress_reaches_the_caller(book: Path) -> None:
    told: list[tuple[float, float | None, str]] = []
    async with Client(mcp_world_server.build(book)) as client, behind(client) as dispatcher:
        done = await dispatcher.dispatch("count", {"to": 3}, on_progress=lambda *what: told.append(what))
        assert done.value == "done"
    assert told == [(1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")]


@pytest.mark.requirement("D53")
@pytest.mark.parametrize("trusts", [False, True])
async def test_a_server_that_dies_in_a_call(book: Path, trusts: bool) -> None:
    async with Client(on_stdio(book)) as client, behind(client, trust_hints=trusts) as dispatcher:
        lost = failure_of(await dispatcher.dispatch("die", {"at": "once"}, key="order-7"))
        # A retry has nobody to go to: nothing is sent then, and what the first attempt did stays possible.
        kind = ErrorKind.UNAVAILABLE if trusts else ErrorKind.CRASHED
        assert (lost.kind, lost.outcome, lost.attempts) == (kind, Outcome.UNKNOWN, 1)
        assert lines(book) == ["once"]
        after = failure_of(await dispatcher.dispatch("add", {"a": 1, "b": 1}))
        assert (after.kind, after.outcome) == (ErrorKind.UNAVAILABLE, Outcome.NOT_RUN)
        assert after.attempts == 0
        if not trusts:  # what may have happened is not done again
            again = failure_of(await dispatcher.dispatch("die", {"at": "once"}, key="order-7"))
            assert (again.deduplicated, again.outcome) == (True, Outcome.UNKNOWN)


@pytest.mark.requirement("D53")
async def test_a_bare_session_and_one_that_was_closed(book: Path) -> None:
    async with stdio_client(on_stdio(book)) as streams, ClientSession(*streams) as session:
        await session.initialize()
        registry = Registry()
        await add_mcp_tools(registry, session)
    async with Dispatcher(registry) as dispatcher:
        closed = failure_of(await dispatcher.dispatch("add", {"a": 1, "b": 1}))
        assert (closed.kind, closed.attempts) == (ErrorKind.UNAVAILABLE, 0)
        assert closed.outcome is Outcome.NOT_RUN


def scripted(call: Callable[[Any], Any], **listed: Any) -> Server[Any]:
    """A server of one tool, whose answers are the test's."""
    tool = types.Tool(name="tool", input_schema={"type": "object"}, **listed)

    async def on_list(_: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool])

    async def on_call(_: Any, params: Any) -> Any:
        return call(params)

    return Server("scripted", on_list_tools=on_list, on_call_tool=on_call)


@pytest.mark.requirement("D38")
@pytest.mark.parametrize(
    ("code", "kind", "outcome"),
    [
        (types.INVALID_PARAMS, ErrorKind.SCHEMA, Outcome.NOT_RUN),
        (types.METHOD_NOT_FOUND, ErrorKind.NOT_FOUND, Outcome.NOT_RUN),
        (types.INTERNAL_ERROR, ErrorKind.INTERNAL, Outcome.RAN),
        (types.REQUEST_TIMEOUT, ErrorKind.TIMEOUT, Outcome.UNKNOWN),
        (types.CONNECTION_CLOSED, ErrorKind.CRASHED, Outcome.UNKNOWN),
    ],
)
async def test_errors_of_the_protocol(code: int, kind: ErrorKind, outcome: Outcome) -> None:
    from mcp import MCPError

    def call(_: Any) -> Any:
        raise MCPError(code, "as it was said")

    async with Client(scripted(call), mode="legacy") as client, behind(client) as dispatcher:
        failed = failure_of(await dispatcher.dispatch("tool"))
        assert (failed.kind, failed.outcome) == (kind, outcome)
        assert "as it was said" in failed.message


@pytest.mark.requirement("D53")
@pytest.mark.parametrize(
    ("said", "trusts", "outcome"),
    [
        ("unknown", False, Outcome.UNKNOWN),
        ("not_run", False, Outcome.RAN),
        ("not_run", True, Outcome.NOT_RUN),
        (7, True, Outcome.RAN),
    ],
)
async def test_what_an_error_says_of_its_outcome(said: object, trusts: bool, outcome: Outcome) -> None:
    def call(_: Any) -> types.CallToolResult:
        return types.CallToolResult(content=[], structured_content={"outcome": said}, is_error=True)

    async with Client(scripted(call), mode="legacy") as client, behind(client, trust_hints=trusts) as dispatcher:
        failed = failure_of(await dispatcher.dispatch("tool"))
        assert (failed.kind, failed.outcome) == (ErrorKind.TOOL_ERROR, outcome)


@pytest.mark.parametrize(
    "content",
    [
        types.ImageContent(data="no base64!", mime_type="image/png"),
        types.ImageContent(data="AQID", mime_type="text/html"),
    ],
)
async def test_content_that_is_not_what_it_says(content: types.ImageContent) -> None:
    server = scripted(lambda _: types.CallToolResult(content=[content]))
    async with Client(server, mode="legacy") as client, behind(client) as dispatcher:
        failed = failure_of(await dispatcher.dispatch("tool"))
        assert (failed.kind, failed.outcome) == (ErrorKind.RESULT, Outcome.RAN)


async def test_a_result_that_breaks_its_schema_or_is_too_large() -> None:
    answers = iter([types.CallToolResult(content=[], structured_content={"n": n}) for n in ("x", "y" * 5_000)])
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    server = scripted(lambda _: next(answers), output_schema=schema)
    async with Client(server, mode="legacy") as client, behind(client, max_result_bytes=1_000) as dispatcher:
        for _ in range(2):
            failed = failure_of(await dispatcher.dispatch("tool"))
            assert (failed.kind, failed.outcome) == (ErrorKind.RESULT, Outcome.RAN)


async def test_all_tools_or_none_are_added(book: Path) -> None:
    registry = Registry()

    @registry.tool
    async def greet() -> str:
        return "mine"

    async with Client(mcp_world_server.build(book)) as client:
        with pytest.raises(UsageError, match=r"'greet'.*prefix"):
            await add_mcp_tools(registry, client)
        assert registry.names() == ["greet"]
        await add_mcp_tools(registry, client, override=True)
        assert len(registry) == len(await names_of(client))


async def test_a_schema_that_is_almost_right_is_refused_or_mended() -> None:
    server = scripted(lambda _: types.CallToolResult(content=[types.TextContent(text="x")]))
    tool = types.Tool(name="tool", input_schema={"type": "object", "properties": {"a": {"type": "float"}}})

    async def on_list(_: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool])

    server.add_request_handler("tools/list", types.PaginatedRequestParams, on_list)
    async with Client(server, mode="legacy") as client:
        with pytest.raises(BadSchema, match="float"):
            await add_mcp_tools(Registry(), client)
        async with behind(client, normalize=True) as dispatcher:
            assert (await dispatcher.dispatch("tool", {"a": 1.5})).value == "x"


async def test_every_page_is_read_and_a_list_without_an_end_is_refused() -> None:
    ends = True

    async def on_list(_: Any, params: Any) -> types.ListToolsResult:
        number = int((params and params.cursor) or 0)
        tool = types.Tool(name=f"tool{number}", input_schema={"type": "object"})
        last = ends and number == 2
        return types.ListToolsResult(tools=[tool], next_cursor=None if last else str(number + 1))

    async def on_call(_: Any, params: Any) -> Any:
        return types.CallToolResult(content=[])

    server: Server[Any] = Server("pages", on_list_tools=on_list, on_call_tool=on_call)
    async with InMemoryTransport(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        registry = Registry()
        await add_mcp_tools(registry, session)
        assert registry.names() == ["tool0", "tool1", "tool2"]
        ends = False
        with pytest.raises(UsageError, match="lists more than"):
            await add_mcp_tools(Registry(), session)


async def test_a_question_of_a_tool_goes_to_the_callbacks_of_its_client() -> None:
    async def on_list(_: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name="ask", input_schema={"type": "object"})])

    async def on_call(_: Any, params: Any) -> Any:
        if params.input_responses:
            return types.CallToolResult(content=[types.TextContent(text=str(params.input_responses["q"].action))])
        form = types.ElicitRequestFormParams(message="Sure?", requested_schema={"type": "object", "properties": {}})
        return types.InputRequiredResult(input_requests={"q": types.ElicitRequest(params=form)}, request_state="s")

    async def decline(context: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="decline")

    server: Server[Any] = Server("asks", on_list_tools=on_list, on_call_tool=on_call)
    async with Client(server, mode="2026-07-28", elicitation_callback=decline) as client:
        async with behind(client) as dispatcher:
            assert (await dispatcher.dispatch("ask")).value == "decline"
        async with behind(client.session) as dispatcher:
            refused = failure_of(await dispatcher.dispatch("ask"))
            assert (refused.kind, refused.outcome) == (ErrorKind.DENIED, Outcome.RAN)


@pytest.mark.requirement("D53")
@pytest.mark.parametrize(
    ("waits", "kind", "attempts"), [(True, ErrorKind.CRASHED, 1), (False, ErrorKind.UNAVAILABLE, 0)]
)
async def test_a_stream_that_breaks_is_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch, waits: bool, kind: ErrorKind, attempts: int
) -> None:
    async def broken(*_: Any, **__: Any) -> types.CallToolResult:
        if waits:
            await asyncio.sleep(0)
        raise anyio.ClosedResourceError

    async with (
        Client(scripted(lambda _: types.CallToolResult(content=[]))) as client,
        behind(client) as dispatcher,
    ):
        assert (await dispatcher.dispatch("tool")).value is None
        monkeypatch.setattr(client, "call_tool", broken)
        lost = failure_of(await dispatcher.dispatch("tool"))
        assert (lost.kind, lost.attempts) == (kind, attempts)
