"""Exclusive functions, and what an interruption costs the executor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from callyard.errors import CallError, ErrorKind
from callyard.worker.worker import Worker

FUNCTIONS = """
import os
import time

from callyard import function, sleep


@function(exclusive=True)
def alone(seconds: float) -> int:
    sleep(seconds)
    return os.getpid()


@function
def beside(seconds: float) -> int:
    sleep(seconds)
    return os.getpid()


@function(exclusive=True)
def alone_and_gone() -> None:
    sleep(0.05)
    os._exit(1)


@function
def spin() -> None:
    while True:
        time.monotonic()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.mark.requirement("X90")
async def test_a_crash_of_an_exclusive_call_costs_nobody_else(path: Path) -> None:
    async with Worker(path, executors=2, on_output=lambda *_: None) as worker:
        others = [asyncio.ensure_future(worker.call("beside", [0.2])) for _ in range(20)]
        gone = [asyncio.ensure_future(worker.call("alone_and_gone")) for _ in range(3)]
        for call in gone:
            with pytest.raises(CallError) as caught:
                await call
            assert caught.value.failure.kind is ErrorKind.CRASHED
        assert len(await asyncio.gather(*others)) == 20


@pytest.mark.requirement("X90")
async def test_the_pool_grows_while_exclusive_calls_wait_and_shrinks_again(path: Path) -> None:
    async with Worker(path, executors=1, executors_max=3) as worker:
        pids = await asyncio.gather(*[worker.call("alone", [1.5]) for _ in range(6)])
        assert len(set(pids)) == 3
        async with asyncio.timeout(30):
            while len(worker.slots()) > 1:
                await asyncio.sleep(0.05)
        assert await worker.call("beside", [0])


@pytest.mark.parametrize(("after_interrupt", "same"), [("recycle", False), ("keep", True)])
async def test_an_executor_is_replaced_after_an_interruption_unless_told_otherwise(
    path: Path, after_interrupt: str, same: bool
) -> None:
    async with Worker(path, executors=1, after_interrupt=after_interrupt) as worker:
        before = await worker.call("beside", [0])
        neighbour = asyncio.ensure_future(worker.call("beside", [1.0]))
        with pytest.raises(CallError, match="budget"):
            await worker.call("spin", budget_ms=100)
        assert await neighbour == before  # its others are done first
        assert (await worker.call("beside", [0]) == before) is same
