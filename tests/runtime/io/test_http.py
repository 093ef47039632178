"""The provider `http` against servers on the loopback address, which the tests allow by option."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from callyard.worker.io.config import IoConfig
from callyard.worker.io.http import HttpProvider
from callyard.worker.io.port import IoFailure, Reply

from .conftest import Serve, perform, refusal

LOOPBACK = {"allow_private": ["127.0.0.0/8", "::1/128"]}
WAIT_S = 30.0


def make(settings: dict[str, Any] | None = None, *, sandboxed: bool = False) -> HttpProvider:
    config = IoConfig.from_mapping({"http": LOOPBACK if settings is None else settings}).http
    return HttpProvider(config, sandboxed=sandboxed)


@pytest.fixture
async def http() -> AsyncIterator[HttpProvider]:
    provider = make()
    yield provider
    await provider.close()


async def echo(request: web.Request) -> web.Response:
    found = {
        "method": request.method,
        "path": request.path_qs,
        "headers": dict(request.headers),
        "body": (await request.read()).decode("latin-1"),
    }
    return web.json_response(found, headers={"X-One": "1"})


def url_of(server: TestServer, path: str = "/", host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.port}{path}"


def head_of(reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(reply.result)
    return found


def echoed(reply: Reply) -> dict[str, Any]:
    assert reply.body is not None
    found: dict[str, Any] = msgspec.json.decode(reply.body)
    return found


# --- plain requests ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42")
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_methods_headers_and_bodies(serve: Serve, http: HttpProvider, method: str) -> None:
    server = await serve(echo)
    request = {"url": url_of(server, "/a%2Fb?x=%26&y=1#frag"), "headers": [["X-Mine", "ä"], ["Accept", "text/x"]]}
    reply = await perform(http, method, request, b"\x00\xffbody" if method != "GET" else None)
    head, seen = head_of(reply), echoed(reply)
    assert head["status"] == 200
    assert ["X-One", "1"] in head["headers"]
    assert (seen["method"], seen["path"]) == (method, "/a%2Fb?x=%26&y=1")
    assert seen["body"] == ("\x00\xffbody" if method != "GET" else "")
    assert (seen["headers"]["X-Mine"], seen["headers"]["Accept"]) == ("ä", "text/x")
    assert seen["headers"]["User-Agent"] == "callyard"


async def test_head_has_no_body(serve: Serve, http: HttpProvider) -> None:
    server = await serve(echo)
    assert (await perform(http, "HEAD", {"url": url_of(server)})).body == b""


async def test_a_large_body_goes_and_comes(serve: Serve, http: HttpProvider) -> None:
    async def mirror(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    server = await serve(mirror)
    body = bytes(range(256)) * (4 * 1024 * 4)
    assert (await perform(http, "POST", {"url": url_of(server)}, body)).body == body


async def test_only_reads_are_kept_and_only_good_ones(serve: Serve, http: HttpProvider) -> None:
    async def status(request: web.Request) -> web.Response:
        return web.Response(status=int(request.path[1:]), headers={"Cache-Control": request.query.get("c", "x")})

    server = await serve(status)
    assert [http.is_read_only(method, b"") for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE")] == [
        *(True, True, True, False, False, False)
    ]
    for path, kept in [("/200", True), ("/404", False), ("/503", False), ("/200?c=no-store", False)]:
        assert (await perform(http, "GET", {"url": url_of(server, path)})).keep is kept


async def test_cookies_are_not_kept_between_requests(serve: Serve, http: HttpProvider) -> None:
    async def cookie(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("Cookie", ""), headers={"Set-Cookie": "a=1"})

    server = await serve(cookie)
    for _ in range(2):
        assert (await perform(http, "GET", {"url": url_of(server)})).body == b""


async def test_connections_are_used_again(serve: Serve, http: HttpProvider) -> None:
    async def peer(request: web.Request) -> web.Response:
        assert request.transport is not None
        return web.Response(text=str(request.transport.get_extra_info("peername")[1]))

    server = await serve(peer)
    ports = {(await perform(http, "GET", {"url": url_of(server)})).body for _ in range(3)}
    assert len(ports) == 1


# --- caps -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42")
async def test_a_response_is_read_to_the_cap_and_no_further(serve: Serve) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for _ in range(10_000):
                await response.write(b"x" * 65_536)
                sent += 65_536
        except ConnectionError:
            pass
        return response

    server = await serve(endless)
    http = make({**LOOPBACK, "max_bytes": "128KiB"})
    failure = await refusal(perform(http, "GET", {"url": url_of(server)}))
    assert (failure.kind, failure.details["limit"], failure.details["max_bytes"]) == ("result", "max_bytes", 131_072)
    assert sent < 600 * 1024 * 1024
    await http.close()


@pytest.mark.requirement("X42")
async def test_the_cap_counts_what_was_decompressed(serve: Serve) -> None:
    bomb = gzip.compress(bytes(64 * 1024 * 1024))

    async def zipped(request: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    server = await serve(zipped)
    http = make({**LOOPBACK, "max_bytes": "1MiB"})
    failure = await refusal(perform(http, "GET", {"url": url_of(server)}))
    assert (failure.kind, failure.details["limit"]) == ("result", "max_bytes")
    await http.close()


async def test_a_request_may_ask_for_less_than_the_cap_and_not_for_more(serve: Serve) -> None:
    async def body(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 1_000)

    server = await serve(body)
    http = make({**LOOPBACK, "max_bytes": 1_000})
    assert len((await perform(http, "GET", {"url": url_of(server), "max_bytes": 5_000})).body or b"") == 1_000
    assert (await refusal(perform(http, "GET", {"url": url_of(server), "max_bytes": 999}))).kind == "result"
    await http.close()


@pytest.mark.requirement("X42")
async def test_a_timeout_is_over_all_of_it(serve: Serve, http: HttpProvider) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        await asyncio.sleep(WAIT_S)
        return response

    server = await serve(slow)
    failure = await refusal(perform(http, "GET", {"url": url_of(server, "/?key=secret"), "timeout_ms": 50}))
    assert (failure.kind, failure.retryable, failure.details) == ("timeout", True, {"limit": "timeout_ms"})
    assert "secret" not in failure.message


@pytest.mark.requirement("X42")
async def test_cancelling_closes_the_connection(serve: Serve, http: HttpProvider) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        arrived.set()
        try:
            while True:
                await response.write(b"x")
                await asyncio.sleep(0.01)
        finally:
            left.set()

    server = await serve(slow)
    request = asyncio.create_task(perform(http, "GET", {"url": url_of(server)}))
    async with asyncio.timeout(WAIT_S):
        await arrived.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await left.wait()


# --- who may be reached -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
        *("2130706433", "0x7f000001", "0x7f.1", "127.1", "0177.0.0.1", "017700000001", "127.0.0.1."),
        *("10.0.0.1", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "240.0.0.1"),
        *("[fe80::1]", "[fc00::1]", "[ff02::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
        "①②⑦.⓪.⓪.①",
    ],
)
async def test_nothing_private_is_reached_unless_allowed(serve: Serve, host: str) -> None:
    reached: list[str] = []

    async def note(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    server = await serve(note)
    http = make({})
    failure = await refusal(perform(http, "GET", {"url": f"http://{host}:{server.port}/", "timeout_ms": 20_000}))
    await http.close()
    assert reached == []
    if failure.kind == "schema":  # numbers that are no address as it is written, refused before they are resolved
        assert host.replace(".", "").isdigit()
    else:
        assert failure.kind == "denied"
        assert "not a public address" in failure.message
        assert "allow_private" in failure.message


class Resolver:
    """Stands for the name server: `public.example` and `rebind.example` lead where the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[str, list[list[str]]]) -> None:
        self.asked: list[str] = []
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def getaddrinfo(host: str, port: int, **options: Any) -> Any:
            if host not in names:
                return await real(host, port, **options)
            self.asked.append(host)
            answers = names[host]
            addresses = answers.pop(0) if len(answers) > 1 else answers[0]
            return [
                (
                    socket.AF_INET6 if ":" in address else socket.AF_INET,
                    socket.SOCK_STREAM,
                    6,
                    "",
                    (address, port, 0, 0) if ":" in address else (address, port),
                )
                for address in addresses
            ]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)


