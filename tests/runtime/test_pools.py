"""The shell of named pools: slots, environment, what becomes of a pool without executors, and of executors replaced."""

from __future__ import annotations

import asyncio

import pytest

from callyard.errors import CallError, ErrorKind
from callyard.worker.config import PoolConfig

from . import fakes
from .conftest import MakeWorker, ManualClock
from .fakes import FakeProcess, FakeSpawner

POOLS = {"gpu": PoolConfig(environment={"DEVICE": "{slot}"})}


@pytest.fixture
def far_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fakes.PROMISES, "far", {"pool": "gpu"})


async def until(condition: object) -> None:
    async with asyncio.timeout(fakes.WAIT_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


@pytest.mark.requirement("X92")
async def test_pools_start_with_their_size_and_their_environment(make_worker: MakeWorker, far_function: None) -> None:
    spawner = FakeSpawner(answers=lambda process, execute: process.complete(execute))
    pools = {"gpu": PoolConfig(executors=2, executor_max_inflight=3, environment={"DEVICE": "cuda:{slot}"})}
    async with make_worker(spawner, pools=pools) as worker:
        orders = [process.order for process in spawner.processes]
        assert [order.environment for order in orders] == [{}, {"DEVICE": "cuda:0"}, {"DEVICE": "cuda:1"}]
        assert [order.executor_max_inflight for order in orders] == [128, 3, 3]
        await worker.call("far")
        await worker.call("effect")
        assert [len(process.executes) for process in spawner.processes].count(1) == 2
        assert len(spawner.processes[0].executes) == 1
        spawner.processes[2].exit(-9)
        assert (await spawner.wait_spawned(4)).order.environment == {"DEVICE": "cuda:1"}


@pytest.mark.requirement("X71")
async def test_a_pool_without_executors_ends_its_own_calls_only(make_worker: MakeWorker, far_function: None) -> None:
    clock, spawner = ManualClock(), FakeSpawner()
    async with make_worker(spawner, clock=clock, pools=POOLS, restart_delay_ms=60_000) as worker:
        near, far = spawner.processes
        far.exit(1)
        held = asyncio.ensure_future(worker.call("endless"))
        lost = asyncio.ensure_future(worker.call("far"))
        (execute,) = await near.wait_executes(1)
        near.mark(execute)
        await until(lambda: worker._pool._pools["gpu"].slots[0].executor is None)
        for _ in range(130):
            clock.added_ms += 500
            near.heartbeat(running_call_id="")
            await asyncio.sleep(0)
            worker._pool.tick()
        with pytest.raises(CallError, match=r"of pool 'gpu'.*exited with status 1") as caught:
            await lost
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        near.complete(execute)
        assert await held == 1


def interrupt(process: FakeProcess, number: int) -> None:
    """A call that had begun was stopped in the middle of its code."""
    execute = process.executes[number]
    process.fail(execute.call_id, execute.payload.attempt_seq, ErrorKind.TIMEOUT, "over", outcome="unknown")


@pytest.mark.requirement("X47")
async def test_a_replaced_executor_s_long_calls_hold_no_slot_and_pile_up_no_processes(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner) as worker:
        calls = []
        for number in (1, 2):
            process = await spawner.wait_spawned(number)
            calls += [asyncio.ensure_future(worker.call("effect")) for _ in range(2)]
            for slot, execute in enumerate(await process.wait_executes(2)):
                process.mark(execute, slot)
            interrupt(process, 0)
            await until(calls[-2].done)
        first, second = spawner.processes[:2]
        late = asyncio.ensure_future(worker.call("effect"))
        worker._pool.tick()
        await asyncio.sleep(0.02)
        assert len(spawner.processes) == 2, "one ends its call beside the slot, the other one's slot waits"
        assert (first.returncode, second.returncode) == (None, None)
        first.complete(first.executes[1])
        await until(lambda: first.returncode is not None)
        worker._pool.tick()
        third = await spawner.wait_spawned(3)
        (execute,) = await third.wait_executes(1)
        third.complete(execute)
        assert await late == 1
        assert second.returncode is None
        second.complete(second.executes[1])
        assert [await calls[1], await calls[3]] == [1, 1]
        await until(lambda: second.returncode is not None)
        assert len(spawner.processes) == 3
        for call in (calls[0], calls[2]):
            with pytest.raises(CallError):
                await call


@pytest.mark.requirement("X72")
async def test_a_spare_takes_a_replaced_executor_s_slot_at_once(make_worker: MakeWorker) -> None:
    spawner = FakeSpawner()
    async with make_worker(spawner, spare_executors=1) as worker:
        spare = await spawner.wait_spawned(2)
        calls = [asyncio.ensure_future(worker.call("effect")) for _ in range(2)]
        for slot, execute in enumerate(await spawner.processes[0].wait_executes(2)):
            spawner.processes[0].mark(execute, slot)
        interrupt(spawner.processes[0], 0)
        await until(lambda: worker.slots()[0].executor_id == spare.executor_id)
        assert spawner.processes[0].returncode is None
        spawner.processes[0].complete(spawner.processes[0].executes[1])
        assert await calls[1] == 1
        with pytest.raises(CallError):
            await calls[0]
