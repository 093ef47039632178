"""The MCP server: what the SDK's lowlevel `Server` asks, answered by the gateway, for both revisions in one process.

| MCP | here |
| --- | --- |
| `tools/*`, `prompts/*`, `resources/*`, `completion/complete` | functions, by role |
| `subscriptions/listen`, list-changed and updated notifications | `Gateway.on_changed`: a reload |
| `logging/setLevel`, the log level of a request | which of a function's log messages go out |
| `inputResponses`, `requestState` | `mcp_calls` |

`_meta` of a request, under our prefix: `callyard/idempotencyKey`, `callyard/owner`, `callyard/deadlineMs`,
`callyard/timeoutMs`; the trace context as MCP has it. Source: tool-dispatch D33, D34.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import mcp_types as types
import msgspec
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, authorization_context
from mcp.server.auth.provider import AccessToken
from mcp.server.caching import CacheHint
from mcp.server.connection import Connection
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import PromptsListChanged, ResourcesListChanged, ResourceUpdated, ToolsListChanged
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.responses import Response
from starlette.types import Message, Receive, Scope
from starlette.types import Send as AsgiSend

from callyard import __version__
from callyard.dispatch.outcomes import DispatchError, DispatchResult, Ok
from callyard.errors import CallError, ErrorKind
from callyard.functions.completion import (
    SUGGESTIONS_MAX,
    Completion,
    completer_arguments,
    read_suggestions,
    suggest,
)
from callyard.functions.misfits import ArgumentsMisfit
from callyard.functions.registry import FunctionSpec
from callyard.functions.strict_json import decode_json
from callyard.ids import CallId
from callyard.serve.contents import JSON_TYPE, to_messages, to_resource
from callyard.serve.gateway import Caller, Gateway
from callyard.serve.guard import TOKENS_SHARE, Lost, ended_with
from callyard.serve.mcp_calls import (
    Arrival,
    Calls,
    Context,
    arrival_of,
    connection_of,
    is_modern,
)
from callyard.serve.mcp_sessions import Sessions
from callyard.serve.mcp_tools import (
    KEPT,
    PREFIX,
    Shown,
    call_meta,
    page_of,
    show,
    tell,
    to_error,
    to_prompt,
    to_resource_entry,
    to_result,
    to_template,
    unknown,
)

if TYPE_CHECKING:
    from callyard.serve.kept import KeptResults

_log: Final = logging.getLogger("callyard.serve.mcp")

LISTENERS_MAX: Final = 1_024
"""Most open `subscriptions/listen` of all clients."""
WATCHED_MAX: Final = 1_000
"""Most resources that one connection, or one listener, is told the changes of."""
SESSIONS_MAX: Final = 1_000
SESSION_IDLE_S: Final = 30 * 60.0
STATE_TTL_S: Final = 600.0
KEPT_URI: Final = "callyard://kept/"
_RESOURCE_NOT_FOUND: Final = -32002
"""Of the revisions before 2026-07-28."""
_HEADER_MARK: Final = b'"x-mcp-header"'
_WATCHED: Final = "callyard.watched"


class _SdkServer(Server[Any]):
    """The SDK's, which says at `initialize` that its lists may change."""

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return super().create_initialization_options(
            notification_options or changes, experimental_capabilities, extensions
        )


