"""Health and metrics, on a listener of their own that takes no permit: `/livez`, `/readyz`, `/metrics`.

    alive    the loop beats in time, and the worker has not failed by a fault of its own: else restart this process
    ready    executors up, sandboxed as asked, keys reachable, audit written, not draining: else send it no requests

Three questions are answered from what is known already; none of them waits for anything. What takes time, asking the
key store, is done beside them, every `ASK_MS`. The same loop serves them that serves the gates: when it stands still
nobody answers, and a probe's timeout says the same as a 503.

It needs no token, so it is for loopback or a network that only operators reach: it shows names of functions and
figures, and nothing of any call. Source: tool-dispatch D36, D46; job-queue R68.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from callyard.dispatch.stores.port import Claimed, Full, KeyScope, StoreUnavailable
from callyard.errors import CallyardError
from callyard.ids import CallId, Tenant
from callyard.scheduler.placement import PoolName
from callyard.serve.config import Address
from callyard.serve.listener import Listener, ListenerLimits
from callyard.serve.metrics import Metrics
from callyard.worker.sandbox.levels import Level

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from callyard.serve.server import Server

CONNECTIONS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 8 * 1_024
BEAT_MS: Final = 250
LATE_MS: Final = 2_000
"""A beat later than this says that the loop does not turn as it should."""
PEAK_BEATS: Final = 60_000 // BEAT_MS
EMPTY_MS: Final = 5_000
"""A pool without an executor for longer is not ready."""
ASK_MS: Final = 5_000
ANSWER_MS: Final = 2_000
"""A store that takes longer to answer is out of reach."""
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Reason(msgspec.Struct, frozen=True):
    """Why it is not ready, or not alive."""

    check: str
    """executors, sandbox, store, audit, draining, loop or worker."""
    message: str


class Health(msgspec.Struct, frozen=True):
    """What `/livez` and `/readyz` answer, as JSON."""

    ok: bool
    reasons: tuple[Reason, ...] = ()


class Pulse:
    """The heartbeat of the loop: how late its timers are."""

    def __init__(self, on_beat: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._on_beat = on_beat
        self._lags_s: deque[float] = deque((0.0,), maxlen=PEAK_BEATS)
        self._due_s = clock() + BEAT_MS / 1_000
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due_s = self._clock() + BEAT_MS / 1_000
        self._timer = asyncio.get_running_loop().call_later(BEAT_MS / 1_000, self._beat)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lag_s(self) -> float:
        """Of the last beat, or of the one that is due and has not come."""
        return max(self._lags_s[-1], self._clock() - self._due_s)

    def lags_s(self) -> tuple[float, float]:
        """The last, and the latest of the last minute."""
        lag_s = self.lag_s()
        return lag_s, max(lag_s, *self._lags_s)

    def _beat(self) -> None:
        self._lags_s.append(max(0.0, self._clock() - self._due_s))
        self.start()
        self._on_beat()


class Probe:
    """Asks the key store now and then whether it answers; what it said last is what counts."""

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[None] | None = None
        self.failure = "it was not asked yet"
        """Why it is out of reach; empty: it answers."""

    async def start(self) -> None:
        """Returns with the first answer."""
        await self._ask_once()
        self._task = asyncio.create_task(self._go_on(), name="admin store probe")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(ASK_MS / 1_000)
            await self._ask_once()

    async def _ask_once(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_MS / 1_000):
                await self._ask()
        except TimeoutError:
            self.failure = f"the key store did not answer within {ANSWER_MS} ms"
        except (CallyardError, OSError) as error:
            self.failure = f"the key store cannot be reached: {error}"
        else:
            self.failure = ""


class Admin:
    """The listener of one running server. Made when the server runs; closed after its gates, so that what drains can be
    looked at until its end."""

    def __init__(
        self,
        server: Server,
        *,
        ask_store: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`ask_store` is for tests."""
        self.metrics = Metrics(server)
        self.pulse = Pulse(self._look_at_pools)
        self.store = Probe(ask_store or (lambda: ask_key_store(server)))
        self.listener: Listener | None = None
        self.is_loopback = True
        self._server = server
        self._full: set[str] = set()
        """Pools that had all the executors that were asked for."""
        self._seen_s: dict[str, float] = {}
        """When a pool last had an executor."""
        self._unsubscribe: Callable[[], None] = lambda: None
        self.metrics.lags_s = self.pulse.lags_s

    async def start(self, address: Address) -> Address:
        """Listen; where, with the port that was free for port 0. Raises UsageError."""
        self._unsubscribe = self._server.gateway.subscribe(self.metrics)
        self.is_loopback = address.is_loopback
        limits = ListenerLimits(
            connections_max=CONNECTIONS_MAX,
            connections_spare=1,
            header_bytes_max=HEADER_BYTES_MAX,
            header_ms=5_000,
            idle_ms=90_000,
            write_ms=10_000,
        )
        bound = self._server.bound.get("admin")
        listener = Listener(self, host=address.host, port=address.port, limits=limits, bound=bound)
        await listener.start()
        self.listener = listener
        self._server.listeners["admin"] = listener
        self._look_at_pools()
        self.pulse.start()
        await self.store.start()
        return Address(address.host, listener.port)

    async def close(self) -> None:
        """Idempotent."""
        self._unsubscribe()
        self.pulse.stop()
        await self.store.stop()
        if self.listener is not None:
            self._server.listeners.pop("admin", None)
            await self.listener.close()

    # --- what is so -----------------------------------------------------------------------------------------------

    def look_alive(self) -> Health:
        return _health(self._why_not_alive())

    def look_ready(self) -> Health:
        return _health(self._why_not_ready())

    def _why_not_alive(self) -> Iterator[Reason]:
        lag_s = self.pulse.lag_s()
        if lag_s * 1_000 > LATE_MS:
            yield Reason("loop", f"the event loop is {lag_s:.1f} s late")
        if not self._server.stopping.is_set():
            try:
                self._server.worker.statistics()
            except CallyardError as error:
                yield Reason("worker", str(error))

    def _why_not_ready(self) -> Iterator[Reason]:
        server = self._server
        if server.stopping.is_set() or server.gateway.is_draining:
            yield Reason("draining", "the server stops: it takes no new calls")
            return
        yield from self._why_not_alive()
        yield from self._missing_executors()
        for pool, sandbox in server.worker.sandboxes.items():
            least = _least_level(server, pool)
            if sandbox.level.strength < least.strength:
                yield Reason("sandbox", f"pool {pool} is confined by {sandbox.level}, asked for is {least}")
        if self.store.failure:
            yield Reason("store", self.store.failure)
        audit = server.audit
        if audit is not None and audit.required and audit.writer.is_failing:
            yield Reason("audit", "the audit file cannot be written, and no call may run without it")

    def _missing_executors(self) -> Iterator[Reason]:
        """At first all that were asked for; from then on one of each pool, but for a moment: a function that kills its
        process is no reason to take the server away from the others."""
        for pool, (count, asked) in self._look_at_pools().items():
            empty_s = time.monotonic() - self._seen_s.get(pool, float("-inf"))
            if pool not in self._full or (count == 0 and empty_s * 1_000 > EMPTY_MS):
                yield Reason("executors", f"{count} of the {asked} executors of pool {pool} are up")

    def _look_at_pools(self) -> dict[str, tuple[int, int]]:
        """How many executors of each pool are up, and how many were asked for."""
        attached: dict[str, list[bool]] = {}
        for slot in self._server.worker.slots():
            attached.setdefault(slot.pool, []).append(slot.is_attached)
        for pool, slots in attached.items():
            if all(slots):
                self._full.add(pool)
            if any(slots):
                self._seen_s[pool] = time.monotonic()
        return {pool: (sum(slots), len(slots)) for pool, slots in attached.items()}

    # --- answers --------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, content_type, body = self._answer(scope)
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type.encode()),
                    (b"content-length", str(len(body)).encode()),
                    (b"cache-control", b"no-store"),
                    (b"x-content-type-options", b"nosniff"),
                ],
            }
        )
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Scope) -> tuple[int, str, bytes]:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if self.is_loopback and not _names_this_machine(headers.get(b"host", b"").decode("latin-1")):
            return 403, _TEXT, b"the header Host names another machine than this\n"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, _TEXT, b"GET and HEAD only\n"
        match scope["path"]:
            case "/livez":
                return _show(self.look_alive())
            case "/readyz":
                return _show(self.look_ready())
            case "/metrics":
                text, content_type = self.metrics.render(headers.get(b"accept", b"").decode("latin-1"))
                return 200, content_type, text
        return 404, _TEXT, b"there are /livez, /readyz and /metrics\n"


