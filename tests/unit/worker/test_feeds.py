"""Rows read ahead by a thread: in order, bounded by count and by bytes, and ended when nobody takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from callyard.worker.builders import Row
from callyard.worker.feeds import AHEAD_BYTES_MAX, AHEAD_ROWS_MAX, ThreadFeed

WAIT_S = 30.0


class Rows:
    """Rows of one size, which count how many were read."""

    def __init__(self, count: int, size: int) -> None:
        self.read = 0
        self._count = count
        self._args = b"[" + b" " * (size - 2) + b"]"

    def __iter__(self) -> Iterator[Row]:
        for index in range(self._count):
            self.read += 1
            yield Row(index, self._args)


async def until_still(rows: Rows, feed: ThreadFeed) -> int:
    """How many rows were read when the reader waits for room."""
    async with asyncio.timeout(WAIT_S):
        while not feed._room._waiters:  # type: ignore[attr-defined]  # nothing else says that it waits
            await asyncio.sleep(0.005)
    return rows.read


@pytest.mark.requirement("X43")
@pytest.mark.parametrize(
    ("size", "ahead"), [(2, AHEAD_ROWS_MAX), (1_000_000, -(-AHEAD_BYTES_MAX // 1_000_000))], ids=["rows", "bytes"]
)
async def test_reading_ahead_is_bounded(size: int, ahead: int) -> None:
    rows = Rows(3 * AHEAD_ROWS_MAX, size)
    feed = ThreadFeed(iter(rows), lambda: None)
    assert await until_still(rows, feed) == ahead + 1  # the one in hand
    assert len(feed.take(5, 1 << 30).rows) == 5
    async with asyncio.timeout(WAIT_S):
        while rows.read < ahead + 6:
            await asyncio.sleep(0.005)
    assert await until_still(rows, feed) == ahead + 6
    feed.close()


async def test_every_row_comes_once_and_in_order_and_then_the_error() -> None:
    def broken() -> Iterator[Row]:
        yield from Rows(5_000, 2)
        raise ValueError("cut off")

    ready = asyncio.Event()
    feed = ThreadFeed(broken(), ready.set)
    taken: list[int] = []

    async def take_all() -> None:
        while True:
            ready.clear()
            got = feed.take(100, 1_000)
            taken.extend(row.index for row in got.rows)
            if not got.rows:
                await ready.wait()

    with pytest.raises(ValueError, match="cut off"):
        await asyncio.wait_for(take_all(), WAIT_S)
    assert taken == list(range(5_000))


async def test_a_reader_that_waits_for_room_ends_when_the_feed_is_closed() -> None:
    rows = Rows(3 * AHEAD_ROWS_MAX, 2)
    feed = ThreadFeed(iter(rows), lambda: None)
    await until_still(rows, feed)
    feed.close()
    async with asyncio.timeout(WAIT_S):
        while not feed._ended:
            await asyncio.sleep(0.005)
    assert rows.read == AHEAD_ROWS_MAX + 1
