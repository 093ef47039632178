"""Which call is charged where an executor falls silent: the one whose code runs, as its page says."""

from __future__ import annotations

import asyncio
import os

import pytest

from callyard.errors import CallError

from .conftest import MakeWorker, ManualClock
from .fakes import FakeProcess, FakeSpawner


def mark_running(process: FakeProcess, number: int) -> None:
    end = os.fstat(process._mark_fd).st_size
    os.pwrite(process._mark_fd, number.to_bytes(8, "little"), end - 8)


@pytest.mark.requirement("X38")
@pytest.mark.parametrize(
    ("told", "marked", "causes"),
    [
        (0, 1, ["neighbour", "wedge"]),
        (0, 0, ["wedge", "neighbour"]),
        (0, None, ["wedge", "neighbour"]),
        (None, 1, ["neighbour", "heartbeat"]),
        (None, None, ["heartbeat", "heartbeat"]),
    ],
)
async def test_silence_is_charged_to_the_call_that_runs(
    make_worker: MakeWorker, told: int | None, marked: int | None, causes: list[str]
) -> None:
    """A call that holds the GIL lets no heartbeat out; the last one that left named another call, or none."""
    clock = ManualClock()
    spawner = FakeSpawner()
    async with make_worker(spawner, clock=clock) as worker:
        calls = [asyncio.ensure_future(worker.call("quick", [n])) for n in range(2)]
        process = spawner.processes[0]
        executes = await process.wait_executes(2)
        for slot, execute in enumerate(executes):
            process.mark(execute, slot)
        if told is not None:
            process.heartbeat(running_call_id=executes[told].call_id)
            executor = worker._pool._executors[process.executor_id]
            async with asyncio.timeout(20):
                while not executor.heartbeat.running_call_id:
                    await asyncio.sleep(0)
        if marked is not None:
            mark_running(process, executes[marked].payload.call_number)
        for _ in range(100):
            clock.added_ms += 500
            worker._pool.tick()
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, CallError) for error in errors)
    assert [error.failure.details["cause"] for error in errors] == causes  # type: ignore[union-attr]
