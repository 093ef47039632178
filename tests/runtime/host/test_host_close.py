"""Close, at every point: nothing new, what was accepted until the deadline, then the end; and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.host import Host
from callyard.host.ledger import OwnerLimits
from callyard.host.states import HostState
from callyard.testing.scripted_transport import HOLD, ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import FlowResult, FlowState, OutgoingKind
from tests.runtime.host.kit import Add, Counter, Total, Wait, add, drops, kind_of, make_host, until


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000)


def never(*_: Any) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@virtual_time
async def test_what_was_accepted_runs_and_what_was_not_stays_in_the_transport() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    counter = Counter()
    host = make_host(transport, jobs_max=3)
    host.spot("a", counter)
    await host.start()
    await host.send("a", Wait(1_000))
    await until(lambda: host.statistics().turns.active == 1)
    source.one_way("a", add(1), message_type="Add", count=10)
    await until(lambda: host.parts.jobs.in_use == 3)
    await host.close()
    assert (now_ms(), counter.seen, transport.takes("peer")) == (1_000, [1, 1, 1], 3)
    assert drops(host) == {}, "a wait for a permit ended, and nothing else"
    assert host.status().state is HostState.STOPPED
    host.assert_empty()


@virtual_time
async def test_at_the_deadline_the_rest_is_ended_and_told() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    counter = Counter()
    host = make_host(transport, shutdown_timeout_ms=5_000)
    host.spot("a", counter)
    await host.start()
    running = asyncio.ensure_future(host.request("a", Wait(60_000), timeout_ms=100_000))
    queued = asyncio.ensure_future(host.request("a", Total(), timeout_ms=100_000))
    await until(lambda: host.statistics().turns.active == 1)
    source.one_way("a", add(), message_type="Add", count=2)
    source.request("a", add(), message_type="Add", operation_id=6)
    await until(lambda: transport.takes("peer") == 3)
    await host.close()
    assert now_ms() == 5_000
    assert await kind_of(running) is await kind_of(queued) is HostErrorKind.SHUTTING_DOWN
    assert [(reply.operation_id, reply.error) for reply in transport.accepted()] == [(6, "shutting_down")]
    assert drops(host)["one_way", "shutdown"] == 2
    assert counter.seen == []
    host.assert_empty()


@virtual_time
async def test_a_handler_that_will_not_end_is_left_behind() -> None:
    host = make_host(shutdown_timeout_ms=1_000)
    over = asyncio.Event()

    @host.on("a")
    async def stubborn(message: Any) -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    await host.start()
    asked = asyncio.ensure_future(host.request("a", 1, timeout_ms=100_000))
    await until(lambda: host.statistics().turns.active == 1)
    await host.close()
    assert now_ms() == 2_000
    assert await kind_of(asked) is HostErrorKind.SHUTTING_DOWN
    assert host.statistics().turns.abandoned == 1
    host.assert_empty()
    over.set()


@pytest.mark.requirement("R72")
@virtual_time
async def test_setters_that_never_return_and_a_transport_that_never_closes_do_not_hold_it_up() -> None:
    transport = ScriptedTransport()
    for name in ("router", "dealer"):
        transport.add_flow_target(name)
    host = make_host(transport, jobs_max=1)
    await host.start()
    for target in transport.flow_targets():
        target.on_set = never  # type: ignore[attr-defined]
    permit = host.parts.jobs.try_acquire()
    assert permit is not None
    await until(lambda: transport.counts["set_receive_flow_state"] == 4)
    transport.close = never  # type: ignore[assignment, method-assign]
    permit.release()
    await host.close(drain_deadline_ms=3_000)
    assert now_ms() <= 3_000 + 2_000
    host.assert_empty()


@pytest.mark.requirement("R75")
@virtual_time
async def test_sockets_are_told_before_records_come_and_one_that_does_not_answer_is_told_later() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    source.one_way("a", add(), message_type="Add")
    good, silent, closing = (transport.add_flow_target(name) for name in ("good", "silent", "closing"))
    answer: asyncio.Future[FlowResult] = never()
    silent.on_set = lambda state: answer
    closing.on_set = lambda state: FlowResult.INVALID_STATE
    host = make_host(transport)
    host.spot("a", counter := Counter())
    starting = asyncio.ensure_future(host.start())
    await until(lambda: len(good.applied) == 1)
    assert (transport.counts["attach"], host.is_ready) == (0, False)
    await starting
    assert now_ms() == 1_000
    await until(lambda: counter.seen == [1])
    assert host.status().receive_flow_states == {"good": "running"}
    answer.set_result(FlowResult.OK)
    await until(lambda: host.status().receive_flow_states == {"good": "running", "silent": "running"})
    assert closing.applied == []
    await host.close()
    host.assert_empty()


@virtual_time
async def test_what_waits_ends_when_the_close_begins_and_what_runs_goes_on() -> None:
    host = make_host(owners=OwnerLimits(application_items_max=1))
    host.spot("a", Counter())
    await host.start()
    running = asyncio.ensure_future(host.request("a", Wait(5_000), timeout_ms=60_000))
    await until(lambda: host.statistics().turns.active == 1)
    waiting = host.send("a", Add(1))
    closing = asyncio.ensure_future(host.close())
    assert await kind_of(waiting) is HostErrorKind.SHUTTING_DOWN
    assert now_ms() == 0
    assert await running == "waited"
    await closing
    with pytest.raises(HostError, match="takes no more jobs"):
        host.parts.jobs.wait("late", lambda permit: None)


@virtual_time
async def test_what_is_held_at_the_deadline_ends_with_the_rest() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    host = make_host(transport, jobs_max=2, owners=OwnerLimits(application_items_max=25))
    host.spot("a", Counter())
    await host.start()
    moving = asyncio.ensure_future(host.move("a", SlowLoad))
    await asyncio.sleep(0.1)
    source.one_way("a", b'{"ms":60000}', message_type="Wait", count=5)
    for number in range(20):
        source.request("a", add(), message_type="Add", operation_id=1 + number)
    await until(lambda: transport.takes("peer") == 25)
    await moving
    assert host.parts.moving.held("a") > 10, "it is replayed, as far as there is room"
    await host.close(drain_deadline_ms=1_000)
    assert {reply.error for reply in transport.accepted()} == {"shutting_down"}
    assert len(transport.accepted()) == 20
    host.assert_empty()
    assert host.parts.jobs.in_use == 0


POINTS: dict[str, Callable[[Host, ScriptedTransport], Any]] = {
    "nothing": lambda host, transport: None,
    "a send waits for room": lambda host, transport: host.send("full", Add(1)),
    "a send waits in the transport": lambda host, transport: host.send("far", Add(1)),
    "a request runs": lambda host, transport: host.request("a", Wait(2_000)),
    "a request is queued": lambda host, transport: host.request("full", Total(), timeout_ms=60_000),
    "a request is far": lambda host, transport: host.request("far", Total(), timeout_ms=60_000),
    "a publish": lambda host, transport: host.publish("*", Add(1)),
    "a spot is made": lambda host, transport: host.request("slow/1", Total(), timeout_ms=60_000),
    "a spot is moved": lambda host, transport: host.move("a", SlowLoad),
    "a spot that hangs is moved": lambda host, transport: host.move("a", NeverLoads),
    "a spot that hangs is moved, and sent to": lambda host, transport: asyncio.gather(
        host.move("a", NeverLoads), _soon(lambda: host.request("a", Add(1), timeout_ms=60_000)), return_exceptions=True
    ),
    "a timer is armed": lambda host, transport: host.every_ms("a", 1, Add(1)),
    "a spot is removed": lambda host, transport: host.remove("a"),
    "records wait": lambda host, transport: transport.source("peer").one_way(
        "full", add(), message_type="Add", count=100
    ),
    "a publish is under way": lambda host, transport: transport.source("peer").publish(
        "*", add(), message_type="Add", count=3
    ),
    "a peer goes": lambda host, transport: transport.close_source("peer"),  # type: ignore[arg-type]
    "the pressure changes": lambda host, transport: host.parts.jobs.try_acquire().release(),  # type: ignore[union-attr]
    "another close": lambda host, transport: host.close(),
}


class SlowLoad(Counter):
    async def load(self, state: list[int]) -> None:  # type: ignore[override]
        await asyncio.sleep(0.5)


class NeverLoads(Counter):
    async def load(self, state: list[int]) -> None:  # type: ignore[override]
        await never()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("drain_ms", [0, 4_000])
@pytest.mark.parametrize("point", POINTS)
def test_close_at_every_point(point: str, drain_ms: int, steps: int) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        transport.on_start = lambda outgoing: HOLD if outgoing.kind is OutgoingKind.ONE_WAY else None
        source = transport.add_source("peer")
        transport.add_flow_target("router")
        host = make_host(transport, jobs_max=2, owners=OwnerLimits(application_items_max=3))
        host.spot("a", Counter())
        host.spot("full", full := Counter())
        full.gate = asyncio.Event()

        async def make(spot: str) -> Counter:
            await asyncio.sleep(1)
            return Counter(spot)

        make.__annotations__["return"] = Counter
        host.spots("slow/*", make)
        await host.start()
        for number in range(2):
            await host.send("full", Add(number))
        source.one_way("full", add(), message_type="Add", count=5)
        for _ in range(steps):
            await asyncio.sleep(0)
        begun = POINTS[point](host, transport)
        under_way = asyncio.ensure_future(_settle(begun))
        for _ in range(steps):
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(1.5, full.gate.set)
        began_at_ms = now_ms()
        await host.close(drain_deadline_ms=drain_ms)
        assert now_ms() - began_at_ms <= drain_ms + 4_000
        host.assert_empty()
        assert host.status().state is HostState.STOPPED
        await asyncio.wait([under_way], timeout=1)
        assert under_way.done(), "nobody waits for a closed host"
        told = under_way.result()
        assert told is None or isinstance(told, (HostError, asyncio.CancelledError)), told
        takes = transport.counts["take"]
        await asyncio.sleep(3_600)
        assert transport.counts["take"] == takes
        assert host.statistics().turns.active == 0
        host.assert_empty()
        left = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        assert left == set(), "no task outlives its host"

    run()


async def _soon(call: Callable[[], Any]) -> Any:
    await asyncio.sleep(0.01)
    return await call()


async def _settle(begun: Any) -> Any:
    try:
        if hasattr(begun, "__await__"):
            outcomes = await begun
            if isinstance(outcomes, list):
                return next((each for each in outcomes if isinstance(each, BaseException)), None)
    except (HostError, asyncio.CancelledError) as error:
        return error
    return None


@virtual_time
async def test_close_before_while_and_instead_of_a_start() -> None:
    host = make_host()
    await host.close()
    await host.close()
    assert host.status().state is HostState.STOPPED
    assert await kind_of(host.start()) is HostErrorKind.INVALID_OPERATION

    transport = ScriptedTransport()
    transport.add_flow_target("router").on_set = never
    host = make_host(transport)
    starting = asyncio.ensure_future(host.start())
    await asyncio.sleep(0)
    await host.close(drain_deadline_ms=0)
    assert await kind_of(starting) is HostErrorKind.SHUTTING_DOWN
    assert transport.counts["attach"] == 0
    host.assert_empty()


@virtual_time
async def test_a_cancelled_start_leaves_nothing_and_a_cancelled_close_goes_on() -> None:
    transport = ScriptedTransport()
    transport.add_flow_target("router").on_set = never
    host = make_host(transport)

    async def enter() -> None:
        async with host:
            raise AssertionError("it does not come this far")

    entering = asyncio.ensure_future(enter())
    await asyncio.sleep(0.1)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert host.status().state is HostState.STOPPED

    host = make_host()
    host.spot("a", Counter())
    await host.start()
    began_at_ms = now_ms()
    await host.send("a", Wait(1_000))
    closing = asyncio.ensure_future(host.close())
    await asyncio.sleep(0.5)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await host.close()
    assert now_ms() - began_at_ms == 1_000, "the second close waits for the first one's end"
    assert host.status().state is HostState.STOPPED
    host.assert_empty()


@virtual_time
async def test_an_error_in_the_block_does_not_drain() -> None:
    host = make_host()
    host.spot("a", Counter())

    async def fail() -> None:
        async with host:
            await host.send("a", Wait(60_000))
            await until(lambda: host.statistics().turns.active == 1)
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert now_ms() == 0
    host.assert_empty()


@virtual_time
async def test_pressure_goes_to_the_sockets_and_not_after_the_close() -> None:
    transport = ScriptedTransport()
    router = transport.add_flow_target("router")
    source = transport.add_source("peer")
    host = make_host(transport, jobs_max=10)
    host.spot("a", counter := Counter())
    counter.gate = asyncio.Event()
    await host.start()
    await host.send("a", Add(0))
    await until(lambda: counter.seen == [0])
    source.one_way("a", add(), message_type="Add", count=10)
    await until(lambda: len(router.applied) == 2)
    counter.gate.set()
    await until(lambda: len(counter.seen) == 11)
    await until(lambda: len(router.applied) == 3)
    assert router.applied == [FlowState.RUNNING, FlowState.PAUSED, FlowState.RUNNING]
    await host.close()
    assert len(router.calls) == 3
