"""How many rows of a list are under way before the first of them has ended."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import MakeWorker
from .fakes import FakeSpawner


@pytest.mark.requirement("X20")
async def test_many_slow_calls_do_not_use_up_the_window_by_ones(make_worker: MakeWorker) -> None:
    """A thousand calls that only wait can wait side by side, though nothing is known of their throughput yet."""
    spawner = FakeSpawner()
    async with make_worker(spawner, executor_max_inflight=2_000, executor_max_runnable=2_000) as worker:
        stream = worker.map("effect", ([] for _ in range(2_000)))
        first = asyncio.ensure_future(anext(stream))
        process = spawner.processes[0]
        await process.wait_executes(1_000)
        assert worker.config.max_outstanding_batches == 256
        process.answers = lambda process, execute: process.complete(execute)
        for execute in list(process.executes):
            process.complete(execute)
            await asyncio.sleep(0)  # both ends are in this loop: the worker must read before the socket is full
        assert (await first).value == 1
        assert [result.value async for result in stream] == [1] * 1_999
