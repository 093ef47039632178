"""What strangers send to an HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from callyard.errors import UsageError
from callyard.functions.registry import Registry
from callyard.serve.bound import bind_address
from callyard.serve.config import Address
from callyard.serve.gateway import Caller
from callyard.serve.guard import Refusal
from callyard.serve.kept import READING_BYTES_MAX, KeptResults
from callyard.serve.listener import Listener, ListenerLimits, PeerWatch

from .http_world import Peer, World, on_both_loops, request_bytes, served, token, until


class Tools(Registry):
    def __init__(self) -> None:
        super().__init__()
        self.ran = 0
        self.held = 0
        self.release = asyncio.Event()

        @self.tool(idempotent=True)
        async def hold() -> str:
            self.held += 1
            await self.release.wait()
            return "held"

        @self.tool(idempotent=True)
        async def add(a: int, b: int = 1) -> int:
            self.ran += 1
            return a + b

        @self.tool()
        async def long(n: int) -> str:
            return "x" * n

        @self.tool()
        async def any_value(value: Any = None) -> int:
            self.ran += 1
            return len(value) if isinstance(value, list | dict | str) else 0


ADD = request_bytes("POST", "/tools/add", {"a": 1})


async def still_answers(world: World) -> None:
    assert (await world.ask("POST", "/tools/add", {"a": 1})).json == 2


# --- slow ones ------------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D36")
async def test_a_header_that_trickles_in_is_cut_off() -> None:
    async with served(Tools(), limits=ListenerLimits(header_ms=300)) as world:
        peer = await world.connect()
        trickling = asyncio.create_task(
            trickle(peer, b"POST /tools/add HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 999)
        )
        answer = await peer.ended()
        trickling.cancel()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert world.listener.statistics().timed_out == 1
        await still_answers(world)


async def trickle(peer: Peer, data: bytes) -> None:
    for byte in data:
        try:
            await peer.send(bytes([byte]))
        except ConnectionError:
            return
        await asyncio.sleep(0.01)


@on_both_loops
@pytest.mark.requirement("D36")
async def test_who_sends_nothing_is_closed_and_not_told() -> None:
    async with served(Tools(), limits=ListenerLimits(header_ms=200, idle_ms=1_000)) as world:
        assert await (await world.connect()).ended() == b""
        kept = await world.connect()
        await kept.send(ADD)
        assert (await kept.reply()).status == 200
        assert await kept.ended() == b""  # idle after its answer
        for _ in range(3):
            blank = await world.connect()
            await blank.send(b"\r\n\r\n")
            assert (await blank.ended())[:12] in (b"", b"HTTP/1.1 408", b"HTTP/1.1 400")


@on_both_loops
@pytest.mark.requirement("D36", "R110")
async def test_a_body_that_does_not_come_gives_its_permit_back() -> None:
    async with served(Tools(), jobs_max=1, receive_ms_max=200) as world:
        peer = await world.connect()
        await peer.send(request_bytes("POST", "/tools/add", {"a": 1})[:-3])
        reply = await peer.reply()
        assert (reply.status, reply.json["error"]["details"]) == (408, {"limit": "receive_ms_max"})
        await still_answers(world)


@on_both_loops
@pytest.mark.requirement("D36")
async def test_who_does_not_read_its_answer_is_cut_off() -> None:
    async with served(Tools(), limits=ListenerLimits(write_ms=300)) as world:
        peer = await world.connect()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await peer.send(request_bytes("POST", "/tools/long", {"n": 8_000_000}))
        await until(lambda: world.listener.statistics().timed_out == 1)
        await until(lambda: world.listener.connections == 0)
        await still_answers(world)


# --- large ones -----------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D36")
@pytest.mark.parametrize("flood", [b"x: " + b"y" * 200_000, b"x: y\r\n" * 40_000, b"x: " + b"y" * 33_000 + b"\r\n\r\n"])
async def test_large_headers_are_refused(flood: bytes) -> None:
    async with served(Tools()) as world:
        peer = await world.connect()
        await peer.send(b"GET /tools HTTP/1.1\r\nhost: localhost\r\n" + flood)
        assert (await peer.reply()).status == 431
        await still_answers(world)


@on_both_loops
@pytest.mark.requirement("D36", "R110")
async def test_a_body_that_says_that_it_is_too_large_is_refused_unread() -> None:
    async with served(Tools(), jobs_max=1, body_bytes_max=2_000) as world:
        permit = await world.gateway.admit("somebody")  # it needs none
        peer = await world.connect()
        await peer.send(request_bytes("POST", "/rpc", b" " * 900_000))
        reply = await peer.reply()
        assert (reply.status, reply.json["error"]["data"]["details"]) == (413, {"limit": 2_000})
        assert await peer.ended() == b""
        permit.release()


@on_both_loops
@pytest.mark.requirement("D36")
async def test_a_body_that_does_not_say_its_size_is_counted() -> None:
    async with served(Tools(), jobs_max=1, body_bytes_max=100_000) as world:
        peer = await world.connect()
        await peer.send(
            request_bytes(
                "POST", "/tools/add", headers={"content-type": "application/json", "transfer-encoding": "chunked"}
            )
        )
        flooding = asyncio.create_task(flood_chunks(peer))
        assert (await peer.reply()).status == 413
        await peer.ended()
        await flooding
        await still_answers(world)


async def flood_chunks(peer: Peer) -> None:
    try:
        for _ in range(10_000):
            await peer.send(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
    except ConnectionError:
        pass  # cut off, as it should be
    else:
        pytest.fail("80 MB were taken")


# --- malformed ones -------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D36")
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (b"GET /tools HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET /tools HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET /to ols HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (ADD.replace(b"content-length: 8", b"content-length: -8"), b"400"),
        (ADD.replace(b"content-length: 8", b"content-length: 8\r\ncontent-length: 9"), b"400"),
        (ADD.replace(b"content-length: 8", b"content-length: 8\r\ntransfer-encoding: chunked"), b"400"),
        (ADD.replace(b"content-length: 8", b"transfer-encoding: gzip"), b"501"),
        (ADD.replace(b"content-length: 8", b"transfer-encoding: chunked")[:-8] + b"zz\r\n{}\r\n0\r\n\r\n", b"400"),
        (ADD.replace(b"content-length: 8", b"transfer-encoding: chunked")[:-8] + b"3\r\n{}}}}\r\n0\r\n\r\n", b"400"),
        (ADD.replace(b"content-type", b"authorization: a\r\nauthorization: b\r\ncontent-type"), b"400"),
    ],
)
async def test_what_is_no_http_is_answered_and_closed(data: bytes, status: bytes) -> None:
    tools = Tools()
    async with served(tools) as world:
        peer = await world.connect()
        await peer.send(data)
        if b"authorization" in data or b"host: b" in data:
            reply = await peer.reply()
            assert str(reply.status).encode() == status
        else:
            assert (await peer.ended()).startswith(b"HTTP/1.1 " + status)
        assert tools.ran == 0
        await still_answers(world)


@on_both_loops
@pytest.mark.requirement("D36")
async def test_a_wrong_chunk_behind_an_answer_closes_the_connection() -> None:
    async with served(Tools(), body_bytes_max=1_024) as world:
        peer = await world.connect()
        head = ADD.replace(b"content-length: 8", b"transfer-encoding: chunked")[:-8]
        await peer.send(head + b"800\r\n" + b" " * 0x800 + b"\r\n")
        assert (await peer.reply()).status == 413
        await peer.send(b"zz\r\n\r\n" + ADD)
        assert b"200 OK" not in await peer.ended()
        await still_answers(world)


@on_both_loops
@pytest.mark.requirement("D36")
async def test_requests_in_one_go_are_answered_in_order() -> None:
    tools = Tools()
    async with served(tools) as world:
        peer = await world.connect()
        await peer.send(b"".join(request_bytes("POST", "/tools/add", {"a": n}) for n in range(50)))
        assert [(await peer.reply()).json for _ in range(50)] == [n + 1 for n in range(50)]
        assert world.listener.statistics().requests == 50


@on_both_loops
@pytest.mark.requirement("D36")
async def test_http_1_0() -> None:
    async with served(Tools()) as world:
        for headers in ({}, {"host": ""}):
            peer = await world.connect()
            await peer.send(request_bytes("POST", "/tools/add", {"a": 1}, headers, version="1.0"))
            assert (await peer.reply()).json == 2
            assert await peer.ended() == b""
        evil = await world.connect()
        await evil.send(request_bytes("GET", "/tools", headers={"host": "evil.example"}, version="1.0"))
        assert (await evil.reply()).status == 421


@on_both_loops
@pytest.mark.requirement("D36")
async def test_who_asks_before_it_sends_is_told_to_go_on_or_not() -> None:
    async with served(Tools()) as world:
        peer = await world.connect()
        whole = request_bytes("POST", "/tools/add", {"a": 1}, {"expect": "100-continue"})
        await peer.send(whole[:-8])
        assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await peer.send(whole[-8:])
        assert (await peer.reply()).json == 2
        refused = await world.connect()
        await refused.send(whole[:-8].replace(b"application/json", b"text/plain"))
        assert (await refused.reply()).status == 415


@pytest.mark.requirement("D36")
@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/tools/add", {"content-type": "text/plain"}, 415),
        ("POST", "/tools/add", {"content-type": ""}, 415),
        ("POST", "/rpc", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/rpc", {"content-type": "application/json; charset=latin-1"}, 415),
        ("POST", "/tools/add", {"content-type": "application/json; charset=UTF-8"}, 200),
        ("POST", "/tools/add", {"content-encoding": "gzip"}, 415),
        ("POST", "/tools/add", {"content-encoding": "identity"}, 200),
        ("PUT", "/tools/add", {}, 405),
        ("GET", "/rpc", {}, 405),
        ("GET", "/nothing", {}, 404),
        ("POST", "/tools/add/more", {}, 404),
        ("POST", "/tools/none", {}, 404),
        ("GET", "/tools", {"upgrade": "websocket", "connection": "upgrade"}, 200),
    ],
)
async def test_what_is_not_taken_says_why(method: str, path: str, headers: dict[str, str], status: int) -> None:
    async with served(Tools()) as world:
        peer = await world.connect()
        await peer.send(request_bytes(method, path, {"a": 1} if method in ("POST", "PUT") else None, headers))
        reply = await peer.reply()
        assert reply.status == status
        if status >= 400:
            assert set(reply.json) == {"error"} if path != "/rpc" else {"jsonrpc", "id", "error"}
        if status == 405:
            assert "POST" in reply.headers["allow"]


# --- foreign pages --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D36", "D33")
@pytest.mark.parametrize(
    ("settings", "host", "origin", "status"),
    [
        ({}, "127.0.0.1", None, 200),
        ({}, "localhost:8700", None, 200),
        ({}, "[::1]:8700", None, 200),
        ({}, "LOCALHOST", None, 200),
        ({}, "127.0.0.2", None, 200),
        ({}, "10.0.0.1", None, 421),
        ({}, "evil.example", None, 421),
        ({}, "127.0.0.1.evil.example", None, 421),
        ({}, "evil.example@127.0.0.1", None, 421),
        ({}, "127.0.0.1:80:evil", None, 421),
        ({}, "localhost", "http://localhost:6274", 200),
        ({}, "localhost", "http://127.0.0.1", 200),
        ({}, "localhost", "https://evil.example", 403),
        ({}, "localhost", "null", 403),
        ({}, "localhost", "http://localhost.evil.example", 403),
        ({}, "localhost", "http://evil.example/localhost", 403),
        ({}, "localhost", "http://[", 403),
        ({}, "localhost", "http://evil.example@localhost", 403),
        ({}, "localhost", "//localhost", 403),
        ({}, "localhost", "capacitor://localhost", 403),
        ({"allowed_hosts": ("tools.example",)}, "tools.example:443", None, 200),
        ({"allowed_hosts": ("tools.example",)}, "localhost", None, 200),
        ({"allowed_origins": ("https://app.example",)}, "localhost", "https://app.example", 200),
        ({"allowed_origins": ("https://app.example",)}, "localhost", "https://app.example.evil", 403),
        ({"allowed_origins": ("*",)}, "localhost", "https://any.example", 200),
    ],
)
async def test_hosts_and_origins(settings: dict[str, Any], host: str, origin: str | None, status: int) -> None:
    async with served(Tools(), **settings) as world:
        headers = {"host": host, **({} if origin is None else {"origin": origin})}
        assert (await world.ask("POST", "/tools/add", {"a": 1}, headers)).status == status
        assert (await world.ask("GET", "/healthz", headers=headers)).status == status


@pytest.mark.requirement("D36")
@pytest.mark.parametrize(
    ("allowed", "host", "origin", "status"),
    [
        ((), "anything.example", None, 200),
        ((), "anything.example", "http://anything.example", 200),
        ((), "anything.example", "http://other.example", 403),
        ((), "anything.example", "http://localhost", 403),
        (("tools.example",), "tools.example", None, 200),
        (("tools.example",), "other.example", None, 421),
        (("tools.example",), "localhost", None, 421),
    ],
)
async def test_hosts_and_origins_beyond_the_loopback(
    allowed: tuple[str, ...], host: str, origin: str | None, status: int
) -> None:
    outside = Address("0.0.0.0", 0)
    async with served(Tools(), http=outside, tokens={"a": token("cy_a")}, allowed_hosts=allowed) as world:
        headers = {"host": host, "authorization": "Bearer cy_a", **({} if origin is None else {"origin": origin})}
        assert (await world.ask("GET", "/tools", headers=headers)).status == status


# --- wrong tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D36")
async def test_wrong_tokens_are_slowed_and_right_ones_are_not() -> None:
    async with served(Tools(), tokens={"a": token("cy_a")}) as world:
        statuses = []
        for n in range(40):
            reply = await world.ask("GET", "/tools", headers={"authorization": f"Bearer cy_wrong{n}"})
            statuses.append(reply.status)
        assert statuses[:10] == [401] * 10
        assert 429 in statuses[10:]
        assert (await world.ask("GET", "/tools", headers={"authorization": "Bearer cy_a"})).status == 200
        assert world.gate.guarded.wrong_tokens == 40
        for odd in (
            "Basic cy_a",
            "Bearer",
            "Bearer  ",
            "cy_a",
            "Bearer cy_a cy_a",
            "Bearer \xff\xfe",
            "Bearer " + "x" * 9_000,
        ):
            assert (await world.ask("GET", "/tools", headers={"authorization": odd})).status in (401, 429)


@pytest.mark.requirement("D36")
async def test_wrong_tokens_of_many_addresses_need_a_bounded_memory() -> None:
    async with served(Tools(), tokens={"a": token("cy_a")}) as world:
        guard = world.gate.guarded
        for n in range(20_000):
            client = (f"10.{n >> 16}.{(n >> 8) & 255}.{n & 255}", 1)
            scope = {"type": "http", "client": client}
            with contextlib.suppress(Refusal):
                guard._count_wrong(scope)
        assert len(guard._wrong) <= 4_096


# --- JSON -----------------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D36", "D26")
@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 2_000_000,
        b'{"value":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}",
        b'{"value":' * 400_000 + b"1" + b"}" * 400_000,
        b'{"value":' + b"9" * 3_000_000 + b"}",
        b'{"value":1e' + b"9" * 3_000_000 + b"}",
        b'{"value":"' + b"\\ud800" * 500_000 + b'"}',
        b'{"value":"' + b"\xff" * 3_000_000 + b'"}',
        b"{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}",
        b"{" + b",".join(b'"value":1' for _ in range(300_000)) + b"}",
    ],
    ids=["open", "deep", "deep objects", "long integer", "exponent", "surrogates", "no UTF-8", "keys", "one key"],
)
async def test_json_bombs(bomb: bytes) -> None:
    tools = Tools()
    async with served(tools) as world:
        reply = await world.ask("POST", "/tools/any_value", bomb)
        assert (reply.status, reply.json["error"]["kind"]) == (422, "schema")
        assert len(reply.body) < 100_000
        for body in (bomb, b'{"jsonrpc":"2.0","id":1,"method":"any_value","params":' + bomb + b"}"):
            answer = (await world.ask("POST", "/rpc", body)).json
            assert answer["error"]["code"] in (-32700, -32600, -32602)
        assert tools.ran == 0
        await still_answers(world)


@pytest.mark.requirement("D36", "R110")
async def test_a_batch_of_a_million_is_refused_whole() -> None:
    tools = Tools()
    async with served(tools) as world:
        reply = await world.ask("POST", "/rpc", b"[" + b"{}," * 1_300_000 + b"{}]")
        assert (reply.status, reply.json["error"]["code"]) == (400, -32600)
        one = {"jsonrpc": "2.0", "id": 1, "method": "add", "params": {"a": 1}}
        assert (await world.ask("POST", "/rpc", [one] * 101)).json["error"]["code"] == -32600
        assert tools.ran == 0


# --- many ones ------------------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D36", "R110")
async def test_beyond_the_limit_only_health_is_answered_and_then_nothing() -> None:
    limits = ListenerLimits(connections_max=4, connections_spare=2, idle_ms=60_000)
    tools = Tools()
    async with served(tools, limits=limits) as world:
        busy = [await world.connect() for _ in range(4)]
        for peer in busy:
            await peer.send(request_bytes("POST", "/tools/hold", {}))
        await until(lambda: tools.held == 4)
        spare = await world.connect()
        await spare.send(request_bytes("GET", "/healthz"))
        assert (await spare.reply()).status == 200
        await spare.send(request_bytes("POST", "/tools/add", {"a": 1}))
        refused = await spare.reply()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        more = [await world.connect() for _ in range(2)]
        beyond = [await world.connect() for _ in range(3)]
        answers = [await peer.ended() for peer in beyond]
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        assert world.listener.statistics().refused >= 3
        tools.release.set()
        assert [(await peer.reply()).json for peer in busy] == ["held"] * 4
        for peer in (*busy, *more):
            await peer.close()
        await until(lambda: world.listener.connections == 0)
        await still_answers(world)


@on_both_loops
@pytest.mark.requirement("D36", "R110")
async def test_strangers_that_say_nothing_make_room_for_who_asks() -> None:
    """Who is idle for longest goes, never one whose request is under way or whose answer is not out yet."""
    tools = Tools()
    async with served(tools, limits=ListenerLimits(connections_max=4, connections_spare=1)) as world:
        busy = await world.connect()
        await busy.send(request_bytes("POST", "/tools/hold", {}))
        await until(lambda: tools.held == 1)
        known = await world.connect()
        await known.send(ADD)
        assert (await known.reply()).status == 200
        strangers = []
        for _ in range(20):
            strangers.append(await world.connect())
            await still_answers(world)
        assert await known.ended() == b""  # idle after its answer
        assert await strangers[0].ended() == b""
        assert world.listener.statistics().refused == 0
        assert world.listener.dropped >= 18
        tools.release.set()
        assert (await busy.reply()).json == "held"
        assert set(world.listener._idle) <= world.listener._state.connections
    assert not world.listener._idle


@on_both_loops
@pytest.mark.requirement("D36", "R125")
async def test_a_thousand_idle_connections_hurt_nobody() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4_096:
        pytest.skip("2,000 files cannot be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4_096), hard))
    async with served(Tools(), limits=ListenerLimits(header_ms=60_000)) as world:
        for _ in range(20):
            await asyncio.gather(*(world.connect() for _ in range(50)))
        await until(lambda: world.listener.connections == 1_000)
        for _ in range(20):
            await still_answers(world)
        assert world.listener.statistics().refused == 0
        for peer in world.peers:
            peer.vanish()
        await until(lambda: world.listener.connections == 0)


# --- the listener itself --------------------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("R111")
async def test_a_peer_that_goes_is_noticed_where_there_is_no_epoll() -> None:
    class Told:
        def __init__(self) -> None:
            self.times = 0

        def peer_gone(self) -> None:
            self.times += 1

    loop = asyncio.get_running_loop()
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
    await until(lambda: accepted)
    accepted[0].transport.pause_reading()  # type: ignore[attr-defined]
    for polls in (True, False):
        if polls or hasattr(__import__("select"), "epoll"):
            told, watch = Told(), PeerWatch(loop, polls=polls)
            watch.add(accepted[0].get_extra_info("socket").fileno(), told)  # type: ignore[arg-type]
            if polls:
                await asyncio.sleep(0)
                assert told.times == 0
                client.write_eof()
            await until(lambda told=told: told.times)
            assert told.times == 1
            watch.close()
    client.close()
    accepted[0].close()
    server.close()


@pytest.mark.requirement("D36")
@on_both_loops
async def test_of_two_that_are_bound_alike_one_listens() -> None:
    """Neither listened yet when the other was bound: servers that start at the same time."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    ours = bind_address("127.0.0.1", 0)
    port = ours[0].getsockname()[1]
    theirs = bind_address("127.0.0.1", port)
    first, second = Listener(app, port=port, bound=ours), Listener(app, port=port, bound=theirs)
    await first.start()
    with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"):
        await second.start()
    assert theirs[0].fileno() == -1
    await first.close()


