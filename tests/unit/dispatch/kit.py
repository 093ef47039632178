"""What the dispatcher's tests share: one in virtual time, tools that say what they did, a worker that is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import msgspec

from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.events import DispatchEvent
from callyard.errors import CallFailure, ErrorKind, fail
from callyard.functions.function import Promises
from callyard.functions.ports import (
    AskCallback,
    CallContext,
    CallEventPayload,
    CallOutcome,
    CancelReason,
    SubcallEvent,
)
from callyard.functions.registry import FunctionSpec, Registry, UnknownFunction
from callyard.ids import Digest, FunctionId, RequestId
from callyard.testing.virtual_time import VirtualTimers


def make(registry: Registry, **settings: Any) -> Dispatcher:
    return Dispatcher(registry, **{"clock": VirtualTimers(), "rng": Random(7), **settings})


def now_ms() -> int:
    return VirtualTimers().now_ms()


def hear(dispatcher: Dispatcher) -> list[DispatchEvent]:
    """Every event from now on."""
    events: list[DispatchEvent] = []
    dispatcher.subscribe(events.append)
    return events


def told(events: list[DispatchEvent]) -> list[str]:
    return [event.name for event in events]


def assert_quiet(dispatcher: Dispatcher, *, stragglers: int = 0) -> None:
    """Nothing is held, nobody waits."""
    seen = dispatcher.statistics()
    assert (seen.calls, seen.running, seen.queued, seen.flights, seen.owners) == (0, 0, 0, 0, 0), seen
    assert len(seen.stragglers) == stragglers
    admission = dispatcher._admission
    for line in admission._seats.values():
        assert line.is_empty
    assert not admission._tenant_use


async def spin(turns: int = 20) -> None:
    """Let everything that can run go on; no time passes."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Work:
    """A tool that counts who is in it, and how it left."""

    def __init__(self, wait_ms: int = 1_000) -> None:
        self.wait_ms = wait_ms
        self.begun = 0
        self.ended = 0
        self.cancelled = 0
        self.inside = 0
        self.peak = 0
        self.order: list[Any] = []

    async def __call__(self, mark: Any = None) -> int:
        self.begun += 1
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        self.order.append(mark)
        try:
            await asyncio.sleep(self.wait_ms / 1_000)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        self.ended += 1
        return self.begun


ANY = {"type": "object"}


def add(registry: Registry, name: str, handler: Callable[[dict[str, Any]], Any], **promises: Any) -> None:
    """A tool whose handler takes one dict, whatever is in it."""
    registry.add_tool(name, handler, input_schema=ANY, **promises)


def add_work(registry: Registry, name: str = "work", wait_ms: int = 1_000, **promises: Any) -> Work:
    work = Work(wait_ms)

    async def handler(arguments: dict[str, Any]) -> int:
        return await work(arguments.get("mark"))

    add(registry, name, handler, **promises)
    return work


Script = Callable[["FakeRunner", bytes, CallContext], Awaitable[CallOutcome]]


class FakeRunner:
    """Attempts as a worker would make them: each function has a script; a cancellation ends it."""

    capacity = 8

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.specs: dict[str, FunctionSpec] = {}
        self.contexts: list[CallContext] = []
        self.budgets: list[int] = []
        self.cancels: list[CancelReason] = []
        self.on_event: Callable[[CallEventPayload], None] | None = None
        """Of the newest attempt, and its way to ask."""
        self.on_ask: AskCallback | None = None
        self.pins = 0
        self.unconfirmed = False
        """Cancellations are taken and never confirmed."""
        self._running: dict[RequestId, asyncio.Future[CallOutcome]] = {}

    @property
    def runner(self) -> FakeRunner:
        return self

    def pin(self, name: str) -> tuple[FunctionSpec, Callable[[], None]]:
        if name not in self.specs:
            raise UnknownFunction(f"no function {name!r}")
        self.pins += 1

        def unpin() -> None:
            self.pins -= 1

        return self.specs[name], unpin

    async def call(
        self,
        request_id: RequestId,
        spec: FunctionSpec,
        args: bytes,
        *,
        budget_ms: int,
        context: CallContext | None = None,
        on_event: Callable[[CallEventPayload], None] | None = None,
        on_subcall: Callable[[SubcallEvent], None] | None = None,
        on_ask: AskCallback | None = None,
    ) -> CallOutcome:
        assert context is not None
        self.on_event, self.on_ask = on_event, on_ask
        self.contexts.append(context)
        self.budgets.append(budget_ms)
        stopped: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        self._running[request_id] = stopped
        task = asyncio.ensure_future(self.scripts[spec.name](self, args, context))
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else stopped.result()
        finally:
            del self._running[request_id]
            task.cancel()

    def cancel(self, request_id: RequestId, reason: CancelReason) -> bool:
        stopped = self._running.get(request_id)
        if stopped is None:
            return False
        self.cancels.append(reason)
        if not stopped.done() and not self.unconfirmed:
            stopped.set_result(CallOutcome(None, fail(ErrorKind.CANCELLED, "interrupted", attempts=1)))
        return True

    def when_ended(self, request_id: RequestId, then: Callable[[], None]) -> bool:
        return False


def described(name: str, **promises: Any) -> FunctionSpec:
    return FunctionSpec(
        name=FunctionId(name),
        digest=Digest("d" * 64),
        entry_selector=f"tools:{name}",
        input_schema=msgspec.Raw(b'{"type":"object"}'),
        promises=Promises(**promises),
    )


def add_described(registry: Registry, worker: FakeRunner, name: str, script: Script, **promises: Any) -> None:
    worker.specs[name] = described(name, **promises)
    registry.add(worker.specs[name])
    worker.scripts[name] = script


def ending(*ends: bytes | CallFailure) -> Script:
    """Attempt after attempt ends like this; the last one again and again."""
    left = list(ends)

    async def script(runner: FakeRunner, args: bytes, context: CallContext) -> CallOutcome:
        end = left.pop(0) if len(left) > 1 else left[0]
        return CallOutcome(end, None) if isinstance(end, bytes) else CallOutcome(None, end)

    return script


async def hanging(runner: FakeRunner, args: bytes, context: CallContext) -> CallOutcome:
    await asyncio.sleep(10_000)
    raise AssertionError("nobody waits so long")
