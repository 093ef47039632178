"""A dispatcher in virtual time, over two tools that do what each test says."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Awaitable, Callable
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

from callyard import sdk
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.events import DispatchEvent
from callyard.dispatch.outcomes import DispatchError, DispatchResult, Ok
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import KeyStore
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import VirtualTimers

RUN_MS = 1_000
Act = Callable[[], Awaitable[Any]]


class Run(NamedTuple):
    """What a handler saw of itself."""

    tool: str
    n: int
    attempt: int
    key: str
    call_id: str


class Bench:
    """`charge` is not idempotent, `search` is; each takes `n` and gives `{"n": n}` after a second, unless told."""

    def __init__(self, store: KeyStore | None = None, **settings: Any) -> None:
        self.registry = Registry()
        self.runs: list[Run] = []
        self.ended: list[str] = []
        """How each run's code ended: `ok`, `cancelled`, or the name of what it raised."""
        self.acts: deque[Act] = deque()
        """What the next runs do, one after another."""
        self.events: list[DispatchEvent] = []
        self.noise: list[dict[str, Any]] = []
        self.timers = VirtualTimers()
        self.add("charge")
        self.add("search", idempotent=True)
        self.store: Any = MemoryKeyStore(now_ms=self.timers.now_ms) if store is None else store
        self.dispatcher = Dispatcher(
            self.registry, clock=self.timers, rng=Random(7), store=self.store, **{"breaker": None, **settings}
        )
        self.dispatcher.subscribe(self.events.append)

    def add(self, name: str, **promises: Any) -> None:
        async def tool(n: int = 0) -> Any:
            info = sdk.context()
            self.runs.append(Run(name, n, info.attempt, info.idempotency_key, info.call_id))
            try:
                value = await (self.acts.popleft() if self.acts else after(RUN_MS, {"n": n}))()
            except BaseException as error:
                self.ended.append("cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__)
                raise
            self.ended.append("ok")
            return value

        self.registry.add_function(tool, name=name, **promises)

    async def __aenter__(self) -> Bench:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.noise.append(context))
        await self.dispatcher.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.dispatcher.__aexit__(kind, error, trace)
        if error is None:
            self.check_empty()

    def check_empty(self) -> None:
        """Nothing is left of any call: no line, no flight, no task, no exception that nobody saw."""
        statistics = self.dispatcher.statistics()
        assert (statistics.calls, statistics.running, statistics.queued, statistics.flights) == (0, 0, 0, 0)
        assert statistics.owners == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        assert self.noise == []

    def start(self, tool: str = "charge", n: int = 0, key: str | None = "k", **options: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.dispatcher.dispatch(tool, {"n": n}, key=key, **options))

    async def call(self, tool: str = "charge", n: int = 0, key: str | None = "k", **options: Any) -> DispatchResult:
        return await self.dispatcher.dispatch(tool, {"n": n}, key=key, **options)

    async def fill(self, ms: int, calls: int = 1, **options: Any) -> list[asyncio.Task[Any]]:
        """Hold slots with calls of another tool for `ms`."""
        if "filler" not in self.registry.names():

            async def filler(ms: int) -> None:
                await asyncio.sleep(ms / 1_000)

            self.registry.add_function(filler)
        started = [
            asyncio.ensure_future(self.dispatcher.dispatch("filler", {"ms": ms}, **options)) for _ in range(calls)
        ]
        await pause(0)
        return started

    def names(self) -> list[str]:
        return [event.name.removeprefix("dispatch.") for event in self.events]


def after(ms: int, value: Any = None) -> Act:
    async def act() -> Any:
        await asyncio.sleep(ms / 1_000)
        return value

    return act


def raising(error: BaseException, ms: int = 0) -> Act:
    async def act() -> Any:
        await asyncio.sleep(ms / 1_000)
        raise error

    return act


def stubborn(ms: int) -> Act:
    """Swallows its cancellation for `ms`, counted from then."""

    async def act() -> Any:
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            await asyncio.sleep(ms / 1_000)
        return "late"

    return act


def tidying(ms: int) -> Act:
    """Takes `ms` to end when it is cancelled."""

    async def act() -> Any:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(ms / 1_000)

    return act


async def pause(ms: int) -> None:
    """Until `ms` have gone by, and what was due by then has run."""
    await asyncio.sleep(ms / 1_000)
    for _ in range(10):
        await asyncio.sleep(0)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


def good(result: DispatchResult) -> Ok:
    assert isinstance(result, Ok), result
    return result


def bad(result: DispatchResult, kind: ErrorKind, outcome: Outcome) -> DispatchError:
    assert isinstance(result, DispatchError), result
    assert (result.kind, result.outcome) == (kind, outcome), result
    return result


def small_store() -> MemoryKeyStore:
    """Room for two keys."""
    return MemoryKeyStore(entries_max=2, now_ms=VirtualTimers().now_ms)
