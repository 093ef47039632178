"""How requests of calls come to the IO hub, and what becomes of them with their call, task and worker."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
import pytest

from callyard.errors import UsageError
from callyard.ids import FunctionId, RequestId
from callyard.wire.messages import (
    CallWaiting,
    CallWaitingPayload,
    ExecuteCall,
    IoRequest,
    ResumeCall,
    SubcallRequest,
    WaitKind,
)
from callyard.worker import worker as worker_module
from callyard.worker.io.port import IoScope, Provider, Reply

from .conftest import MakeWorker
from .fakes import WAIT_S, FakeProcess, FakeSpawner


class Slow(Provider):
    """Answers when told to; `may_open` holds its start back."""

    read_only: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.may_open = asyncio.Event()
        self.opening = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    async def open(self) -> None:
        self.opening.set()
        await self.may_open.wait()

    async def perform(self, operation: str, request: bytes, body: bytes | None, scope: IoScope) -> Reply:
        self.asked.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return Reply(b"7")


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    provider = Slow()
    monkeypatch.setattr(worker_module, "build_providers", lambda config, *, sandboxed: {"slow": provider})
    return provider


def ask(process: FakeProcess, execute: ExecuteCall) -> None:
    process.mark(execute)
    payload = CallWaitingPayload(WaitKind.IO, execute.payload.task_id, 1, io=IoRequest("slow", "do"))
    process.send(CallWaiting(execute.call_id, RequestId("r"), payload))


async def wait(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        await event.wait()


@pytest.mark.requirement("X42")
@pytest.mark.requirement("X85")
async def test_a_request_is_answered_and_its_running_time_paid_by_the_call(make_worker: MakeWorker, slow: Slow) -> None:
    slow.may_open.set()
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call("effect", [], budget_ms=10_000))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        ask(process, execute)
        await wait(slow.asked)
        await asyncio.sleep(0.02)  # so that there is something to pay: the least that it took
        slow.go_on.set()
        await process.wait_for(lambda: any(isinstance(message, ResumeCall) for message in process.received))
        (resumed,) = [message for message in process.received if isinstance(message, ResumeCall)]
        paid_ms = resumed.payload.budget_used_ms
        assert bytes(resumed.payload.result) == b"7"
        assert paid_ms >= 19
        subcall = SubcallRequest(FunctionId("effect"), msgspec.Raw(b"[1]"))
        payload = CallWaitingPayload(WaitKind.SUBCALL, execute.payload.task_id, 1, subcall=subcall)
        process.send(CallWaiting(execute.call_id, RequestId("s"), payload))
        _, child = await process.wait_executes(2)
        assert child.payload.call_budget_ms == 10_000 - paid_ms
        process.complete(child)
        process.complete(execute)
        assert await call == 1
        assert worker._io is not None
        assert worker._io._tasks == {}, "what a task kept goes with it"


@pytest.mark.requirement("X42")
async def test_a_cancelled_call_s_request_is_cancelled_at_once(make_worker: MakeWorker, slow: Slow) -> None:
    """When the call is told to stop, not when its executor has confirmed that it did."""
    slow.may_open.set()
    spawner = FakeSpawner()
    async with make_worker(spawner, cancel_grace_ms=60_000, after_interrupt="keep") as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        ask(process, execute)
        await wait(slow.asked)
        call.cancel()
        await wait(slow.was_cancelled)
        assert worker.statistics().draining == 1


@pytest.mark.requirement("X42")
async def test_a_lost_executor_s_requests_are_cancelled(make_worker: MakeWorker, slow: Slow) -> None:
    slow.may_open.set()
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        ask(process, execute)
        await wait(slow.asked)
        process.exit(1)
        await wait(slow.was_cancelled)
        await asyncio.wait([call])
        assert call.exception() is not None


@pytest.mark.requirement("X44")
async def test_closing_while_a_provider_opens_ends_the_start(make_worker: MakeWorker, slow: Slow) -> None:
    spawner = FakeSpawner()

    async def start() -> None:
        async with make_worker(spawner) as worker:
            raise AssertionError(f"{worker} started")

    workers: list[worker_module.Worker] = []
    original = worker_module.Worker.start

    async def remember(self: worker_module.Worker) -> None:
        workers.append(self)
        await original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module.Worker, "start", remember)
        starting = asyncio.ensure_future(start())
        await wait(slow.opening)
        await workers[0].close()
        slow.may_open.set()
        with pytest.raises(UsageError, match="closed"):
            await starting
    assert spawner.processes == []
