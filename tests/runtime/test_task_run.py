"""How many rows of a list are under way before the first of them has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from callyard.wire.messages import ExecuteCall
from callyard.worker.builders import Row
from callyard.worker.outputs import MemoryOutput

from .conftest import MakeWorker
from .fakes import FakeProcess, FakeSpawner


@pytest.mark.requirement("X20")
async def test_many_slow_calls_do_not_use_up_the_window_by_ones(make_worker: MakeWorker) -> None:
    """A thousand calls that only wait can wait side by side, though nothing is known of their throughput yet."""
    spawner = FakeSpawner()
    async with make_worker(
        spawner, executor_max_inflight=2_000, executor_max_runnable=2_000, queue_ahead_ms=0
    ) as worker:
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


class Counted(Sequence[list[str]]):
    """Rows that are made when they are asked for, and counted."""

    def __init__(self, count: int, size: int) -> None:
        self.taken = 0
        self._count = count
        self._text = "x" * size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)
        self.taken = max(self.taken, index + 1)
        return [self._text]


@pytest.mark.requirement("X20", "X76")
async def test_large_rows_are_bounded_by_their_bytes_and_not_only_by_batches(make_worker: MakeWorker) -> None:
    """A megabyte of rows of 100 kB is ten of them, beside those whose results are on their way to the reader."""
    spawner = FakeSpawner()
    rows = Counted(200, 100_000)
    async with make_worker(spawner, outstanding_bytes_max=1_000_000, executor_max_inflight=2_000) as worker:
        stream = worker.map("effect", rows)
        first = asyncio.ensure_future(anext(stream))
        process = spawner.processes[0]
        await process.wait_executes(1)
        held, seen = 0, 0
        process.answers = lambda process, execute: process.complete(execute)
        for execute in list(process.executes):
            process.complete(execute)
        assert (await first).value == 1
        async for result in stream:
            held, seen = max(held, rows.taken - result.index), seen + 1
        assert seen == 199
        assert 2 <= held <= 30


@pytest.mark.requirement("X20", "X76")
async def test_large_results_that_wait_hold_back_the_rows_behind_them(make_worker: MakeWorker) -> None:
    """The first call has no end: what the others return is held, up to the bound, and then no more is begun."""
    text = b'"%b"' % (b"y" * 20_000)
    first_call: list[str] = []

    def answer(process: FakeProcess, execute: ExecuteCall) -> None:
        if first_call:
            process.complete(execute, text)
        else:
            first_call.append(execute.call_id)

    spawner = FakeSpawner(answers=answer)
    rows = Counted(4_000, 4_000)
    settings = {"outstanding_bytes_max": 200_000, "reorder_bytes_max": 200_000, "executor_max_inflight": 4}
    async with make_worker(spawner, **settings) as worker:
        stream = worker.map("effect", rows)
        first = asyncio.ensure_future(anext(stream))
        process = spawner.processes[0]
        await process.wait_executes(12)
        before = -1
        while before < rows.taken:  # until it stands still for as long as a hundred turns
            before = rows.taken
            for _ in range(100):
                await asyncio.sleep(0)
        assert rows.taken <= 80
        process.complete(process.executes[0], text)
        assert len((await first).value) == 20_000
        assert sum([1 async for _ in stream]) == 3_999


class Remaining:
    """A source whose rows have gaps, as those of a run that goes on."""

    name = "remaining"
    may_block = False
    read_fraction = None

    def __init__(self, indices: Sequence[int]) -> None:
        self.total: int | None = len(indices)
        self._indices = indices

    def rows(self) -> Iterator[Row]:
        return (Row(index, b"[]") for index in self._indices)


@pytest.mark.requirement("X88")
async def test_rows_that_do_not_follow_one_another_keep_their_places(make_worker: MakeWorker) -> None:
    """So many that one look at the source takes several together: those of a batch do follow one another."""
    indices = [index for index in range(3_000) if index % 5 not in (0, 3)]
    output = MemoryOutput()
    async with make_worker(FakeSpawner(answers=lambda process, execute: process.complete(execute))) as worker:
        await worker.run("effect", Remaining(indices), output)
    assert [result.index for result in output.results] == indices
