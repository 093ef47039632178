"""What stands before every HTTP request: who may talk to us, who it is, room for one call, and only then its body.

    header sizes -> Host, Origin -> token -> kind of body -> permit -> body, within its bytes and its time -> the app

No step reads what a later one has to allow. The app gets the whole body in one message, and in `scope["state"]`:
`caller`, `received_at_ms`, and where there may be a body `permit`, which comes back when the request ends unless the
call gave it back before. A refusal is an envelope like any other end of a call, with its HTTP status.
Source: tool-dispatch D24, D36, D44, D46, D57; job-queue R16, R110, R111.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from callyard.dispatch.outcomes import DispatchError
from callyard.errors import CallError, CallFailure, ErrorKind, Outcome, fail
from callyard.ids import CallId, Tenant
from callyard.policy.rate import Rate, RateLimiter

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from callyard.host.jobs import Permit
    from callyard.serve.config import ServeConfig
    from callyard.serve.gateway import Caller, Gateway
    from callyard.serve.tokens import Tokens

_log: Final = logging.getLogger("callyard.serve.http")

HEALTH_PATH: Final = "/healthz"
_JSONRPC_PATHS: Final = frozenset({"/rpc", "/mcp"})
_ONCE: Final = frozenset(
    {
        *(b"host", b"origin", b"authorization"),
        *(b"content-type", b"content-encoding", b"content-length", b"transfer-encoding"),
        *(b"idempotency-key", b"x-callyard-owner", b"x-callyard-deadline-ms", b"x-callyard-timeout-ms"),
        *(b"mcp-session-id", b"mcp-protocol-version", b"mcp-method", b"mcp-name"),
    }
)
_BODILESS: Final = frozenset({"GET", "HEAD", "DELETE"})
"""No other methods but these and POST are routed."""
TOKENS_SHARE: Final = 4
"""One token has at most one in so many of what all share while it makes others wait for it: bodies on their way,
suspended calls, sessions."""
_WRONG_TOKENS: Final = Rate(10, 60_000)
_PEERS_MAX: Final = 4_096


class Refusal(Exception):
    """A request that ends here: raised by the guard and the routes, answered in one place."""

    def __init__(self, status: int, failure: CallFailure, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(failure.message)
        self.status = status
        self.failure = failure
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Lost(Hashable, Protocol):
    """What the guard asks of a connection; it is also the key of its waiter."""

    def on_lost(self, then: Callable[[], None]) -> Callable[[], None]: ...


class Guard:
    """ASGI middleware around everything that one listener serves."""

    def __init__(
        self,
        app: ASGIApp,
        gateway: Gateway,
        config: ServeConfig,
        tokens: Callable[[], Tokens],
    ) -> None:
        self.wrong_tokens = 0
        self._app = app
        self._gateway = gateway
        self._config = config
        self._tokens = tokens
        self._rooms: dict[tuple[Tenant, str], asyncio.Semaphore] = {}
        """For bodies of a token that are on their way."""
        self._is_loopback = config.http is None or config.http.is_loopback
        self._own_host = "" if config.http is None else config.http.host.lower()
        self._wrong = RateLimiter(_WRONG_TOKENS, keys_max=_PEERS_MAX)
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def tell(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._serve(scope, receive, tell)
        except ClientGone:
            pass  # there is nobody to answer
        except Refusal as refusal:
            self._gateway.refused_by_status[refusal.status] += 1
            if not has_begun:
                await answer_refusal(scope, send, refusal)
        except Exception:
            reference = secrets.token_hex(8)
            _log.exception("%s %s failed inside the server (reference %s)", scope["method"], scope["path"], reference)
            if has_begun:
                raise  # cuts the answer off: it must not look whole
            text = f"it failed inside the server (reference {reference})"
            ours = fail(ErrorKind.INTERNAL, text, outcome=Outcome.UNKNOWN, reference=reference)
            await answer_refusal(scope, send, Refusal(500, ours))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: dict[str, Any] = scope.setdefault("state", {})
        headers = self._read_headers(scope)
        self._check_host(scope, headers)
        path: str = scope["path"]
        if path == HEALTH_PATH:
            await self._app(scope, receive, send)
            return
        if state.get("is_spare"):
            raise _overloaded()
        state["caller"] = self._identify(scope, headers)
        state["received_at_ms"] = self._gateway.now_ms()
        if scope["method"] != "POST":
            has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b" 0")
            if has_body and scope["method"] in _BODILESS:  # nobody would bound, or time, the reading of it
                raise _refuse(400, f"a {scope['method']} has no body here")
            await self._app(scope, receive, send)
            return
        self._check_body(headers)
        connection: Lost = state.setdefault("connection", _NeverLost())
        permit: Permit | None = None
        try:
            with ended_with(connection):
                has_come = getattr(connection, "has_body", False)
                async with self._own_room(state, has_come=has_come):
                    permit = state["permit"] = await admit(self._gateway, connection, state["received_at_ms"])
                    body = await self._read_body(receive, has_come=has_come)
            if body and b"content-type" not in headers:
                raise _no_json()
            await self._app(scope, _replay(body, receive), send)
        finally:
            if permit is not None:
                permit.release()

    # --- steps, in their order ------------------------------------------------------------------------------------

    def _read_headers(self, scope: Scope) -> dict[bytes, bytes]:
        """Those that the guard looks at. One of them twice is refused: who is in front of us may read the other."""
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            size += len(name) + len(value) + 4
            if name in _ONCE:
                if name in headers:
                    raise _refuse(400, f"the header {name.decode()} stands twice: send it once")
                headers[name] = value
        if size > self._config.headers_bytes_max:
            raise _refuse(
                431, f"headers of {size} bytes exceed headers_bytes_max={self._config.headers_bytes_max}: send less"
            )
        if b"transfer-encoding" in headers and b"content-length" in headers:
            raise _refuse(400, "a body has a Content-Length or a Transfer-Encoding, not both")
        if scope["http_version"] not in ("1.0", "1.1"):
            raise _refuse(505, "expected HTTP/1.1")
        return headers

    def _check_host(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """A page of another site that has its name point here (DNS rebinding) sends that name as the Host."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if b"host" in headers or scope["http_version"] != "1.0":  # a browser always sends one
            self._check_host_name(host)
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin.decode("latin-1").lower(), host, scope.get("scheme", "http"))

    def _check_host_name(self, host: str) -> None:
        name = _split_host(host)
        if name and ("*" in self._hosts or host in self._hosts or name in self._hosts):
            return
        if name and (_is_loopback(name) if self._is_loopback else not self._hosts or name == self._own_host):
            return
        text = "the Host of this request is not served here: call it by its address, or allow the name (allowed_hosts)"
        raise Refusal(421, fail(ErrorKind.DENIED, text, reason="host"))

    def _check_origin(self, origin: str, host: str, scheme: str) -> None:
        if "*" in self._origins or origin in self._origins:
            return
        try:
            parts = urlsplit(origin)
            name = parts.hostname if parts.scheme in ("http", "https") and "@" not in parts.netloc else None
        except ValueError:
            name = None
        is_ours = origin == f"{scheme}://{host}" or (self._is_loopback and name is not None and _is_loopback(name))
        if not (name and is_ours):
            text = "pages of this Origin may not call: allow it (allowed_origins), or call without a browser"
            raise Refusal(403, fail(ErrorKind.DENIED, text, reason="origin"))

    def _identify(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        caller = self._tokens().find_bearer(authorization)  # asked each time: a reload changes them
        if caller is not None:
            return caller  # before any rate: a stranger behind the same address does not lock it out
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() == "bearer" and token:
            self._count_wrong(scope)
        what = "it is not one of ours" if token else "send Authorization: Bearer TOKEN"
        challenge = 'Bearer realm="callyard"' + (', error="invalid_token"' if token else "")
        failure = fail(ErrorKind.DENIED, f"a token is needed: {what}", reason="token")
        raise Refusal(401, failure, {"www-authenticate": challenge})

    def _count_wrong(self, scope: Scope) -> None:
        self.wrong_tokens += 1
        wait_ms = self._wrong.ask(_name_peer(scope), self._gateway.now_ms())
        if wait_ms > 0:
            failure = fail(ErrorKind.RATE_LIMITED, "too many wrong tokens from this address", retry_after_ms=wait_ms)
            raise Refusal(429, failure)

    def _check_body(self, headers: Mapping[bytes, bytes]) -> None:
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b""):
            raise Refusal(
                415,
                fail(ErrorKind.SCHEMA, "compressed bodies are not taken: send it without Content-Encoding"),
                {"accept-encoding": "identity"},
            )
        length = headers.get(b"content-length", b"0").strip()
        if not length.isdigit() or len(length) > 18:
            raise _refuse(400, "Content-Length must be a whole number")
        if int(length) > self._config.body_bytes_max:
            raise self._too_large(int(length))
        if int(length) == 0 and b"content-type" not in headers:
            return  # what has no body has no type
        kind, *parameters = headers.get(b"content-type", b"").decode("latin-1").lower().split(";")
        charsets = [
            value.strip(" '\"") for name, _, value in (p.partition("=") for p in parameters) if "charset" in name
        ]
        if kind.strip() != "application/json" or any(charset not in ("utf-8", "utf8") for charset in charsets):
            raise _no_json()

    @asynccontextmanager
    async def _own_room(self, state: Mapping[str, Any], *, has_come: bool) -> AsyncIterator[None]:
        """While a body is on its way it holds a permit. Of one token only some may: its further ones wait for these, so
        that bodies that do not come take the permits of nobody else."""
        caller: Caller = state["caller"]
        if has_come or not caller.token:
            yield
            return
        share = max(1, self._config.jobs_max // TOKENS_SHARE)
        room = self._rooms.setdefault((caller.tenant, caller.token), asyncio.Semaphore(share))
        limit_ms = self._gateway.queue_wait_ms_max
        waited_ms = self._gateway.now_ms() - state["received_at_ms"]
        try:
            async with asyncio.timeout(max(0, limit_ms - waited_ms) / 1_000 if room.locked() else None):
                await room.acquire()
        except TimeoutError:
            raise _waited_too_long(limit_ms) from None
        try:
            yield
        finally:
            room.release()

    async def _read_body(self, receive: Receive, *, has_come: bool) -> bytes:
        """`has_come`: all of it is here, so that no clock has to run."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(None if has_come else self._config.receive_ms_max / 1_000):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._config.body_bytes_max:
                        raise self._too_large(size)
                    parts.append(part)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            text = f"the body took longer than {self._config.receive_ms_max} ms to come"
            raise Refusal(
                408, fail(ErrorKind.DEADLINE, text, limit="receive_ms_max"), {"connection": "close"}
            ) from None

    def _too_large(self, size: int) -> Refusal:
        limit = self._config.body_bytes_max
        text = f"a body of {size} bytes or more exceeds body_bytes_max={limit}: send less"
        return Refusal(413, fail(ErrorKind.SCHEMA, text, limit=limit), {"connection": "close"})


async def admit(gateway: Gateway, connection: Lost, received_at_ms: int) -> Permit:
    """A permit, or why there is none: the wait counts as queueing. Raises Refusal. Source: D57."""
    permit = None if gateway.is_draining else gateway.jobs.try_acquire()
    if permit is not None:  # mostly nobody waits, and then there is nothing to time
        return permit
    limit_ms = gateway.queue_wait_ms_max
    waited_ms = gateway.now_ms() - received_at_ms
    try:
        async with asyncio.timeout(max(0, limit_ms - waited_ms) / 1_000):
            return await gateway.admit(connection)
    except TimeoutError:
        raise _waited_too_long(limit_ms) from None
    except CallError as error:
        raise Refusal(503, error.failure, {"connection": "close"}) from None  # shutting down


@contextmanager
def ended_with(connection: Lost) -> Iterator[None]:
    """Cancel what runs inside when the connection is lost; outside, that is ClientGone. Source: D41, D56, R111."""
    task = asyncio.current_task()
    assert task is not None
    is_lost = False

    def cancel() -> None:
        nonlocal is_lost
        is_lost = True
        task.cancel()

    forget = connection.on_lost(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if is_lost and task.uncancel() <= 0:
            raise ClientGone from None
        raise
    finally:
        forget()


class _NeverLost:
    """Of a server that cannot tell."""

    def on_lost(self, then: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def to_envelope(failure: CallFailure, call_id: str = "") -> dict[str, Any]:
    """As every surface shows an end, for a caller outside this machine."""
    return DispatchError(CallId(call_id), failure).to_json(remote=True)


def retry_after(failure: CallFailure) -> dict[str, str]:
    """The header that says when to try again, where the failure knows."""
    wait_ms = failure.details.get("retry_after_ms")
    return {} if not isinstance(wait_ms, int) else {"retry-after": str(max(1, -(-wait_ms // 1_000)))}


async def answer_refusal(scope: Scope, send: Send, refusal: Refusal) -> None:
    envelope = to_envelope(refusal.failure)
    body: dict[str, Any] = {"error": envelope}
    if scope["path"] in _JSONRPC_PATHS:
        code = envelope["jsonrpc_code"]
        body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": envelope["message"], "data": envelope}}
    payload = msgspec.json.encode(body)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(payload)),
        **retry_after(refusal.failure),
        **refusal.headers,
    }
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": payload})


def _refuse(status: int, text: str) -> Refusal:
    """A request whose end, or whose meaning to somebody else, is not sure: nothing more is read of its connection."""
    return Refusal(status, fail(ErrorKind.SCHEMA, text), {"connection": "close"})


def _waited_too_long(limit_ms: int) -> Refusal:
    text = f"waited longer than queue_wait_ms_max={limit_ms} for room"
    return Refusal(503, fail(ErrorKind.DEADLINE, text, limit="queue_wait_ms_max", retry_after_ms=1_000))


def _no_json() -> Refusal:
    text = "expected a body of JSON in UTF-8: send Content-Type: application/json"
    return Refusal(415, fail(ErrorKind.SCHEMA, text), {"accept": "application/json"})


def _overloaded() -> Refusal:
    failure = fail(ErrorKind.UNAVAILABLE, "too many connections", retry_after_ms=1_000)
    return Refusal(503, failure, {"connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then what happens after it."""
    messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _split_host(host: str) -> str:
    """The name or address of a Host header, without its port; empty: it is none."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, "0"
    if not (port.isascii() and port.isdigit()):
        return ""
    return name.removeprefix("[").removesuffix("]")


@lru_cache(maxsize=256)
def _is_loopback(name: str) -> bool:
    """An address cannot be made to point elsewhere; of names this is the one that browsers keep to the machine."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name_peer(scope: Scope) -> str:
    """The address that wrong tokens are counted by: of IPv6 the network, since a host has as many as it likes."""
    client = scope.get("client")
    if not client:
        return ""
    address: str = client[0]
    with contextlib.suppress(ValueError):
        if ":" in address:
            return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address
