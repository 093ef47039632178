"""What a lost executor costs, and how loss is found."""

from __future__ import annotations

import asyncio

import pytest

from callyard.errors import CallError, ErrorKind, Outcome
from callyard.wire.frames import FRAME_BYTES_MAX
from callyard.wire.messages import ExecuteCall
from callyard.worker.builders import IterableSource
from callyard.worker.outputs import MemoryOutput

from .conftest import MakeWorker, ManualClock
from .fakes import FakeProcess, FakeSpawner, begin


async def failure_of(call: asyncio.Future[object]) -> CallError:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value


@pytest.mark.requirement("X62")
@pytest.mark.requirement("X45")
async def test_begun_calls_crash_and_the_others_run_once_elsewhere(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, queue_ahead_ms=0) as worker:
        calls = [asyncio.ensure_future(worker.call("effect", [i])) for i in range(128)]
        first = spawner.processes[0]
        executes = await first.wait_executes(128)
        for slot, execute in enumerate(executes[:3]):
            first.mark(execute, slot)
        spawner.answers = lambda process, execute: process.complete(execute)
        first.exit(-9)
        results = await asyncio.gather(*calls, return_exceptions=True)
    crashed = [result for result in results if isinstance(result, CallError)]
    assert [error.kind for error in crashed] == [ErrorKind.CRASHED] * 3
    assert {error.outcome for error in crashed} == {Outcome.UNKNOWN}
    assert {error.attempts for error in crashed} == {1}
    assert results.count(1) == 125
    second = spawner.processes[1]
    assert {execute.call_id for execute in second.executes} == {execute.call_id for execute in executes[3:]}


@pytest.mark.requirement("X62")
async def test_a_result_sent_before_the_death_counts(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, process, execute = await begin(worker, spawner)
        process.complete(execute, b'"done"')
        process.exit(-9)  # in the same step: the worker sees bytes, EOF and exit together
        assert await call == "done"


@pytest.mark.requirement("X62")
async def test_a_result_survives_a_failed_write_of_ours(make_worker: MakeWorker) -> None:
    """A write to a dead peer closes the transport; what the peer had sent before is read all the same."""
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        first = asyncio.ensure_future(worker.call("effect", [1]))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        process.mark(execute)
        process.complete(execute, b'"done"')
        process.stop_reading()
        process.sock.close()
        spawner.answers = lambda process, execute: process.complete(execute, b"2")
        link = worker._pool._executors[process.executor_id].link
        link._transport.write(b"x" * 100_000)  # EPIPE, before the loop reads what is there
        second = asyncio.ensure_future(worker.call("effect", [2]))
        assert await first == "done"
        assert await second == 2


@pytest.mark.requirement("X12")
@pytest.mark.requirement("X45")
async def test_an_idempotent_call_is_retried_after_a_crash(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, process, execute = await begin(worker, spawner, "safe")
        spawner.answers = lambda process, execute: process.complete(execute, b'"again"')
        process.exit(3)
        assert await call == "again"
    assert spawner.processes[1].executes[0].payload.context.attempt == 2
    assert spawner.processes[1].executes[0].payload.call_number != execute.payload.call_number


async def test_the_failure_names_the_exit_status(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, process, _execute = await begin(worker, spawner)
        process.exit(3)
        error = await failure_of(call)
    assert "exited with status 3" in str(error)
    assert error.failure.details["exit_code"] == 3
    assert error.failure.details["cause"] == "exited"


@pytest.mark.requirement("X50")
@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\x02{}",
        b"\0\0\0\x05hello",
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        b'\0\0\0\x30{"message_type":"CallCompleted","call_id":1234567}',
    ],
)
async def test_a_malformed_frame_costs_that_executor_only(make_worker: MakeWorker, data: bytes) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, executors=2) as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        bad = spawner.processes[0]
        (execute,) = await bad.wait_executes(1)
        bad.mark(execute)
        bad.send_bytes(data)
        error = await failure_of(call)
        assert error.failure.details["cause"] == "malformed_frame"
        assert bad.returncode == -9
        good = spawner.processes[1]
        good.answers = lambda process, execute: process.complete(execute, b"7")
        assert await worker.call("effect", []) == 7
        assert good.returncode is None


