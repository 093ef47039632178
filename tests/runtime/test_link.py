"""One connection: outbox, flushes, seats, and the two ways to connect."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callyard.clock import SYSTEM_CLOCK
from callyard.errors import CallError, ErrorKind
from callyard.ids import CallId, CallNumber, Digest, ExecutorId, FunctionId, RequestId, TaskId
from callyard.scheduler.calls import FunctionTarget
from callyard.wire.codec import decode_worker_message, encode_message
from callyard.wire.frames import FrameReader
from callyard.wire.messages import (
    JSON_FORM,
    RECALLED,
    BatchedCall,
    CallFailed,
    CallFailedPayload,
    CallsSettled,
    CallsSettledPayload,
    CallWaiting,
    CallWaitingPayload,
    CancelCall,
    CancelCallPayload,
    CancelReason,
    ExecuteCall,
    ExecuteCallPayload,
    ExecuteCalls,
    HeartbeatAck,
    HeartbeatPayload,
    IoRequest,
    ResumeCall,
    ResumeCallPayload,
    SettledCall,
    WaitKind,
)
from callyard.worker.link import FRAMES_PER_FLUSH, HELD_OUTBOXES, ExecutorLink
from callyard.worker.marks import MarkPage

from .conftest import MakeWorker, ManualClock
from .fakes import FakeProcess, FakeSpawner, begin, read_until


class Owner:
    """Records what a link tells."""

    def __init__(self) -> None:
        self.broken: list[tuple[str, str]] = []
        self.events: list[Any] = []

    def on_events(self, link: ExecutorLink, events: list[Any]) -> None:
        self.events += events

    def on_heartbeat(self, link: ExecutorLink, heartbeat: HeartbeatPayload) -> None: ...
    def on_waiting(self, link: ExecutorLink, message: CallWaiting, sidecar: bytes | None) -> None: ...
    def on_described(self, link: ExecutorLink, message: object) -> None: ...

    def on_broken(self, link: ExecutorLink, cause: str, message: str) -> None:
        self.broken.append((cause, message))


class Transport(asyncio.Transport):
    """Takes writes and remembers their sizes in frames of one byte."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None: ...
    def pause_reading(self) -> None: ...


@pytest.fixture
def link(tmp_path: Path) -> Any:
    marks = MarkPage(tmp_path / "marks", 8)
    yield ExecutorLink(ExecutorId("exec-1"), Owner(), marks, SYSTEM_CLOCK, 256, 1_000_000)
    marks.close()


@pytest.mark.requirement("X33")
async def test_a_flush_takes_up_to_64_frames_and_stops_when_the_transport_is_full(link: ExecutorLink) -> None:
    transport = Transport()
    link.connection_made(transport)
    for _ in range(150):
        assert link.send_nowait(b"x")
    assert transport.writes == []
    link.flush()
    assert [len(write) for write in transport.writes] == [FRAMES_PER_FLUSH, FRAMES_PER_FLUSH, 22]
    link.pause_writing()
    assert link.send_nowait(b"y")
    link.flush()
    assert len(transport.writes) == 3
    link.resume_writing()
    assert transport.writes[3] == b"y"


@pytest.mark.requirement("X33")
@pytest.mark.requirement("X34")
async def test_a_full_outbox_refuses_an_execute_and_takes_a_cancel(link: ExecutorLink) -> None:
    link.connection_made(Transport())
    link.pause_writing()
    for _ in range(256):
        assert link.send_nowait(b"x")
    assert not link.send_nowait(b"x")
    assert not link.reserve(CallId("c"), 1, CallNumber(1), 0)
    assert link.send(HeartbeatAck())


@pytest.mark.requirement("X34")
async def test_more_than_outbox_bytes_max_unread_breaks_the_link(link: ExecutorLink) -> None:
    link.connection_made(Transport())
    link.pause_writing()
    big = ResumeCall(CallId("c"), RequestId("r"), ResumeCallPayload(WaitKind.IO, 1, msgspec.Raw(b"1" * 10_000)))
    flushed: list[bool] = []
    while link.send(big, lambda: flushed.append(True)):
        pass
    owner = link._owner
    assert isinstance(owner, Owner)
    assert owner.broken[0][0] == "not_reading"
    assert flushed == []


