"""Sessions of 2025-11-25 on the SDK's transport, which holds a stream ready for every request: that costs more than the
call. Here a request gets a stream once something comes before its answer, or the answer takes long; else its answer
is one JSON body. Clients take both, by that revision.

Source: tool-dispatch D33.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.streamable_http import (
    CONTENT_TYPE_SSE,
    MCP_SESSION_ID_HEADER,
    REQUEST_STREAM_BUFFER_SIZE,
    EventMessage,
    SSEEvent,
    StreamableHTTPServerTransport,
    check_accept_headers,
)
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import SessionMessage
from mcp_types import (
    DEFAULT_NEGOTIATED_VERSION,
    INTERNAL_ERROR,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic_core import from_json
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from callyard.serve.guard import Lost, ended_with

STREAM_AFTER_S: Final = 1.0
"""An answer that takes longer comes by a stream, so that who stands between sees that the connection is in use."""


class Sessions(StreamableHTTPSessionManager):
    """The SDK's, whose sessions have a `Transport` each."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        if self.max_sessions is not None and len(self._server_instances) >= self.max_sessions:
            return None
        session_id = uuid4().hex
        transport = Transport(
            session_id, security_settings=self.security_settings, idle_timeout=self.session_idle_timeout
        )
        if requestor is not None:
            self._session_owners[session_id] = requestor
        self._server_instances[session_id] = transport
        return transport


class Transport(StreamableHTTPServerTransport):
    """One session's. An id is in use until its answer has passed, also when nobody is there to read it any more: what
    comes late would else answer the next request of that id."""

    async def _handle_post_request(self, scope: Scope, request: Request, receive: Receive, send: Send) -> None:
        message = await self._read_message(request)
        writer = self._read_stream_writer
        if message is None or writer is None:
            await super()._handle_post_request(scope, request, receive, send)
            return
        if not isinstance(message, JSONRPCRequest):
            response = await self._take(SessionMessage(message, metadata=self._message_metadata(request)))
            await response(scope, receive, send)
            return
        key = str(message.id)
        if key in self._request_streams:
            text = f"request id {message.id!r} is in use: each request of a session needs an id of its own"
            await self._create_error_response(text[:300], HTTPStatus.BAD_REQUEST)(scope, receive, send)
            return
        if message.method == "initialize":
            await super()._handle_post_request(scope, request, receive, send)
            return
        answers = _Answers(key, self._request_streams)
        connection: Lost | None = scope["state"].get("connection")
        first: EventMessage | None = None
        try:
            # Whoever goes away meanwhile is noticed after it: what is half handed over may be answered, or not.
            await writer.send(self._create_session_message(message, request, key, DEFAULT_NEGOTIATED_VERSION))
            with (
                ended_with(connection) if connection is not None else nullcontext(),
                anyio.move_on_after(STREAM_AFTER_S),
            ):
                first = await answers.reader.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            response = self._create_error_response(
                "Session terminated before the request completed", HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL_ERROR
            )
            await response(scope, receive, send)
        else:
            if first is not None and _is_answer(first.message):
                await self._create_json_response(first.message)(scope, receive, send)
            else:
                await self._stream(first, answers.reader, request, send)
        finally:
            answers.close()

    async def _read_message(self, request: Request) -> JSONRPCMessage | None:
        """None: it is of no session, or wrong, and that is the SDK's to say."""
        if self._get_session_id(request) != self.mcp_session_id:
            return None
        if check_accept_headers(request) != (True, True) or not self._check_content_type(request):
            return None
        try:
            return jsonrpc_message_adapter.validate_python(from_json(await request.body()), by_name=False)
        except ValueError:  # pydantic's ValidationError is one
            return None

    async def _take(self, message: SessionMessage) -> Response:
        """Of what wants no answer, once it is handed over: the session may be ended at the same time."""
        assert self._read_stream_writer is not None
        try:
            await self._read_stream_writer.send(message)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return self._create_error_response("Not Found: Session has been terminated", HTTPStatus.NOT_FOUND)
        return self._create_json_response(None, HTTPStatus.ACCEPTED)

    async def _stream(
        self,
        first: EventMessage | None,
        answers: MemoryObjectReceiveStream[EventMessage],
        request: Request,
        send: Send,
    ) -> None:
        """`first` and what comes after it, up to the answer."""
        to_wire, from_writer = anyio.create_memory_object_stream[SSEEvent](0)
        response = EventSourceResponse(
            content=from_writer,
            data_sender_callable=partial(self._forward, first, answers, to_wire),
            headers={
                "Cache-Control": "no-cache, no-transform",
                "Connection": "keep-alive",
                "Content-Type": CONTENT_TYPE_SSE,
                MCP_SESSION_ID_HEADER: self.mcp_session_id or "",
            },
        )
        with to_wire, from_writer:
            await response(request.scope, request.receive, send)

    async def _forward(
        self,
        first: EventMessage | None,
        answers: MemoryObjectReceiveStream[EventMessage],
        to_wire: MemoryObjectSendStream[SSEEvent],
    ) -> None:
        with to_wire, suppress(anyio.EndOfStream, anyio.ClosedResourceError):  # the session was ended
            event = first or await answers.receive()
            while not _is_answer(event.message):
                await to_wire.send(self._create_event_data(event))
                event = await answers.receive()
            await to_wire.send(self._create_event_data(event))

    async def _clean_up_memory_streams(self, request_id: RequestId) -> None:
        """Of the SDK's, for its own streams; of ours when the session ends."""
        writer: object = self._request_streams.get(request_id, (None,))[0]
        if isinstance(writer, _Answers):
            writer.close()
        else:
            await super()._clean_up_memory_streams(request_id)


class _Answers:
    """What belongs to one request, as the SDK's router gives it: it finds this in `open_requests` up to the answer."""

    __slots__ = ("_key", "_open_requests", "_writer", "reader")

    def __init__(self, key: str, open_requests: dict[RequestId, Any]) -> None:
        self._key = key
        self._open_requests = open_requests
        self._writer, self.reader = anyio.create_memory_object_stream[EventMessage](REQUEST_STREAM_BUFFER_SIZE)
        open_requests[key] = (self, self.reader)

    async def send(self, event: EventMessage) -> None:
        if _is_answer(event.message):
            self._open_requests.pop(self._key, None)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody reads any more
            await self._writer.send(event)

    def close(self) -> None:
        self._writer.close()
        self.reader.close()


def _is_answer(message: JSONRPCMessage) -> bool:
    return isinstance(message, JSONRPCResponse | JSONRPCError)
