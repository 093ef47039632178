"""The pump on a loop with timers: what an hour of saturation costs, and what a lost signal costs."""

from __future__ import annotations

import asyncio

import pytest

from callyard.host.jobs import JobQueue
from callyard.host.pump import Pump
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from callyard.transport.port import SourceKind
from tests.unit.host.pump.kit import FakeIngress

HOUR_S = 3_600


class Parts:
    def __init__(self, jobs_max: int) -> None:
        self.transport = ScriptedTransport()
        self.jobs = JobQueue(jobs_max, clock=VirtualTimers())
        self.ingress = FakeIngress()
        self.pump = Pump(self.transport, self.jobs, self.ingress, VirtualTimers())
        self.pump.start()


async def rest() -> None:
    """Let the loop come to rest: time moves only when nothing else can run."""
    await asyncio.sleep(0.001)


@pytest.mark.requirement("R34", "R93")
@virtual_time
async def test_an_hour_of_saturation_costs_nothing() -> None:
    parts = Parts(jobs_max=2)
    held = [parts.jobs.try_acquire(), parts.jobs.try_acquire()]
    sources = [parts.transport.add_source(kind.value, kind) for kind in SourceKind]
    for source in sources:
        source.one_way(count=100)
        source.control(count=100)
    await rest()
    loop = asyncio.get_running_loop()
    armed: list[float] = []
    real_call_at = loop.call_at

    def call_at(when: float, *args: object, **kwargs: object) -> object:
        armed.append(when)
        return real_call_at(when, *args, **kwargs)  # type: ignore[arg-type]

    loop.call_at = call_at  # type: ignore[method-assign, assignment]
    before = parts.pump.statistics(), parts.transport.counts.copy()
    await asyncio.sleep(HOUR_S)
    assert (parts.pump.statistics(), parts.transport.counts) == before
    assert len(armed) == 1  # this test's own
    status = parts.jobs.status()
    assert (status.waiters, status.in_use) == (len(sources), 2)
    assert parts.ingress.refusals == []
    for permit in held:
        assert permit is not None
        permit.release()
    while sum(source.unread for source in sources) or parts.ingress.queued:
        await rest()
        while parts.ingress.queued:
            record, queued = parts.ingress.queued.popleft()
            parts.ingress.begun.append(record)
            queued.release()
    assert len(parts.ingress.begun) == len(parts.ingress.controlled) == 100 * len(sources)
    parts.pump.close()


@pytest.mark.requirement("R55")
@virtual_time
async def test_a_swallowed_signal_loses_nothing() -> None:
    parts = Parts(jobs_max=10)
    source = parts.transport.add_source("a")
    parts.transport.on_signal = lambda source: 0
    source.one_way()
    await rest()
    assert parts.transport.counts["take"] == 0
    parts.transport.on_signal = lambda source: 1
    source.one_way()
    await rest()
    assert [record.sequence for record in parts.ingress.committed] == [1, 2]
    parts.pump.close()


@virtual_time
async def test_repeated_signals_change_nothing() -> None:
    parts = Parts(jobs_max=10)
    parts.transport.on_signal = lambda source: 50
    source = parts.transport.add_source("a")
    source.one_way(count=3)
    await rest()
    assert [record.sequence for record in parts.ingress.committed] == [1, 2, 3]
    assert parts.pump.statistics().wakes == 1
    parts.pump.close()


@pytest.mark.requirement("R112")
@virtual_time
async def test_timers_fire_between_two_rotations() -> None:
    parts = Parts(jobs_max=1_000_000)
    fired: list[int] = []
    loop = asyncio.get_running_loop()
    loop.call_later(0, lambda: fired.append(parts.transport.counts["take"]))
    source = parts.transport.add_source("a")
    source.endless(lambda n: source.record(), count=10_000)
    await rest()
    assert fired[0] <= 64
    assert parts.transport.counts["take"] == 10_000
    parts.pump.close()
