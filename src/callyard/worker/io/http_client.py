"""One HTTP request by the rules: who may be reached, how much is read, what follows a redirect.

Redirects are followed here, hop by hop, so that each is judged like the first. The address is judged twice: when the
name is resolved, and again on the socket that is about to connect to it, so that nothing lies between the check and its
use. Connections are pooled by the client; cookies are not kept, since several tenants share it; proxies and netrc of
the environment are not used. Source: call-execution X42.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from callyard.errors import ErrorKind
from callyard.worker.io.addresses import HostRules, Network, find_refusal, parse_address
from callyard.worker.io.deadlines import Deadlines
from callyard.worker.io.port import IoFailure

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

READ_ONLY_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS: Final = READ_ONLY_METHODS | {"POST", "PUT", "PATCH", "DELETE"}
URL_CHARACTERS_MAX: Final = 16 * 1024
HEADERS_MAX: Final = 128
HEADERS_BYTES_MAX: Final = 32 * 1024
USER_AGENT: Final = "callyard"

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OURS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade", "te", "trailer", "expect"}
)
"""A function that set these could speak to another site behind the same address, or smuggle a second request."""
_ACROSS_ORIGINS: Final = frozenset({"accept", "accept-language", "accept-encoding", "content-type", "user-agent"})
"""What goes along to another origin: any other header may be a credential."""
_TOKEN: Final = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

Headers = Sequence[tuple[str, str]]


class AddressRefused(OSError):
    """A name leads to a place where functions may not connect to; no address of it is left."""


class HttpReply(msgspec.Struct, frozen=True, gc=False):
    status: int
    url: str
    """Where it came from, after redirects."""
    headers: list[tuple[str, str]]
    body: bytes
    no_store: bool
    """Its Cache-Control says not to keep it."""


class HttpClient:
    """A pool of connections, made at the first request: importing aiohttp costs more than most workers want."""

    def __init__(self, private_allowed: Sequence[Network]) -> None:
        self._private_allowed = tuple(private_allowed)
        self._session: aiohttp.ClientSession | None = None
        self._deadlines = Deadlines()

    async def close(self) -> None:
        self._deadlines.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def fetch(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes | None,
        *,
        hosts: Sequence[HostRules],
        timeout_ms: int,
        redirects_max: int,
        max_bytes: int,
    ) -> HttpReply:
        """`hosts`: every one of them must permit. Raises `IoFailure`."""
        session = self._open_session()
        import aiohttp

        check_headers(headers)
        target = _parse_url(url)
        try:
            with self._deadlines.within(timeout_ms):
                return await self._follow(session, method, target, headers, body, hosts, redirects_max, max_bytes)
        except TimeoutError as error:
            message = f"{method} {show_url(target)}: no whole answer in {timeout_ms} ms"
            raise IoFailure(
                ErrorKind.TIMEOUT, message, retryable=method in READ_ONLY_METHODS, limit="timeout_ms"
            ) from error
        except UnicodeError as error:  # of the resolver, for a label that is empty or too long
            raise IoFailure(ErrorKind.SCHEMA, f"{_host_of(target)[:80]!r} is no name of a host") from error
        except aiohttp.ClientError as error:
            raise _explain(error, method, target) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            try:
                import aiohttp
            except ImportError as error:
                message = "http needs aiohttp in the worker's environment: pip install 'callyard[http]'"
                raise IoFailure(ErrorKind.UNAVAILABLE, message) from error
            connector = aiohttp.TCPConnector(
                limit=0,  # the gate holds the number of requests
                resolver=_make_resolver(self._private_allowed),
                socket_factory=self._open_socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": USER_AGENT},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                trust_env=False,
            )
        return self._session

    def _open_socket(self, found: tuple[Any, ...]) -> socket.socket:
        """For aiohttp: a socket that will connect to exactly this address."""
        family, kind, protocol, _, where = found
        check_address(str(where[0]), self._private_allowed)
        return socket.socket(family, kind, protocol)

    async def _follow(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: URL,
        headers: Headers,
        body: bytes | None,
        hosts: Sequence[HostRules],
        redirects_max: int,
        max_bytes: int,
    ) -> HttpReply:
        for hop in range(redirects_max + 1):
            self._check_target(url, hosts)
            data = None if body is None else io.BytesIO(body)
            async with await session.request(
                method, url, headers=headers or None, data=data, allow_redirects=False
            ) as response:
                status, found = response.status, response.headers
                location = found.get("Location")
                if location is None or status not in _REDIRECTS or redirects_max == 0:
                    read = await _read(response, method, max_bytes)
                    pairs = [(_latin(name), _latin(value)) for name, value in found.items()]
                    no_store = any("no-store" in value.lower() for value in found.getall("Cache-Control", ()))
                    return HttpReply(status, str(url), pairs, read, no_store)
                if hop == redirects_max:
                    break
            target = _parse_url(_latin(location), url)
            if url.scheme == "https" and target.scheme != "https":
                raise IoFailure(ErrorKind.DENIED, f"{show_url(url)} redirects from https to {target.scheme}")
            if status == 303 or (status in (301, 302) and method == "POST"):
                method, body = "HEAD" if method == "HEAD" else "GET", None
                headers = [(name, value) for name, value in headers if name.lower() != "content-type"]
            if target.origin() != url.origin():
                headers = [(name, value) for name, value in headers if name.lower() in _ACROSS_ORIGINS]
            url = target
        raise IoFailure(
            ErrorKind.RESULT, f"{show_url(url)}: more than {redirects_max} redirects", limit="redirects_max"
        )

    def _check_target(self, url: URL, hosts: Sequence[HostRules]) -> None:
        host, port = _host_of(url), url.port or 0
        for rules in hosts:
            if rules.permits(host, port):
                continue
            message = f'host {host} is not allowed; whoever runs the worker may add it: [io.http] allow = ["{host}"]'
            raise IoFailure(ErrorKind.DENIED, message, host=host)
        if parse_address(host) is not None:
            try:
                check_address(host, self._private_allowed)
            except AddressRefused as error:
                raise _denied(error, host) from error


def check_address(text: str, allowed: Sequence[Network]) -> None:
    """Raises `AddressRefused`."""
    address = parse_address(text)
    if address is None:
        raise AddressRefused(f"{text!r} is no IP address")
    kind = find_refusal(address, allowed)
    if kind is not None:
        raise AddressRefused(f"{text} is {kind}")


def check_headers(headers: Headers) -> None:
    """Raises `IoFailure`, which names a header and never shows its value: it may be a secret."""
    if not headers:
        return
    if len(headers) > HEADERS_MAX or sum(len(name) + len(value) for name, value in headers) > HEADERS_BYTES_MAX:
        message = f"expected at most {HEADERS_MAX} headers of {HEADERS_BYTES_MAX} bytes, got {len(headers)}"
        raise IoFailure(ErrorKind.SCHEMA, message)
    for name, value in headers:
        if not name or not _TOKEN.issuperset(name):
            raise IoFailure(ErrorKind.SCHEMA, f"{name[:80]!r} is no name of a header")
        if name.lower() in _OURS or name.lower().startswith("proxy-"):
            raise IoFailure(ErrorKind.SCHEMA, f"the header {name} is set by the worker")
        if any((ord(c) < 32 and c != "\t") or ord(c) == 127 for c in value) or not _is_encodable(value):
            raise IoFailure(ErrorKind.SCHEMA, f"the value of the header {name} has characters that no header may have")


def show_url(url: URL) -> str:
    """For messages: without the query and fragment, which may hold secrets."""
    shown = str(url.with_query(None).with_fragment(None))
    return shown if len(shown) <= 200 else shown[:199] + "…"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_url(text: str, base: URL | None = None) -> URL:
    """By the parser that the request is made with: two parsers would be two opinions of where it goes."""
    from yarl import URL

    if len(text) > URL_CHARACTERS_MAX:
        raise IoFailure(ErrorKind.SCHEMA, f"URL of {len(text)} characters, more than {URL_CHARACTERS_MAX}")
    try:
        url = URL(text) if base is None else base.join(URL(text))
        port = url.port
        host = url.raw_host
    except (ValueError, TypeError) as error:
        raise IoFailure(
            ErrorKind.SCHEMA, "expected a URL such as https://example.com/path; it cannot be read"
        ) from error
    if url.scheme not in ("http", "https"):
        raise IoFailure(ErrorKind.DENIED, f"expected a URL of http or https, got scheme {url.scheme[:20]!r}")
    if not host or not port:
        raise IoFailure(ErrorKind.SCHEMA, "expected a URL with a host, such as https://example.com/path")
    if url.raw_user is not None or url.raw_password is not None:
        raise IoFailure(ErrorKind.SCHEMA, "a URL must not hold a user or password; use the header Authorization")
    return url.with_fragment(None)


def _host_of(url: URL) -> str:
    return (url.raw_host or "").lower().rstrip(".")


async def _read(response: aiohttp.ClientResponse, method: str, max_bytes: int) -> bytes:
    """The body, decompressed as it comes; stops at the cap, however little was sent for it."""
    if method == "HEAD":
        return b""
    chunks: list[bytes] = []
    size = 0
    while chunk := await response.content.readany():
        size += len(chunk)
        if size > max_bytes:
            response.close()
            message = f"{show_url(response.url)}: the body is larger than max_bytes={max_bytes}"
            raise IoFailure(ErrorKind.RESULT, message, limit="max_bytes", max_bytes=max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _latin(text: str) -> str:
    """Header text as JSON can hold it: a plain str, and without the surrogates that stand for what is no UTF-8."""
    return str(text) if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _make_resolver(allowed: Sequence[Network]) -> aiohttp.abc.AbstractResolver:
    """The system's resolver, less the addresses that are refused: it also reads forms such as 2130706433 and 0x7f.1."""
    from aiohttp.abc import ResolveResult
    from aiohttp.resolver import ThreadedResolver

    class CheckedResolver(ThreadedResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            kept: list[ResolveResult] = []
            refused: AddressRefused | None = None
            for found in await super().resolve(host, port, family):
                try:
                    check_address(found["host"], allowed)
                except AddressRefused as error:
                    refused = error
                else:
                    kept.append(found)
            if not kept and refused is not None:
                raise refused
            return kept

    return CheckedResolver()


def _denied(error: AddressRefused, host: str) -> IoFailure:
    message = (
        f"{host}: {error}, not a public address; whoever runs the worker may allow its network: [io.http] allow_private"
    )
    return IoFailure(ErrorKind.DENIED, message, host=host)


def _explain(error: aiohttp.ClientError, method: str, url: URL) -> IoFailure:
    """Kinds of aiohttp's errors. Their own texts are not shown where they could hold headers or a query."""
    import aiohttp

    shown = f"{method} {show_url(url)}"
    again = method in READ_ONLY_METHODS

    def unavailable(message: str, cause: str, *, retryable: bool) -> IoFailure:
        return IoFailure(ErrorKind.UNAVAILABLE, f"{shown}: {message}", retryable=retryable, cause=cause)

    if isinstance(error, aiohttp.ClientSSLError):
        return unavailable(f"TLS failed: {error.os_error}", "tls", retryable=False)
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, AddressRefused):
            return _denied(error.os_error, error.host)
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
