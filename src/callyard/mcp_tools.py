"""Tools of MCP servers, by client sessions of the official SDK, as tools of a registry.

    registry = Registry()
    async with Client(StdioServerParameters(command="their-server")) as session:
        await add_mcp_tools(registry, session, prefix="their_", timeout_ms=10_000)
        async with Dispatcher(registry) as dispatcher:
            done = await dispatcher.dispatch("their_search", {"query": "ferries"})

Each is a tool of this process, behind limits, keys, breaker and events as any other. What a server says of its tools is
believed only when it is trusted to: else none is idempotent, so that nothing is retried or shared.

| what comes back | the attempt ends with |
| --- | --- |
| a result | `structuredContent` where there is an output schema, or nothing but text beside it; else the contents |
| a result with `isError` | `tool_error`, its text as written |
| error -32602; -32601 | `schema`; `not_found`: it did not run |
| another error | `internal` |
| a result that is not what MCP, or the output schema, says | `result` |
| no answer: the connection is gone | `crashed`, outcome unknown; `unavailable` where nothing was sent any more |
| no answer within the session's own time | `timeout` |

An attempt that has to end cancels its request, which the session tells the server.
Source: tool-dispatch D35, D38, D53.
"""

from __future__ import annotations

import base64
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, Final

from callyard.errors import CallFailure, ErrorKind, Outcome, UsageError, fail
from callyard.extras import needs
from callyard.functions.contents import Audio, Content, File, Image, ResourceLink
from callyard.functions.current import RUNNING, RunningCall
from callyard.functions.json_schema import normalize_schema
from callyard.functions.ports import AttemptFailed
from callyard.functions.registry import FUNCTIONS_MAX, FunctionSpec, Registry

with needs("serve", "add_mcp_tools"):
    import anyio
    import mcp_types as types
    from mcp import Client, MCPError

if TYPE_CHECKING:
    from typing import Unpack

    from mcp import ClientSession

    from callyard.functions.function import PromiseArguments

_Answer = types.CallToolResult | types.InputRequiredResult
_PAGES_MAX: Final = 1_000
_TERMINATED: Final = "Session terminated"
"""What the SDK says when a server answered that it does not know the session: the request was not taken."""


async def add_mcp_tools(
    registry: Registry,
    session: ClientSession | Client,
    *,
    trust_hints: bool = False,
    prefix: str = "",
    normalize: bool = False,
    override: bool = False,
    **promises: Unpack[PromiseArguments],
) -> list[FunctionSpec]:
    """Add the tools that the server has now; all of them, or none.

    `session` is connected, and stays the caller's to close; a `Client` also answers what a tool asks, by its callbacks.
    `trust_hints`: take `readOnlyHint`, `idempotentHint` and `destructiveHint` for promises, so that failed calls are
    retried. `promises` are the caller's own word, for each of the tools and over the hints. `normalize` mends schemas
    that are almost right. Raises `BadSchema` for one that is not usable, `UsageError` for a name that is there already
    (give a `prefix`, or `override`) or that is none, and what the session raises.
    """
    found = Registry()
    for tool in await _list(session):
        input_schema, output_schema = tool.input_schema, tool.output_schema
        if normalize:
            input_schema = normalize_schema(input_schema)[0]
            output_schema = output_schema and normalize_schema(output_schema)[0]
        held: dict[str, Any] = {**(_read_hints(tool.annotations) if trust_hints else {}), **promises}
        found.add_tool(
            prefix + tool.name,
            _RemoteTool(session, tool, is_trusted=trust_hints),
            description=tool.description or tool.title or "",
            input_schema=input_schema,
            output_schema=output_schema,
            **held,
        )
    taken = [name for name in found.names() if name in registry]
    if taken and not override:
        raise UsageError(f"there is a function {taken[0]!r} already: give a prefix=, or override=True")
    for spec in found:
        registry.add(spec, override=override)
    return found.specs()


async def _list(session: ClientSession | Client) -> list[types.Tool]:
    """All pages. Raises UsageError for a list without an end."""
    tools: list[types.Tool] = []
    cursor: str | None = None
    for _ in range(_PAGES_MAX):
        if isinstance(session, Client):
            page = await session.list_tools(cursor=cursor)
        else:
            page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
        if len(tools) > FUNCTIONS_MAX:
            break
    raise UsageError(f"the server lists more than {FUNCTIONS_MAX} tools, or {_PAGES_MAX} pages of them")


def _read_hints(hints: types.ToolAnnotations | None) -> PromiseArguments:
    """As promises. Never `pure`: no hint says that a result may be shared."""
    if hints is None:
        return {}
    if hints.read_only_hint:
        return {"read_only": True}  # the other two mean nothing beside it
    return {"idempotent": bool(hints.idempotent_hint), "destructive": hints.destructive_hint}