@pytest.mark.requirement("D36")
async def test_an_address_that_is_taken_is_a_clear_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    first = Listener(app)
    await first.start()
    second = Listener(app, port=first.port)
    with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{first.port}: Address already in use.*--http"):
        await second.start()
    await second.close()
    await first.close()
    await first.close()
    with pytest.raises(UsageError, match="--tls-cert FILE --tls-key FILE"):
        await Listener(app, tls_cert=Path("a.pem")).start()
    with pytest.raises(UsageError, match=r"missing\.pem.*cannot be used"):
        await Listener(app, tls_cert=Path("missing.pem"), tls_key=Path("missing.key")).start()
    with pytest.raises(ValueError, match="connections_max must be"):
        ListenerLimits(connections_max=0)


@on_both_loops
@pytest.mark.requirement("D36")
async def test_tls(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert),
        ],
        check=True,
        capture_output=True,
    )
    async with served(Tools()) as world:
        listener = Listener(world.gate.guarded, tls_cert=cert, tls_key=key)
        await listener.start()
        assert listener.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        peer = Peer(
            *await asyncio.open_connection("127.0.0.1", listener.port, ssl=context, server_hostname="localhost")
        )
        await peer.send(ADD)
        assert (await peer.reply()).json == 2
        await peer.send(request_bytes("POST", "/tools/add", b" " * 5_000_000)[:2_000])
        assert (await peer.reply()).status == 413
        await peer.close()
        await listener.close()
        assert listener.connections == 0