@pytest.mark.requirement("X91")
async def test_the_running_time_of_ends_that_come_together_counts_once(link: ExecutorLink) -> None:
    link.connection_made(Transport())
    ends = [SettledCall(CallId(f"task-1-{number}"), 1) for number in range(3)]
    link.data_received(encode_message(CallsSettled(CallsSettledPayload(ends, run_us=700))))
    owner = link._owner
    assert isinstance(owner, Owner)
    assert [event.run_us for event in owner.events] == [0, 0, 700]
    assert link.finished_calls == 3
    ends[-1] = SettledCall(CallId("task-1-2"), 1, failure=CallFailedPayload(1, "internal"))
    link.data_received(encode_message(CallsSettled(CallsSettledPayload(ends, run_us=800))))
    assert [event.run_us for event in owner.events[3:]] == [0, 0, 800], "a failure may be the last"


@pytest.mark.requirement("X47")
async def test_a_call_that_was_given_back_is_none_that_ended(link: ExecutorLink) -> None:
    link.connection_made(Transport())
    for kind, finished in ((RECALLED, 0), ("internal", 1)):
        link.data_received(encode_message(CallFailed(CallId("task-1-0"), CallFailedPayload(1, kind))))
        assert link.finished_calls == finished


TARGET = FunctionTarget(FunctionId("f"), Digest("d" * 64), "m:f", idempotent=True)


def send_short(
    link: ExecutorLink, name: str, *, task: str = "task-1", strings: bool = False, budget_ms: int = 0
) -> bool:
    one = BatchedCall(CallId(name), 1, msgspec.Raw(b"[1]"), CallNumber(7))
    return link.send_with_others(TaskId(task), TARGET, False, strings, budget_ms, "", False, JSON_FORM, one)


def sent_by(link: ExecutorLink) -> list[tuple[str, list[str]]]:
    """What the link hands to its transport now: message types and the calls in them."""
    transport = Transport()
    link.connection_made(transport)
    found = []
    for body in FrameReader().feed(b"".join(transport.writes)):
        message, _ = decode_worker_message(body)
        calls = message.payload.calls if isinstance(message, ExecuteCalls) else [message]
        found.append((type(message).__name__, [getattr(call, "call_id", "") for call in calls]))
    return found


@pytest.mark.requirement("X94")
async def test_neighbours_share_a_frame_and_a_lonely_call_has_its_own(link: ExecutorLink) -> None:
    for name in ("a", "b"):
        assert send_short(link, name)
    assert sent_by(link) == [("ExecuteCalls", ["a", "b"])]
    assert send_short(link, "c")
    assert sent_by(link) == [("ExecuteCall", ["c"])]


@pytest.mark.requirement("X94")
async def test_at_most_64_calls_share_a_frame(link: ExecutorLink) -> None:
    names = [f"c{i}" for i in range(130)]
    assert all(send_short(link, name) for name in names)
    assert sent_by(link) == [
        ("ExecuteCalls", names[:64]),
        ("ExecuteCalls", names[64:128]),
        ("ExecuteCalls", names[128:]),
    ]


@pytest.mark.requirement("X94")
async def test_calls_that_differ_in_what_a_frame_says_once_share_none(link: ExecutorLink) -> None:
    send_short(link, "a")
    send_short(link, "b", task="task-2")
    send_short(link, "c", task="task-2", strings=True)
    send_short(link, "d", task="task-2", strings=True, budget_ms=5)
    assert [calls for _, calls in sent_by(link)] == [["a"], ["b"], ["c"], ["d"]]


@pytest.mark.requirement("X68")
async def test_no_frame_overtakes_the_calls_that_gather(link: ExecutorLink) -> None:
    send_short(link, "a")
    send_short(link, "b")
    link.send(CancelCall(CallId("b"), CancelCallPayload(CancelReason.CANCELLED, 1)))
    send_short(link, "c")
    lonely = ExecuteCallPayload(TaskId("t"), FunctionId("f"), Digest("d"), 1, msgspec.Raw(b"[]"))
    link.send_nowait(encode_message(ExecuteCall(CallId("d"), lonely)))
    assert sent_by(link) == [
        ("ExecuteCalls", ["a", "b"]),
        ("CancelCall", ["b"]),
        ("ExecuteCall", ["c"]),
        ("ExecuteCall", ["d"]),
    ]


@pytest.mark.requirement("X34")
async def test_calls_that_gather_are_refused_when_full_and_gone_when_sealed(link: ExecutorLink) -> None:
    send_short(link, "a")
    link.seal()
    assert not send_short(link, "b")
    assert sent_by(link) == []


