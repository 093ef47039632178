"""The three key stores under one face, and the Redis servers that the tests start."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import Claim, KeyEnd, KeyScope, KeyStore
from callyard.dispatch.stores.redis import RedisKeyStore
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.errors import ErrorKind, fail
from callyard.ids import CallId, Tenant

BOUND_S = 30
MONTH_MS = 30 * 86_400_000
MINUTE_MS = 60_000
START_MS = 1_750_000_000_000


def scope(key: str = "order-7", tool: str = "charge", tenant: str = "default") -> KeyScope:
    return KeyScope(Tenant(tenant), tool, key)


def success(call_id: str = "c-0", output: bytes = b'{"paid":true}', attempts: int = 1) -> KeyEnd:
    return KeyEnd(CallId(call_id), attempts, output=output)


def unknown_end(call_id: str = "c-0") -> KeyEnd:
    failure = fail(ErrorKind.TIMEOUT, "no answer within 50 ms", attempts=2, limit="timeout_ms", big=10**30)
    return KeyEnd(CallId(call_id), 2, failure=failure)


def ran_end(call_id: str = "c-0") -> KeyEnd:
    return KeyEnd(CallId(call_id), 1, failure=fail(ErrorKind.INTERNAL, "ValueError: no", attempts=1, stack="Traceback"))


async def claim(
    store: KeyStore,
    where: KeyScope,
    fingerprint: str = "f",
    call_id: str = "c-0",
    *,
    idempotent: bool = False,
    unknown_ttl_ms: int = MONTH_MS,
) -> Claim:
    return await store.claim(where, fingerprint, CallId(call_id), idempotent=idempotent, unknown_ttl_ms=unknown_ttl_ms)


class FakeWall:
    """A wall clock that the test moves."""

    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms


class Backing:
    """What stores of one kind stand on: stores made here see each other's keys, where the kind can."""

    shared = False
    """Several stores at once."""
    survives = False
    """A store closed and made anew finds the keys."""

    def __init__(self) -> None:
        self.wall = FakeWall()
        self.opened: list[KeyStore] = []

    def make(self, **options: Any) -> Any:
        raise NotImplementedError

    async def open(self, **options: Any) -> Any:
        store = self.make(**options)
        await store.open()
        self.opened.append(store)
        return store

    async def let_pass(self, ms: int) -> None:
        self.wall.ms += ms

    async def let_holders_live(self, ms: int) -> None:
        """Time passes in which whoever holds a claim lives."""
        await self.let_pass(ms)

    async def now_ms(self) -> int:
        return self.wall.ms

    async def die(self, store: KeyStore) -> None:
        """The process of `store` is gone, and what held its claims for it too."""
        await store.close()

    async def close(self) -> None:
        for store in self.opened:
            await store.close()


class MemoryBacking(Backing):
    def make(self, **options: Any) -> MemoryKeyStore:
        return MemoryKeyStore(now_ms=self.wall.now_ms, **options)


class SqliteBacking(Backing):
    survives = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "keys.db"

    def make(self, **options: Any) -> SqliteKeyStore:
        return SqliteKeyStore(self.path, now_ms=self.wall.now_ms, lock_wait_ms=0, **options)


class RedisBacking(Backing):
    """Its clock is the server's: time passes when the server says so."""

    shared = survives = True

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server
        self.prefix = f"callyard:{uuid.uuid4().hex}:"

    def make(self, **options: Any) -> RedisKeyStore:
        return RedisKeyStore(self.server.url, prefix=self.prefix, timeout_ms=BOUND_S * 1_000, **options)

    async def now_ms(self) -> int:
        async with self.server.client() as client:
            seconds, microseconds = await client.time()
        return int(seconds) * 1_000 + int(microseconds) // 1_000

    async def let_pass(self, ms: int) -> None:
        until_ms = await self.now_ms() + ms
        await eventually(lambda: self._is_past(until_ms))

    async def let_holders_live(self, ms: int) -> None:
        """Until each lease was moved on twice since now."""
        for _ in range(2):
            seen = await self.leases()
            await eventually(partial(self._are_later, seen))

    async def leases(self) -> dict[bytes, int]:
        async with self.server.client() as client:
            names = [name async for name in client.scan_iter(match=f"{self.prefix}key:*")]
            found = {name: await client.hget(name, "lease") for name in names}
        return {name: int(lease) for name, lease in found.items() if lease is not None}

    async def _are_later(self, seen: dict[bytes, int]) -> bool:
        leases = await self.leases()
        return all(leases[name] > lease for name, lease in seen.items())

    async def _is_past(self, until_ms: int) -> bool:
        return await self.now_ms() >= until_ms

    async def die(self, store: KeyStore) -> None:
        """Its leases lapse: as if they had been let be for that long."""
        await store.close()
        async with self.server.client() as client:
            async for name in client.scan_iter(match=f"{self.prefix}key:*"):
                lease, idempotent = await client.hmget(name, "lease", "idem")
                if lease is not None:
                    lapsed_at = await self.now_ms() - 1
                    await client.hset(name, "lease", lapsed_at)
                    if idempotent == b"1":
                        await client.pexpireat(name, lapsed_at)
                    else:
                        await client.zadd(f"{self.prefix}leases", {name: lapsed_at})


async def eventually(holds: Any) -> None:
    """Until the condition holds, looked at again and again, for no longer than the bound."""
    async with asyncio.timeout(BOUND_S):
        while not await holds():
            await asyncio.sleep(0.005)


class RedisServer:
    """A server of the test's own: loopback only, in a folder of its own, stopped by its pid."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        self._folder = folder
        self._options = options
        self._password = password
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://{f':{self._password}@' if self._password else ''}127.0.0.1:{self.port}/0"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        from redis.asyncio import Redis

        client = Redis.from_url(self.url, protocol=2)
        try:
            yield client
        finally:
            await client.aclose()

    def start(self) -> None:
        """On a free port; on the one it had, if it ran before."""
        for _ in range(10):
            port = self.port or find_free_port()
            command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(self._folder)]
            command += ["--save", "", *self._options]
            if self._password:
                command += ["--requirepass", self._password]
            log = (self._folder / "redis.log").open("ab")
            with log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            if self._wait_ready(port):
                self.port = port
                return
            self.stop()
        raise AssertionError((self._folder / "redis.log").read_text(errors="replace"))

    def _wait_ready(self, port: int) -> bool:
        assert self.process is not None
        give_up_at = time.monotonic() + BOUND_S
        while time.monotonic() < give_up_at and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                    return self.process.poll() is None
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(BOUND_S)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                self.kill()


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_redis() -> None:
    pytest.importorskip("redis", reason="the client of Redis is not installed: extra `redis`")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")


@contextlib.contextmanager
def run_redis(folder: Path, *options: str, password: str = "") -> Iterator[RedisServer]:
    require_redis()
    server = RedisServer(folder, *options, password=password)
    server.start()
    try:
        yield server
    finally:
        server.stop()
