"""Waiting for a permit as a coroutine: a grant and a cancellation in one step of the loop."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from callyard.host.acquire import acquire
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue, Permit
from callyard.testing.virtual_time import VirtualTimers, virtual_time


def full(limit: int = 1) -> tuple[JobQueue, list[Permit]]:
    jobs = JobQueue(limit, clock=VirtualTimers())
    return jobs, [permit for _ in range(limit) if (permit := jobs.try_acquire()) is not None]


async def wait_until_in_line(jobs: JobQueue, count: int = 1) -> None:
    while jobs.waiters < count:
        await asyncio.sleep(0)


@pytest.mark.requirement("R16")
@virtual_time
async def test_in_the_order_of_asking() -> None:
    jobs, held = full()
    order: list[str] = []

    async def work(key: str) -> None:
        permit = await acquire(jobs, key)
        order.append(key)
        permit.release()

    tasks = []
    for count, key in enumerate("CAB", 1):
        tasks.append(asyncio.ensure_future(work(key)))
        await wait_until_in_line(jobs, count)
    held.pop().release()
    await asyncio.gather(*tasks)
    assert (order, jobs.in_use) == (["C", "A", "B"], 0)


@pytest.mark.requirement("R48")
@pytest.mark.parametrize("order", list(permutations(["release", "cancel", "close"])), ids="-".join)
def test_all_in_one_step_of_the_loop(order: tuple[str, ...]) -> None:
    """However grant, cancellation and close fall together: one outcome, and the permit is home."""

    @virtual_time
    async def run() -> None:
        jobs, held = full()
        task = asyncio.ensure_future(acquire(jobs, "A"))
        await wait_until_in_line(jobs)
        for name in order:
            {"release": held[0].release, "cancel": task.cancel, "close": jobs.close}[name]()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (jobs.in_use, jobs.waiters) == (0, 0)
        jobs.check_invariants()

    run()


@pytest.mark.requirement("R48")
@virtual_time
async def test_cancelled_and_closed_before_its_task_ran() -> None:
    jobs, held = full()
    task = asyncio.ensure_future(acquire(jobs, "A"))
    await wait_until_in_line(jobs)
    jobs.close()
    with pytest.raises(HostError) as ended:
        await task
    assert ended.value.kind is HostErrorKind.SHUTTING_DOWN
    held.pop().release()
    assert jobs.in_use == 0


@pytest.mark.requirement("R31")
@virtual_time
async def test_a_time_limit_around_it_ends_the_wait() -> None:
    jobs, held = full()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3_600):
            await acquire(jobs, "A")
    assert (jobs.waiters, jobs.in_use) == (0, 1)
    held.pop().release()
    (await acquire(jobs, "A")).release()
    assert jobs.in_use == 0


@pytest.mark.requirement("R27")
@virtual_time
async def test_a_key_that_waits_already_is_refused() -> None:
    jobs, held = full()
    first = asyncio.ensure_future(acquire(jobs, "A"))
    await wait_until_in_line(jobs)
    with pytest.raises(HostError) as refused:
        await acquire(jobs, "A")
    assert refused.value.kind is HostErrorKind.INVALID_OPERATION
    held.pop().release()
    (await first).release()
    assert jobs.in_use == 0
