"""Blocks that are cut short: in time, once, and never for another's reason."""

from __future__ import annotations

import asyncio

import pytest

from callyard.worker.io.deadlines import Deadlines

pytestmark = pytest.mark.requirement("X42")
LONG_MS = 3_600_000


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def wait_cut(deadlines: Deadlines, timeout_ms: int) -> str:
    with pytest.raises(TimeoutError), deadlines.within(timeout_ms):
        await never()
    current = asyncio.current_task()
    assert current is not None
    return f"cut, {current.cancelling()} cancellations left"


async def test_a_block_over_its_time_is_cut() -> None:
    async with asyncio.timeout(30):
        assert await wait_cut(Deadlines(), 10) == "cut, 0 cancellations left"


async def test_each_is_cut_at_its_own_time() -> None:
    """The second begins while the first one's timer runs, the third when its queue has been let go of."""
    deadlines = Deadlines()
    loop = asyncio.get_running_loop()
    ended: list[str] = []

    async def block(name: str, timeout_ms: int) -> None:
        began = loop.time()
        await wait_cut(deadlines, timeout_ms)
        assert loop.time() - began > timeout_ms / 1_000 - 0.005  # uvloop's clock has steps of a millisecond
        ended.append(name)

    async with asyncio.timeout(30):
        first = asyncio.ensure_future(block("first", 60))
        await asyncio.sleep(0.03)
        short, second = asyncio.ensure_future(block("short", 5)), asyncio.ensure_future(block("second", 60))
        await asyncio.gather(first, short, second)
        assert ended == ["short", "first", "second"]
        await block("third", 60)


async def test_what_ends_in_time_is_left_alone() -> None:
    deadlines = Deadlines()
    async with asyncio.timeout(30):
        with deadlines.within(20):
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="its own"), deadlines.within(20):
            raise ValueError("its own")
        await wait_cut(deadlines, 20)  # so the timer of the first two has fired
        await asyncio.sleep(0.03)


async def test_a_cancellation_is_not_a_timeout() -> None:
    deadlines = Deadlines()
    aio_task = asyncio.ensure_future(wait_cut(deadlines, LONG_MS))
    await asyncio.sleep(0)
    aio_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aio_task
    deadlines.close()


async def test_cancelled_and_over_its_time_is_cancelled() -> None:
    """Both before the task runs again: whoever cancelled it wants it to end."""
    deadlines = Deadlines()

    aio_task = asyncio.ensure_future(wait_cut(deadlines, LONG_MS))
    await asyncio.sleep(0)
    (queue,) = deadlines._queues.values()
    (block,) = queue._waiting
    block.at_s = 0
    queue._look()
    aio_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aio_task
    deadlines.close()


async def test_one_timer_for_many_of_one_length() -> None:
    deadlines = Deadlines()
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    call_at = loop.call_at

    def counted(when: float, *args: object, **kwargs: object) -> asyncio.TimerHandle:
        timers.append(when)
        return call_at(when, *args, **kwargs)  # type: ignore[arg-type]

    loop.call_at = counted  # type: ignore[method-assign]
    waiting = [asyncio.ensure_future(wait_cut(deadlines, LONG_MS)) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(timers) == 1
    for aio_task in waiting:
        aio_task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    deadlines.close()
