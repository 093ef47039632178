"""A server as admin and metrics see it: a dispatcher and a gateway that are real, over a worker that is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from callyard import Dispatcher, Registry, ToolError
from callyard.dispatch.outcomes import DispatchResult
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.errors import CallyardError
from callyard.scheduler.statistics import SchedulerStatistics
from callyard.serve.config import ServeConfig
from callyard.serve.gateway import Caller, Gateway, ToolRequest
from callyard.worker.config import WorkerConfig
from callyard.worker.io.hub import IoStatistics
from callyard.worker.pool import SlotView
from callyard.worker.sandbox.levels import OFF, Sandbox

STILL = SchedulerStatistics(**dict.fromkeys(SchedulerStatistics.__struct_fields__, 0))


def slot(index: int = 0, *, up: bool = True, pool: str = "default") -> SlotView:
    state = "RUNNING" if up else "WAITING"
    return SlotView(
        pool=pool, index=index, state=state, executor_id=f"exec-{index}", pid=1, inflight=0, memory_bytes=0,
        is_attached=up,
    )  # fmt: skip


@dataclass
class FakeWorker:
    config: WorkerConfig = field(default_factory=WorkerConfig)
    seats: list[SlotView] = field(default_factory=lambda: [slot(0), slot(1)])
    sandboxes: dict[str, Sandbox] = field(default_factory=lambda: {"default": OFF})
    failure: str = ""

    def slots(self) -> list[SlotView]:
        return self.seats

    def statistics(self) -> SchedulerStatistics:
        if self.failure:
            raise CallyardError(self.failure)
        return STILL

    def restarts(self) -> dict[str, int]:
        return {"default": 3}

    def io_statistics(self) -> dict[str, IoStatistics]:
        return {"http": IoStatistics(1, 2, 0, 30, 4, 5, 6, 7)}


class FakeKept:
    held_bytes = 2_048
    dropped_total = 1

    def __len__(self) -> int:
        return 2


class FakeServer:
    def __init__(self, dispatcher: Dispatcher, **settings: Any) -> None:
        self.config = ServeConfig(drain_deadline_ms=2_000)
        self.dispatcher = dispatcher
        self.gateway = Gateway(dispatcher, **settings)
        self.worker = FakeWorker()
        self.kept = FakeKept()
        self.store = MemoryKeyStore()
        self.audit: Any = None
        self.logs: Any = None
        self.bound: dict[str, Any] = {}
        self.listeners: dict[str, Any] = {}
        self.stopping = asyncio.Event()

    async def call(self, tool: str, args: dict[str, Any] | None = None, **options: Any) -> DispatchResult:
        permit = await self.gateway.admit("test")
        try:
            return await self.gateway.call(ToolRequest(tool=tool, args=args or {}, caller=Caller(), **options), permit)
        finally:
            permit.release()


@asynccontextmanager
async def opened_server(registry: Registry | None = None, **settings: Any) -> AsyncIterator[FakeServer]:
    async with Dispatcher(registry or tools()) as dispatcher:
        yield FakeServer(dispatcher, **settings)


def tools() -> Registry:
    registry = Registry()

    @registry.tool(idempotent=True)
    async def add(a: int, b: int) -> int:
        return a + b

    @registry.tool
    async def fail() -> None:
        raise ToolError("no")

    return registry