@on_both_loops
@pytest.mark.requirement("R110", "D44")
async def test_bodies_of_one_token_that_do_not_come_leave_others_their_permits() -> None:
    tokens = {"a": token("cy_a", "a"), "b": token("cy_b", "b")}
    async with served(Tools(), tokens=tokens, jobs_max=8, queue_wait_ms_max=300) as world:
        slow = {"authorization": "Bearer cy_a"}
        part = request_bytes("POST", "/tools/add", {"a": 1}, slow)[:-3]
        waiting = [await world.connect() for _ in range(8)]
        for peer in waiting:
            await peer.send(part)
        await until(lambda: world.gateway.statistics().permits == 2)
        late = [await peer.reply() for peer in waiting[2:]]
        assert {(reply.status, reply.json["error"]["kind"]) for reply in late} == {(503, "deadline")}
        other = await world.ask("POST", "/tools/add", {"a": 1}, {"authorization": "Bearer cy_b"})
        own = await world.ask("POST", "/tools/add", {"a": 1}, slow)  # whose body comes with its header
        assert (other.json, own.json, world.gateway.statistics().permits) == (2, 2, 2)
        for peer in waiting[:2]:
            await peer.send(b": 1}"[-3:])
            assert (await peer.reply()).status == 200
        await until(lambda: world.gateway.statistics().permits == 0)


