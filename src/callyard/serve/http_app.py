"""The HTTP gate: one ASGI app over one gateway.

| request | what |
| --- | --- |
| `POST /rpc` | JSON-RPC 2.0, single and batch (`rpc`) |
| `POST /tools/{name}` | body: the arguments; answer: the value. `Accept: text/event-stream` tells progress as well |
| `GET /tools`, `GET /openapi.json` | what this caller may call |
| `GET /calls/{id}`, `DELETE /calls/{id}` | a call of this tenant that runs, or whose client had gone; cancel it |
| `GET /results/{id}` | a result that was too large for its answer |
| `GET /keys?unknown=1`, `POST /keys/resolve` | outcomes that nobody knows, for tokens with the claim `keys = true` |
| `/mcp` | MCP, when it is there |
| `GET /healthz` | the loop turns, and calls are taken |

What a request says of a call stands in headers: `Idempotency-Key`, `X-Callyard-Owner`, `X-Callyard-Deadline-Ms`,
`X-Callyard-Timeout-Ms`, `traceparent`, `tracestate`, `baggage`. A client that goes away cancels whoever awaits the
gateway for it.
Source: tool-dispatch D23, D24, D36, D41, D55-D57; job-queue R110, R111.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

import callyard
from callyard.dispatch.outcomes import DispatchError, DispatchResult, Ok
from callyard.dispatch.refusals import unavailable
from callyard.dispatch.stores.port import StoreUnavailable
from callyard.errors import KIND_RULES, CallError, CallFailure, ErrorKind, UsageError, fail
from callyard.ids import CallId, Tenant
from callyard.serve.contents import JSON_TYPE, Body, to_body
from callyard.serve.gateway import Caller, Gateway, ToolRequest
from callyard.serve.guard import HEALTH_PATH, Guard, Lost, Refusal, ended_with, retry_after
from callyard.serve.kept import encode_envelope
from callyard.serve.listener import Listener, ListenerLimits
from callyard.serve.mcp_calls import suspended_max_of
from callyard.serve.mcp_server import McpApp, McpGate
from callyard.serve.openapi import build_openapi, build_openrpc
from callyard.serve.rpc import CallOptions, Rpc

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from callyard.functions.registry import FunctionSpec
    from callyard.host.jobs import Permit
    from callyard.serve.config import ServeConfig
    from callyard.serve.kept import KeptResults
    from callyard.serve.server import Server
    from callyard.serve.tokens import Tokens

KEEP_ALIVE_S: Final = 15.0
"""Between comments on a stream on which nothing happens, so that nobody on the way takes it for dead."""
_LAST_ANSWERS_MS: Final = 500
LOG_MAX: Final = 256
"""Most log records that wait for a client to read; more push the oldest out, and are counted."""
_PIECE_BYTES: Final = 64 * 1024
_TRACE: Final = ("traceparent", "tracestate", "baggage")
_MIME: Final = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}([ \t]*;[ \t]*[\w-]{1,32}=[\w.+-]{1,64})?", re.ASCII)
_NAME: Final = re.compile(r"[^\w .()+-]+", re.ASCII)
_INERT: Final = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cache-control": "no-store",
}
"""A function's bytes are data, whatever type it gives them: no browser runs them as a page of this server."""


class Keys(Protocol):
    """`keys.ServedKeys`."""

    async def list_unknown(self, tenant: Tenant) -> list[dict[str, Any]]: ...
    async def resolve(self, tenant: Tenant, tool: str, key: str, *, result: Any, retry: bool, by: str) -> bool: ...


