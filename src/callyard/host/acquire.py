"""Waiting for a permit as a coroutine. Source: job-queue §11.3, R31, R48."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue, Permit


async def acquire(jobs: JobQueue, key: Hashable) -> Permit:
    """Wait in line for a permit. Safe to cancel at any point: a permit that came in the same step goes back.

    Raises `HostError`: SHUTTING_DOWN when the queue is or gets closed, INVALID_OPERATION when `key` waits already, and
    what the queue's `may_wait` raises.
    """
    if jobs.is_in_line(key):
        raise HostError(HostErrorKind.INVALID_OPERATION, f"{key!r} waits for a permit already: a source has one place")
    future: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()

    def granted(permit: Permit) -> None:
        if future.done():  # cancelled, and its task has not run since
            permit.release()
        else:
            future.set_result(permit)

    def closed() -> None:
        if not future.done():
            future.set_exception(HostError(HostErrorKind.SHUTTING_DOWN, f"the host takes no more jobs: {key!r} waited"))

    waiter = jobs.wait(key, granted, closed=closed)
    try:
        return await future
    except asyncio.CancelledError:
        waiter.cancel()
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()
        raise