@on_both_loops
@pytest.mark.requirement("R110")
async def test_no_body_is_read_without_a_permit_wherever_it_goes() -> None:
    tools = Tools()
    async with served(tools, jobs_max=1, queue_wait_ms_max=200, attempt_min_ms=0) as world:
        peer = await world.connect()
        await peer.send(request_bytes("POST", "/tools/add", {"a": 1})[:-3])
        await until(lambda: world.gateway.statistics().permits == 1)
        for path in ("/nothing", "/keys/resolve", "/results/x", "/rpc"):
            assert (await world.ask("POST", path, {"a": "x" * 100_000})).status == 503


# --- what says two things, or more than it may ----------------------------------------------------------------------


@on_both_loops
@pytest.mark.requirement("D36", "R110")
async def test_a_body_where_none_belongs_is_refused_unread() -> None:
    """Nobody would bound it, or the time that it takes."""
    reads: list[str] = []

    async def reads_all(scope: Any, receive: Any, send: Any) -> None:
        reads.append((await receive())["type"])

    async with served(Tools(), mcp_app=reads_all) as world:
        for method in ("GET", "DELETE", "PUT"):
            for said in ({"content-length": "3000000"}, {"transfer-encoding": "chunked"}):
                peer = await world.connect()
                await peer.send(request_bytes(method, "/mcp", None, said) + b"1\r\nx\r\n" * 1_000)
                assert (await peer.reply()).status == (405 if method == "PUT" else 400)
        assert (await world.ask("GET", "/tools", headers={"content-length": "0"})).status == 200
        assert reads == []


