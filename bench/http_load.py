"""A small HTTP/1.1 client for load: raw keep-alive connections on one epoll, each with one request at a time.

It costs some 10 µs a request, so that what is measured is the server; and it never gives an answer to the wrong
request, since none is sent before the last one is answered.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

READ_BYTES: Final = 1 << 18
SILENT_S: Final = 120.0
"""A request that is not answered for so long is lost."""


class Broken(Exception):
    """The connection ended before its answer was whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        """The message in the body, which may be the last one of a stream of events."""
        if self.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            data = [line for line in self.body.splitlines() if line.startswith(b"data: {")]
            return json.loads(data[-1].removeprefix(b"data: "))
        return json.loads(self.body)


def build(path: str, body: bytes, headers: Mapping[str, str] = {}, *, method: str = "POST") -> bytes:
    """One request as it goes out."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost:80"]
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Parser:
    """Reads the answers of one connection, one after another."""

    __slots__ = ("_buffer", "_chunks", "_headers", "_length", "_status")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._status = 0
        """0: the head of the next answer is not there yet."""
        self._length = -1
        """Of the body; -1: it comes in chunks."""
        self._headers: dict[bytes, bytes] = {}
        self._chunks: list[bytes] = []

    def feed(self, data: bytes) -> Answer | None:
        """The answer that is whole with these bytes, if one is."""
        self._buffer += data
        if not self._status and not self._read_head():
            return None
        body = self._take_chunks() if self._length < 0 else self._take(self._length)
        if body is None:
            return None
        answer = Answer(self._status, self._headers, body)
        self._status = 0
        return answer

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        pairs = (line.split(b":", 1) for line in lines)
        self._headers = {name.lower(): value.strip() for name, value in pairs}
        self._status = int(first.split(b" ", 2)[1])
        is_chunked = self._headers.get(b"transfer-encoding") == b"chunked"
        self._length = -1 if is_chunked else int(self._headers.get(b"content-length", b"0"))
        self._chunks = []
        return True

    def _take(self, length: int) -> bytes | None:
        if len(self._buffer) < length:
            return None
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body

    def _take_chunks(self) -> bytes | None:
        while (end := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:end], 16)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunks.append(bytes(self._buffer[end + 2 : end + 2 + size]))
            del self._buffer[: end + 2 + size + 2]
            if not size:
                return b"".join(self._chunks)
        return None


class Client:
    """One blocking connection, for what is not measured or is measured alone."""

    def __init__(self, port: int, *, timeout_s: float = SILENT_S) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = Parser()

    def ask(self, request: bytes) -> Answer:
        """Raises Broken, OSError."""
        self._socket.sendall(request)
        while True:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise Broken
            answer = self._parser.feed(data)
            if answer is not None:
                return answer

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class Seen:
    """What a load saw of one kind of request."""

    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """By what each was taken for. A request that got none is in no count but `sent`."""
    seconds: list[float] = field(default_factory=list)
    """From request to answer, in the order of the answers."""
    ended_at: list[float] = field(default_factory=list)
    """`time.perf_counter` of each."""

    @property
    def answered(self) -> int:
        return self.answers.total()


@dataclass(slots=True)
class Stream:
    """A connection that sends one request after another. `next_request`: what to send; None: nothing more."""

    next_request: Callable[[], bytes | None]
    judge: Callable[[Answer], str]
    """What an answer is counted as."""
    seen: Seen
    connection: socket.socket | None = None
    parser: Parser = field(default_factory=Parser)
    sent_at: float = 0.0
    unsent: bytes = b""

    @property
    def is_waiting(self) -> bool:
        return self.sent_at > 0


def drive(port: int, streams: list[Stream], *, seconds: float = float("inf"), patience_s: float = SILENT_S) -> float:
    """Let each stream ask, for so long or until it has nothing more to ask, and wait for the last answers.

    The seconds that this took. A connection that ends without its answer is counted as `lost`, and opened again.
    """
    selector = selectors.DefaultSelector()
    started = last_at = time.perf_counter()
    until = started + seconds
    waiting = sum(_ask(selector, port, stream) for stream in streams)
    while waiting:
        events = selector.select(1.0)
        now = time.perf_counter()
        if not events and now - max(last_at, min(now, until)) > patience_s:
            break
        for key, mask in events:
            stream: Stream = key.data
            if mask & selectors.EVENT_WRITE:
                _flush(selector, stream)
                continue
            answer = _read(selector, stream)
            if answer is None:
                continue
            last_at = now = time.perf_counter()
            if stream.is_waiting:
                stream.seen.answers[answer if isinstance(answer, str) else stream.judge(answer)] += 1
                stream.seen.seconds.append(now - stream.sent_at)
                stream.seen.ended_at.append(now)
                stream.sent_at = 0.0
                waiting -= 1
                if now < until:
                    waiting += _ask(selector, port, stream)
            elif not isinstance(answer, str):
                stream.seen.answers["one too many"] += 1
    for stream in streams:
        if stream.connection is not None:
            stream.connection.close()
            stream.connection = None
    selector.close()
    return time.perf_counter() - started


def _ask(selector: selectors.BaseSelector, port: int, stream: Stream) -> int:
    request = stream.next_request()
    if request is None:
        return 0
    if stream.connection is None:
        stream.connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        stream.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.connection.setblocking(False)
        stream.parser = Parser()
        selector.register(stream.connection, selectors.EVENT_READ, stream)
    stream.seen.sent += 1
    stream.sent_at = time.perf_counter()
    stream.unsent = request
    _flush(selector, stream)
    return 1


def _flush(selector: selectors.BaseSelector, stream: Stream) -> None:
    assert stream.connection is not None
    had_rest = len(stream.unsent)
    try:
        stream.unsent = stream.unsent[stream.connection.send(stream.unsent) :]
    except BlockingIOError:
        pass
    except OSError:
        stream.unsent = b""  # reading tells the same
    if stream.unsent or had_rest != len(stream.unsent):
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.unsent else 0)
        if selector.get_key(stream.connection).events != wanted:
            selector.modify(stream.connection, wanted, stream)


def _read(selector: selectors.BaseSelector, stream: Stream) -> Answer | str | None:
    """An answer, `lost`, or None: more is to come."""
    assert stream.connection is not None
    try:
        data = stream.connection.recv(READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        data = b""
    if data:
        return stream.parser.feed(data)
    selector.unregister(stream.connection)
    stream.connection.close()
    stream.connection = None
    return "lost"
