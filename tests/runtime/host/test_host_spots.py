"""The life of spots: made on their first message, put away, moved, removed; their timers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.host import Host, SpotTurn
from callyard.host.ledger import OwnerLimits
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from tests.runtime.host.kit import Add, Counter, Fail, Total, Wait, add, drops, kind_of, serving, until


class Shelf:
    """Where states are put away, slowly."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.is_broken = False
        self.saves = 0

    async def load(self, spot: str) -> bytes | None:
        await asyncio.sleep(0.05)
        return self.kept.get(spot)

    async def save(self, spot: str, state: bytes) -> None:
        self.saves += 1
        await asyncio.sleep(0.05)
        if self.is_broken:
            raise OSError("disk full")
        self.kept[spot] = state


@pytest.mark.requirement("R116")
@virtual_time
async def test_a_spot_is_made_on_its_first_message_and_what_comes_meanwhile_is_held() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    made: list[str] = []

    async def make(spot: str) -> Counter:
        made.append(spot)
        await asyncio.sleep(1)
        return Counter(spot)

    make.__annotations__["return"] = Counter
    async with serving(transport, jobs_max=2) as host:
        host.spots("cart/*", make)
        source.one_way("cart/1", add(1), message_type="Add", count=5)
        await until(lambda: transport.takes("peer") == 5)
        assert host.parts.jobs.in_use == 0, "held is backlog, no job"
        await host.send("cart/1", Add(10))
        assert await host.request("cart/1", Total()) == 15
        assert made == ["cart/1"]


@virtual_time
async def test_a_spot_that_cannot_be_made_answers_and_is_tried_again() -> None:
    tries: list[str] = []

    def make(spot: str) -> Counter:
        tries.append(spot)
        if len(tries) == 1:
            raise OSError("no such shelf")
        return Counter(spot)

    make.__annotations__["return"] = Counter
    async with serving() as host:
        host.spots("cart/*", make)
        assert await kind_of(host.request("cart/1", Total())) is HostErrorKind.INTERNAL_FAILURE
        assert await host.request("cart/1", Total()) == 0
        assert len(tries) == 2


@virtual_time
async def test_so_many_spots_and_no_more() -> None:
    async with serving(spots_max=2) as host:
        host.spots("clock/*", Clock, idle_ms=100)
        for number in range(2):
            assert await host.request(f"clock/{number}", Total()) == []
        assert await kind_of(host.request("clock/2", Total())) is HostErrorKind.CAPACITY_EXCEEDED
        await asyncio.sleep(1)
        assert host.statistics().spots == 0
        assert await host.request("clock/2", Total()) == []


@virtual_time
async def test_an_idle_spot_is_put_away_and_comes_back_as_it_was() -> None:
    shelf = Shelf()
    async with serving(states=shelf) as host:
        host.spots("cart/*", Counter, idle_ms=100)
        await host.send("cart/1", Add(5))
        await asyncio.sleep(0.09)
        await host.send("cart/1", Add(6))
        await asyncio.sleep(0.15)
        assert host.statistics().spots == 1, "it was used in between"
        await asyncio.sleep(0.5)
        assert (host.statistics().spots, shelf.kept) == (0, {"cart/1": b"[5,6]"})
        assert await host.request("cart/1", Total()) == 11


@virtual_time
async def test_what_comes_while_it_is_put_away_keeps_it_and_what_fails_loses_nothing() -> None:
    shelf = Shelf()
    async with serving(states=shelf) as host:
        host.spots("cart/*", Counter, idle_ms=100)
        await host.send("cart/1", Add(5))
        await until(lambda: host.statistics().spots == 1)
        while not shelf.saves:
            await asyncio.sleep(0.01)
        assert await host.request("cart/1", Add(1)) == 6, "its object goes on"
        shelf.is_broken = True
        await asyncio.sleep(1)
        assert shelf.saves > 2
        assert await host.request("cart/1", Total()) == 6


@virtual_time
async def test_a_busy_spot_is_not_forgotten() -> None:
    async with serving() as host:
        host.spots("clock", Clock, idle_ms=100)
        first = asyncio.ensure_future(host.request("clock", Add(3_000)))
        second = asyncio.ensure_future(host.request("clock", Total()))
        await first
        assert len(await second) == 1, "the same object, and what was queued for it"


@virtual_time
async def test_a_busy_spot_is_not_put_away() -> None:
    async with serving() as host:
        host.spots("cart/*", Counter, idle_ms=100)
        assert await host.request("cart/1", Wait(3_000)) == "waited"
        assert host.statistics().moves.done == 0


@virtual_time
async def test_spots_with_a_dump_are_saved_at_the_close_where_there_is_a_store() -> None:
    shelf = Shelf()
    async with serving(states=shelf) as host:
        host.spots("cart/*", Counter)
        for number in range(3):
            await host.send(f"cart/{number}", Add(number))
    assert shelf.kept == {f"cart/{number}": b"[%d]" % number for number in range(3)}


@pytest.mark.requirement("R22")
@pytest.mark.requirement("R124")
@virtual_time
async def test_a_move_holds_what_comes_and_runs_it_in_order_under_the_budget() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    moved: list[Counter] = []

    class Slow(Counter):
        async def load(self, state: list[int]) -> None:  # type: ignore[override]
            await asyncio.sleep(1)
            self.seen = state
            moved.append(self)

    old = Counter()
    async with serving(transport, jobs_max=2) as host:
        host.spot("a", old)
        await host.send("a", Wait(500))
        for number in range(3):
            await host.send("a", Add(number))
        moving = asyncio.ensure_future(host.move("a", Slow))
        await asyncio.sleep(0.1)
        for number in range(3, 13):
            source.one_way("a", add(number), message_type="Add")
        await until(lambda: transport.takes("peer") == 10)
        assert host.parts.jobs.in_use == 0
        assert host.parts.moving.held("a") == 13
        await moving
        assert await host.request("a", Total()) == sum(range(13))
        assert host.status().capacity.peak_permits_in_use <= 2
    assert moved[0].seen == list(range(13))
    assert old.seen is not moved[0].seen, "a state goes over as data"