@pytest.mark.requirement("X42")
async def test_a_name_is_judged_by_where_it_leads(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve(echo)
    Resolver(monkeypatch, {"inner.example": [["127.0.0.1"]], "mixed.example": [["10.0.0.1", "::ffff:127.0.0.1"]]})
    http = make({"allow": ["*.example"]})
    for host in ("inner.example", "mixed.example"):
        failure = await refusal(perform(http, "GET", {"url": url_of(server, host=host)}))
        assert failure.kind == "denied"
        assert failure.details == {"host": host}
    await http.close()


@pytest.mark.requirement("X42")
async def test_a_name_that_changes_its_mind_leads_nowhere(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each resolution is judged, and the address that was judged is the one that is connected to."""
    server = await serve(echo)
    Resolver(monkeypatch, {"rebind.example": [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.3"]]})
    http = make({"allow_private": ["127.0.0.1/32"]})
    connector = http._client._connect()._connector
    connector._use_dns_cache = False
    assert (await perform(http, "GET", {"url": url_of(server, host="rebind.example"), "headers": []})).body
    for connection in list(connector._conns.values()):
        for protocol, *_ in connection:
            protocol.close()
    failure = await refusal(perform(http, "GET", {"url": url_of(server, host="rebind.example")}))
    assert (failure.kind, "127.0.0.2 is loopback" in failure.message) == ("denied", True)
    await http.close()


@pytest.mark.requirement("X42")
async def test_the_socket_itself_refuses_what_the_resolver_let_through(serve: Serve) -> None:
    server = await serve(echo)
    http = make({})
    found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))
    with pytest.raises(OSError, match=r"127\.0\.0\.1 is loopback"):
        http._client._connect()._open_socket(found)
    await http.close()


@pytest.mark.requirement("X42")
async def test_hosts_by_list_of_the_worker_and_of_the_task(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve(echo)
    Resolver(monkeypatch, {name: [["127.0.0.1"]] for name in ("a.example", "b.example", "c.other")})
    http = make({**LOOPBACK, "allow": ["*.example"]})
    for host, names, permitted in [
        ("a.example", None, True),
        ("c.other", None, False),
        ("a.example", ("a.example",), True),
        ("b.example", ("a.example",), False),
        ("c.other", ("c.other", "*"), False),
        ("a.example", ("*",), True),
        ("a.example", (), False),
    ]:
        request = perform(http, "GET", {"url": url_of(server, host=host)}, names=names)
        if permitted:
            assert (await request).body
        else:
            failure = await refusal(request)
            assert failure.kind == "denied"
            assert f'[io.http] allow = ["{host}"]' in failure.message
    await http.close()


@pytest.mark.requirement("X42")
async def test_under_a_sandbox_nobody_is_reached_without_a_list(serve: Serve) -> None:
    server = await serve(echo)
    http = make(sandboxed=True)
    assert (await refusal(perform(http, "GET", {"url": url_of(server)}))).kind == "denied"
    await http.close()
    listed = make({**LOOPBACK, "allow": ["127.0.0.1"]}, sandboxed=True)
    assert (await perform(listed, "GET", {"url": url_of(server)})).body
    await listed.close()


# --- redirects --------------------------------------------------------------------------------------------------------


async def redirecting(request: web.Request) -> web.Response:
    """`/to/STATUS?LOCATION` redirects; everything else echoes."""
    if request.path.startswith("/to/"):
        return web.Response(status=int(request.path[4:]), headers={"Location": request.query["l"]})
    return await echo(request)


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    ("status", "method", "then", "body"),
    [
        (301, "GET", "GET", ""),
        (302, "POST", "GET", ""),
        (303, "POST", "GET", ""),
        (303, "PUT", "GET", ""),
        (307, "POST", "POST", "body"),
        (308, "PUT", "PUT", "body"),
        (302, "PUT", "PUT", "body"),
    ],
)
async def test_redirects(serve: Serve, http: HttpProvider, status: int, method: str, then: str, body: str) -> None:
    server = await serve(redirecting)
    headers = [["Authorization", "secret"], ["Content-Type", "text/x"]]
    reply = await perform(
        http,
        method,
        {"url": url_of(server, f"/to/{status}?l=/end?a=1"), "headers": headers},
        b"body" if method != "GET" else None,
    )
    seen = echoed(reply)
    assert (seen["method"], seen["path"], seen["body"]) == (then, "/end?a=1", body)
    assert seen["headers"]["Authorization"] == "secret"
    assert (seen["headers"].get("Content-Type") == "text/x") is (then == method)
    assert head_of(reply)["url"] == url_of(server, "/end?a=1")


@pytest.mark.requirement("X42")
@pytest.mark.parametrize("status", [302, 307])
async def test_credentials_do_not_go_along_to_another_origin(serve: Serve, http: HttpProvider, status: int) -> None:
    first, second = await serve(redirecting), await serve(echo)
    headers = [
        *(["Authorization", "secret"], ["Cookie", "secret"], ["X-Api-Key", "secret"], ["X-Anything", "secret"]),
        *(["Accept", "text/x"], ["User-Agent", "me"]),
    ]
    reply = await perform(http, "GET", {"url": url_of(first, f"/to/{status}?l={url_of(second)}"), "headers": headers})
    seen = echoed(reply)["headers"]
    assert "secret" not in seen.values()
    assert (seen["Accept"], seen["User-Agent"]) == ("text/x", "me")


@pytest.mark.requirement("X42")
async def test_a_redirect_into_the_private_net_is_refused(serve: Serve) -> None:
    inner_reached: list[str] = []

    async def inner(request: web.Request) -> web.Response:
        inner_reached.append(request.path)
        return web.Response()

    outer = await serve(redirecting)
    secret = await serve(inner)
    http = make({"allow_private": ["127.0.0.1/32"]})
    for place in (f"http://127.0.0.2:{secret.port}/", f"http://[::ffff:127.0.0.2]:{secret.port}/", "http://10.0.0.1/"):
        failure = await refusal(perform(http, "GET", {"url": url_of(outer, f"/to/302?l={place}")}))
        assert failure.kind == "denied"
    assert inner_reached == []
    await http.close()


@pytest.mark.requirement("X42")
async def test_a_redirect_to_a_host_that_is_not_listed_is_refused(serve: Serve) -> None:
    outer = await serve(redirecting)
    http = make({**LOOPBACK, "allow": ["127.0.0.1"]})
    failure = await refusal(perform(http, "GET", {"url": url_of(outer, f"/to/302?l=http://localhost:{outer.port}/")}))
    assert (failure.kind, failure.details) == ("denied", {"host": "localhost"})
    await http.close()


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("file:///etc/passwd", "denied"),
        ("ftp://127.0.0.1/", "denied"),
        ("http://u:p@127.0.0.1/", "schema"),
        ("http://[", "schema"),
    ],
)
async def test_redirects_to_what_is_no_place(serve: Serve, http: HttpProvider, location: str, kind: str) -> None:
    server = await serve(redirecting)
    assert (await refusal(perform(http, "GET", {"url": url_of(server, f"/to/302?l={location}")}))).kind == kind


@pytest.mark.requirement("X42")
async def test_redirects_are_bounded_and_may_be_left_to_the_function(serve: Serve) -> None:
    hops = 0

    async def loop(request: web.Request) -> web.Response:
        nonlocal hops
        hops += 1
        return web.Response(status=302, headers={"Location": "/again"})

    server = await serve(loop)
    http = make({**LOOPBACK, "redirects_max": 3})
    failure = await refusal(perform(http, "GET", {"url": url_of(server), "redirects_max": 50}))
    assert (failure.kind, failure.details, hops) == ("result", {"limit": "redirects_max"}, 4)
    reply = await perform(http, "GET", {"url": url_of(server), "redirects_max": 0})
    assert head_of(reply)["status"] == 302
    assert hops == 5
    await http.close()


# --- what does not fit, and what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({}, "schema"),
        ({"url": 3}, "schema"),
        ({"url": "http://h/", "proxy": "x"}, "schema"),
        ({"url": "http://h/", "timeout_ms": 0}, "schema"),
        ({"url": "http://h/", "redirects_max": -1}, "schema"),
        ({"url": "/relative"}, "denied"),
        ({"url": "file:///etc/passwd"}, "denied"),
        ({"url": "gopher://h/"}, "denied"),
        ({"url": "http:///x"}, "schema"),
        ({"url": "http://.a/"}, "schema"),
        ({"url": "http://a..b/"}, "schema"),
        ({"url": "http://" + "a" * 70 + ".example/"}, "schema"),
        ({"url": "http://h:99999/"}, "schema"),
        ({"url": "http://user:secret@h/"}, "schema"),
        ({"url": "http://h/" + "x" * 20_000}, "schema"),
        ({"url": "http://h/", "headers": [["Host", "other"]]}, "schema"),
        ({"url": "http://h/", "headers": [["content-length", "3"]]}, "schema"),
        ({"url": "http://h/", "headers": [["Proxy-Authorization", "secret"]]}, "schema"),
        ({"url": "http://h/", "headers": [["X-A", "secret\r\nX-B: 1"]]}, "schema"),
        ({"url": "http://h/", "headers": [["X-A\r\nX-B", "secret"]]}, "schema"),
        ({"url": "http://h/", "headers": [["X A", "secret"]]}, "schema"),
        ({"url": "http://h/", "headers": [["X-A", "secret\0"]]}, "schema"),
        ({"url": "http://h/", "headers": [["X-A", "secret" * 10_000]]}, "schema"),
        ({"url": "http://h/", "headers": [["X-A", "secret"]] * 200}, "schema"),
    ],
)
async def test_requests_that_are_refused_before_anything_is_sent(
    http: HttpProvider, request_: dict[str, Any], kind: str
) -> None:
    failure = await refusal(perform(http, "GET", request_))
    assert failure.kind == kind
    assert "secret" not in failure.message + repr(failure.details)


async def test_unknown_methods(http: HttpProvider) -> None:
    for method in ("TRACE", "CONNECT", "get", "GET /\r\n"):
        assert (await refusal(perform(http, method, {"url": "http://h/"}))).kind == "schema"


@pytest.fixture
async def raw_server() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that answers every connection with the bytes in the list, then closes it."""
    answer: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(answer))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], answer


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"", "connection_lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "connection_lost"),
        (b"SSH-2.0-x\r\n\r\n", "not_http"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "not_http"),
    ],
)
async def test_answers_that_are_not_whole(
    http: HttpProvider, raw_server: tuple[int, list[bytes]], answer: bytes, cause: str
) -> None:
    port, answers = raw_server
    answers.append(answer)
    headers = [["Authorization", "secret"]]
    failure = await refusal(perform(http, "GET", {"url": f"http://127.0.0.1:{port}/?k=secret", "headers": headers}))
    assert (failure.kind, failure.details["cause"], failure.retryable) == ("unavailable", cause, True)
    assert "secret" not in failure.message + repr(failure.details)
    post = await refusal(perform(http, "POST", {"url": f"http://127.0.0.1:{port}/"}, b"x"))
    assert (post.kind, post.retryable) == ("unavailable", False)  # it may have been done


