"""Blocking work of a provider in threads of its own, stopped when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

STOP_EVERY_S: Final = 0.05
STOP_TRIES: Final = 40


class Threads:
    """At most `count` at a time. They start at the first use; the loop's default threads stay free for others."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T], stop: Callable[[], None] | None = None, timeout_ms: int = 0) -> T:
        """What `work` returns or raises. Raises TimeoutError; 0: no limit.

        When it is cancelled or late, `stop` is called until the thread has ended, for two seconds at most: an
        interruption that comes before the statement has begun is lost, so that one call is not enough.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix=f"callyard-{self._name}")
        job = self._pool.submit(work)
        future = asyncio.wrap_future(job)
        try:
            async with asyncio.timeout(timeout_ms / 1_000 if timeout_ms else None):
                return await asyncio.shield(future)
        except (TimeoutError, asyncio.CancelledError):
            if not job.cancel() and stop is not None:  # it has begun
                for _ in range(STOP_TRIES):
                    stop()
                    if (await asyncio.wait([future], timeout=STOP_EVERY_S))[0]:
                        break
            if future.done() and not future.cancelled():
                future.exception()  # seen: it says that it was stopped
            raise
