"""A whole host at the end of its permits: it waits, costs nothing, and one that is stuck holds up nobody else."""

from __future__ import annotations

import asyncio
import gc

import pytest

from callyard.host.ledger import OwnerLimits
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import Record, SourceKind
from tests.runtime.host.kit import Counter, add, drops, serving, until

HOUR_S = 3_600


@pytest.mark.requirement("R34", "R93")
@virtual_time
async def test_a_saturated_host_arms_no_timer_for_an_hour_and_wakes_for_nothing() -> None:
    transport = ScriptedTransport()
    sources = [transport.add_source(kind.value, kind) for kind in SourceKind]
    async with serving(transport, jobs_max=2) as host:
        counter = Counter("a")
        counter.gate = asyncio.Event()
        host.spot("a", counter)
        for source in sources:
            source.one_way("a", add(), message_type="Add", count=100)
        await until(lambda: host.status().capacity.capacity_waiters == len(sources))
        await asyncio.sleep(1)
        loop = asyncio.get_running_loop()
        armed: list[float] = []
        arm = loop.call_at

        def call_at(when: float, *args: object, **options: object) -> object:
            armed.append(when)
            return arm(when, *args, **options)  # type: ignore[arg-type]

        loop.call_at = call_at  # type: ignore[method-assign, assignment]
        before = host.statistics(), transport.counts.copy()
        await asyncio.sleep(HOUR_S)
        assert (host.statistics(), transport.counts) == before
        assert len(armed) == 1, "this test's own"
        assert drops(host) == {}
        counter.gate.set()
        await until(lambda: len(counter.seen) == 100 * len(sources), steps=100_000)
        assert drops(host) == {}


@pytest.mark.requirement("R126", "R56")
@virtual_time
async def test_a_turn_that_never_returns_and_a_flood_for_it_hold_up_nobody_else() -> None:
    """The lane of one owner is a quarter of the permits, so the flood is refused, and the others are served at once."""
    transport = ScriptedTransport()
    flood, other = transport.add_source("flood"), transport.add_source("other")
    async with serving(transport, jobs_max=16, owners=OwnerLimits(application_items_max=4)) as host:
        stuck = Counter("stuck")
        stuck.gate = asyncio.Event()
        host.spot("stuck", stuck)
        host.spots("cart/*", Counter)
        flood.endless(lambda number: flood.record(target="stuck", message_type="Add", payload=add()), count=20_000)
        await until(lambda: host.status().capacity.queued_application_jobs >= 3)
        steps: list[int] = []
        for number in range(200):
            other.request(f"cart/{number % 7}", b"{}", message_type="Total", operation_id=1 + number)
            taken = 0
            while len(transport.accepted()) == number:
                await asyncio.sleep(0)
                taken += 1
                assert taken < 50, "an answer waits for the flood"
            steps.append(taken)
        assert asyncio.get_running_loop().time() == 0, "and no time at all"
        assert host.status().capacity.queued_application_jobs <= 4
        assert drops(host).keys() == {("one_way", "backpressure")}
        stuck.gate.set()


@pytest.mark.requirement("R35")
@virtual_time
async def test_what_is_pushed_at_saturation_stays_in_the_transport() -> None:
    """A census over five kinds of sources: what lives of a hundred thousand records is what permits there are."""
    transport = ScriptedTransport()
    sources = [transport.add_source(kind.value, kind) for kind in SourceKind]
    async with serving(transport, jobs_max=6) as host:
        counter = Counter("a")
        counter.gate = asyncio.Event()
        host.spot("a", counter)
        payload = add()
        gc.collect()
        before = sum(isinstance(each, Record) for each in gc.get_objects())
        for source in sources:
            source.endless(
                lambda number, source=source: source.record(target="a", payload=payload, message_type="Add"),  # type: ignore[misc]
                count=20_000,
            )
        await until(lambda: host.status().capacity.capacity_waiters == len(sources))
        for _ in range(500):
            for source in sources:
                source.signal()
            await asyncio.sleep(0)
        alive = sum(isinstance(each, Record) for each in gc.get_objects()) - before
        assert alive <= 6 + 1 + len(sources), "queued, running, and at the head of each source"
        assert sum(source.taken for source in sources) == 7
        counter.gate.set()
