"""The actor: one writer, turns, bounds, one timer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from callyard.errors import ErrorKind, InvalidTransition
from callyard.ids import CallId, RequestId, TaskId
from callyard.scheduler import events as e
from callyard.wire.codec import encode_message
from callyard.wire.frames import FRAME_BYTES_MAX
from callyard.wire.messages import CallWaiting, CallWaitingPayload, IoRequest
from callyard.worker.link import ExecutorLink

from .conftest import MakeWorker
from .fakes import FakeProcess, FakeSpawner


@pytest.mark.requirement("X2")
async def test_only_a_turn_may_change_the_scheduler(make_worker: MakeWorker) -> None:
    asyncio.get_running_loop().set_debug(True)
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner) as worker:
        scheduler = worker._actor._scheduler
        with pytest.raises(InvalidTransition, match="post an event instead"):
            scheduler.handle(e.ProductionEnded(TaskId("t")), 0)
        with pytest.raises(InvalidTransition):
            scheduler.try_dispatch_next(0)
        with pytest.raises(InvalidTransition):
            scheduler.flush_dirty_tasks(0)
        worker._actor._in_turn = True  # inside a turn, but from another thread
        caught: list[BaseException] = []

        def foreign() -> None:
            try:
                scheduler.handle(e.ProductionEnded(TaskId("t")), 0)
            except InvalidTransition as error:
                caught.append(error)

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        worker._actor._in_turn = False
        assert len(caught) == 1
        assert await worker.call("effect", []) == 1


@pytest.mark.requirement("X31")
async def test_sends_happen_outside_the_turn(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    flushed: list[bool] = []
    flush = ExecutorLink.flush

    async with make_worker(spawner) as worker:

        def spy(link: ExecutorLink) -> None:
            flushed.append(worker._actor._in_turn)
            flush(link)

        monkeypatch.setattr(ExecutorLink, "flush", spy)
        await asyncio.gather(*(worker.call("effect", [i]) for i in range(200)))
    assert flushed
    assert not any(flushed)


@pytest.mark.requirement("X39")
async def test_no_timer_per_call_and_one_for_all_retries(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    armed: list[Any] = []
    call_at = loop.call_at

    def counting(when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        handle = call_at(when, *args, **kwargs)
        armed.append(handle)
        return handle

    def first_fails(process: FakeProcess, execute: Any) -> None:
        if execute.payload.context.attempt == 1:
            process.fail(execute.call_id, execute.payload.attempt_seq, ErrorKind.TRANSIENT, "later")
        else:
            process.complete(execute)

    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner, base_backoff_ms=60) as worker:
        monkeypatch.setattr(loop, "call_at", counting)
        await asyncio.gather(*(worker.call("effect", [i]) for i in range(1_000)))
        plain = len(armed)
        assert plain < 20, "ticks only"
        spawner.processes[0].answers = first_fails
        await asyncio.gather(*(worker.call("effect", [i]) for i in range(100)))
        alive = [handle for handle in armed[plain:] if not handle.cancelled()]
        assert len(alive) < 100, "retries share a timer, moved when an earlier one is due"


@pytest.mark.requirement("X82")
async def test_a_flood_of_one_executor_is_bounded_and_others_go_on(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0

    def answer(process: FakeProcess, execute: Any) -> None:
        if process is spawner.processes[1]:
            process.complete(execute)

    spawner = FakeSpawner(answers=answer)
    async with make_worker(spawner, executors=2) as worker:
        actor = worker._actor
        post_from = actor.post_from

        def spy(link: ExecutorLink, events: list[Any]) -> None:
            nonlocal longest
            post_from(link, events)
            longest = max(longest, len(actor._inbox))

        monkeypatch.setattr(actor, "post_from", spy)
        process = spawner.processes[0]
        call = asyncio.ensure_future(worker.call("effect", []))
        (execute,) = await process.wait_executes(1)
        payload = CallWaitingPayload("io", execute.payload.task_id, 1, IoRequest("p", "o"))
        process.stop_reading()
        flood = encode_message(CallWaiting(CallId("nobody"), RequestId("r"), payload)) * 100_000
        sending = asyncio.ensure_future(asyncio.to_thread(send_all, process, flood))
        for i in range(200):
            assert await worker.call("effect", [i]) == 1
        await sending
        assert longest <= 4_096 + 262_144 // 80, "the bound, and what one read may hold"
        assert process.returncode == -9, "it left our answers unread"
        assert await call == 1, "it had not begun there"


def send_all(process: FakeProcess, data: bytes) -> None:
    """Send from a thread; the worker may close the connection before the end."""
    try:
        process.send_bytes(data)
    except OSError:
        return


@pytest.mark.requirement("X82")
@pytest.mark.requirement("X66")
async def test_more_open_requests_than_allowed_is_a_protocol_error(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        process = spawner.processes[0]
        call = asyncio.ensure_future(worker.call_result("effect", []))
        (execute,) = await process.wait_executes(1)
        process.mark(execute)
        worker._pool.on_waiting = lambda *_: None  # nobody answers
        payload = CallWaitingPayload("io", execute.payload.task_id, 1, IoRequest("p", "o"))
        frames = [encode_message(CallWaiting(execute.call_id, RequestId(f"r{i}"), payload)) for i in range(1_025)]
        await asyncio.to_thread(send_all, process, b"".join(frames))
        result = await call
    assert result.error is not None
    assert result.error.details["cause"] == "malformed_frame"
    assert "1024" in result.error.message


@pytest.mark.requirement("X93")
async def test_handing_back_a_call_that_has_begun_is_a_protocol_error(make_worker: MakeWorker) -> None:
    """It made a request, so it has begun: run again it would run twice. The connection pays, not the worker."""
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        process = spawner.processes[0]
        call = asyncio.ensure_future(worker.call_result("effect", []))
        (execute,) = await process.wait_executes(1)
        worker._pool.on_waiting = lambda *_: None  # nobody answers
        payload = CallWaitingPayload("io", execute.payload.task_id, 1, IoRequest("p", "o"))
        process.send(CallWaiting(execute.call_id, RequestId("r"), payload))
        process.fail(execute.call_id, 1, "recalled")
        result = await call
    assert result.error is not None
    assert (result.error.kind, result.error.details["cause"]) == (ErrorKind.CRASHED, "malformed_frame")


@pytest.mark.requirement("X48")
@pytest.mark.requirement("X76")
async def test_a_row_above_the_frame_cap_fails_alone(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner, arena_bytes_max=0) as worker:
        rows = [["small"], ["x" * FRAME_BYTES_MAX], ["small"]]
        results = [result async for result in worker.map("effect", rows)]
    assert [result.ok for result in results] == [True, False, True]
    error = results[1].error
    assert error is not None
    assert (error.kind, error.attempts, error.outcome) == (ErrorKind.SCHEMA, 0, "not_run")


@pytest.mark.requirement("X84")
@pytest.mark.requirement("X83")
async def test_a_function_outside_the_pinned_view_is_that_calls_failure(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call_result("effect", []))
        await asyncio.sleep(0)
        for run in worker._runs:
            run._view = {}
        result = await call
        assert result.error is not None
        assert result.error.kind is ErrorKind.NOT_FOUND
        assert result.error.attempts == 0
        assert await worker.call("effect", []) == 1
    assert len(spawner.processes[0].executes) == 1


@pytest.mark.requirement("X84")
async def test_rows_that_name_no_function_or_an_unknown_one_fail_in_their_place(make_worker: MakeWorker) -> None:
    from callyard.worker.builders import Row
    from callyard.worker.outputs import MemoryOutput

    class Named:
        name, total, may_block, read_fraction = "rows", 3, False, None

        def rows(self) -> Any:
            return iter([Row(0, b"[]", "effect"), Row(1, b"[]", "efect"), Row(2, b"[]")])

    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner) as worker:
        sink = MemoryOutput()
        summary = await worker.run(None, Named(), sink)
    assert (summary.calls, summary.failed) == (3, 2)
    assert [result.failure.kind if result.failure else None for result in sink.results] == [
        None,
        ErrorKind.NOT_FOUND,
        ErrorKind.NOT_FOUND,
    ]