@pytest.mark.requirement("X34")
@pytest.mark.requirement("X82")
async def test_large_answers_wait_for_room_up_to_a_bound_and_leave_in_order(link: ExecutorLink) -> None:
    transport = Transport()
    link.connection_made(transport)
    link.pause_writing()

    def answer(number: int) -> ResumeCall:
        payload = ResumeCallPayload(WaitKind.IO, 1, msgspec.Raw(b"1" * 600_000))
        return ResumeCall(CallId("c"), RequestId(f"r{number}"), payload)

    seen: list[int] = []
    count = 0
    for number in range(10):
        assert link.send_when_room(answer(number), lambda number=number: seen.append(number))  # type: ignore[misc]
    link.resume_writing()
    assert seen == list(range(10))
    frames = [decode_worker_message(body)[0] for body in FrameReader().feed(b"".join(transport.writes))]
    assert [getattr(frame, "request_id", "") for frame in frames] == [f"r{number}" for number in range(10)]
    link.pause_writing()
    while link.send_when_room(answer(count)):
        count += 1
    owner = link._owner
    assert isinstance(owner, Owner)
    assert owner.broken[0][0] == "not_reading"
    assert count * 600_000 <= (1 + HELD_OUTBOXES) * 1_000_000 < (count + 3) * 600_000


@pytest.mark.requirement("X82")
async def test_what_makes_large_answers_waits_while_one_does(link: ExecutorLink) -> None:
    link.connection_made(Transport())
    asked: list[str] = []
    link.when_room(lambda: asked.append("before"))
    link.pause_writing()
    payload = ResumeCallPayload(WaitKind.IO, 1, msgspec.Raw(b"1" * 900_000))
    for _ in range(3):
        link.send_when_room(ResumeCall(CallId("c"), RequestId("r"), payload))
    link.when_room(lambda: asked.append("after"))
    assert asked == ["before"]
    link.resume_writing()
    assert asked == ["before", "after"]


