"""MCP on stdin and stdout: one client, a line a message.

```text
fd 0 -> Lines (size limit) -> a permit -> parse -> SDK -> handlers -> SDK -> Writer -> fd 1
                                 |                                      |
                                 '-- given back when the answer is written: a call's own goes earlier, as it begins
```

Before anything else the two descriptors are moved away: what prints in this process, or in one that it starts, goes to
stderr, and stdout is protocol only. No line is taken without a permit; that the client has gone is seen all the same.
Source: tool-dispatch D33, D41, D56; job-queue R108, R110, R111.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import mcp_types as types
import msgspec
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from pydantic import ValidationError

from callyard.errors import CallError
from callyard.host.jobs import Permit
from callyard.serve.gateway import Caller, Gateway
from callyard.serve.mcp_calls import Arrival, suspended_max_of
from callyard.serve.mcp_server import McpGate, misfit_of_keys, raw_arguments

if TYPE_CHECKING:
    from callyard.serve.server import Server

_log: Final = logging.getLogger("callyard.serve.mcp")

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
_READ_BYTES: Final = 64 * 1024
_WATCH_S: Final = 0.05
"""How often a client that waits for its turn is looked at."""
_LAST_ANSWERS_S: Final = 1.0
"""So long what is no call may still be answered once the client has closed its end."""
_HUNG_UP: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


async def run(server: Server) -> None:
    """Serve the client on stdin and stdout until it has gone, or `server.stopping` is set and all is answered."""
    gate = McpGate(
        server.gateway,
        kept=server.kept,
        headers=server.config.headers,
        owner_by_session=server.config.owner_by_session,
        suspended_max=suspended_max_of(server.worker.capacity, server.config.slots),
    )
    caller = Caller()
    with taken_stdio() as ends:
        session = StdioSession(gate, ends, caller, line_bytes_max=server.config.body_bytes_max)
        serving = asyncio.ensure_future(session.run())
        stopping = asyncio.ensure_future(server.stopping.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                gate.close()
                await session.until_answered()
        finally:
            stopping.cancel()
            serving.cancel()
            await asyncio.wait({serving})
            gate.close()
        if not serving.cancelled():
            serving.result()


# --- descriptors ----------------------------------------------------------------------------------------------------


class Ends(NamedTuple):
    """Descriptors of our own: to read requests from, to write answers to."""

    reads: int
    writes: int


@contextmanager
def taken_stdio() -> Iterator[Ends]:
    """Stdin and stdout for the protocol alone: until the end 0 is empty, and 1 is stderr."""
    sys.stdout.flush()
    ends = Ends(_duplicate(0), _duplicate(1))
    empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(empty, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # there is no stderr
            os.dup2(empty, 1)
        yield ends
    finally:
        sys.stdout.flush()
        os.dup2(ends.reads, 0)
        os.dup2(ends.writes, 1)
        for fd in (empty, *ends):
            os.close(fd)


def _duplicate(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


class Lines:
    """Lines of a descriptor that others may hold too: it stays blocking, and is read when it is ready."""

    def __init__(self, fd: int, bytes_max: int) -> None:
        self._fd = fd
        self._bytes_max = bytes_max
        self._held = bytearray()
        self._is_ended = False
        self._skipped = 0
        """Bytes of a line too long to be held, so far."""

    async def wait_some(self) -> bool:
        """Until there is something to read, so that who says nothing holds no permit. False: there is nothing more."""
        if b"\n" not in self._held and not self._is_ended:
            await _ready(self._fd, to_write=False)
        return not self._is_ended

    async def next(self) -> bytes | int | None:
        """A line without its end; the size of one that was too long; None: there are no more."""
        start = 0
        while True:
            at = self._held.find(b"\n", start)
            if at >= 0:
                return self._take(at)
            start = len(self._held)
            if start > self._bytes_max:
                self._skipped += start
                self._held.clear()
                start = 0
            if self._is_ended:
                return None  # a line without its end is the rest of a message that was cut off
            await self._read()

    def _take(self, at: int) -> bytes | int:
        line = bytes(self._held[:at])
        del self._held[: at + 1]
        skipped, self._skipped = self._skipped, 0
        if skipped or len(line) > self._bytes_max:
            return skipped + len(line)
        return line.removesuffix(b"\r")

    async def _read(self) -> None:
        await _ready(self._fd, to_write=False)
        try:
            data = os.read(self._fd, _READ_BYTES)
        except OSError as error:  # a terminal that has gone
            _log.info("stdin ended: %s", error)
            data = b""
        if data:
            self._held += data
        else:
            self._is_ended = True

    def has_hung_up(self) -> bool:
        """Whether the client has closed its end, seen without reading."""
        poller = select.poll()
        poller.register(self._fd, getattr(select, "POLLRDHUP", 0))
        return any(events & _HUNG_UP for _, events in poller.poll(0))


class Writer:
    """Writes messages one after another, a little at a time, so that a client that does not read holds up nobody."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = asyncio.Lock()
        self.is_gone = False

    async def write(self, line: bytes) -> None:
        """A message; its end is added. Does nothing once the client has gone."""
        async with self._turn:
            left = memoryview(line + b"\n")
            while left and not self.is_gone:
                await _ready(self._fd, to_write=True)
                try:
                    # A pipe that is ready takes so much without blocking; more it may not.
                    left = left[os.write(self._fd, left[: select.PIPE_BUF]) :]
                except OSError as error:
                    _log.info("stdout ended: %s", error)
                    self.is_gone = True


