"""One HTTP request by the rules: who may be reached, how much is read, what follows a redirect.

Redirects are followed here, hop by hop, so that each is judged like the first. The address is judged twice more, by
`http_exchange`: when the name is resolved, and on the socket that is about to connect to it, so that nothing lies
between the check and its use. Connections are pooled by the client; cookies are not kept, since several tenants share
it; proxies and netrc of the environment are not used. Source: call-execution X42.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from callyard.errors import ErrorKind, UsageError
from callyard.extras import needs
from callyard.worker.io.addresses import HostRules, Network, find_refusal, parse_address
from callyard.worker.io.deadlines import Deadlines
from callyard.worker.io.port import IoFailure

if TYPE_CHECKING:
    from yarl import URL

    from callyard.worker.io.http_exchange import Connections

READ_ONLY_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS: Final = READ_ONLY_METHODS | {"POST", "PUT", "PATCH", "DELETE"}
URL_CHARACTERS_MAX: Final = 16 * 1024
HEADERS_MAX: Final = 128
HEADERS_BYTES_MAX: Final = 32 * 1024
TARGETS_MAX: Final = 1_024

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
        self._connections: Connections | None = None
        self._deadlines = Deadlines()
        self._check_host = lru_cache(TARGETS_MAX)(self._judge_host)
        """Only who is permitted is remembered, since a refusal is raised."""

    async def close(self) -> None:
        self._deadlines.close()
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()

    async def fetch(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes | None,
        *,
        hosts: tuple[HostRules, ...],
        timeout_ms: int,
        redirects_max: int,
        max_bytes: int,
    ) -> HttpReply:
        """`hosts`: every one of them must permit. Raises `IoFailure`."""
        connections = self._connections or self._connect()
        check_headers(headers)
        target = _parse_url(url)
        try:
            with self._deadlines.within(timeout_ms):
                return await self._follow(connections, method, target, headers, body, hosts, redirects_max, max_bytes)
        except TimeoutError as error:
            message = f"{method} {show_url(target)}: no whole answer in {timeout_ms} ms"
            raise IoFailure(
                ErrorKind.TIMEOUT, message, retryable=method in READ_ONLY_METHODS, limit="timeout_ms"
            ) from error
        except UnicodeError as error:  # of the resolver, for a label that is empty or too long
            raise IoFailure(ErrorKind.SCHEMA, f"{_host_of(target)[:80]!r} is no name of a host") from error

    def _connect(self) -> Connections:
        try:
            with needs("http", "http in the worker's environment"):
                import aiohttp  # noqa: F401 - asked for by itself: what imports it may be loaded

                from callyard.worker.io.http_exchange import Connections
        except UsageError as error:
            raise IoFailure(ErrorKind.UNAVAILABLE, str(error)) from error
        self._connections = Connections(self._private_allowed)
        return self._connections

    async def _follow(
        self,
        connections: Connections,
        method: str,
        url: URL,
        headers: Headers,
        body: bytes | None,
        hosts: tuple[HostRules, ...],
        redirects_max: int,
        max_bytes: int,
    ) -> HttpReply:
        for hop in range(redirects_max + 1):
            self._check_host(_host_of(url), url.port or 0, hosts)
            answer = await connections.exchange(method, url, headers, body, max_bytes, follow=redirects_max > 0)
            status, location = answer.status, answer.location
            if location is None:
                return HttpReply(status, str(url), answer.headers, answer.body, answer.no_store)
            if hop == redirects_max:
                break
            target = _parse_url(location, url)
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

    def _judge_host(self, host: str, port: int, hosts: tuple[HostRules, ...]) -> None:
        """By the lists, and if it is a literal address, by what that is. Raises `IoFailure`."""
        for rules in hosts:
            if rules.permits(host, port):
                continue
            message = f'host {host} is not allowed; whoever runs the worker may add it: [io.http] allow = ["{host}"]'
            raise IoFailure(ErrorKind.DENIED, message, host=host)
        if parse_address(host) is not None:
            try:
                check_address(host, self._private_allowed)
            except AddressRefused as error:
                raise explain_refused(error, host) from error


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


def explain_refused(error: AddressRefused, host: str) -> IoFailure:
    message = (
        f"{host}: {error}, not a public address; whoever runs the worker may allow its network: [io.http] allow_private"
    )
    return IoFailure(ErrorKind.DENIED, message, host=host)