async def test_flush_callbacks_come_in_order_after_their_frame(link: ExecutorLink) -> None:
    transport = Transport()
    link.connection_made(transport)
    seen: list[int] = []
    for number in range(100):
        link.send(HeartbeatAck(), lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == []
    link.flush()
    assert seen == list(range(100))


@pytest.mark.requirement("X34")
@pytest.mark.requirement("X66")
async def test_a_wait_nobody_answers_is_resumed_with_an_error(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        for kind, request in (("io", "r1"), ("telepathy", "r2")):
            payload = CallWaitingPayload(
                kind, execute.payload.task_id, execute.payload.attempt_seq, IoRequest("p", "o")
            )
            process.send(CallWaiting(execute.call_id, RequestId(request), payload))
        await process.wait_for(lambda: sum(isinstance(message, ResumeCall) for message in process.received) == 2)
        resumes = [message for message in process.received if isinstance(message, ResumeCall)]
        assert {resume.request_id for resume in resumes} == {"r1", "r2"}
        assert all(resume.payload.error is not None for resume in resumes)
        process.complete(execute, b"1")
        assert await call == 1


@pytest.mark.requirement("X36")
async def test_a_resume_that_cannot_be_sent_ends_the_attempt(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, outbox_bytes_max=64 * 1024) as worker:
        call, process, execute = await begin(worker, spawner)
        link = worker._pool._executors[process.executor_id].link
        link.pause_writing()
        assert link.send_nowait(b"x" * 64 * 1024)
        payload = CallWaitingPayload("io", execute.payload.task_id, execute.payload.attempt_seq, IoRequest("p", "o"))
        process.send(CallWaiting(execute.call_id, RequestId("r"), payload))
        with pytest.raises(CallError) as caught:
            await call
    assert caught.value.kind is ErrorKind.CRASHED
    assert caught.value.failure.details["cause"] == "resume_send_failed"


@pytest.mark.requirement("X68")
async def test_an_executor_that_stops_reading_but_sends_heartbeats_is_lost(make_worker: MakeWorker) -> None:
    clock = ManualClock()
    spawner = FakeSpawner()
    async with make_worker(spawner, clock=clock) as worker:
        call, process, _execute = await begin(worker, spawner)
        process.stop_reading()
        link = worker._pool._executors[process.executor_id].link
        while link.write_blocked_since_ms is None:
            link._outbox.append(b"x" * 65_536)
            link.flush()
        for _ in range(40):
            clock.added_ms += 500
            seen = worker._pool._executors[process.executor_id].heartbeat
            process.heartbeat()
            async with asyncio.timeout(20):
                while (executor := worker._pool._executors.get(process.executor_id)) and executor.heartbeat is seen:
                    await asyncio.sleep(0)
            worker._pool.tick()
            if process.returncode is not None:
                break
        with pytest.raises(CallError) as caught:
            await call
    assert caught.value.failure.details["cause"] == "not_reading"


@pytest.mark.requirement("X68")
async def test_a_call_cancelled_in_the_turn_that_bound_it_is_cancelled_after_its_execute(
    make_worker: MakeWorker,
) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        process = spawner.processes[0]
        second = asyncio.ensure_future(worker.call("effect", []))
        await process.wait_for(lambda: bool(process.executes))
        kinds = [type(message).__name__ for message in process.received if type(message).__name__ != "HeartbeatAck"]
        cancelled = [message.call_id for message in process.cancels]
        for call_id in cancelled:
            sent = [execute.call_id for execute in process.executes]
            assert call_id in sent, f"a CancelCall without its ExecuteCall: {kinds}"
            execute = process.executes[sent.index(call_id)]
            process.fail(call_id, execute.payload.attempt_seq, ErrorKind.CANCELLED, outcome="not_run")
        await process.wait_for(lambda: any(execute.call_id not in cancelled for execute in process.executes))
        process.complete(process.executes[-1])
        assert await second == 1


@pytest.mark.requirement("X35")
async def test_a_cancelled_call_holds_its_seat_until_the_terminal_frame(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, cancel_grace_ms=60_000, executor_max_inflight=1, after_interrupt="keep") as worker:
        call = asyncio.ensure_future(worker.call("effect", [1]))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        call.cancel()
        await process.wait_for(lambda: bool(process.cancels))
        assert process.cancels[0].payload.reason is CancelReason.CANCELLED
        after = asyncio.ensure_future(worker.call("effect", [2]))
        process.heartbeat()
        await asyncio.sleep(0.05)
        assert len(process.executes) == 1, "its only context is still held"
        process.fail(execute.call_id, 1, ErrorKind.CANCELLED, outcome="unknown")
        executes = await process.wait_executes(2)
        process.complete(executes[1], b"2")
        assert await after == 2


async def test_a_cancel_without_an_answer_costs_the_process(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, cancel_grace_ms=20) as worker:
        call, process, _execute = await begin(worker, spawner)
        call.cancel()
        await spawner.wait_spawned(2)
        assert process.returncode == -9
        assert worker.statistics().inflight == 0


@pytest.mark.requirement("X32")
async def test_the_dialled_link_works_and_refuses_a_second_connection(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute, b"3"))
    async with make_worker(spawner, link_mode="path") as worker:
        order = spawner.processes[0].order
        assert order.socket_path is not None
        folder = order.socket_path.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        assert await worker.call("effect", []) == 3
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as second:
            second.connect(str(order.socket_path))
            second.setblocking(False)
            assert await read_until(second, b"") == b""
        assert await worker.call("effect", []) == 3
    assert not folder.exists()


@pytest.mark.requirement("X32")
async def test_a_wrong_token_is_refused(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(attach=False)

    def spawn(order: Any, on_output: Any) -> FakeProcess:
        process = FakeSpawner.spawn(spawner, order, on_output)
        process.heartbeat(**({"token": "guess"} if len(spawner.processes) == 1 else {}))
        return process

    spawner.spawn = spawn  # type: ignore[method-assign]
    async with make_worker(spawner, link_mode="path", restart_delay_ms=1) as worker:
        await spawner.wait_spawned(2)
        assert spawner.processes[0].returncode == -9
        assert worker.slots()[0].executor_id == spawner.processes[1].executor_id


@pytest.mark.requirement("X51")
async def test_another_protocol_is_refused_with_the_command_that_mends_it(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(attach=False)

    def spawn(order: Any, on_output: Any) -> FakeProcess:
        process = FakeSpawner.spawn(spawner, order, on_output)
        process.heartbeat(**({"protocol": 99, "callyard_version": "9.9"} if len(spawner.processes) == 1 else {}))
        return process

    spawner.spawn = spawn  # type: ignore[method-assign]
    async with make_worker(spawner, restart_delay_ms=1) as worker:
        assert "pip install callyard==" in worker._pool._last_loss
        assert "protocol 99" in worker._pool._last_loss


@pytest.mark.requirement("X32")
async def test_the_first_heartbeat_attaches(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(attach=False, answers=lambda process, execute: process.complete(execute, b"1"))
    async with asyncio.timeout(20):
        made = make_worker(spawner)
        entering = asyncio.ensure_future(made.__aenter__())
        process = await spawner.wait_spawned(1)
        assert not entering.done()
        process.heartbeat()
        worker = await entering
        assert await worker.call("effect", []) == 1
        await made.__aexit__(None, None, None)


async def test_heartbeats_are_acknowledged(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner):
        process = spawner.processes[0]
        process.heartbeat()
        await process.wait_for(
            lambda: [m.payload.heartbeat_seq for m in process.received if isinstance(m, HeartbeatAck)] == [1, 2]
        )