@pytest.mark.parametrize("part", ["dump", "load"])
def test_a_move_that_fails_leaves_the_old_one(part: str) -> None:
    @virtual_time
    async def run() -> None:
        def break_down(*arguments: Any) -> None:
            raise RuntimeError(part)

        Broken = type("Broken", (Counter,), {part: break_down})
        counter = Counter() if part == "load" else Broken()
        async with serving() as host:
            host.spot("a", counter)
            await host.send("a", Add(3))
            moving = asyncio.ensure_future(host.move("a", Broken))
            asked = asyncio.ensure_future(host.request("a", Total()))
            with pytest.raises(RuntimeError, match=part):
                await moving
            assert await asked == 3
            assert host.statistics().moves.failed == 1

    run()


@virtual_time
async def test_a_removed_spot_ends_what_was_to_come() -> None:
    async with serving() as host:
        host.spot("a", Counter())
        running = asyncio.ensure_future(host.request("a", Wait()))
        await asyncio.sleep(0.1)
        queued = asyncio.ensure_future(host.request("a", Total()))
        host.every_ms("a", 10, Add(1))
        await asyncio.sleep(0.001)
        assert host.remove("a")
        assert not host.remove("a")
        assert await kind_of(queued) is HostErrorKind.NOT_FOUND
        assert await running == "waited"
        assert await kind_of(host.send("a", Add(1))) is HostErrorKind.NOT_FOUND
        assert host.statistics().timers == 0


@pytest.mark.requirement("R107")
@virtual_time
async def test_a_request_whose_caller_has_gone_is_not_run() -> None:
    counter = Counter()
    async with serving() as host:
        host.spot("a", counter)
        first = asyncio.ensure_future(host.request("a", Wait()))
        second = asyncio.ensure_future(host.request("a", Add(1)))
        await asyncio.sleep(0.1)
        second.cancel()
        await first
        assert await host.request("a", Total()) == 0


@pytest.mark.requirement("R107")
@virtual_time
async def test_a_cancel_record_ends_a_request_that_has_not_begun() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    counter = Counter()
    async with serving(transport, jobs_max=2) as host:
        host.spot("a", counter)
        await host.send("a", Wait())
        source.request("a", add(), message_type="Add", operation_id=8)
        source.control("cancel", operation_id=8)
        await asyncio.sleep(2)
        assert (counter.seen, transport.accepted(), host.parts.jobs.in_use) == ([], [], 0)


class Clock:
    def __init__(self, spot: str) -> None:
        self.at_ms: list[int] = []

    @Host.handler
    async def tick(self, turn: SpotTurn, message: Add) -> None:
        self.at_ms.append(round(asyncio.get_running_loop().time() * 1_000))
        await asyncio.sleep(message.count / 1_000)

    @Host.handler
    def total(self, turn: SpotTurn, message: Total) -> list[int]:
        turn.after_ms(5, Add(0))
        return self.at_ms


@virtual_time
async def test_timers_come_as_turns_and_do_not_pile_up() -> None:
    async with serving() as host:
        host.spots("clock", Clock)
        assert await host.request("clock", Total()) == []
        await asyncio.sleep(1)
        every = host.every_ms("clock", 100, Add(250))  # each takes more than two ticks
        await asyncio.sleep(1)
        every.cancel()
        every.cancel()
        await asyncio.sleep(1)
        assert await host.request("clock", Total()) == [5, 1_100, 1_400, 1_700, 2_000]
        assert host.statistics().timers == 1
        await asyncio.sleep(1)
        assert host.statistics().timers == 0


@virtual_time
async def test_a_timer_outlives_its_object_and_makes_a_new_one() -> None:
    async with serving() as host:
        host.spots("cart/*", Counter, idle_ms=100)
        await host.send("cart/1", Add(1))
        host.after_ms("cart/1", 1_000, Add(2))
        await asyncio.sleep(0.9)
        assert host.statistics().spots == 0
        await asyncio.sleep(0.15)
        assert await host.request("cart/1", Total()) == 3


@virtual_time
async def test_a_timer_of_a_full_spot_waits_as_a_send_and_its_failures_stay_its_own() -> None:
    counter = Counter()
    async with serving(owners=OwnerLimits(application_items_max=1)) as host:
        host.spot("a", counter)
        await host.send("a", Wait(500))
        host.after_ms("a", 10, Add(1))
        await asyncio.sleep(1)
        assert counter.seen == [1]
        await host.send("a", Wait(5_000))
        host.after_ms("a", 10, Add(2))
        await asyncio.sleep(6)
        assert (counter.seen, drops(host)) == ([1], {("one_way", "backpressure"): 1})
        host.after_ms("a", 10, Fail())
        host.after_ms("a", 20, {"odd": 1})
        await asyncio.sleep(1)
        assert await host.request("a", Total()) == 1
        assert await kind_of(asyncio.wait_for(host.request("nobody", 1), 1)) is HostErrorKind.NOT_FOUND
        with pytest.raises(Exception, match="no spot 'nobody' here"):
            host.after_ms("nobody", 10, Add(1))
        for _ in range(1_024):
            host.after_ms("a", 10_000, Add(1))
        with pytest.raises(Exception, match="1024 timers already"):
            host.after_ms("a", 10_000, Add(1))