Talk = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[str]:
    """The URL of a server that calls `talk(number of the connection from 0, …)` and then closes the connection."""
    numbers = itertools.count()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await talk(next(numbers), reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a%20b?c=d e#f"


@pytest.mark.parametrize(
    ("method", "headers", "body", "expected"),
    [
        ("GET", [], None, ["Accept", "User-Agent: callyard"]),
        ("GET", [["uSER-agent", "me"], ["X", "1"], ["X", "ä"]], None, ["Accept", "uSER-agent: me", "X: 1", "X: ä"]),
        ("POST", [], b"ab", ["Accept", "Content-Length: 2", "Content-Type: application/octet-stream"]),
        ("POST", [["content-type", "text/x"]], b"ab", ["content-type: text/x", "Content-Length: 2"]),
        ("DELETE", [], None, ["Content-Length: 0"]),
    ],
)
async def test_what_is_sent(
    http: HttpProvider, method: str, headers: list[list[str]], body: bytes | None, expected: list[str]
) -> None:
    sent = b""

    async def talk(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        sent = await reader.readuntil(b"\r\n\r\n")
        sent += await reader.readexactly(len(body or b""))
        writer.write(OK)
        await writer.drain()

    async with talking(talk) as url:
        assert (await perform(http, method, {"url": url, "headers": headers}, body)).body == b"ok"
        await http.close()
    head, _, rest = sent.partition(b"\r\n\r\n")
    first, host, *lines = head.decode().split("\r\n")
    assert first == f"{method} /a%20b?c=d+e HTTP/1.1"
    assert host == f"Host: {url.split('/')[2]}"
    assert rest == (body or b"")
    for one in expected:
        assert one in lines if ":" in one else any(line.startswith(f"{one}: ") for line in lines)
    names = [line.partition(":")[0].lower() for line in lines if not line.startswith("X: ")]
    assert len(set(names)) == len(names)
    assert ("content-length" in names) is (method != "GET")


async def test_a_connection_that_is_closed_just_then_is_replaced_for_what_may_be_repeated(http: HttpProvider) -> None:
    async def talk(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")  # and closes

    async with talking(talk) as url:
        for method, kind in (("GET", ""), ("POST", "unavailable"), ("PUT", ""), ("PUT", "")):
            if kind:
                assert (await refusal(perform(http, method, {"url": url}))).details["cause"] == "connection_lost"
                assert (await perform(http, "GET", {"url": url})).body == b"ok"  # on a new connection
            else:
                assert (await perform(http, method, {"url": url})).body == b"ok"
        await http.close()


async def test_interim_answers_are_passed_over(http: HttpProvider, raw_server: tuple[int, list[bytes]]) -> None:
    port, answers = raw_server
    answers += [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK]
    reply = await perform(http, "GET", {"url": f"http://127.0.0.1:{port}/"})
    assert (head_of(reply)["status"], reply.body) == (200, b"ok")


async def test_an_answer_to_half_a_request_ends_the_connection(http: HttpProvider) -> None:
    answered, closed = asyncio.Event(), asyncio.Event()

    async def talk(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await answered.wait()  # what the system does not take waits at the other side
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        closed.set()

    async with talking(talk) as url, asyncio.timeout(WAIT_S):
        assert (await perform(http, "POST", {"url": url}, bytes(32 << 20))).body == b"ok"
        answered.set()
        await closed.wait()
        await http.close()


async def test_nobody_listens_and_nobody_has_that_name(http: HttpProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        failure = await refusal(perform(http, "POST", {"url": f"http://127.0.0.1:{free.getsockname()[1]}/"}))
    assert (failure.kind, failure.details["cause"], failure.retryable) == ("unavailable", "connect", True)

    async def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    failure = await refusal(perform(http, "GET", {"url": "http://nowhere.example/"}))
    assert (failure.kind, failure.details["cause"]) == ("unavailable", "dns")
    assert "nowhere.example" in failure.message


async def test_headers_that_are_no_utf8_arrive(http: HttpProvider, raw_server: tuple[int, list[bytes]]) -> None:
    port, answers = raw_server
    answers.append(b"HTTP/1.1 200 OK\r\nX: a\xffb\r\nContent-Length: 0\r\n\r\n")
    reply = await perform(http, "GET", {"url": f"http://127.0.0.1:{port}/"})
    assert ["X", "a\N{REPLACEMENT CHARACTER}b"] in head_of(reply)["headers"]


async def test_without_aiohttp_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(IoFailure, match=r"callyard\[http\]"):
        await perform(make(), "GET", {"url": "http://h/"})