async def _ready(fd: int, *, to_write: bool) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT if to_write else select.POLLIN)
    if poller.poll(0):
        await asyncio.sleep(0)
        return
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
    add(fd, done.set)
    try:
        await done.wait()
    finally:
        remove(fd)


# --- messages -------------------------------------------------------------------------------------------------------


class _Id(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"")


_WITH_ID: Final = msgspec.json.Decoder(_Id)


class _Open(NamedTuple):
    """A request without its answer."""

    permit: Permit
    is_call: bool


class StdioSession:
    """One client on two descriptors."""

    def __init__(self, gate: McpGate, ends: Ends, caller: Caller, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._gate = gate
        self._gateway: Gateway = gate.gateway
        self._caller = caller
        self._line_bytes_max = line_bytes_max
        self._lines = Lines(ends.reads, line_bytes_max)
        self._writer = Writer(ends.writes)
        self._open: dict[types.RequestId, _Open] = {}
        self._closed = asyncio.Event()
        self._closed.set()
        """Whether no request is open."""

    async def run(self) -> None:
        """Until the client has gone. Cancelled, it closes at once."""
        to_sdk, from_client = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_client, from_sdk = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write_all, from_sdk, group.cancel_scope)
                group.start_soon(self._read_all, to_sdk)
                await self._gate.server.run(from_client, to_client, self._gate.server.create_initialization_options())
                group.cancel_scope.cancel()
        finally:
            for one in self._open.values():
                one.permit.release()
            for stream in (to_sdk, from_client, to_client, from_sdk):
                stream.close()

    async def until_answered(self) -> None:
        """Until no request waits for its answer."""
        await self._closed.wait()

    # --- in -----------------------------------------------------------------------------------------------------------

    async def _read_all(self, to_sdk: anyio.abc.ObjectSendStream[SessionMessage | Exception]) -> None:
        async with to_sdk:
            while await self._lines.wait_some():
                permit = await self._admit()
                if permit is None:
                    break
                is_kept = False
                try:
                    line = await self._lines.next()
                    if line is None:
                        break
                    is_kept = await self._take(line, permit, to_sdk)
                finally:
                    if not is_kept:
                        permit.release()
            await self._finish_control()

    async def _admit(self) -> Permit | None:
        """None: the client has gone, or the server takes nothing more."""
        waiting = asyncio.ensure_future(self._gateway.admit(self))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=_WATCH_S)
                if not waiting.done() and self._lines.has_hung_up():
                    return None
            return waiting.result()
        except CallError:  # it drains: what is under way is still answered
            await asyncio.Event().wait()
            return None
        finally:
            if not waiting.done():
                waiting.cancel()

    async def _take(
        self, line: bytes | int, permit: Permit, to_sdk: anyio.abc.ObjectSendStream[SessionMessage | Exception]
    ) -> bool:
        """Hand a message on. True: its permit goes back with its answer."""
        if isinstance(line, int):
            problem = f"a line of {line} bytes exceeds body_bytes_max={self._line_bytes_max}: send less"
            await self._answer_error(types.INVALID_REQUEST, problem)
            return False
        if not line.strip():
            return False
        try:
            message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValidationError as error:
            is_json = all(problem["type"] != "json_invalid" for problem in error.errors(include_input=False))
            if is_json:
                await self._answer_error(types.INVALID_REQUEST, "Invalid request: a line is one JSON-RPC 2.0 message")
            else:
                await self._answer_error(types.PARSE_ERROR, "Parse error: a line is one JSON-RPC 2.0 message")
            return False
        if isinstance(message, types.JSONRPCNotification) and _WITH_ID.decode(line).id:
            await self._answer_error(types.INVALID_REQUEST, "Invalid request: its id must be text or a whole number")
            return False
        if misfit := misfit_of_keys(line):
            await self._answer_error(types.INVALID_REQUEST, f"Invalid request: {misfit}", getattr(message, "id", None))
            return False
        if not isinstance(message, types.JSONRPCRequest):
            await to_sdk.send(SessionMessage(message))
            return False
        if message.id in self._open:
            problem = f"Invalid request: the id {message.id!r} is in use"
            await self._answer_error(types.INVALID_REQUEST, problem, message.id)
            return False
        is_call = message.method in ("tools/call", "prompts/get", "resources/read")
        arrival = Arrival(
            self._caller,
            permit,
            arguments=raw_arguments(line) if message.method == "tools/call" else None,
            received_at_ms=self._gateway.now_ms(),
            connection=self,
        )
        self._open[message.id] = _Open(permit, is_call)
        self._closed.clear()

        async def on_unanswered() -> None:
            self._close(message.id)

        metadata = ServerMessageMetadata(
            request_context=SimpleNamespace(state=SimpleNamespace(arrival=arrival), headers={}),
            on_request_unanswered=on_unanswered,
        )
        await to_sdk.send(SessionMessage(message, metadata=metadata))
        return True

    async def _finish_control(self) -> None:
        """What is no call is answered still: `printf … | callyard serve` shows what it says."""
        until = asyncio.get_running_loop().time() + _LAST_ANSWERS_S
        while any(not one.is_call for one in self._open.values()) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)

    # --- out ----------------------------------------------------------------------------------------------------------

    async def _write_all(
        self, from_sdk: anyio.abc.ObjectReceiveStream[SessionMessage], session: anyio.CancelScope
    ) -> None:
        async for item in from_sdk:
            message = item.message
            line = message.model_dump_json(by_alias=True, exclude_unset=True).encode()
            await self._writer.write(line)
            if self._writer.is_gone:  # also where it still writes: nothing that it asks for can be answered
                session.cancel()
                return
            if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id is not None:
                self._close(message.id)

    def _close(self, request_id: types.RequestId) -> None:
        one = self._open.pop(request_id, None)
        if one is not None:
            one.permit.release()
        if not self._open:
            self._closed.set()

    async def _answer_error(self, code: int, message: str, request_id: types.RequestId | None = None) -> None:
        error = types.JSONRPCError(jsonrpc="2.0", id=request_id, error=types.ErrorData(code=code, message=message))
        await self._writer.write(error.model_dump_json(by_alias=True, exclude_unset=True).encode())