async def serve(server: Server, address: Address, on_ready: Callable[[Address], None]) -> None:
    """The gate: until the server has stopped all calls, so that a drain can be looked at until its end. `on_ready` is
    told where it listens. Raises UsageError."""
    admin = Admin(server)
    try:
        on_ready(await admin.start(address))
        await server.stopping.wait()
        await server.gateway.wait_idle(server.config.drain_deadline_ms)
    finally:
        await admin.close()


async def ask_key_store(server: Server) -> None:
    """As a call does: claim a key, and give it back. Raises StoreUnavailable, also for a disk that is full."""
    scope = KeyScope(Tenant("callyard"), "readyz", f"probe-{os.getpid()}")
    claim = await server.store.claim(scope, "", CallId("probe"), idempotent=True, unknown_ttl_ms=1)
    if isinstance(claim, Claimed):
        await server.store.settle(scope, claim.fence, None, 0)
    elif isinstance(claim, Full):
        raise StoreUnavailable("it has no room for another key")


def _health(reasons: Iterator[Reason]) -> Health:
    found = tuple(reasons)
    return Health(not found, found)


def _show(health: Health) -> tuple[int, str, bytes]:
    return 200 if health.ok else 503, _JSON, msgspec.json.encode(health) + b"\n"


def _least_level(server: Server, pool: str) -> Level:
    """What the pool's sandbox must come to."""
    config = server.worker.config.of_pool(PoolName(pool))
    choice = config.sandbox_choice
    return config.sandbox_least if choice == "auto" else Level(choice)


def _names_this_machine(host: str) -> bool:
    """A page of another site whose name points here (DNS rebinding) sends that name."""
    if host.startswith("["):
        return host[1:].partition("]")[0] in _LOOPBACK
    return host.partition(":")[0].lower() in _LOOPBACK
