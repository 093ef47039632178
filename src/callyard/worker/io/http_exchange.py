"""One request and its answer, over connections that aiohttp keeps and by its parser.

Its session is left out: cookies, redirects, traces, netrc and timers are not wanted here, and to go around them is half
of what a request costs. Everything that aiohttp raises ends here, as an `IoFailure`. Source: call-execution X42.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp.abc import ResolveResult
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from callyard.errors import ErrorKind
from callyard.worker.io.addresses import Network
from callyard.worker.io.http_client import (
    READ_ONLY_METHODS,
    AddressRefused,
    Headers,
    check_address,
    explain_refused,
    show_url,
)
from callyard.worker.io.port import IoFailure

USER_AGENT: Final = "callyard"
ORIGINS_MAX: Final = 1_024

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_REPEATABLE: Final = READ_ONLY_METHODS | {"PUT", "DELETE"}
_DEFAULTS: Final = (
    ("User-Agent", USER_AGENT),
    *((str(name), value) for name, value in aiohttp.ClientRequest.DEFAULT_HEADERS.items()),
)
"""Sent unless the function sets them. What is accepted as an encoding is what the parser can decode."""
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=None)
_NOT_IN_A_LINE: Final = re.compile(r"[\x00-\x20\x7f]")


class Answer(msgspec.Struct, frozen=True, gc=False):
    status: int
    headers: list[tuple[str, str]]
    location: str | None
    """Where it redirects to, if it is to be followed: then there is no body."""
    body: bytes
    no_store: bool
    """Its Cache-Control says not to keep it."""


class Connections:
    """A pool, for permitted addresses only: judged when a name is resolved, and on the socket that connects."""

    def __init__(self, private_allowed: Sequence[Network]) -> None:
        self._private_allowed = private_allowed
        self._loop = asyncio.get_running_loop()
        self._connector = aiohttp.TCPConnector(
            limit=0,  # the gate holds the number of requests
            resolver=_CheckedResolver(private_allowed),
            socket_factory=self._open_socket,
        )
        self._origin_of = lru_cache(ORIGINS_MAX)(self._make_origin)

    async def close(self) -> None:
        await self._connector.close()

    def _open_socket(self, found: tuple[Any, ...]) -> socket.socket:
        """For aiohttp: a socket that will connect to exactly this address."""
        family, kind, protocol, _, where = found
        check_address(str(where[0]), self._private_allowed)
        return socket.socket(family, kind, protocol)

    def _make_origin(self, scheme: str, authority: str) -> aiohttp.ClientRequest:
        """What the pool looks connections up by."""
        return aiohttp.ClientRequest("GET", URL(f"{scheme}://{authority}"), loop=self._loop)

    async def exchange(
        self, method: str, url: URL, headers: Headers, body: bytes | None, max_bytes: int, *, follow: bool
    ) -> Answer:
        """Send it, and read the answer to its end, or to its head when that is a redirect and `follow`.

        Raises `IoFailure`. Headers were checked.
        """
        origin = self._origin_of(url.scheme, url.raw_authority)
        data = _encode(method, url, origin.headers["Host"], headers, body)
        try:
            try:
                return await self._attempt(origin, method, url, data, max_bytes, follow)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
                if method not in _REPEATABLE or isinstance(error, aiohttp.ClientConnectorError):
                    raise
            # Most likely the server closed a connection that was kept, just when it was to be used again.
            return await self._attempt(origin, method, url, data, max_bytes, follow)
        except (aiohttp.ClientError, HttpProcessingError) as error:
            raise _explain(error, method, url) from error

    async def _attempt(
        self, origin: aiohttp.ClientRequest, method: str, url: URL, data: bytes, max_bytes: int, follow: bool
    ) -> Answer:
        connection = await self._connector.connect(origin, [], _NO_TIMEOUT)
        protocol = connection.protocol
        assert protocol is not None  # until it is released
        is_done = False
        try:
            transport = protocol.transport
            if transport is None:
                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(skip_payload=method == "HEAD", read_until_eof=True)
            transport.write(data)
            message, content = await protocol.read()
            while message.code < 200 and message.code != 101:
                message, content = await protocol.read()
            found = message.headers
            location = found.get("Location") if follow and message.code in _REDIRECTS else None
            chunks: list[bytes] = []
            size = 0
            while location is None and not content.at_eof():
                chunk = await content.readany()  # decompressed as it comes
                size += len(chunk)
                if size > max_bytes:
                    text = f"{show_url(url)}: the body is larger than max_bytes={max_bytes}"
                    raise IoFailure(ErrorKind.RESULT, text, limit="max_bytes", max_bytes=max_bytes)
                chunks.append(chunk)
            is_done = not transport.get_write_buffer_size()
        finally:
            if is_done:
                connection.release()  # which closes it if there is more to read
            else:
                protocol.abort()  # what is still to be sent must not stay until somebody reads it
                connection.close()
        no_store = any("no-store" in value.lower() for value in found.getall("Cache-Control", ()))
        pairs = [(str(name, "utf-8", "replace"), str(value, "utf-8", "replace")) for name, value in message.raw_headers]
        return Answer(message.code, pairs, None if location is None else _plain(location), b"".join(chunks), no_store)


def _encode(method: str, url: URL, host: str, headers: Headers, body: bytes | None) -> bytes:
    """The bytes to send. Raises `IoFailure`."""
    target = url.raw_path_qs
    if _NOT_IN_A_LINE.search(target):  # the parser of URLs quotes them: then it has changed
        raise IoFailure(ErrorKind.SCHEMA, f"{show_url(url)} has characters that no URL may have")
    given = {name.lower() for name, _ in headers}
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in _DEFAULTS if name.lower() not in given]
    lines += [f"{name}: {value}" for name, value in headers]
    if body is not None and "content-type" not in given:
        lines.append("Content-Type: application/octet-stream")
    if body is not None or method not in READ_ONLY_METHODS:
        lines.append(f"Content-Length: {len(body or b'')}")
    return "\r\n".join((*lines, "\r\n")).encode() + (body or b"")


def _plain(text: str) -> str:
    """Without the surrogates that stand for what is no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class _CheckedResolver(ThreadedResolver):
    """The system's resolver, less the addresses that are refused: it also reads forms such as 2130706433 and 0x7f.1."""

    def __init__(self, private_allowed: Sequence[Network]) -> None:
        super().__init__()
        self._private_allowed = private_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        kept: list[ResolveResult] = []
        refused: AddressRefused | None = None
        for found in await super().resolve(host, port, family):
            try:
                check_address(found["host"], self._private_allowed)
            except AddressRefused as error:
                refused = error
            else:
                kept.append(found)
        if not kept and refused is not None:
            raise refused
        return kept


