"""What a full spot, a used-up budget and a deadline are to a caller: each its own answer, none of them late."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.host import Host
from callyard.host.ledger import OwnerLimits
from callyard.testing.scripted_transport import HOLD, ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import Outgoing, SourceKind
from tests.runtime.host.kit import Add, Counter, Fail, Total, Wait, add, drops, kind_of, serving, until

SMALL = OwnerLimits(application_items_max=3)


async def fill(host: Host, spot: str = "a") -> Counter:
    """A spot with a turn that waits, and no room left."""
    counter = Counter(spot)
    counter.gate = asyncio.Event()
    host.spot(spot, counter)
    for number in range(SMALL.application_items_max):
        await host.send(spot, Add(number))
    await until(lambda: counter.seen == [0])
    return counter


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000)


@pytest.mark.requirement("R83")
@pytest.mark.requirement("R84")
@virtual_time
async def test_a_full_spot_of_this_host_answers_a_request_at_once_and_a_send_waits() -> None:
    async with serving(owners=SMALL) as host:
        counter = await fill(host)
        with pytest.raises(HostError) as caught:
            await host.request("a", Total())
        assert (caught.value.kind, now_ms()) == (HostErrorKind.CAPACITY_EXCEEDED, 0)
        sending = host.send("a", Add(9))
        await asyncio.sleep(0.5)
        assert sending.state == "under_way"
        assert counter.gate is not None
        counter.gate.set()
        await sending


@pytest.mark.requirement("R84")
@pytest.mark.parametrize("kind", [SourceKind.MESH, SourceKind.CLIENT_SERVER])
def test_a_full_spot_is_unavailable_to_another_host_and_its_one_way_is_counted(kind: SourceKind) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer", kind)
        async with serving(transport, owners=SMALL, jobs_max=100) as host:
            counter = await fill(host)
            source.one_way("a", add(), message_type="Add")
            source.request("a", add(), message_type="Add", operation_id=5)
            await until(lambda: bool(transport.accepted()))
            (reply,) = transport.accepted()
            assert (reply.operation_id, reply.error, now_ms()) == (5, "unavailable", 0)
            assert drops(host) == {("one_way", "backpressure"): 1}
            assert counter.gate is not None
            counter.gate.set()

    run()


@pytest.mark.requirement("R85")
@virtual_time
async def test_room_within_the_deadline_is_one_delivery() -> None:
    async with serving(owners=SMALL) as host:
        counter = await fill(host)
        assert counter.gate is not None
        asyncio.get_running_loop().call_later(0.5, counter.gate.set)
        await host.send("a", Add(9))
        assert now_ms() == 500
        await until(lambda: len(counter.seen) == 4)
    assert counter.seen == [0, 1, 2, 9]


@pytest.mark.requirement("R86")
@virtual_time
async def test_no_room_within_the_deadline_is_no_delivery_ever() -> None:
    async with serving(owners=SMALL) as host:
        counter = await fill(host)
        assert counter.gate is not None
        asyncio.get_running_loop().call_later(1.1, counter.gate.set)
        assert await kind_of(host.send("a", Add(9))) is HostErrorKind.DEADLINE_EXCEEDED
        assert now_ms() == 1_000
        await asyncio.sleep(60)
    assert counter.seen == [0, 1, 2]


@pytest.mark.requirement("R118")
@virtual_time
async def test_a_send_may_shorten_its_time_but_not_lengthen_it() -> None:
    async with serving(owners=SMALL, send_timeout_ms=200) as host:
        counter = await fill(host)
        for timeout_ms, ended_at_ms in ((50, 50), (5_000, 250)):
            assert await kind_of(host.send("a", Add(9), timeout_ms=timeout_ms)) is HostErrorKind.DEADLINE_EXCEEDED
            assert now_ms() == ended_at_ms
        assert counter.gate is not None
        counter.gate.set()


@pytest.mark.requirement("R87")
@virtual_time
async def test_what_fails_after_the_end_of_a_call_is_only_seen() -> None:
    transport = ScriptedTransport()
    async with serving(transport, owners=SMALL) as host:
        counter = await fill(host)
        other = Counter()
        host.spot("ab", other)
        await host.publish("a*", Add(7))  # one of the two has no room
        await until(lambda: other.seen == [7])
        assert drops(host) == {("publish", "backpressure"): 1}

        transport.on_start = lambda outgoing: HOLD
        unawaited = host.send("far", Add(1))
        transport.started[-1].refuse("not_connected")
        await until(lambda: unawaited.state == "ended")
        assert drops(host)["one_way", "stale_target"] == 1
        assert counter.gate is not None
        counter.gate.set()


@pytest.mark.requirement("R104")
@virtual_time
async def test_a_full_spot_and_a_used_up_budget_look_different() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport, owners=SMALL, jobs_max=100) as host:
        counter = await fill(host)
        assert await kind_of(host.request("a", Total())) is HostErrorKind.CAPACITY_EXCEEDED
        assert await kind_of(host.send("a", Add(1))) is HostErrorKind.DEADLINE_EXCEEDED
        assert host.status().capacity.capacity_wait_count == 0
        assert counter.gate is not None
        counter.gate.set()

    async with serving(transport := ScriptedTransport(), jobs_max=2) as host:
        source = transport.add_source("peer")
        counter = Counter()
        counter.gate = asyncio.Event()
        host.spot("a", counter)
        source.one_way("a", add(), message_type="Add", count=10)
        await until(lambda: host.status().capacity.capacity_waiters == 1)
        assert host.status().capacity.capacity_wait_count > 0
        counter.gate.set()
        await until(lambda: len(counter.seen) == 10)
        assert (drops(host), transport.accepted()) == ({}, []), "nobody was told, nothing was lost"


@pytest.mark.requirement("R90")
@pytest.mark.parametrize("seed", range(4))
def test_no_caller_ever_hears_of_backpressure(seed: int) -> None:
    """All kinds of calls on hosts that are full in all ways: the outcomes are the thirteen kinds, or good."""
    assert not [kind for kind in HostErrorKind if "PRESSURE" in kind.name]
    assert len(HostErrorKind) == 13
    rng = random.Random(seed)
    told: list[HostErrorKind | None] = []

    async def call(host: Host) -> None:
        spot = rng.choice(["a", "b", "cart/1", "cart/2", "far", "nobody"])
        message = rng.choice([Add(1), Total(), Fail(), Wait(rng.randrange(3_000)), {"odd": 1}])
        await asyncio.sleep(rng.random())
        if rng.random() < 0.4:
            told.append(await kind_of(host.send(spot, message)))
        elif rng.random() < 0.2:
            told.append(await kind_of(host.publish("*", message)))
        else:
            told.append(await kind_of(host.request(spot, message, timeout_ms=rng.randrange(1, 2_000))))

    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()

        def answer(outgoing: Outgoing) -> Any:
            started = transport.started[-1]
            how = rng.choice([None, None, HOLD, "timeout", "not_connected", "not_found"])
            if how is HOLD:  # as a transport whose peer is paused
                asyncio.get_running_loop().call_later(1, started.refuse, "timeout")
            return how

        transport.on_start = answer
        source = transport.add_source("peer")
        async with serving(transport, owners=SMALL, jobs_max=2, requests_max=20, outbound_waiter_slots=5) as host:
            for spot in ("a", "b"):
                host.spot(spot, Counter(spot))
            host.spots("cart/*", Counter, idle_ms=50)
            source.one_way("a", add(), message_type="Add", count=50)
            await asyncio.gather(*(call(host) for _ in range(200)))

    run()
    assert len(told) == 200
    assert {HostErrorKind.CAPACITY_EXCEEDED, HostErrorKind.DEADLINE_EXCEEDED, None} <= set(told)


@pytest.mark.requirement("R56")
@virtual_time
async def test_a_flood_on_one_spot_leaves_the_others_their_turns() -> None:
    transport = ScriptedTransport()
    source, other = transport.add_source("flood"), transport.add_source("other")
    async with serving(transport, jobs_max=256, owners=OwnerLimits(application_items_max=64)) as host:
        host.spots("cart/*", Counter)
        source.endless(
            lambda n: source.record(target="cart/0", message_type="Wait", payload=b'{"ms":10}'),
            count=5_000,
        )
        waits = []
        for number in range(100):
            asked_at_ms = now_ms()
            other.request(f"cart/{1 + number % 9}", b"{}", message_type="Total", operation_id=1 + number)
            answers = number + 1
            await until(lambda answers=answers: len(transport.accepted()) == answers, steps=5_000)  # type: ignore[misc]
            waits.append(now_ms() - asked_at_ms)
            await asyncio.sleep(0.01)
        assert max(waits) == 0, "in virtual time, where only the flooded cart takes any"
        assert host.status().capacity.peak_permits_in_use <= 256