class _RemoteTool:
    """The handler of one tool. An `AttemptFailed` says how an attempt ended."""

    def __init__(self, session: ClientSession | Client, tool: types.Tool, *, is_trusted: bool) -> None:
        self._session = session
        self._name = tool.name
        self._has_schema = tool.output_schema is not None
        self._is_trusted = is_trusted

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        running = RUNNING.get()
        tell = None if running is None else _Progress(running)
        request = _Request(self._send(arguments, tell))
        try:
            result = await request
        except MCPError as error:
            raise AttemptFailed(self._judge(error.error, was_sent=request.was_sent)) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise AttemptFailed(self._lost(type(error).__name__, was_sent=request.was_sent)) from error
        except (RuntimeError, ValueError) as error:  # the SDK's: of a session that is closed, of an answer that misfits
            if not request.was_sent:
                raise AttemptFailed(self._lost(str(error), was_sent=False)) from error
            raise AttemptFailed(fail(ErrorKind.RESULT, f"{self._name}: {error}", attempts=1)) from error
        if not isinstance(result, types.CallToolResult):
            message = (
                f"{self._name} asks its client for input: a Client with callbacks answers, a bare session does not"
            )
            raise AttemptFailed(fail(ErrorKind.DENIED, message, attempts=1, outcome=Outcome.RAN))
        if result.is_error:
            raise AttemptFailed(self._told(result))
        try:
            return self._read(result)
        except ValueError as error:
            raise AttemptFailed(fail(ErrorKind.RESULT, f"{self._name}: {error}", attempts=1)) from error

    def _send(self, arguments: dict[str, Any], tell: _Progress | None) -> Coroutine[Any, Any, _Answer]:
        session = self._session
        if isinstance(session, Client):
            return session.call_tool(self._name, arguments, progress_callback=tell)
        return session.call_tool(self._name, arguments, progress_callback=tell, allow_input_required=True)

    def _read(self, result: types.CallToolResult) -> Any:
        """Raises ValueError for content that is not what it says it is."""
        is_text = all(isinstance(block, types.TextContent) for block in result.content)
        if result.structured_content is not None and (self._has_schema or is_text):
            return result.structured_content
        contents = [_to_content(block) for block in result.content]
        return contents if len(contents) > 1 else next(iter(contents), None)

    def _told(self, result: types.CallToolResult) -> CallFailure:
        """The tool's own error. What a server says of its outcome (as Callyard's do) makes the caller more careful; a
        trusted one may say that nothing was done."""
        texts = [block.text for block in result.content if isinstance(block, types.TextContent)]
        envelope = result.structured_content
        said = envelope.get("outcome") if isinstance(envelope, dict) else None
        outcome = None
        if said == Outcome.UNKNOWN or (said == Outcome.NOT_RUN and self._is_trusted):
            outcome = Outcome(said)
        message = "\n".join(texts) or f"{self._name} failed, and said nothing more"
        return fail(ErrorKind.TOOL_ERROR, message, attempts=1, outcome=outcome)

    def _judge(self, error: types.ErrorData, *, was_sent: bool) -> CallFailure:
        code, message = error.code, f"{self._name}: {error.message}"
        if code == types.CONNECTION_CLOSED:
            return self._lost(error.message, was_sent=was_sent)
        if code == types.INVALID_REQUEST and error.message == _TERMINATED:
            return self._lost(error.message, was_sent=False)
        if code == types.REQUEST_TIMEOUT:
            return fail(ErrorKind.TIMEOUT, message, attempts=1, limit="session")
        if code == types.INVALID_PARAMS:
            return fail(ErrorKind.SCHEMA, message, attempts=1)
        if code == types.METHOD_NOT_FOUND:
            return fail(ErrorKind.NOT_FOUND, message, attempts=1)
        return fail(ErrorKind.INTERNAL, message, attempts=1, jsonrpc_code=code)

    def _lost(self, why: str, *, was_sent: bool) -> CallFailure:
        if was_sent:
            message = f"{self._name}: the connection to its server was lost while it ran: {why}"
            return fail(ErrorKind.CRASHED, message, attempts=1, cause="connection_lost")
        return fail(ErrorKind.UNAVAILABLE, f"{self._name}: there is no connection to its server: {why}")


class _Progress:
    """What the session is told of a request goes to the call that made it."""

    def __init__(self, running: RunningCall) -> None:
        self._running = running

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self._running.progress(progress, total, message or "")


class _Request:
    """Awaits a request of a session. One that ended before it ever waited was not sent: all that a session does before
    is to look whether it may."""

    def __init__(self, request: Coroutine[Any, Any, _Answer]) -> None:
        self._request = request
        self.was_sent = False

    def __await__(self) -> Generator[Any, Any, _Answer]:
        result: _Answer = yield from self
        return result

    def __iter__(self) -> _Request:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        waits_for = self._request.send(value)
        self.was_sent = True
        return waits_for

    def throw(self, *error: Any) -> Any:
        return self._request.throw(*error)

    def close(self) -> None:
        self._request.close()


def _to_content(block: types.ContentBlock) -> str | Content:
    """As a function would return it. Raises ValueError."""
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent():
            return Image(_decode(block.data), block.mime_type)
        case types.AudioContent():
            return Audio(_decode(block.data), block.mime_type)
        case types.ResourceLink():
            return ResourceLink(
                block.uri,
                block.name,
                title=block.title or "",
                description=block.description or "",
                mime_type=block.mime_type or "",
                size=block.size,
            )
        case types.EmbeddedResource():
            resource = block.resource
            if isinstance(resource, types.TextResourceContents):
                return File(resource.text.encode(), resource.mime_type or "text/plain", uri=resource.uri)
            return File(_decode(resource.blob), resource.mime_type, uri=resource.uri)


def _decode(data: str) -> bytes:
    return base64.b64decode(data, validate=True)