@pytest.mark.requirement("X49")
async def test_unknown_messages_and_fields_are_dropped(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        body = b'{"message_type":"Gossip","call_id":"x","payload":{"news":[1]}}'
        process.send_bytes(len(body).to_bytes(4, "big") + body)
        process.complete(execute, b"5")
        assert await call == 5
        assert worker._pool._executors[process.executor_id].link.dropped_messages == 1


@pytest.mark.requirement("X37")
async def test_silence_is_loss_but_a_late_tick_judges_nobody(make_worker: MakeWorker) -> None:
    clock = ManualClock()
    spawner = FakeSpawner()
    async with make_worker(spawner, clock=clock) as worker:
        call, process, _execute = await begin(worker, spawner)
        clock.added_ms += 60_000
        worker._pool.tick()
        assert process.returncode is None, "the tick was late: our own loop stood still"
        clock.added_ms += 500
        worker._pool.tick()
        error = await failure_of(call)
    assert error.failure.details["cause"] == "heartbeat"
    assert process.returncode == -9


@pytest.mark.requirement("X37")
async def test_two_ticks_in_state_t_are_loss(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, process, _execute = await begin(worker, spawner)
        process.stopped = True
        worker._pool.tick()
        assert process.returncode is None
        worker._pool.tick()
        error = await failure_of(call)
    assert error.failure.details["cause"] == "stopped"


async def pass_time(
    worker: object, clock: ManualClock, milliseconds: int, process: FakeProcess, **heartbeat: object
) -> None:
    for _ in range(milliseconds // 500):
        clock.added_ms += 500
        if process.returncode is not None:
            return
        seen = worker._pool._executors[process.executor_id].heartbeat  # type: ignore[attr-defined]
        process.heartbeat(**heartbeat)
        async with asyncio.timeout(20):
            while (executor := worker._pool._executors.get(process.executor_id)) and executor.heartbeat is seen:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
        worker._pool.tick()  # type: ignore[attr-defined]


@pytest.mark.requirement("X38")
async def test_a_wedge_is_charged_to_the_running_call(make_worker: MakeWorker) -> None:
    clock = ManualClock()
    spawner = FakeSpawner()
    async with make_worker(spawner, clock=clock) as worker:
        running = asyncio.ensure_future(worker.call("quick", [1]))
        beside = asyncio.ensure_future(worker.call("quick", [2]))
        queued = asyncio.ensure_future(worker.call("quick", [3]))
        process = spawner.processes[0]
        executes = await process.wait_executes(3)
        process.mark(executes[0], 0)
        process.mark(executes[1], 1)
        stuck_since = clock.now_ms()
        spawner.answers = lambda process, execute: process.complete(execute, b"3")
        stuck = {"running_call_id": executes[0].call_id, "last_scheduler_active_at_ms": stuck_since}
        await pass_time(worker, clock, 9_500, process, **stuck)
        assert process.returncode is None, "the stall timeout is call_deadline_ms + 5000 = 10 s"
        await pass_time(worker, clock, 2_000, process, **stuck)
        first, second = await failure_of(running), await failure_of(beside)
        assert await queued == 3
    assert first.failure.details["cause"] == "wedge"
    assert second.failure.details["cause"] == "neighbour"


@pytest.mark.requirement("X74")
@pytest.mark.parametrize(("function", "lives"), [("slow", True), ("endless", True), ("quick", False)])
async def test_limits_follow_the_largest_budget_begun_there(
    make_worker: MakeWorker, function: str, lives: bool
) -> None:
    clock = ManualClock()
    spawner = FakeSpawner()
    async with make_worker(spawner, clock=clock) as worker:
        call, process, execute = await begin(worker, spawner, function)
        stuck = {"running_call_id": execute.call_id, "last_scheduler_active_at_ms": clock.now_ms()}
        await pass_time(worker, clock, 60_000, process, **stuck)
        assert (process.returncode is None) == lives
        if lives:
            process.complete(execute, b"4")
            assert await call == 4
        else:
            assert (await failure_of(call)).failure.details["cause"] == "wedge"


@pytest.mark.requirement("X74")
async def test_silence_under_an_unlimited_budget_is_judged_by_cpu_time(make_worker: MakeWorker) -> None:
    clock = ManualClock()
    spawner = FakeSpawner()
    async with make_worker(spawner, clock=clock) as worker:
        call, process, _execute = await begin(worker, spawner, "endless")
        for _ in range(120):
            clock.added_ms += 500
            process.ticks += 10
            worker._pool.tick()
        assert process.returncode is None, "its CPU time rises: a C call that holds the GIL"
        clock.added_ms += 500
        worker._pool.tick()
        assert (await failure_of(call)).failure.details["cause"] == "heartbeat"


@pytest.mark.requirement("X72")
async def test_kills_of_ours_and_losses_after_progress_restart_at_once(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner, max_restarts=3) as worker:
        for round_ in range(1, 31):
            assert await worker.call("effect", []) == 1
            spawner.processes[-1].exit(-9)
            await spawner.wait_spawned(round_ + 1)
            assert worker.slots()[0].state != "BACKOFF"


@pytest.mark.requirement("X45")
async def test_starts_that_lead_to_nothing_back_off(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, max_restarts=3, restart_delay_ms=1, backoff_ms=60_000) as worker:
        for round_ in range(1, 5):
            (await spawner.wait_spawned(round_)).exit(1)
        async with asyncio.timeout(20):
            while worker.slots()[0].state != "BACKOFF":
                await asyncio.sleep(0.001)
        assert len(spawner.processes) == 4


@pytest.mark.requirement("X72")
async def test_a_spare_takes_the_slot_at_once(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    async with make_worker(spawner, spare_executors=1) as worker:
        spare = await spawner.wait_spawned(2)
        assert await worker.call("effect", []) == 1
        spawner.processes[0].exit(-9)
        assert await worker.call("effect", []) == 1
        assert worker.slots()[0].executor_id == spare.executor_id
        await spawner.wait_spawned(3)


async def test_no_executor_for_too_long_ends_waiting_calls(make_worker: MakeWorker) -> None:
    clock = ManualClock()
    spawner = FakeSpawner()
    async with make_worker(spawner, clock=clock, restart_delay_ms=60_000) as worker:
        spawner.processes[0].exit(1)
        call = asyncio.ensure_future(worker.call("effect", []))
        await asyncio.sleep(0.05)
        for _ in range(130):
            clock.added_ms += 500
            worker._pool.tick()
        error = await failure_of(call)
    assert error.kind is ErrorKind.UNAVAILABLE
    assert "exited with status 1" in str(error)


@pytest.mark.requirement("X63")
async def test_nothing_is_reported_before_the_process_is_dead(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call, process, _execute = await begin(worker, spawner)
        reported: list[int | None] = []
        call.add_done_callback(lambda _: reported.append(process.returncode))
        process.send_bytes(b"\0\0\0\0")
        await failure_of(call)
        assert reported == [-9]


@pytest.mark.requirement("X35")
async def test_stale_frames_of_an_executor_that_holds_nothing_change_nothing(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, executors=2) as worker:
        call = asyncio.ensure_future(worker.call("effect", []))
        holder, other = spawner.processes
        (execute,) = await holder.wait_executes(1)
        other.complete(execute, b'"forged"')
        holder.complete(ExecuteCall(execute.call_id, execute.payload), b'"true"')
        holder.complete(ExecuteCall(execute.call_id, execute.payload), b'"twice"')
        assert await call == "true"
        other.heartbeat()
        async with asyncio.timeout(20):
            while worker.statistics().stale < 2:
                await asyncio.sleep(0)


async def test_a_draining_executor_is_replaced_when_its_calls_are_done(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        call = asyncio.ensure_future(worker.call("effect", [1]))
        process = spawner.processes[0]
        (execute,) = await process.wait_executes(1)
        process.heartbeat(draining="quarantine")
        later = asyncio.ensure_future(worker.call("effect", [2]))
        process.complete(execute, b"1")
        assert await call == 1
        worker._pool.tick()
        second = await spawner.wait_spawned(2)
        (execute,) = await second.wait_executes(1)
        second.complete(execute, b"2")
        assert await later == 2
        assert len(process.executes) == 1


@pytest.mark.requirement("X37")
async def test_a_process_stopped_before_it_attached_is_lost_too(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        spawner.attach = False
        spawner.processes[0].exit(1)
        second = await spawner.wait_spawned(2)
        second.stopped = True
        worker._pool.tick()
        assert second.returncode is None
        worker._pool.tick()
        await spawner.wait_spawned(3)
        assert second.returncode == -9


async def test_a_run_that_is_never_started_does_not_hold_up_the_close(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, drain_deadline_ms=60_000) as worker:
        worker.open_run("effect", IterableSource([1]), MemoryOutput())
        async with asyncio.timeout(20):
            await worker.close()