@pytest.mark.requirement("D36", "D55")
@pytest.mark.parametrize("name", ["Idempotency-Key", "X-Callyard-Owner", "X-Callyard-Timeout-Ms", "Mcp-Session-Id"])
async def test_what_decides_over_a_call_is_said_once(name: str) -> None:
    registry = Tools()
    async with served(registry) as world:
        peer = await world.connect()
        head, _, body = request_bytes("POST", "/tools/any_value", {}, {name: "1"}).partition(b"\r\n\r\n")
        await peer.send(head + f"\r\n{name}: 2\r\n\r\n".encode() + body)
        reply = await peer.reply()
        assert (reply.status, registry.ran) == (400, 0)
        assert "stands twice" in reply.json["error"]["message"]


@on_both_loops
@pytest.mark.requirement("D36")
async def test_large_results_that_nobody_reads_take_bounded_room(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path / "kept", max_result_bytes=1_024, kept_ms=60_000, bytes_max=1 << 30)
    await kept.open()
    async with served(Tools(), kept=kept) as world:
        size = READING_BYTES_MAX // 8 + 1  # of half of it: they are one tenant's
        uri = f"/results/{await kept.put(Caller(), b'1' * size)}"
        sleepers = [await world.connect() for _ in range(3)]
        for peer in sleepers:
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await peer.send(request_bytes("GET", uri))
        await until(lambda: kept.reading_bytes == 3 * size)
        refused = await world.ask("GET", uri)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        await still_answers(world)
        for peer in sleepers:
            peer.vanish()
        await until(lambda: kept.reading_bytes == 0)
        whole = await world.ask("GET", uri)
        assert (whole.status, len(whole.body), whole.headers["content-length"]) == (200, size, str(size))
        await until(lambda: kept.reading_bytes == 0)
    await kept.close()
