"""Leaving a loop over results cancels the calls that are left, with real executors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from callyard import Worker, as_completed
from tests.e2e import typed_file as f

ROWS = 40
WAIT_S = 60.0


def quiet(*_: object) -> None:
    """Drop what executors print."""


class Left(Exception):
    pass


WAYS: dict[str, Callable[[Worker, str, str], AsyncGenerator[Any, None]]] = {
    "map": lambda worker, gate, began: worker.map(f.wait_for, [(gate, began, n) for n in range(ROWS)]),
    "unordered": lambda worker, gate, began: worker.map(
        "wait_for", ([gate, began, n] for n in range(ROWS)), ordered=False
    ),
    "as_completed": lambda worker, gate, began: as_completed(
        worker.call(f.wait_for, gate, began, n) for n in range(ROWS)
    ),
    "as_completed_of_results": lambda worker, gate, began: as_completed(
        [worker.call_result("wait_for", [gate, began, n]) for n in range(ROWS)], limit=8
    ),
}


async def leave(way: str, results: Callable[[], AsyncGenerator[Any, None]]) -> None:
    """Take one result, and leave."""
    if way == "break":
        async for result in results():
            assert (result.index, result.value) == (0, 0)
            break
    elif way == "exception":

        async def fail() -> None:
            async for result in results():
                raise Left(result)

        with pytest.raises(Left):
            await fail()
    elif way == "cancelled":

        async def take() -> None:
            async for _ in results():
                taken.set()

        taken = asyncio.Event()
        taking = asyncio.create_task(take())
        async with asyncio.timeout(WAIT_S):
            await taken.wait()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    else:
        held = results()
        assert (await anext(held)).value == 0
        await held.aclose()


@pytest.mark.parametrize("what", WAYS)
@pytest.mark.parametrize("way", ["break", "exception", "cancelled", "aclose"])
async def test_leaving_the_loop_cancels_the_rest(way: str, what: str, tmp_path: Path) -> None:
    gate, began = str(tmp_path / "gate"), str(tmp_path / "began")
    Path(f"{gate}0").touch()  # no other call ever ends by itself
    async with Worker(f.__file__, executors=2, spare_executors=0, on_output=quiet) as worker:
        await leave(way, lambda: WAYS[what](worker, gate, began))
        async with asyncio.timeout(WAIT_S):
            while worker.statistics().calls or worker.running():
                await asyncio.sleep(0.01)
        assert await worker.call(f.point) == f.Point(1, 2)