def _explain(error: aiohttp.ClientError | HttpProcessingError, method: str, url: URL) -> IoFailure:
    """Kinds of aiohttp's errors. Their own texts are not shown where they could hold headers or a query."""
    shown = f"{method} {show_url(url)}"
    again = method in READ_ONLY_METHODS

    def unavailable(message: str, cause: str, *, retryable: bool) -> IoFailure:
        return IoFailure(ErrorKind.UNAVAILABLE, f"{shown}: {message}", retryable=retryable, cause=cause)

    if isinstance(error, aiohttp.ClientSSLError):
        return unavailable(f"TLS failed: {error.os_error}", "tls", retryable=False)
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, AddressRefused):
            return explain_refused(error.os_error, error.host)
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return unavailable(
                f"no address for {error.host}: {error.os_error.strerror or error.os_error}", "dns", retryable=True
            )
        return unavailable(f"cannot connect: {error.os_error.strerror or error.os_error}", "connect", retryable=True)
    if isinstance(error, aiohttp.InvalidURL):
        return IoFailure(ErrorKind.SCHEMA, "expected a URL such as https://example.com/path; it cannot be read")
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | aiohttp.ClientPayloadError):
        return unavailable("the connection ended before the answer was whole", "connection_lost", retryable=again)
    return unavailable(f"the answer is not HTTP as it should be ({type(error).__name__})", "not_http", retryable=again)
