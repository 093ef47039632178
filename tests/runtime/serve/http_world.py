"""A server of the HTTP gate on a real socket, with tools of this process behind it; a client that sends any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from callyard.dispatch.dispatcher import Dispatcher
from callyard.functions.registry import Registry
from callyard.serve.config import Address, ServeConfig, gateway_of
from callyard.serve.gateway import Gateway
from callyard.serve.http_app import HttpGate, Keys
from callyard.serve.kept import KeptResults
from callyard.serve.listener import Listener, ListenerLimits
from callyard.serve.tokens import HashedToken, Tokens, build_caller, hash_token

WAIT_S = 20.0
"""How long a condition may take on a loaded machine."""


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run on asyncio's own loop and on uvloop, which serve with different transports."""

    @pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    @functools.wraps(test)
    def run(*args: Any, make_loop: Callable[[], asyncio.AbstractEventLoop], **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), 60))

    import inspect

    signature = inspect.signature(test)
    extra = inspect.Parameter("make_loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Peer:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> Reply:
        """The next answer, whole."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name
            }
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                body = b"".join([part async for part in self.chunks()])
            elif first.split()[1] == "204":
                body = b""
            else:
                body = await self.reader.read()
            return Reply(int(first.split()[1]), headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self.reader.readline()).strip(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def ended(self) -> bytes:
        """What comes until the server closes."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def vanish(self) -> None:
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@dataclass
class World:
    gateway: Gateway
    dispatcher: Dispatcher
    gate: HttpGate
    listener: Listener
    peers: list[Peer] = field(default_factory=list)

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.listener.port))
        self.peers.append(peer)
        return peer

    async def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        peer = await self.connect()
        await peer.send(request_bytes(method, path, body, {"connection": "close", **(headers or {})}))
        reply = await peer.reply()
        await peer.close()
        return reply

    async def rpc(self, method: str, params: Any = None, **members: Any) -> Any:
        asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}, **members}
        return (await self.ask("POST", "/rpc", asked)).json


def request_bytes(
    method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, version: str = "1.1"
) -> bytes:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = {"host": "127.0.0.1"}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(raw))}
    fields |= {name.lower(): value for name, value in (headers or {}).items()}
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + raw


def token(text: str, name: str = "ci", **given: Any) -> HashedToken:
    caller = build_caller("tests", **{"name": name, "tenant": "acme", "tools": ["*"], **given})
    return HashedToken(hash_token(text), caller)


@asynccontextmanager
async def served(
    registry: Registry,
    *,
    tokens: Mapping[str, HashedToken] | None = None,
    limits: ListenerLimits | None = None,
    kept: KeptResults | None = None,
    keys: Keys | None = None,
    mcp_app: Any = None,
    wrap: Callable[[Gateway], None] | None = None,
    dispatcher: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """At the end no permit may be out, no connection open and no request under way."""
    config = ServeConfig(http=settings.pop("http", Address("127.0.0.1", 0)), tokens=tokens or {}, **settings)
    known = Tokens(config.tokens.values())
    async with Dispatcher(registry, **(dispatcher or {})) as inner:
        gateway = gateway_of(config, inner)
        if wrap is not None:
            wrap(gateway)
        gate = HttpGate(gateway, config, lambda: known, kept=kept, keys=keys, mcp_app=mcp_app)
        listener = Listener(gate.guarded, limits=limits)
        await listener.start()
        world = World(gateway, inner, gate, listener)
        try:
            yield world
        finally:
            for peer in world.peers:
                peer.vanish()
            await listener.close()
        assert listener.connections == 0
        gateway.seal()
        gateway.abort()
        await until(lambda: gateway.statistics().permits == 0)
        assert gate._progress == {}


Wait = Callable[[], Awaitable[None]]
