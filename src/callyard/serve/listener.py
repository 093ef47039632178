"""One HTTP server: uvicorn's h11 protocol with what it has no limits for.

A connection is idle, or sends a header, or is busy with one request; each of these has its own clock:

    idle --first byte--> header --complete--> busy --answered--> idle
      idle_ms: closed      header_ms: 408        the body's clock is the guard's; write_ms while the peer reads nothing

asyncio tells nobody that a peer has gone while reading is paused, which it is for as long as a request waits for its
permit. So the kernel is asked: an epoll of our own, for EPOLLRDHUP alone, stands in the loop as one more readable file;
it costs nothing until somebody goes. What it cannot see is an end that stands behind more bytes than the kernel takes
in unread: that peer's own kernel has not sent it yet. Source: tool-dispatch D36, D46; job-queue R110, R111.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import resource
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from callyard.errors import UsageError
from callyard.serve.bound import Bound, bind_address, cannot_listen, close_bound

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_log: Final = logging.getLogger("callyard.serve.http")
_uvicorn_log: Final = logging.getLogger("callyard.serve.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)  # what a stranger sends is no warning of ours, and there may be a flood of it

PEEK_MS: Final = 50
"""Where the kernel has no epoll: how often each connection is looked at."""
_GONE_S: Final = 0.02
"""What had come before the end of file is still delivered, when it is wanted."""
_LEFTOVER_BYTES: Final = 64 * 1024
_LOOKED_AT: Final = 64
_HELD_S: Final = 0.001
_HELD_BYTES_MAX: Final = 64 * 1024
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 1 << 20
_FILES_BESIDE: Final = 512
"""Files that a server has open besides its connections."""
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 21\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\ntoo many connections\n"
)
_PHRASES: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    505: b"HTTP Version Not Supported",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """Bounds of one listener. All are positive."""

    connections_max: int = 1_024
    connections_spare: int = 64
    """More, on which only what takes no permit is answered: `/healthz` at saturation."""
    header_bytes_max: int = 32 * 1024
    header_ms: int = 10_000
    """To send a whole header, from its first byte; of a new connection from its beginning."""
    idle_ms: int = 60_000
    write_ms: int = 30_000
    """How long a peer may leave an answer unread."""
    handshake_ms: int = 10_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


class ListenerStatistics(msgspec.Struct, frozen=True):
    connections: int
    requests: int
    """Answered."""
    refused: int
    """Connections beyond the limit."""
    timed_out: int
    """Closed because a header, or the reading of an answer, took too long. Idle ones are not counted."""
    malformed: int
    """Closed because what came was no HTTP."""
    vanished: int
    """Peers that went while a request of theirs was under way."""


class Listener:
    """Serves one ASGI app on one address, from the loop that `start` runs in.

    Each request's `scope["state"]` has `connection`, a `Connection`, and `is_spare`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: ListenerLimits | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        bound: Bound | None = None,
    ) -> None:
        """`bound`: where, already; None: `start` sees to it."""
        self.limits = limits = limits or ListenerLimits()
        self._bound = bound
        self.host = host
        self.port = port
        """0 until `start`: the one that was free."""
        self.refused = self.timed_out = self.malformed = self.vanished = 0
        self._tls = (tls_cert, tls_key)
        self._config = Config(
            app,
            http=Connection,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            workers=1,
            proxy_headers=False,
            server_header=False,
            forwarded_allow_ips="",
            timeout_keep_alive=max(1, limits.idle_ms // 1_000),
            h11_max_incomplete_event_size=limits.header_bytes_max,
            ssl_certfile=None if tls_cert is None else str(tls_cert),
            ssl_keyfile=None if tls_key is None else str(tls_key),
        )
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._watch: PeerWatch | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._idle: dict[Connection, None] = {}
        """Without a whole request, the longest first."""
        self.dropped = 0
        """Idle connections that went to make room."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._config.is_ssl else 'http'}://{host}:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(
            connections=self.connections,
            requests=self._state.total_requests,
            refused=self.refused,
            timed_out=self.timed_out,
            malformed=self.malformed,
            vanished=self.vanished,
        )

    async def start(self) -> None:
        """Listen. Raises UsageError: the address is taken or not ours, the certificate cannot be used."""
        if self._tls != (None, None) and None in self._tls:
            raise UsageError("TLS needs both a certificate and its key: --tls-cert FILE --tls-key FILE")
        try:
            self._config.load()
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"the certificate {self._tls[0]} with the key {self._tls[1]} cannot be used: {error}"
            ) from error
        loop = asyncio.get_running_loop()
        limits = self.limits
        _reserve_files(limits.connections_max + limits.connections_spare + _FILES_BESIDE)
        self._watch = PeerWatch(loop)
        self._tick()
        context = self._config.ssl
        bound: Bound = ()
        try:
            bound = self._bound or bind_address(self.host, self.port)
            backlog = min(limits.connections_max, 1_024)
            for one in bound:
                one.listen(backlog)  # may be taken still, by who was bound as we are; uvloop would not say so
                server = await loop.create_server(
                    lambda: Connection(self, loop),
                    sock=one,
                    ssl=context,
                    backlog=backlog,
                    ssl_handshake_timeout=None if context is None else limits.handshake_ms / 1_000,
                )
                self._servers.append(server)
        except (OSError, UsageError) as error:
            self.stop_listening()
            self._release()
            close_bound(bound)
            if isinstance(error, UsageError):
                raise
            raise cannot_listen(self.host, self.port, error) from error
        self.port = self._servers[0].sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        """Take no more connections; those that there are go on."""
        for server in self._servers:
            server.close()
        self._servers = []

    async def close(self, *, drain_ms: int = 0) -> None:
        """Stop listening, let requests under way end within `drain_ms`, then cut them off. Idempotent.

        Idle connections are closed at once, the others with their answer. Returns at most 1 s after the drain.
        """
        self.stop_listening()
        for connection in self._connections():
            connection.shutdown()
        await self._wait_quiet(drain_ms / 1_000)
        for connection in self._connections():
            connection.abort()  # most requests end by that
        await self._wait_quiet(0.5)
        for task in list(self._state.tasks):
            task.cancel()
        await self._wait_quiet(0.5)
        if self._state.tasks:
            _log.error("%d requests did not end when they were cancelled", len(self._state.tasks))
        self._release()

    async def _wait_quiet(self, seconds: float) -> None:
        """Until no connection and no request is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._state.connections or self._state.tasks:
                    self._changed.clear()
                    for task in self._state.tasks:
                        task.add_done_callback(self._told)
                    await self._changed.wait()

    def _connections(self) -> list[Connection]:
        return cast("list[Connection]", list(self._state.connections))

    def _drop_idle(self) -> bool:
        """Make room: whoever has been without a request for longest goes. False: all are busy."""
        for connection in islice(self._idle, _LOOKED_AT):
            if not connection._raw.get_write_buffer_size():  # else its answer is not out yet
                del self._idle[connection]
                self.dropped += 1
                connection.abort()
                return True
        return False

    def _told(self, _: object) -> None:
        self._changed.set()

    def _tick(self) -> None:
        now = email.utils.formatdate(time.time(), usegmt=True).encode()
        self._state.default_headers = [(b"date", now)]
        self._ticking = asyncio.get_running_loop().call_later(1, self._tick)

    def _release(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class Connection(H11Protocol):
    """One client. As a value it is the key of the one waiter that a connection may have (R16)."""

    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(listener._config, listener._state, {}, loop)
        self.logger = _uvicorn_log
        self.is_lost = False
        self._listener = listener
        self._clock: asyncio.TimerHandle | None = None
        """Of the header, or of a peer that leaves an answer unread."""
        self._file = -1
        self._raw: asyncio.Transport
        self._lingering = -1
        """Bytes that may still come and are thrown away; below 0: it does not linger."""
        self._leftover = -1
        """Bytes that may still come of a body whose answer was given; below 0: there is none, or it is over."""
        self._when_lost: dict[object, Callable[[], None]] = {}

    # --- for the guard --------------------------------------------------------------------------------------------

    def on_lost(self, then: Callable[[], None]) -> Callable[[], None]:
        """Call `then` once when the peer has gone, soon if it has already. Returns what takes that back."""
        token = object()
        self._when_lost[token] = then
        if self.is_lost:
            self.loop.call_soon(self._tell_lost)

        def forget() -> None:
            self._when_lost.pop(token, None)

        return forget

    @property
    def has_body(self) -> bool:
        """All of the request under way has come."""
        cycle = self._cycle
        return cycle is not None and not cycle.more_body

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        listener = self._listener
        limits = listener.limits
        count = len(self.connections)
        if count >= limits.connections_max and listener._drop_idle():
            count = limits.connections_max - 1
        if count >= limits.connections_max + limits.connections_spare or listener._watch is None:
            listener.refused += 1
            self.transport = transport
            self._lingering = 0
            transport.write(_REFUSAL)
            transport.close()
            return
        is_spare = count >= limits.connections_max
        self.app_state = {"connection": self, "is_spare": is_spare}
        self._out = _Transport(self, transport)
        super().connection_made(cast("asyncio.Transport", self._out))
        endpoint = transport.get_extra_info("socket")
        if endpoint is not None:
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._file = endpoint.fileno()
            listener._watch.add(self._file, self)
        if not is_spare:
            listener._idle[self] = None
        self._arm(min(limits.header_ms, 1_000) if is_spare else limits.header_ms, self._header_late)

    def data_received(self, data: bytes) -> None:
        if self._lingering >= 0:
            self._lingering -= len(data)
            if self._lingering < 0:
                self.abort()
            return
        if self._leftover >= 0 and self.conn.their_state is h11.SEND_BODY:
            self._leftover -= len(data)
            if self._leftover < 0:
                self.close()
                return
        super().data_received(data)
        if self._is_busy:
            self._leftover = -1
            self._disarm()
            self._listener._idle.pop(self, None)
            if self.cycle.more_body and not self.flow.read_paused:
                self.flow.pause_reading()  # until its permit is there, and the guard asks for more
        elif self._clock is None and not self._raw.is_closing():
            self._arm(self._listener.limits.header_ms, self._header_late)

    def connection_lost(self, exc: Exception | None) -> None:
        listener = self._listener
        self.is_lost = True
        self._disarm()
        listener._idle.pop(self, None)
        if listener._watch is not None and self._file >= 0:
            listener._watch.remove(self._file, self)
        if self._is_busy:
            listener.vanished += 1
        super().connection_lost(exc or ConnectionError())  # with None it would close the transport once more
        self._unset_keepalive_if_required()
        self._tell_lost()
        listener._changed.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm(self._listener.limits.write_ms, self._unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm()

    def abort(self) -> None:
        self._raw.abort()

    def peer_gone(self) -> None:
        """The kernel says that nothing more will come."""
        self.loop.call_later(_GONE_S, self._drop)

    def _drop(self) -> None:
        if not self.is_lost:
            self.abort()

    def _tell_lost(self) -> None:
        while self._when_lost:
            self._when_lost.popitem()[1]()

    # --- uvicorn's side -------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        cycle = self._cycle
        return cycle is not None and not cycle.response_complete

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return cast("RequestResponseCycle | None", self.cycle)

    def shutdown(self) -> None:
        if self._is_busy:
            self.cycle.keep_alive = False
        else:
            self.close()

    def on_response_complete(self) -> None:
        self._out.flush()
        super().on_response_complete()
        if not self._is_busy and not self.transport.is_closing() and not self.app_state["is_spare"]:
            self._listener._idle[self] = None
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._leftover = _LEFTOVER_BYTES  # of a body that nobody wants any more
            self._arm(self._listener.limits.header_ms, self._header_late)

    def timeout_keep_alive_handler(self) -> None:
        self.close()

    def send_400_response(self, msg: str) -> None:
        """Called while the error is being handled."""
        self._listener.malformed += 1
        error = sys.exception()
        self._give_up(getattr(error, "error_status_hint", 400), f"{msg}\n")

    def close(self, *, is_sending: bool = False) -> None:
        """Close once what was written is sent; a peer that still sends gets a chance to read the answer first: closing
        on bytes that nobody has read would reset the connection."""
        raw = self._raw
        if raw.is_closing() or self._lingering >= 0:
            return
        self._out.flush()
        is_sending = is_sending or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if is_sending and raw.can_write_eof() and raw.get_extra_info("sslcontext") is None:
            self._lingering = _LINGER_BYTES
            raw.write_eof()
            self.flow.resume_reading()
            self._arm(round(_LINGER_S * 1_000), self.abort)
            return
        unsent = raw.get_write_buffer_size()
        raw.close()
        if unsent:
            self._arm(self._listener.limits.write_ms, self._unread)

    def _header_late(self) -> None:
        if self.conn.trailing_data[0]:
            self._listener.timed_out += 1
            self._give_up(408, "the header took too long\n")
        else:
            self.close()  # nothing came: it was idle

    def _unread(self) -> None:
        self._listener.timed_out += 1
        self.abort()

    def _give_up(self, status: int, text: str) -> None:
        """Answer what is no request, if an answer can be given, and close."""
        cycle = self._cycle
        is_busy = self._is_busy
        if cycle is not None and is_busy:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or not is_busy or not cycle.response_started:
            body = text.encode()
            phrase = _PHRASES.get(status, b"Bad Request")
            self._raw.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, phrase, len(body), body)
            )
        self.close(is_sending=True)
        self._tell_lost()

    def _arm(self, ms: int, then: Callable[[], None]) -> None:
        self._disarm()
        self._clock = self.loop.call_later(ms / 1_000, then)

    def _disarm(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class _Transport:
    """What uvicorn holds: closing goes by the connection, all else to the transport.

    An answer is written in pieces: its head, each event, its end. They are held until it is complete, for a millisecond
    at most, so that a short one costs one call of the system and not three.
    """

    def __init__(self, connection: Connection, raw: asyncio.Transport) -> None:
        self._connection = connection
        self._raw = raw
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _HELD_BYTES_MAX:
            self.flush()
        elif self._timer is None:
            self._timer = self._connection.loop.call_later(_HELD_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._raw.is_closing():
            self._held.clear()
        if self._held:
            held, self._held = self._held, []
            self._held_bytes = 0
            self._raw.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._raw.is_closing() or self._connection._lingering >= 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class PeerWatch:
    """Notices peers that have gone, whoever reads. `polls`: by looking at each, as where there is no epoll."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, polls: bool = not hasattr(select, "epoll")) -> None:
        self._loop = loop
        self._by_file: dict[int, Connection] = {}
        self._epoll = None if polls else select.epoll()
        self._timer: asyncio.TimerHandle | None = None
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._look)
        else:
            self._peek()

    def add(self, file: int, connection: Connection) -> None:
        self._by_file[file] = connection
        if self._epoll is not None:
            self._epoll.register(file, select.EPOLLRDHUP | select.EPOLLET)

    def remove(self, file: int, connection: Connection) -> None:
        """Files are numbered anew as soon as they are closed: one that is another's by now stays."""
        if self._by_file.get(file) is not connection:
            return
        del self._by_file[file]
        if self._epoll is not None:
            with contextlib.suppress(OSError):  # closed before: the kernel has taken it out
                self._epoll.unregister(file)

    def close(self) -> None:
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
        if self._timer is not None:
            self._timer.cancel()
        self._by_file.clear()

    def _look(self) -> None:
        assert self._epoll is not None
        for file, _ in self._epoll.poll(0, 64):
            connection = self._by_file.get(file)
            if connection is not None:
                connection.peer_gone()

    def _peek(self) -> None:
        """Sees the end only when nothing unread stands before it."""
        self._timer = self._loop.call_later(PEEK_MS / 1_000, self._peek)
        for file, connection in list(self._by_file.items()):
            if _has_ended(file):
                self._by_file.pop(file, None)
                connection.peer_gone()


def _has_ended(file: int) -> bool:
    """Whether a socket has come to its end, without taking anything from it."""
    with socket.socket(fileno=file) as endpoint:
        try:
            return endpoint.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            endpoint.detach()


def _reserve_files(count: int) -> None:
    """Raise the number of files that may be open, as far as the system lets us; say so where it does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    possible = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        soft = possible
    if soft < count:
        _log.warning("at most %d files may be open, %d are wanted: raise the limit (ulimit -n)", soft, count)
