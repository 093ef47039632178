"""An executor's word on whose call a frame is about is not believed (X65)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from callyard.errors import CallError
from callyard.ids import CallId, FunctionId, RequestId, TaskId
from callyard.wire.messages import (
    CallCompleted,
    CallCompletedPayload,
    CallEvent,
    CallEventKind,
    CallEventPayload,
    CallFailed,
    CallFailedPayload,
    CallWaiting,
    CallWaitingPayload,
    ExecutorMessage,
    IoRequest,
    ResumeCall,
    SubcallRequest,
    WaitKind,
)

from .conftest import MakeWorker
from .fakes import FakeSpawner, begin

OTHER = TaskId("task-1000000")
RAW = msgspec.Raw(b"1")
IO = IoRequest("files", "read", msgspec.Raw(b'{"path":"data/x"}'))
SUBCALL = SubcallRequest(FunctionId("effect"), msgspec.Raw(b"[]"))


def forged(call_id: CallId) -> dict[str, ExecutorMessage]:
    request = RequestId("r")
    return {
        "completed": CallCompleted(call_id, CallCompletedPayload(1, RAW, OTHER)),
        "failed": CallFailed(call_id, CallFailedPayload(1, "internal", task_id=OTHER)),
        "io": CallWaiting(call_id, request, CallWaitingPayload(WaitKind.IO, OTHER, 1, io=IO)),
        "subcall": CallWaiting(call_id, request, CallWaitingPayload(WaitKind.SUBCALL, OTHER, 1, subcall=SUBCALL)),
        "event": CallEvent(call_id, CallEventPayload(1, CallEventKind.LOG, OTHER)),
    }


@pytest.mark.requirement("X65")
@pytest.mark.requirement("X50")
@pytest.mark.parametrize("what", list(forged(CallId("x"))))
async def test_another_task_s_id_closes_the_connection(make_worker: MakeWorker, what: str) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, after_interrupt="keep") as worker:
        call, process, execute = await begin(worker, spawner)
        process.send(forged(execute.call_id)[what])
        with pytest.raises(CallError, match="took call"):
            await call
        assert process.returncode == -9


@pytest.mark.requirement("X65")
@pytest.mark.parametrize("kind", [WaitKind.IO, WaitKind.SUBCALL])
async def test_a_request_for_a_call_that_it_does_not_hold_reaches_nobody(
    make_worker: MakeWorker, kind: WaitKind
) -> None:
    """Of an older attempt, or of a call that runs elsewhere: nothing is performed, nothing answered."""
    spawner = FakeSpawner()
    async with make_worker(spawner, executors=2) as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        first, second = spawner.processes[:2]
        holder = first if await asyncio.wait_for(_holds(first, second), 30) else second
        other = second if holder is first else first
        (execute,) = holder.executes
        task_id = execute.payload.task_id
        for process, seq in ((other, 1), (holder, 2)):
            payload = CallWaitingPayload(kind, task_id, seq, io=IO, subcall=SUBCALL)
            process.send(CallWaiting(execute.call_id, RequestId(f"r{seq}"), payload))
            process.heartbeat()
        holder.mark(execute)
        payload = CallWaitingPayload(kind, task_id, 1, io=IO, subcall=SubcallRequest(FunctionId("no"), RAW))
        holder.send(CallWaiting(execute.call_id, RequestId("mine"), payload))
        await holder.wait_for(lambda: any(isinstance(message, ResumeCall) for message in holder.received))
        resumes = [m for p in (first, second) for m in p.received if isinstance(m, ResumeCall)]
        assert [resume.request_id for resume in resumes] == ["mine"]
        holder.complete(execute)
        assert await call == 1


async def _holds(first: object, second: object) -> bool:
    while not (first.executes or second.executes):  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    return bool(first.executes)  # type: ignore[attr-defined]


@pytest.mark.requirement("X65")
async def test_an_ancestry_that_is_made_up_changes_nothing(make_worker: MakeWorker) -> None:
    """Depth and cycles come from the worker's own tree: a lie can neither hide a cycle nor invent one."""
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, process, execute = await begin(worker, spawner)
        lies = [CallId(f"task-{i}-0") for i in range(100)]
        asked = SubcallRequest(FunctionId("effect"), msgspec.Raw(b'["deeper"]'), ancestry=lies)
        payload = CallWaitingPayload(WaitKind.SUBCALL, execute.payload.task_id, 1, subcall=asked)
        process.send(CallWaiting(execute.call_id, RequestId("r"), payload))
        _, child = await process.wait_executes(2)
        assert child.payload.parent_call_id == execute.call_id
        again = SubcallRequest(FunctionId("effect"), msgspec.Raw(b'["deeper"]'), ancestry=[])
        payload = CallWaitingPayload(WaitKind.SUBCALL, execute.payload.task_id, 1, subcall=again)
        process.send(CallWaiting(child.call_id, RequestId("s"), payload))
        await process.wait_for(lambda: any(isinstance(message, ResumeCall) for message in process.received))
        (refused,) = [message for message in process.received if isinstance(message, ResumeCall)]
        assert refused.payload.error is not None
        assert refused.payload.error.kind == "denied"
        process.complete(child)
        process.complete(execute)
        assert await call == 1


@pytest.mark.requirement("X65")
@pytest.mark.requirement("X27")
async def test_a_grant_is_cut_to_what_the_parent_has_left(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call("effect", [], budget_ms=1_000))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        process.mark(execute)
        for number, granted in enumerate((0, 1_000_000)):
            args = msgspec.Raw(b"[%d]" % number)
            asked = SubcallRequest(FunctionId("effect"), args, granted_budget_ms=granted)
            payload = CallWaitingPayload(WaitKind.SUBCALL, execute.payload.task_id, 1, subcall=asked)
            process.send(CallWaiting(execute.call_id, RequestId(f"r{number}"), payload))
            *_, child = await process.wait_executes(2 + number)
            assert child.payload.call_budget_ms == 1_000 - number * 400
            done = CallCompletedPayload(1, RAW, child.payload.task_id, budget_used_ms=400)
            process.send(CallCompleted(child.call_id, done))
        process.complete(execute)
        assert await call == 1
