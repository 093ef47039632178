"""A hub over providers that the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import Raw

from callyard.ids import CallId, RequestId, TaskId, Tenant
from callyard.testing.clock import FakeClock
from callyard.wire.messages import IoRequest
from callyard.worker.io.hub import IoAnswer, IoHub, IoLimits, TaskIoOptions
from callyard.worker.io.port import IoScope, Provider, Reply

WAIT_S = 30.0
"""Long enough for any machine; a wait that ends by it is a failure."""


class Performance:
    """One `perform` under way."""

    def __init__(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> None:
        self.operation = operation
        self.request = request
        self.body = body
        self.scope = scope
        self.outcome: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def finish(self, result: bytes = b"1", body: bytes | None = None, *, keep: bool = True) -> None:
        self.outcome.set_result(Reply(result, body, keep))

    def fail(self, error: BaseException) -> None:
        self.outcome.set_exception(error)


class ScriptedProvider(Provider):
    """`read` is read-only, `write` is not."""

    read_only = frozenset({"read"})

    def __init__(self) -> None:
        self.performances: list[Performance] = []
        self.opened = self.closed = 0

    async def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        performance = Performance(operation, request, body, scope)
        self.performances.append(performance)
        try:
            return await performance.outcome
        except asyncio.CancelledError:
            performance.cancelled = True
            raise


class Stage:
    """A hub, its clock, its one provider `p`, and what it answered by request id."""

    def __init__(self, limits: IoLimits | None = None) -> None:
        self.clock = FakeClock()
        self.provider = ScriptedProvider()
        self.hub = IoHub({"p": self.provider}, self.clock, limits)
        self.answers: dict[str, IoAnswer] = {}
        self.order: list[str] = []

    def start(self, task: str = "t", tenant: str = "default", options: TaskIoOptions | None = None) -> None:
        self.hub.start_task(TaskId(task), Tenant(tenant), options)

    def ask(
        self,
        request_id: str,
        operation: str = "read",
        request: bytes = b"{}",
        *,
        call: str = "c",
        seq: int = 1,
        task: str = "t",
        body: bytes | None = None,
        provider: str = "p",
        budget_ms: int = 0,
    ) -> None:
        def on_done(answer: IoAnswer) -> None:
            assert request_id not in self.answers, "answered twice"
            self.answers[request_id] = answer
            self.order.append(request_id)

        io = IoRequest(provider, operation, Raw(request))
        self.hub.submit(TaskId(task), CallId(call), seq, RequestId(request_id), io, body, on_done, budget_ms)

    def cancel(self, call: str = "c", seq: int = 1) -> None:
        self.hub.cancel_call(CallId(call), seq)

    @property
    def running(self) -> list[Performance]:
        return [one for one in self.provider.performances if not one.outcome.done()]

    @property
    def statistics(self) -> Any:
        return self.hub.statistics()["p"]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0)

    async def answer_of(self, request_id: str) -> IoAnswer:
        await self.until(lambda: request_id in self.answers)
        return self.answers[request_id]

    async def performing(self, count: int) -> list[Performance]:
        """All performances so far, once there are that many."""
        await self.until(lambda: len(self.provider.performances) >= count)
        assert len(self.provider.performances) == count
        return self.provider.performances


async def settle() -> None:
    """Give everything that is ready its turn: for what must *not* happen."""
    for _ in range(20):
        await asyncio.sleep(0)
