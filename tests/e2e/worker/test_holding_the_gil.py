"""C code that holds the GIL: nothing of its process is heard any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from callyard.errors import CallError
from callyard.worker.worker import Worker

FUNCTIONS = """
from callyard import function, sleep

@function
def holds(path: str) -> int:
    open(path, "x").close()
    return sum(range(10**15))

@function
def waits(path: str) -> None:
    open(path, "x").close()
    sleep(600)
"""


@pytest.mark.slow
@pytest.mark.requirement("X38")
async def test_it_alone_is_charged(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    async with Worker(file, executors=1, on_output=lambda *_: None) as worker:
        begun = tmp_path / "begun"
        beside = asyncio.ensure_future(worker.call("waits", [str(begun)], budget_ms=1_000))
        async with asyncio.timeout(30):
            while not begun.exists():
                await asyncio.sleep(0.01)
        with pytest.raises(CallError) as caught:
            await worker.call("holds", [str(tmp_path / "held")], budget_ms=100)
        assert caught.value.failure.details["cause"] == "heartbeat"
        with pytest.raises(CallError) as neighbour:
            await beside
    assert neighbour.value.failure.details["cause"] == "neighbour"
