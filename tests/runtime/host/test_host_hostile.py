"""What peers, payloads and users' code do at their worst: a message has one fate, and nobody else is any the worse."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.host import Host, SpotTurn
from callyard.host.ledger import OwnerLimits
from callyard.host.states import HostState
from callyard.testing.scripted_transport import HOLD, ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import Outgoing, TransportRefused
from tests.runtime.host.kit import Add, Counter, Total, Wait, add, drops, kind_of, make_host, serving, until

NARROW = OwnerLimits(application_bytes_max=1_000)


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000)


async def make_slowly(spot: str) -> Counter:
    await asyncio.sleep(1)
    return Counter(spot)


make_slowly.__annotations__["return"] = Counter


# --- what comes in ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R107")
@virtual_time
async def test_a_request_that_is_held_and_whose_caller_has_gone_is_not_run() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport) as host:
        host.spots("cart/*", make_slowly)
        asked = asyncio.ensure_future(host.request("cart/1", Add(1)))
        source.request("cart/1", add(2), message_type="Add", operation_id=7)
        source.control("cancel", operation_id=7)
        await asyncio.sleep(0.1)
        asked.cancel()
        assert await host.request("cart/1", Total()) == 0
        assert transport.accepted() == []


@pytest.mark.requirement("R93")
@pytest.mark.parametrize("kind", ["one_way", "request", "publish"])
def test_a_record_that_no_queue_can_take_stops_nobody(kind: str) -> None:
    """Held for a spot that is being made, it would stand in front of all others for ever."""

    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer")
        async with serving(transport, owners=NARROW) as host:
            host.spots("cart/*", make_slowly)
            fields: dict[str, Any] = {"operation_id": 3} if kind == "request" else {}
            source.one_way("cart/1", add(1), message_type="Add")
            getattr(source, kind)("cart/1", bytes(2_000), message_type="Add", **fields)
            source.one_way("cart/1", add(2), message_type="Add")
            await asyncio.sleep(2)
            getattr(source, kind)("cart/1", bytes(2_000), message_type="Add", **fields)
            assert await host.request("cart/1", Total()) == 3
            if kind == "request":
                assert [reply.error for reply in transport.accepted()] == ["rejected", "rejected"]
            else:
                assert drops(host) == {(kind, "backpressure"): 2}

    run()


@virtual_time
async def test_a_send_that_no_queue_can_take_is_told_so_at_once_and_is_in_nobodys_way() -> None:
    async with serving(owners=NARROW) as host:
        counter = Counter()
        counter.gate = asyncio.Event()
        host.spot("a", counter)
        host.spots("cart/*", make_slowly)
        for spot in ("a", "cart/1"):
            small = host.send(spot, Add(1))
            assert await kind_of(host.send(spot, "x" * 2_000)) is HostErrorKind.REJECTED
            with pytest.raises(HostError, match="application_bytes_max") as caught:
                await host.request(spot, "x" * 2_000)
            assert caught.value.kind is HostErrorKind.REJECTED
            await small
        await host.send("a", Add(2))
        assert now_ms() == 0
        counter.gate.set()


@virtual_time
async def test_a_peer_answers_no_request_that_was_not_sent_to_peers() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport) as host:
        host.spot("a", Counter())
        asked = asyncio.ensure_future(host.request("a", Wait(100)))
        await asyncio.sleep(0.01)
        for operation_id in range(5):
            source.complete(operation_id, b'"forged"')
        assert await asked == "waited"
        assert host.parts.requests.status().late == 5


@pytest.mark.parametrize("pattern", ["*" * 200_000, "cart/*" + "*a" * 100_000, "x" * 256 + "*", "\ud800*", ""])
def test_a_pattern_that_is_none_costs_nothing(pattern: str) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer")
        async with serving(transport) as host:
            host.on("cart/*")(lambda message: None)
            source.endless(lambda n: source.record(target=f"cart/{n}", payload=b"1"), 1_000)
            await until(lambda: host.statistics().spots == 1_000)
            began_at_s = time.process_time()
            source.publish(pattern, b"1")
            await until(lambda: drops(host) == {("publish", "no_handler"): 1})
            assert time.process_time() - began_at_s < 10, "it took minutes"

    run()


@virtual_time
async def test_spots_without_an_object_make_room_for_others() -> None:
    """Whoever names a million of them would have had every place there is, for ever."""
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport, spots_max=100) as host:
        host.on("cart/*")(lambda message: 5)
        source.endless(lambda n: source.record(target=f"cart/{n}", payload=b"1"), 200)
        await until(lambda: transport.takes("peer") == 200)
        assert await kind_of(host.request("cart/new", 1)) is HostErrorKind.CAPACITY_EXCEEDED
        host.after_ms("cart/1", 50_000, 1)
        await asyncio.sleep(20)
        assert (host.statistics().spots, host.statistics().timers) == (0, 1)
        assert await host.request("cart/new", 1) == 5


@pytest.mark.parametrize("spot", [5, None, b"cart", "", "*", "x" * 256, "é" * 128, "\ud800", ["cart"]])
def test_an_id_that_is_none_is_named(spot: Any) -> None:
    @virtual_time
    async def run() -> None:
        async with serving() as host:
            calls: list[Callable[[], Any]] = [
                *(lambda: host.send(spot, 1), lambda: host.spot(spot, Counter()), lambda: host.remove(spot)),
                lambda: host.after_ms(spot, 1, 1),
            ]
            if spot != "*":
                calls += [lambda: host.publish(spot, 1), lambda: host.on(spot), lambda: host.spots(spot, Counter)]
            for call in calls:
                with pytest.raises(ValueError, match="UTF-8"):
                    call()
            for asked in (host.request(spot, 1), host.move(spot)):
                with pytest.raises(ValueError, match="UTF-8"):
                    await asked

    run()


# --- what goes out ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R87")
@virtual_time
async def test_a_transport_that_refuses_in_the_call_costs_the_reply_and_no_more() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")

    def refuse(outgoing: Outgoing) -> None:
        raise TransportRefused("not_connected") if outgoing.payload != b"1" else OSError("a bug")

    transport.on_start = refuse
    async with serving(transport) as host:
        host.spot("a", Counter())
        source.request("nobody", b"1", operation_id=1)
        source.request("a", b"{}", message_type="Total", operation_id=2)
        await until(lambda: drops(host) == {("reply", "stale_target"): 2})
        assert await kind_of(host.send("far", "x")) is HostErrorKind.UNAVAILABLE
        assert await kind_of(host.request("far", "x")) is HostErrorKind.UNAVAILABLE
        assert await kind_of(host.send("far", 1)) is HostErrorKind.INTERNAL_FAILURE
        assert await kind_of(host.request("far", 1)) is HostErrorKind.INTERNAL_FAILURE
        await host.publish("far*", 1)
        assert await host.request("a", Total()) == 0
        assert host.status().state is HostState.SERVING


@virtual_time
async def test_whatever_a_handler_says_reaches_a_peer_as_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "callyard.host")  # half of a surrogate pair is no text for a report
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport) as host:

        @host.on("a")
        def fail(message: int) -> None:
            raise ValueError("\ud800" if message else "x" * 1_000_000)

        @host.on("b")
        def misnamed(message: int) -> None:
            raise HostError("nothing", "that is no kind")  # type: ignore[arg-type]

        for operation_id, (spot, value) in enumerate((("a", b"1"), ("a", b"0"), ("b", b"0")), 1):
            source.request(spot, value, operation_id=operation_id)
        await until(lambda: len(transport.accepted()) == 3)
        assert [reply.error for reply in transport.accepted()] == ["internal_failure"] * 3
        assert b"ValueError: \\ud800" in transport.accepted()[0].payload
        assert len(transport.accepted()[1].payload) < 4_096


class LateTransport(ScriptedTransport):
    """Its operations are coroutines, and take a while to fail."""

    def start(self, outgoing: Outgoing) -> Any:
        return self._fail()

    async def _fail(self) -> None:
        await asyncio.sleep(0.5)
        raise TransportRefused("not_connected")


@virtual_time
async def test_a_reply_goes_on_when_its_turn_is_ended_and_what_becomes_of_it_is_counted() -> None:
    noise: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
    transport = LateTransport()
    source = transport.add_source("peer")
    host = make_host(transport)
    host.spot("a", Counter())
    await host.start()
    source.request("a", b"{}", message_type="Total", operation_id=1)
    await until(lambda: host.statistics().operations == 1)
    await host.close(drain_deadline_ms=0)
    await asyncio.sleep(1)
    gc.collect()
    await asyncio.sleep(0)
    assert (noise, drops(host)) == ([], {("reply", "stale_target"): 1})
    host.assert_empty()


# --- what users do ---------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_send_that_waits_for_a_spots_place_has_it_when_one_goes() -> None:
    async with serving(spots_max=1) as host:
        host.on("clock/*")(lambda message: None)
        host.spots("cart/*", make_slowly)
        await host.send("clock/1", 1)
        order: list[int] = []

        async def send(spot: str, number: int) -> None:
            await host.send(spot, Add(number))
            order.append(number)

        tasks = [
            asyncio.ensure_future(send(spot, number))
            for number, spot in enumerate(("cart/1", "cart/2", "cart/1", "cart/3"))
        ]
        await asyncio.sleep(0.2)
        assert host.remove("clock/1")
        await asyncio.sleep(0)
        assert (order, now_ms()) == ([0, 2], 200), "the first line, as far as there is room"
        await asyncio.sleep(0.2)
        assert host.remove("cart/1")
        await asyncio.sleep(0)
        assert order == [0, 2, 1]
        with pytest.raises(HostError) as caught:
            await tasks[3]
        assert (caught.value.kind, now_ms()) == (HostErrorKind.DEADLINE_EXCEEDED, 1_000)


@virtual_time
async def test_what_is_put_away_in_memory_has_a_place_until_it_is_removed() -> None:
    async with serving(spots_max=2) as host:
        host.spots("cart/*", Counter, idle_ms=100)
        for number in range(2):
            await host.send(f"cart/{number}", Add(5 + number))
        host.after_ms("cart/1", 3_600_000, Add(1))
        await asyncio.sleep(1)
        assert (host.statistics().spots, host.statistics().kept) == (0, 2)
        assert await kind_of(host.request("cart/2", Total())) is HostErrorKind.CAPACITY_EXCEEDED
        assert await host.request("cart/0", Total()) == 5, "who is kept comes back"
        assert (host.statistics().spots, host.statistics().kept) == (1, 1)
        waiting = asyncio.ensure_future(host.send("cart/2", Add(1)))
        await asyncio.sleep(0)
        assert host.remove("cart/1")
        assert not host.remove("cart/1")
        await waiting
        assert host.statistics().timers == 0
        host.remove("cart/2")
        assert await host.request("cart/1", Total()) == 0, "what was forgotten does not come back"
        host.remove("cart/0")
        assert await host.request("cart/0", Total()) == 0


@virtual_time
async def test_a_kept_state_survives_an_object_that_cannot_be_made() -> None:
    class Moody(Counter):
        is_broken = False

        def load(self, state: list[int]) -> None:
            if Moody.is_broken:
                raise OSError("not now")
            super().load(state)

    async with serving(spots_max=1) as host:
        host.spots("cart/*", Moody, idle_ms=100)
        await host.send("cart/1", Add(5))
        await asyncio.sleep(1)
        Moody.is_broken = True
        assert await kind_of(host.request("cart/1", Total())) is HostErrorKind.INTERNAL_FAILURE
        assert host.statistics().kept == 1
        Moody.is_broken = False
        assert await host.request("cart/1", Total()) == 5


@virtual_time
async def test_a_spot_that_is_removed_while_it_is_made_does_not_open_the_next_of_its_name() -> None:
    async with serving() as host:
        host.spots("cart/*", make_slowly)
        first = asyncio.ensure_future(kind_of(host.request("cart/1", Add(1))))
        await asyncio.sleep(0.5)
        assert host.remove("cart/1")
        second = asyncio.ensure_future(host.request("cart/1", Add(2)))
        await asyncio.sleep(0.6)
        assert host.parts.owners.get("cart/1").condition == "creating"  # type: ignore[union-attr]
        assert await first is HostErrorKind.NOT_FOUND
        assert await second == 2


@virtual_time
async def test_a_send_is_awaited_by_one_at_a_time() -> None:
    async with serving(owners=OwnerLimits(application_items_max=1)) as host:
        counter = Counter()
        counter.gate = asyncio.Event()
        host.spot("a", counter)
        await host.send("a", Add(1))
        sending = host.send("a", Add(2))

        async def wait() -> HostErrorKind | None:
            return await kind_of(sending)

        first, second = asyncio.ensure_future(wait()), asyncio.ensure_future(wait())
        assert await second is HostErrorKind.INVALID_OPERATION
        counter.gate.set()
        assert await first is None
        assert await wait() is None, "again, when it is over"


@virtual_time
async def test_what_a_turn_left_behind_is_no_part_of_it() -> None:
    host = make_host()
    counter = Counter()
    host.spot("a", counter)
    tasks: list[asyncio.Task[None]] = []

    async def later() -> None:
        await asyncio.sleep(0.1)
        await host.move("a", Counter)
        await host.close()

    @host.on("b")
    async def leave(turn: SpotTurn, message: int) -> None:
        with pytest.raises(HostError, match="closing the host from a handler"):
            await host.close()
        with pytest.raises(HostError, match="closing the host from a handler"):
            await turn.yield_while(host.close())

    @host.on("c")
    def stop(message: int) -> None:
        tasks.append(asyncio.ensure_future(later()))

    await host.start()
    await host.request("b", 1)
    await host.request("c", 1)
    await tasks[0]
    assert (host.status().state, host.statistics().moves.done) == (HostState.STOPPED, 1)


@virtual_time
async def test_another_thread_or_loop_is_told() -> None:
    async with serving() as host:
        host.spot("a", Counter())
        kinds: list[HostErrorKind | None] = []

        def use() -> None:
            for call in (lambda: host.send("a", Add(1)), lambda: host.publish("a", Add(1)), lambda: host.remove("a")):
                with pytest.raises(HostError, match="event loop") as caught:
                    call()
                kinds.append(caught.value.kind)
            for asked in (lambda: host.request("a", Total()), lambda: host.move("a"), host.close):
                kinds.append(asyncio.run(kind_of(asked())))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert kinds == [HostErrorKind.INVALID_OPERATION] * 6
        assert await host.request("a", Total()) == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there is no eager task factory")
@virtual_time
async def test_a_turn_never_begins_inside_another() -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        loop.set_task_factory(asyncio.eager_task_factory)
    async with serving() as host:

        @host.on("a")
        def outer(message: int) -> None:
            order.append("in")
            host.send("b", 1)
            order.append("out")

        host.on("b")(lambda message: order.append("b"))
        await host.send("a", 1)
        await until(lambda: len(order) == 3)
        assert order == ["in", "out", "b"]
        assert not host.parts.turns._tasks


@virtual_time
async def test_what_is_left_behind_at_the_close_is_silent() -> None:
    noise: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))

    class Store:
        async def load(self, spot: str) -> None: ...

        async def save(self, spot: str, state: bytes) -> None:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
                raise OSError("too late") from None

    host = make_host(states=Store())
    host.spot("a", Counter())
    await host.start()
    await host.request("a", Add(1))
    await host.close(drain_deadline_ms=100)
    await asyncio.sleep(10)
    gc.collect()
    await asyncio.sleep(0)
    assert noise == []


def test_settings_and_handlers_that_cannot_work_are_refused() -> None:
    for settings, named in (
        ({"owners": None}, "owners"),
        ({"jobs": "many", "pause_percent": 5}, "jobs"),
        ({"send_timeouts_ms": None}, "send_timeouts_ms"),
        ({"states": object()}, "states"),
        ({"transport": 5}, "transport"),
        ({"config": {}}, "config"),
    ):
        with pytest.raises(ValueError, match=named):
            Host(**settings)  # type: ignore[arg-type]
    for limits in ({"application_bytes_max": 255}, {"lifecycle_bytes_max": 255}):
        with pytest.raises(ValueError, match="none would ever fit"):
            OwnerLimits(**limits)
    host = make_host()

    def generates(message: int) -> Any:
        yield message

    async def streams(message: int) -> Any:
        yield message

    def wants_more(message: int, *, more: int) -> None: ...

    for function, said in ((generates, "generator"), (streams, "generator"), (wants_more, "more")):
        with pytest.raises(ValueError, match=said):
            host.on("a")(function)


@pytest.mark.parametrize("drain_ms", [-1, float("nan"), float("inf"), "1"])
def test_a_deadline_of_the_close_that_is_none_is_refused(drain_ms: Any) -> None:
    @virtual_time
    async def run() -> None:
        async with serving() as host:
            with pytest.raises(ValueError, match="drain_deadline_ms"):
                await host.close(drain_deadline_ms=drain_ms)
            assert host.is_ready

    run()


@pytest.mark.requirement("R48")
@pytest.mark.parametrize("what", ["request", "send", "move", "yield", "start", "close"])
@pytest.mark.parametrize("steps", range(8))
def test_a_caller_may_go_at_every_step(what: str, steps: int) -> None:
    @virtual_time
    async def run() -> None:
        host = make_host(owners=OwnerLimits(application_items_max=2))
        host.spots("cart/*", Counter, idle_ms=50)

        @host.on("open")
        async def yields(turn: SpotTurn, message: int) -> int:
            return await turn.yield_while(asyncio.sleep(0.01, 5))

        async def act() -> None:
            match what:
                case "request":
                    await host.request("cart/1", Wait(5))
                case "send":
                    await host.send("cart/1", Add(1))
                case "move":
                    await host.move("cart/1", Counter)
                case "yield":
                    await host.request("open", 1)
                case "start":
                    await host.start()
                case "close":
                    await host.close()

        if what != "start":
            await host.start()
            await host.send("cart/1", Wait(10))
        task = asyncio.ensure_future(act())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        host.parts.check_invariants()
        await host.close()
        host.assert_empty()

    run()


@virtual_time
async def test_two_spots_that_ask_each_other_are_told_when_their_time_is_up() -> None:
    async with serving() as host:

        def ask(spot: str, other: str) -> None:
            @host.on(spot)
            async def asks(message: int) -> Any:
                return await host.request(other, message)

        ask("a", "b")
        ask("b", "a")
        assert await kind_of(host.request("a", 1)) is HostErrorKind.DEADLINE_EXCEEDED
        assert now_ms() == 5_000
        await asyncio.sleep(10)


@virtual_time
async def test_replies_that_hang_are_no_reason_for_others_to_lose_theirs() -> None:
    transport = ScriptedTransport()
    transport.on_start = lambda outgoing: HOLD if outgoing.target == "far" else None
    source = transport.add_source("peer")
    async with serving(transport, requests_max=5) as host:
        for _ in range(20):
            host.send("far", 1)
        source.request("nobody", b"1", operation_id=1)
        await until(lambda: len(transport.accepted()) == 1)
        for started in transport.started:
            started.accept()


@pytest.mark.requirement("R35")
@pytest.mark.requirement("R49")
@pytest.mark.parametrize("limits", [{"application_items_max": 5}, {"application_bytes_max": 5 * 267}])
def test_a_spot_that_takes_long_to_be_made_holds_so_much_and_then_its_senders_wait(limits: dict[str, int]) -> None:
    """Held without a permit, a flood would go on into memory for as long as a store hangs."""
    here = asyncio.Event()
    seen: list[int] = []

    class Late(Counter):
        async def load(self, state: list[int]) -> None:  # type: ignore[override]
            await here.wait()
            self.seen = seen

    class Store:
        async def load(self, spot: str) -> bytes | None:
            await here.wait()
            return b"[]"

        async def save(self, spot: str, state: bytes) -> None: ...

    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer")
        async with serving(transport, states=Store(), jobs_max=3, owners=OwnerLimits(**limits)) as host:
            host.spots("cart/*", Late)
            source.endless(
                lambda n: source.record(target="cart/1", message_type="Add", payload=b'{"count":%d}' % (n % 10)), 1_000
            )
            await asyncio.sleep(3_600)
            moving = host.statistics().moving
            assert (transport.takes("peer"), moving.held, moving.permits) == (8, 8, 3)
            assert host.status().capacity.pressure_state == "paused"
            here.set()
            await until(lambda: len(seen) == 1_000, steps=100_000)
            assert seen == [n % 10 for n in range(1_000)]
            assert host.status().capacity.peak_permits_in_use == 3

    run()


@virtual_time
async def test_permits_of_a_hold_come_back_when_it_ends_or_is_short_again() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport, jobs_max=4, owners=OwnerLimits(application_items_max=2)) as host:
        host.spots("cart/*", make_slowly)
        for operation_id in range(1, 6):
            source.request("cart/1", add(), message_type="Add", operation_id=operation_id, deadline_at_ms=100)
        await until(lambda: host.parts.jobs.in_use == 3)
        host.parts.moving.cancel(source.id, 1)
        assert host.parts.jobs.in_use == 3, "still beyond"
        await asyncio.sleep(0.2)
        assert (host.parts.jobs.in_use, len(transport.accepted())) == (0, 4), "they are late"
        source.one_way("cart/1", add(), message_type="Add", count=5)
        await until(lambda: host.parts.jobs.in_use == 3)
        assert host.remove("cart/1")
        assert host.parts.jobs.in_use == 0
