"""What a worker that is killed leaves of the calls that had begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from callyard.errors import ErrorKind
from callyard.worker.begun import BegunRows, read_begun
from callyard.worker.builders import open_rows
from callyard.worker.outputs import MemoryOutput
from callyard.worker.worker import Worker

from .conftest import MakeWorker
from .fakes import WAIT_S, FakeProcess, FakeSpawner


class Gate:
    """Lets every batch through, and holds the table of begun rows."""

    def __init__(self, folder: Path) -> None:
        self.table = folder / "table"
        self.begun: BegunRows | None = BegunRows(self.table, lambda: None)

    def admit(self, end_row: int, send: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(send)

    def abort(self) -> None:
        """Nothing was written."""


async def wait_found(worker: Worker, gate: Gate, count: int, expected: list[int]) -> None:
    marks = worker.run_folder.path / "marks"
    async with asyncio.timeout(WAIT_S):
        while read_begun(gate.table, marks, 0, count) != expected:
            await asyncio.sleep(0.01)


@pytest.mark.requirement("X88", "X62")
async def test_every_way_to_begin_is_known_to_who_comes_after_a_kill(make_worker: MakeWorker, tmp_path: Path) -> None:
    """Marked and running, ended with its mark overwritten, failed, begun in a process that died; and not: never begun,
    and refused before it ran."""
    spawner = FakeSpawner()
    gate = Gate(tmp_path)
    async with make_worker(spawner, executors=2, executor_max_inflight=8) as worker:
        source = open_rows([[row] for row in range(8)])
        run = worker.open_run("effect", source, MemoryOutput(), file_run=cast(Any, gate))
        taking = asyncio.ensure_future(run.wait())
        async with asyncio.timeout(WAIT_S):
            while sum(len(process.executes) for process in spawner.processes) < 8:
                await asyncio.sleep(0.01)
                for process in spawner.processes:
                    process.heartbeat()
        by_row = {
            int(bytes(execute.payload.args)[1:-1]): (process, execute)
            for process in spawner.processes
            for execute in process.executes
        }
        process, execute = by_row[1]
        process.mark(execute, 0)
        process.complete(execute)
        await wait_found(worker, gate, 8, [1])
        process, execute = by_row[2]
        process.mark(execute, 0)  # in the same slot, if it is the same page
        process.fail(execute.call_id, execute.payload.attempt_seq, ErrorKind.INTERNAL, "it raised", outcome="ran")
        process, execute = by_row[3]
        process.fail(execute.call_id, execute.payload.attempt_seq, ErrorKind.SCHEMA, "misfit", outcome="not_run")
        await wait_found(worker, gate, 8, [1, 2])
        dying: FakeProcess = by_row[4][0]
        dying.mark(by_row[4][1], 3)
        await wait_found(worker, gate, 8, [1, 2, 4])
        dying.exit(-9)
        async with asyncio.timeout(WAIT_S):
            while (worker.run_folder.path / "marks" / dying.executor_id).exists():
                await asyncio.sleep(0.01)
        await wait_found(worker, gate, 8, [1, 2, 4])
        taking.cancel()
        await asyncio.wait({taking})