class McpGate:
    """Serves MCP for one gateway. `server` is the SDK's; `close` ends its streams, and what waits for answers.

    `headers` and `meta`: names of those that functions may see. `list_ttl_ms`: how long a client may keep a list.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        name: str = "callyard",
        instructions: str | None = None,
        kept: KeptResults | None = None,
        headers: Collection[str] = (),
        meta: Collection[str] = (),
        owner_by_session: bool = False,
        list_ttl_ms: int = 0,
        **limits: Any,
    ) -> None:
        self.gateway = gateway
        self.calls = Calls(gateway, headers=headers, meta=meta, owner_by_session=owner_by_session, **limits)
        self._kept = kept
        self._shown: dict[str, Shown] = {}
        self._connections: set[Connection] = set()
        """Of 2025-11-25: those that hear of changes without asking."""
        self._told: set[asyncio.Task[None]] = set()
        self._listened: Counter[str] = Counter()
        self._bus = InMemorySubscriptionBus()
        self._listen = ListenHandler(self._bus, max_subscriptions=LISTENERS_MAX)
        hint = CacheHint(list_ttl_ms, "private")  # what a caller sees is its token's
        self.server = _SdkServer(
            name,
            version=__version__,
            instructions=instructions,
            cache_hints={
                "tools/list": hint,
                "prompts/list": hint,
                "resources/list": hint,
                "resources/templates/list": hint,
                "resources/read": CacheHint(0, "private"),
                "server/discover": CacheHint(list_ttl_ms, "private"),
            },
            get_tool_input_schema=self._input_schema_of,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
            on_subscribe_resource=self._subscribe,
            on_unsubscribe_resource=self._unsubscribe,
            on_subscriptions_listen=self._on_listen,
            on_completion=self._complete,
        )
        self.server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, self._set_level)
        self.server.add_notification_handler(
            "notifications/initialized", types.NotificationParams, self._on_initialized
        )
        security = RequestStateSecurity(keys=[os.urandom(32)], ttl=STATE_TTL_S, bind_principal=_principal)
        # The SDK's own middleware makes spans; a call's are the dispatcher's, with the trace of the request.
        self.server.middleware = [RequestStateBoundary(security, default_audience=name)]
        self._stop_hearing = gateway.on_changed(self._on_changed)

    def close(self) -> None:
        self._stop_hearing()
        self._listen.close()
        self.calls.close()
        for task in self._told:
            task.cancel()

    # --- tools --------------------------------------------------------------------------------------------------------

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        specs, cursor = page_of(self._seen(ctx, "tool"), params.cursor if params else None)
        return types.ListToolsResult(tools=[self._show(spec).tool for spec in specs], next_cursor=cursor)

    async def _call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        spec = self.gateway.find(arrival_of(ctx).caller, params.name)
        if spec is not None and spec.role != "tool":
            raise self._unknown(ctx, "tool", params.name)
        args: bytes | Mapping[str, Any] = arrival_of(ctx).arguments or params.arguments or {}
        result = await self.calls.make(ctx, params.name, args, params)
        if isinstance(result, types.InputRequiredResult):
            return result
        if isinstance(result, DispatchError):
            if result.kind is ErrorKind.NOT_FOUND and not result.attempts:
                raise self._unknown(ctx, "tool", params.name)
            return to_error(result)
        shown = None if spec is None else self._show(spec)
        short = await self._shorten(arrival_of(ctx).caller, result)
        return short or to_result(result, is_wrapped=shown is not None and shown.is_wrapped)

    async def _shorten(self, caller: Caller, ok: Ok) -> types.CallToolResult | None:
        """A preview and a link instead of a result that is too large; None: it is not."""
        preview = None if self._kept is None else await self._kept.shorten(caller, ok)
        if preview is None:
            return None
        text = f"The result has {preview.size_bytes} bytes, more than an answer holds; it begins as follows."
        blocks: list[types.ContentBlock] = []
        if preview.kept_id:
            text += " Read the linked resource for all of it."
            blocks.append(
                types.ResourceLink(
                    uri=f"{KEPT_URI}{preview.kept_id}",
                    name=f"result-{preview.kept_id}",
                    description=f"The whole result, readable for {preview.kept_ms // 1_000} s",
                    mime_type=JSON_TYPE,
                    size=preview.size_bytes,
                )
            )
        blocks.insert(0, types.TextContent(text=f"{text}\n{preview.text}"))
        kept: dict[str, Any] = {"size_bytes": preview.size_bytes, "preview": preview.text}
        if preview.kept_id:
            kept |= {"uri": f"{KEPT_URI}{preview.kept_id}", "kept_ms": preview.kept_ms}
        return types.CallToolResult(content=blocks, structured_content={KEPT: kept}, _meta=call_meta(ok))

    def _show(self, spec: FunctionSpec) -> Shown:
        shown = self._shown.get(spec.name)
        if shown is None or shown.spec is not spec:
            shown = self._shown[spec.name] = show(spec)
        return shown

    def _input_schema_of(self, name: str) -> Mapping[str, Any] | None:
        """For the check of headers that a schema asks for; None: it asks for none."""
        registry = self.gateway.registry
        if name not in registry or _HEADER_MARK not in bytes(registry.get(name).input_schema):
            return None
        return self._show(registry.get(name)).tool.input_schema

    def _seen(self, ctx: Context, role: str) -> list[FunctionSpec]:
        return self.gateway.functions(arrival_of(ctx).caller, role)

    def _unknown(self, ctx: Context, role: str, name: str) -> MCPError:
        return unknown(role, name, (spec.name for spec in self._seen(ctx, role)))

    # --- prompts ------------------------------------------------------------------------------------------------------

    async def _list_prompts(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
        specs, cursor = page_of(self._seen(ctx, "prompt"), params.cursor if params else None)
        return types.ListPromptsResult(prompts=[to_prompt(spec) for spec in specs], next_cursor=cursor)

    async def _get_prompt(
        self, ctx: Context, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult | types.InputRequiredResult:
        spec = self._find_prompt(ctx, params.name)
        result = await self.calls.make(ctx, spec.name, params.arguments or {}, params)
        if isinstance(result, types.InputRequiredResult):
            return result
        return types.GetPromptResult(
            description=spec.description or None, messages=to_messages(_output(result)), _meta=call_meta(result)
        )

    def _find_prompt(self, ctx: Context, name: str) -> FunctionSpec:
        spec = self.gateway.find(arrival_of(ctx).caller, name)
        if spec is None or spec.role != "prompt":
            raise self._unknown(ctx, "prompt", name)
        return spec

    # --- resources ----------------------------------------------------------------------------------------------------

    async def _list_resources(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        found = [spec for spec in self._seen(ctx, "resource") if not spec.is_template]
        specs, cursor = page_of(found, params.cursor if params else None)
        return types.ListResourcesResult(resources=[to_resource_entry(spec) for spec in specs], next_cursor=cursor)

    async def _list_templates(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        found = [spec for spec in self._seen(ctx, "resource") if spec.is_template]
        specs, cursor = page_of(found, params.cursor if params else None)
        return types.ListResourceTemplatesResult(
            resource_templates=[to_template(spec) for spec in specs], next_cursor=cursor
        )

    async def _read_resource(
        self, ctx: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult | types.InputRequiredResult:
        uri = str(params.uri)
        if uri.startswith(KEPT_URI):
            return await self._read_kept(ctx, uri)
        spec, texts = self._find_resource(ctx, uri)
        result = await self.calls.make(ctx, spec.name, texts, params)
        if isinstance(result, types.InputRequiredResult):
            return result
        output = _output(result)
        if output == b"null":
            raise _not_found(ctx, uri)
        return types.ReadResourceResult(contents=to_resource(uri, output), _meta=call_meta(result))

    def _find_resource(self, ctx: Context, uri: str) -> tuple[FunctionSpec, dict[str, str]]:
        """What has no variables goes first. Raises `MCPError`."""
        for spec in sorted(self._seen(ctx, "resource"), key=lambda one: one.is_template):
            texts = spec.match(uri)
            if texts is not None:
                return spec, texts
        raise _not_found(ctx, uri)

    async def _read_kept(self, ctx: Context, uri: str) -> types.ReadResourceResult:
        found = None
        if self._kept is not None:
            arrival, kept_id = arrival_of(ctx), uri.removeprefix(KEPT_URI)
            try:
                end = self._kept.begin_reading(arrival.caller, kept_id)
            except CallError as error:
                refused = DispatchError(CallId(""), error.failure)
                raise MCPError(types.INTERNAL_ERROR, error.failure.message, refused.to_json(remote=True)) from None
            if arrival.when_out is None:
                end()  # one client, whose answers go out one by one
            else:
                arrival.when_out.append(end)
            found = await self._kept.read(arrival.caller, kept_id)
        if found is None:
            raise _not_found(ctx, uri)
        return types.ReadResourceResult(contents=to_resource(uri, found))

    # --- completion ---------------------------------------------------------------------------------------------------

    async def _complete(self, ctx: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        if isinstance(params.ref, types.PromptReference):
            spec = self._find_prompt(ctx, params.ref.name)
        else:
            spec = self._find_template(ctx, params.ref.uri)
        known = params.context.arguments if params.context is not None else None
        values = await self._suggest(
            ctx, spec.completions.get(params.argument.name), params.argument.value, known or {}
        )
        return types.CompleteResult(
            completion=types.Completion(
                values=values[:SUGGESTIONS_MAX], total=len(values), has_more=len(values) > SUGGESTIONS_MAX
            )
        )

    def _find_template(self, ctx: Context, uri: str) -> FunctionSpec:
        for spec in self._seen(ctx, "resource"):
            if spec.uri == uri:
                return spec
        raise _not_found(ctx, uri)

    async def _suggest(
        self, ctx: Context, completion: Completion | None, value: str, known: Mapping[str, str]
    ) -> list[str]:
        """What a list, or a function of the author's, has for the beginning `value`."""
        if completion is None:
            return []
        registry = self.gateway.registry
        if not completion.function or completion.function not in registry:
            return suggest(completion.values, value)
        args = completer_arguments(registry.get(completion.function).input_schema, value, known)
        # Whoever may use the prompt may have its arguments completed.
        caller = msgspec.structs.replace(arrival_of(ctx).caller, tools=("*",))
        result = await self.calls.make(ctx, completion.function, args, types.InputResponseRequestParams(), caller)
        if isinstance(result, types.InputRequiredResult):
            raise MCPError(types.INTERNAL_ERROR, f"{completion.function} asks its client, which a completion cannot")
        found = read_suggestions(_output(result))
        if found is None:
            raise MCPError(types.INTERNAL_ERROR, f"{completion.function} returned no list of texts")
        return found

    # --- what changed -------------------------------------------------------------------------------------------------

    async def _subscribe(self, ctx: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        watched: set[str] = connection_of(ctx).state.setdefault(_WATCHED, set())
        if len(watched) >= WATCHED_MAX:
            raise MCPError(types.INVALID_PARAMS, f"a connection watches at most {WATCHED_MAX} resources")
        watched.add(str(params.uri))
        return types.EmptyResult()

    async def _unsubscribe(self, ctx: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        connection_of(ctx).state.get(_WATCHED, set()).discard(str(params.uri))
        return types.EmptyResult()

    async def _on_listen(
        self, ctx: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        arrival_of(ctx).begin_stream()
        uris = params.notifications.resource_subscriptions or []
        if len(uris) > WATCHED_MAX:
            raise MCPError(types.INVALID_PARAMS, f"a listener watches at most {WATCHED_MAX} resources")
        self._listened.update(uris)
        try:
            return await self._listen(ctx, params)
        finally:
            self._listened -= Counter(uris)

    async def _on_initialized(self, ctx: Context, params: types.NotificationParams) -> None:
        connection = connection_of(ctx)
        if connection not in self._connections and not is_modern(ctx):
            self._connections.add(connection)
            connection.exit_stack.callback(self._connections.discard, connection)

    def _on_changed(self) -> None:
        """The functions are others now: every client that wants to know is told, each at its own pace."""
        self._shown.clear()
        self._spawn(self._publish())
        for connection in self._connections:
            if not connection.state.get("callyard.telling"):
                connection.state["callyard.telling"] = True
                self._spawn(self._tell_changed(connection))

    async def _publish(self) -> None:
        for event in (ToolsListChanged(), PromptsListChanged(), ResourcesListChanged()):
            await self._bus.publish(event)
        for uri in list(self._listened):
            await self._bus.publish(ResourceUpdated(uri))

    async def _tell_changed(self, connection: Connection) -> None:
        connection.state["callyard.telling"] = False  # what changes from now on is told again
        await connection.send_tool_list_changed()
        await connection.send_prompt_list_changed()
        await connection.send_resource_list_changed()
        for uri in sorted(connection.state.get(_WATCHED, ())):
            await connection.send_resource_updated(uri)

    def _spawn(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling)
        self._told.add(task)
        task.add_done_callback(self._on_told)

    def _on_told(self, task: asyncio.Task[None]) -> None:
        self._told.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a client could not be told of changed functions", exc_info=error)

    async def _set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        connection_of(ctx).state["callyard.level"] = params.level
        return types.EmptyResult()


def _output(result: DispatchResult) -> bytes:
    """Raises `MCPError`: of prompts and resources a failure is a protocol error, with the envelope."""
    if isinstance(result, Ok):
        return result.output
    envelope = result.to_json(remote=True)
    code = types.INVALID_PARAMS if result.kind is ErrorKind.SCHEMA else types.INTERNAL_ERROR
    raise MCPError(code, tell(result, envelope), envelope)


def _not_found(ctx: Context, uri: str) -> MCPError:
    code = types.INVALID_PARAMS if is_modern(ctx) else _RESOURCE_NOT_FOUND
    return MCPError(code, "Resource not found", {"uri": uri})


def _principal(ctx: Context) -> str:
    """Whose a sealed state is."""
    caller = arrival_of(ctx).caller
    return f"{caller.tenant}\n{caller.token}"


# --- HTTP -----------------------------------------------------------------------------------------------------------


_ABSENT: Final = msgspec.Raw(b"")


class _Meta(msgspec.Struct):
    progress_token: msgspec.Raw = msgspec.field(name="progressToken", default=_ABSENT)
    log_level: msgspec.Raw = msgspec.field(name=types.LOG_LEVEL_META_KEY, default=_ABSENT)
    deadline_ms: msgspec.Raw = msgspec.field(name=f"{PREFIX}deadlineMs", default=_ABSENT)


class _Params(msgspec.Struct):
    arguments: msgspec.Raw = _ABSENT
    meta: _Meta | None = msgspec.field(name="_meta", default=None)


class _Body(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"")
    method: str = ""
    params: _Params | None = None


_BODY: Final = msgspec.json.Decoder(_Body)
_ID: Final = re.compile(rb'"|-?[0-9]+$')
"""How a text, and a whole number, begins."""


def misfit_of_keys(message: bytes) -> str:
    """Of a message that gives its call two idempotency keys, one of which the parser would lose; empty: it does not."""
    if message.count(b'"callyard/idempotencyKey"') > 1:
        try:
            decode_json(message)
        except ArgumentsMisfit as misfit:
            return misfit.message
    return ""


def _look_into(message: bytes) -> _Body:
    try:
        return _BODY.decode(message)
    except (msgspec.DecodeError, RecursionError):
        return _Body()  # the SDK says what is wrong with it


def raw_arguments(message: bytes) -> bytes | None:
    """The arguments of a `tools/call` as they were sent: what a parser would lose, the check of them still sees."""
    return _arguments_in(_look_into(message))


def _arguments_in(body: _Body) -> bytes | None:
    raw = bytes(body.params.arguments) if body.params is not None else b""
    return raw if raw not in (b"", b"null") else None


def _is_quiet(body: _Body) -> bool:
    """Nothing can come before the answer: it asks for no progress and no log, and by its deadline it is not so long
    that somebody on the way would have to be shown that it goes on."""
    meta = body.params.meta if body.params is not None else None
    return (
        body.method == "tools/call"
        and meta is not None
        and not (meta.progress_token or meta.log_level or meta.deadline_ms)
    )


def _asks_as_now(scope: Scope) -> bool:
    """By 2026-07-28, for an answer that may be a stream."""
    version = accept = b""
    for name, value in scope["headers"]:
        if name == b"mcp-protocol-version":
            version = value
        elif name == b"accept":
            accept = value
    return version.decode("latin-1") in MODERN_PROTOCOL_VERSIONS and b"text/event-stream" in accept.lower()


class McpApp:
    """The ASGI app of `/mcp`. `async with app.run():` around its time of serving.

    It expects `caller`, `permit` and `received_at_ms` in `scope["state"]`, and a body whose size was checked. A session
    of 2025-11-25 belongs to the token that opened it: to any other it is not there.
    """

    def __init__(
        self,
        gate: McpGate,
        *,
        sessions_max: int = SESSIONS_MAX,
        session_idle_s: float = SESSION_IDLE_S,
        body_bytes_max: int = 4 * 1024 * 1024,
        security: TransportSecuritySettings | None = None,
    ) -> None:
        """`security`: None where Host and Origin were checked already."""
        self.gate = gate
        self._sessions_max = sessions_max
        bounds: dict[str, Any] = {"max_request_body_size": body_bytes_max, "security_settings": security}
        self._sessions = Sessions(gate.server, session_idle_timeout=session_idle_s, max_sessions=sessions_max, **bounds)
        self._quiet = StreamableHTTPSessionManager(gate.server, json_response=True, stateless=True, **bounds)
        """For calls whose answer is all that can come: it holds no stream ready, which costs as much as the call."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with self._sessions.run(), self._quiet.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        state: dict[str, Any] = scope.setdefault("state", {})
        caller: Caller = state.get("caller") or Caller()
        arrival = Arrival(
            caller,
            state.get("permit"),
            received_at_ms=state.get("received_at_ms"),
            connection=state.get("connection"),
        )
        state["arrival"] = arrival
        arrival.when_out = []
        scope["user"] = _user(caller.tenant, caller.token)
        if scope["method"] != "POST":
            arrival.begin_stream()
            await self._sessions.handle_request(scope, receive, send)
            return
        message, rest = await _read_body(receive)
        body = _look_into(message)
        refusal = self._refuse(scope, caller, message, body)
        if refusal is not None:
            await refusal(scope, rest, send)
            return
        arrival.arguments = _arguments_in(body)
        connection: Lost | None = state.get("connection")
        try:
            if connection is not None and _is_quiet(body) and _asks_as_now(scope):
                with ended_with(connection):
                    await self._quiet.handle_request(scope, rest, send)
            else:
                await self._sessions.handle_request(scope, rest, send)
        finally:
            arrival.end()  # answered already: there is no run any more

    def _refuse(self, scope: Scope, caller: Caller, message: bytes, body: _Body) -> Response | None:
        """What the SDK would take."""
        if misfit := misfit_of_keys(message):
            return _answer_error(400, types.INVALID_REQUEST, misfit)
        request_id = bytes(body.id)
        if request_id and body.method and not _ID.match(request_id):  # it would be run, or not, and never be answered
            return _answer_error(400, types.INVALID_REQUEST, "id must be a text or a whole number")
        if caller.token and self._opens_session(scope):
            owner = authorization_context(scope["user"])
            own = sum(other == owner for other in self._sessions._session_owners.values())
            if own >= max(1, self._sessions_max // TOKENS_SHARE):
                return _answer_error(503, types.INTERNAL_ERROR, "Too many open sessions of this token")
        return None

    @staticmethod
    def _opens_session(scope: Scope) -> bool:
        headers = dict(scope["headers"])
        version = headers.get(b"mcp-protocol-version")
        is_modern = version is not None and version.decode("latin-1") not in HANDSHAKE_PROTOCOL_VERSIONS
        return not is_modern and b"mcp-session-id" not in headers


def _answer_error(status: int, code: int, message: str) -> Response:
    """JSON-RPC's, of no request."""
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return Response(msgspec.json.encode(body), status, media_type="application/json")


@lru_cache(maxsize=1_024)
def _user(tenant: str, token: str) -> AuthenticatedUser:
    """Whose a session is, as the SDK asks."""
    return AuthenticatedUser(AccessToken(token="", client_id=f"{tenant}\n{token}", scopes=[]))


async def _read_body(receive: Receive) -> tuple[bytes, Receive]:
    """The body, and a `receive` that gives it once more."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}
    if message["type"] != "http.request":
        first = message

    async def again() -> Message:
        nonlocal first
        if first is not None:
            given, first = first, None
            return given
        return await receive()

    return body, again