class HttpGate:
    """The app; `guarded` is what a listener serves."""

    def __init__(
        self,
        gateway: Gateway,
        config: ServeConfig,
        tokens: Callable[[], Tokens],
        *,
        kept: KeptResults | None = None,
        keys: Keys | None = None,
        mcp_app: ASGIApp | None = None,
    ) -> None:
        self._gateway = gateway
        self._config = config
        self._tokens = tokens
        self._kept = kept
        self._keys = keys
        self._progress: dict[CallId, dict[str, Any]] = {}
        """The newest, of calls under way."""
        self._rpc = Rpc(
            gateway,
            batch_max=config.batch_max,
            tell_tools=self._tell_tools,
            discover=self._discover,
            run=self._run,
            finish=self._to_json,
        )
        routes = [  # the calls first: each is matched in turn
            *([] if mcp_app is None else [Route("/mcp", _Endpoint(mcp_app), methods=["GET", "POST", "DELETE"])]),
            Route("/tools/{name}", self._call_tool, methods=["POST"]),
            Route("/rpc", self._answer_rpc, methods=["POST"]),
            Route(HEALTH_PATH, self._healthz),
            Route("/tools", self._list_tools),
            Route("/openapi.json", self._openapi),
            Route("/calls/{id}", self._show_call),
            Route("/calls/{id}", self._cancel_call, methods=["DELETE"]),
            Route("/results/{id}", self._read_result),
            Route("/keys", self._list_keys),
            Route("/keys/resolve", self._resolve_key, methods=["POST"]),
        ]
        self._router = Router(routes, redirect_slashes=False)
        self.guarded = Guard(self, gateway, config=config, tokens=tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises what it would else answer in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            raise _routing_refusal(error, scope["path"], self._methods_of(scope["path"])) from None

    def _methods_of(self, path: str) -> str:
        methods: set[str] = set()
        for route in self._router.routes:
            if isinstance(route, Route) and route.path_regex.match(path):
                methods |= route.methods or set()
        return ", ".join(sorted(methods))

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _answer_rpc(self, request: Request) -> Response:
        state = request.scope["state"]
        options = read_options(request.headers)
        body = await request.body()
        is_batch = body.lstrip()[:1] == b"["
        if is_batch and options.idempotency_key is not None:
            raise _schema('a batch has a key for each call: "callyard": {"idempotency_key": …} beside its params')

        def make(tool: str, args: bytes, own: CallOptions) -> ToolRequest:
            return self._make(request, tool, args, own.over(options))

        with ended_with(state["connection"]):
            status, answer = await self._rpc.answer(body, make, state["permit"], state["connection"])
        return _json(answer, status) if answer else Response(status_code=status)

    async def _call_tool(self, request: Request) -> Response | _Stream:
        state = request.scope["state"]
        permit: Permit = state["permit"]
        connection: Lost = state["connection"]
        body = await request.body()
        made = self._make(request, request.path_params["name"], body, read_options(request.headers))
        made.call_id = self._gateway.next_id()
        if "text/event-stream" in request.headers.get("accept", ""):
            return _Stream(self, made, permit, connection)
        with ended_with(connection):
            result = await self._run(made, permit)
        return await self._to_response(made, result)

    def _make(self, request: Request, tool: str, args: bytes, options: CallOptions) -> ToolRequest:
        state = request.scope["state"]
        shown = self._config.headers
        return ToolRequest(
            tool=tool,
            args=args or b"{}",
            caller=state["caller"],
            key=options.idempotency_key,
            owner=options.owner,
            deadline_ms=options.deadline_ms,
            timeout_ms=options.timeout_ms,
            received_at_ms=state["received_at_ms"],
            tags=options.tags,
            trace=options.trace,
            headers={name: value for name in shown if (value := request.headers.get(name)) is not None}
            if shown
            else {},
        )

    async def _run(self, request: ToolRequest, permit: Permit) -> DispatchResult:
        """A call of this gate, which can be looked at and cancelled while it is under way."""
        call_id = request.call_id = request.call_id or self._gateway.next_id()
        spec = self._gateway.find(request.caller, request.tool)
        if spec is not None and spec.role != "tool":
            failure = fail(ErrorKind.NOT_FOUND, f"no tool {spec.name!r}: it is a {spec.role}", tool=spec.name)
            return DispatchError(call_id, failure)
        tell = request.on_progress

        def on_progress(done: float, total: float | None, message: str) -> None:
            self._progress[call_id] = {"done": done, "total": total, "message": message}
            if tell is not None:
                tell(done, total, message)

        request.on_progress = on_progress
        try:
            return await self._gateway.call(request, permit)
        finally:
            self._progress.pop(call_id, None)

    async def _to_response(self, request: ToolRequest, result: DispatchResult) -> Response:
        headers = {"x-callyard-call-id": str(result.call_id), "x-callyard-attempts": str(result.attempts)}
        if result.deduplicated:
            headers["x-callyard-deduplicated"] = "true"
        if isinstance(result, DispatchError):
            return _answer_error(result, headers)
        short = await self._shorten(request, result)
        if short is None:
            return _answer_bytes(to_body(result.output), headers)
        if "uri" in short:
            headers["content-location"] = short["uri"]
        return _json(msgspec.json.encode({"kept": short}), 200, headers)

    async def _to_json(self, request: ToolRequest, result: DispatchResult) -> bytes | CallFailure:
        """What stands for the result where an answer is JSON anyway."""
        if isinstance(result, DispatchError):
            return result.failure
        short = await self._shorten(request, result)
        return result.output if short is None else msgspec.json.encode({"kept": short})

    async def _shorten(self, request: ToolRequest, result: Ok) -> dict[str, Any] | None:
        """The beginning of a result that is too large, and where all of it is; None: it is not."""
        preview = None if self._kept is None else await self._kept.shorten(request.caller, result)
        if preview is None:
            return None
        short: dict[str, Any] = {"preview": preview.text, "size_bytes": preview.size_bytes}
        if preview.kept_id:
            short |= {"uri": f"/results/{preview.kept_id}", "kept_ms": preview.kept_ms}
        return short

    # --- what there is --------------------------------------------------------------------------------------------

    async def _healthz(self, _: Request) -> Response:
        if self._gateway.is_draining:
            return _json(b'{"status":"draining"}', 503)
        return _json(b'{"status":"ok"}')

    async def _list_tools(self, request: Request) -> Response:
        return _json(msgspec.json.encode(self._tell_tools(_caller(request))))

    async def _openapi(self, request: Request) -> Response:
        specs = self._gateway.functions(_caller(request))
        document = build_openapi(specs, version=callyard.__version__, has_tokens=self._tokens().are_asked_for)
        return _json(msgspec.json.encode(document))

    def _tell_tools(self, caller: Caller) -> dict[str, Any]:
        return {"tools": [_tell_tool(spec) for spec in self._gateway.functions(caller)]}

    def _discover(self, caller: Caller) -> dict[str, Any]:
        return build_openrpc(self._gateway.functions(caller), version=callyard.__version__)

    async def _show_call(self, request: Request) -> Response:
        call_id = CallId(request.path_params["id"])
        caller = _caller(request)
        under_way = self._gateway.find_running(caller, call_id)
        if under_way is None:
            try:
                end = await self._gateway.find_end(caller, call_id)
            except StoreUnavailable as error:
                raise Refusal(503, unavailable(f"the store of ends is out of reach: {error}")) from None
            if end is None:
                raise _no_call()
            return _json(encode_envelope(end))  # it ended when nobody was there
        shown = {
            "call_id": call_id,
            "tool": under_way.tool,
            "age_ms": self._gateway.now_ms() - (under_way.received_at_ms or 0),
            "progress": self._progress.get(call_id),
        }
        return _json(msgspec.json.encode(shown))

    async def _cancel_call(self, request: Request) -> Response:
        if not self._gateway.cancel(_caller(request), CallId(request.path_params["id"])):
            raise _no_call()
        return _json(b'{"cancelled":true}', 202)

    async def _read_result(self, request: Request) -> _KeptAnswer:
        return _KeptAnswer(self._kept, _caller(request), request.path_params["id"])

    # --- keys -----------------------------------------------------------------------------------------------------

    async def _list_keys(self, request: Request) -> Response:
        keys = self._keys_for(_caller(request))
        if request.query_params.get("unknown") != "1":
            raise _schema("only unknown outcomes are listed: GET /keys?unknown=1")
        listed = await keys.list_unknown(_caller(request).tenant)
        return _json(msgspec.json.encode({"keys": listed}))

    async def _resolve_key(self, request: Request) -> Response:
        caller = _caller(request)
        keys = self._keys_for(caller)
        try:
            asked = msgspec.json.decode(await request.body(), type=_Resolve)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _schema(f"{error}"[:300]) from None
        has_result = asked.result is not msgspec.UNSET
        if has_result == asked.retry:
            raise _schema('say how it ended, "result": …, or that it may run again, "retry": true')
        try:
            result = msgspec.json.decode(asked.result) if isinstance(asked.result, msgspec.Raw) else None
            by = f"token {caller.token}"
            is_done = await keys.resolve(caller.tenant, asked.tool, asked.key, result=result, retry=asked.retry, by=by)
        except UsageError as error:
            raise _schema(str(error)) from None
        if not is_done:
            raise Refusal(404, fail(ErrorKind.NOT_FOUND, "nothing unknown is kept under that key"))
        return _json(b'{"resolved":true}')

    def _keys_for(self, caller: Caller) -> Keys:
        if caller.claims.get("keys") is not True:
            text = "this needs a token with the claim keys = true; on the machine itself: callyard keys"
            raise Refusal(403, fail(ErrorKind.DENIED, text, reason="keys"))
        if self._keys is None:
            raise Refusal(404, fail(ErrorKind.NOT_FOUND, "no keys are kept here"))
        return self._keys


class _Resolve(msgspec.Struct, forbid_unknown_fields=True):
    tool: str
    key: str
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    retry: bool = False


class _KeptAnswer:
    """A kept result, sent in pieces: of what the peer has not read one is held beside the result itself."""

    def __init__(self, kept: KeptResults | None, caller: Caller, kept_id: str) -> None:
        self._kept = kept
        self._caller = caller
        self._id = kept_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._kept is None:
            raise _no_result()
        try:
            end = self._kept.begin_reading(self._caller, self._id)
        except CallError as error:
            raise Refusal(503, error.failure) from None
        try:
            kept = await self._kept.find(self._caller, self._id)
            if kept is None:
                raise _no_result()
            is_json = kept.mime_type == JSON_TYPE  # and may be contents
            body = to_body(kept.data) if is_json else Body(kept.data, kept.mime_type, kept.name)
            head = _answer_bytes(body._replace(data=b""), {"content-length": str(len(body.data))})
            await send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
            pieces = memoryview(body.data)
            for at in range(0, len(pieces), _PIECE_BYTES):
                piece = bytes(pieces[at : at + _PIECE_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            end()


class _Stream:
    """One call as server-sent events: `start`, `progress` and `log`, then `result` or `error`.

    Of progress that the client does not read in time only the newest is kept, of log records `LOG_MAX`.
    """

    def __init__(self, gate: HttpGate, request: ToolRequest, permit: Permit, connection: Lost) -> None:
        self._gate = gate
        self._request = request
        self._permit = permit
        self._connection = connection
        self._news = asyncio.Event()
        self._progress: dict[str, Any] | None = None
        self._logs: deque[dict[str, Any]] = deque(maxlen=LOG_MAX)
        self._dropped = 0
        request.on_progress = self._on_progress
        request.on_log = self._on_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        headers.append((b"x-callyard-call-id", str(self._request.call_id).encode()))

        async def tell(chunk: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": more})

        with ended_with(self._connection):
            call = asyncio.create_task(self._gate._run(self._request, self._permit))
            call.add_done_callback(lambda _: self._news.set())
            try:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await tell(_event("start", {"call_id": self._request.call_id}))
                while True:
                    self._news.clear()
                    for chunk in self._take():
                        await tell(chunk)
                    if call.done():
                        break
                    try:
                        async with asyncio.timeout(KEEP_ALIVE_S):
                            await self._news.wait()
                    except TimeoutError:
                        await tell(b": still running\n\n")
                for chunk in self._take():
                    await tell(chunk)
                await tell(await self._end(call.result()), more=False)
            finally:
                call.cancel()

    def _on_progress(self, done: float, total: float | None, message: str) -> None:
        self._progress = {"done": done, "total": total, "message": message}
        self._news.set()

    def _on_log(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        self._dropped += len(self._logs) == LOG_MAX
        self._logs.append({"level": level, "message": message, "fields": dict(fields)})
        self._news.set()

    def _take(self) -> list[bytes]:
        """What there is to tell, the records before the progress that they led to."""
        chunks = [_event("log", record) for record in self._logs]
        self._logs.clear()
        if self._dropped:
            chunks.insert(0, _event("dropped", {"logs": self._dropped}))
            self._dropped = 0
        if self._progress is not None:
            chunks.append(_event("progress", self._progress))
            self._progress = None
        return chunks

    async def _end(self, result: DispatchResult) -> bytes:
        finished = await self._gate._to_json(self._request, result)
        if isinstance(finished, bytes):
            return b"event: result\ndata: %b\n\n" % finished.replace(b"\r", b" ").replace(b"\n", b" ")
        error = DispatchError(result.call_id, finished, result.deduplicated)
        return _event("error", error.to_json(remote=True))


def read_options(headers: Mapping[str, str]) -> CallOptions:
    """Raises Refusal."""
    key = headers.get("idempotency-key")
    if key is not None and len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]  # a structured field's text; others send it bare
    trace = {name: value for name in _TRACE if (value := headers.get(name)) is not None}
    try:
        return CallOptions(
            idempotency_key=key,
            owner=headers.get("x-callyard-owner"),
            deadline_ms=_read_ms(headers, "x-callyard-deadline-ms"),
            timeout_ms=_read_ms(headers, "x-callyard-timeout-ms"),
            trace=trace,
        )
    except ValueError as error:
        raise _schema(str(error)) from None


def _read_ms(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise _schema(f"{name} must be whole milliseconds, got {text[:50]!r}")
    return int(text)


def _tell_tool(spec: FunctionSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "signature": spec.signature,
        "description": spec.description,
        "input_schema": spec.input_schema,
        "output_schema": spec.output_schema,
        "promises": spec.promises,
    }


def _answer_bytes(body: Body, headers: Mapping[str, str]) -> Response:
    mime_type = body.mime_type if _MIME.fullmatch(body.mime_type) else "application/octet-stream"
    all_headers = {**headers, **_INERT, "content-type": mime_type}
    if body.name:
        name = _NAME.sub("_", body.name)[-128:]
        all_headers["content-disposition"] = f'attachment; filename="{name}"'
    return Response(body.data, headers=all_headers)


def _answer_error(result: DispatchError, headers: Mapping[str, str]) -> Response:
    envelope = {"error": result.to_json(remote=True)}
    status = status_of(result.failure)
    return _json(msgspec.json.encode(envelope), status, {**headers, **retry_after(result.failure)})


def status_of(failure: CallFailure) -> int:
    """By the table; of a call whose wait in the queue was cut short, 503: it may come again. Source: D23, D57."""
    if failure.kind is ErrorKind.DEADLINE and failure.details.get("limit") == "queue_wait_ms_max":
        return 503
    return KIND_RULES[failure.kind].http_status


def _event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def _json(data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(data, status, {**(headers or {}), "content-type": "application/json", "cache-control": "no-store"})


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller


def _schema(text: str) -> Refusal:
    return Refusal(KIND_RULES[ErrorKind.SCHEMA].http_status, fail(ErrorKind.SCHEMA, text))


def _no_result() -> Refusal:
    return Refusal(404, fail(ErrorKind.NOT_FOUND, "no such result: it is another's, or its time is over"))


def _no_call() -> Refusal:
    return Refusal(404, fail(ErrorKind.NOT_FOUND, "no such call is under way"))


def _routing_refusal(error: HTTPException, path: str, methods: str) -> Refusal:
    if error.status_code == 405:
        failure = fail(ErrorKind.NOT_FOUND, f"this method is not answered here, but: {methods}")
        return Refusal(405, failure, {"allow": methods})
    return Refusal(error.status_code, fail(ErrorKind.NOT_FOUND, f"nothing is at {path[:200]!r}"))


class _Endpoint:
    """An app as a route's endpoint: what is a function would be called with a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def limits_of(config: ServeConfig) -> ListenerLimits:
    return ListenerLimits(
        connections_max=config.connections_max,
        header_bytes_max=config.headers_bytes_max,
        header_ms=config.receive_ms_max,
    )


async def serve_http(server: Server, *, tls_cert: Path | None = None, tls_key: Path | None = None) -> None:
    """The gate on `config.http`, with MCP at `/mcp`: until `server.stopping` is set and what was under way is answered.

    Raises UsageError: the address is taken, or the certificate cannot be used. Source: tool-dispatch D36, D46.
    """
    config = server.config
    assert config.http is not None, "no address to listen on"
    mcp = McpGate(
        server.gateway,
        kept=server.kept,
        headers=config.headers,
        owner_by_session=config.owner_by_session,
        suspended_max=suspended_max_of(server.worker.capacity, config.slots),
    )
    app = McpApp(mcp, body_bytes_max=config.body_bytes_max)
    gate = HttpGate(
        server.gateway,
        config,
        lambda: server.tokens,
        kept=server.kept,
        keys=server.keys,
        mcp_app=app,
    )
    listener = Listener(
        gate.guarded,
        host=config.http.host,
        port=config.http.port,
        limits=limits_of(config),
        tls_cert=tls_cert,
        tls_key=tls_key,
        bound=server.bound.get("http"),
    )
    try:
        await listener.start()  # outside of the group below, which would wrap what it raises
        async with app.run():
            server.listeners["http"] = listener
            server.say(f"HTTP on {listener.url}, MCP at {listener.url}/mcp")
            await server.stopping.wait()
            listener.stop_listening()  # who asks on a connection that there is gets 503
            await server.gateway.wait_idle(config.drain_deadline_ms)
            mcp.close()  # its streams would not end by themselves
            await listener.close(drain_ms=_LAST_ANSWERS_MS)
    finally:
        mcp.close()
        server.listeners.pop("http", None)
        await listener.close()
