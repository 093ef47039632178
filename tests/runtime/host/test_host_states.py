"""Host states by what asks to come in, from the outside. Source: job-queue R120."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.states import HostState
from callyard.host.wiring import REFUSALS_MAX
from callyard.testing.scripted_transport import HOLD, ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import SourceKind
from tests.runtime.host.kit import Add, Counter, Total, add, kind_of, make_host, until

S, K = HostState, HostErrorKind
SHUT, AWAY = K.SHUTTING_DOWN, K.UNAVAILABLE
WAYS = {
    S.PREPARING: (),
    S.SERVING: (S.SERVING,),
    S.RELOCATING: (S.SERVING, S.RELOCATING),
    S.RELOCATED: (S.SERVING, S.RELOCATING, S.RELOCATED),
    S.DRAINING: (S.SERVING, S.DRAINING),
    S.STOPPED: (S.SERVING, S.DRAINING, S.STOPPED),
    S.ERROR: (S.SERVING, S.ERROR),
}
# Of a request from another host: the error of its reply, "ok" when it was handled, "held" while it waits.
TABLE: dict[HostState, tuple[str, str, str]] = {
    # state: a spot that is to be made, one that is there, one that is sealed
    S.PREPARING: ("unavailable", "unavailable", "unavailable"),
    S.SERVING: ("ok", "ok", "held"),
    S.RELOCATING: ("unavailable", "ok", "held"),
    S.RELOCATED: ("unavailable", "unavailable", "unavailable"),
    S.DRAINING: ("shutting_down", "shutting_down", "shutting_down"),
    S.STOPPED: ("shutting_down", "shutting_down", "shutting_down"),
    S.ERROR: ("unavailable", "unavailable", "unavailable"),
}
CELLS = [
    pytest.param(state, spot, answer, id=f"{state}-{spot}")
    for state, row in TABLE.items()
    for spot, answer in zip(("cart/new", "a", "sealed"), row, strict=True)
]


@pytest.mark.requirement("R120")
@pytest.mark.parametrize(("state", "spot", "answer"), CELLS)
def test_what_comes_from_elsewhere(state: HostState, spot: str, answer: str) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer", SourceKind.STREAM)
        host = make_host(transport)
        host.spots("cart/*", Counter)
        host.spot("a", Counter())
        host.spot("sealed", Counter())
        parts = host.parts
        assert parts.pump is not None
        parts.turns.start()
        parts.pump.start()
        parts.moving.seal("sealed")
        for step in WAYS[state]:
            parts.life.move_to(step)
        source.request(spot, add(5), message_type="Add", operation_id=1)
        await asyncio.sleep(1)
        if answer == "held":
            assert (transport.accepted(), parts.moving.held("sealed")) == ([], 1)
            parts.moving.open("sealed")
            await asyncio.sleep(1)
        (reply,) = transport.accepted()
        assert reply.error == ("" if answer in ("ok", "held") else answer)
        status = host.status()
        assert (status.state, status.ready) == (state, state is S.SERVING)
        assert status.accepting_work == (state in (S.SERVING, S.RELOCATING)), "apart from the state"
        assert parts.jobs.in_use == 0

    run()


@pytest.mark.requirement("R120")
@pytest.mark.parametrize("state", WAYS)
def test_replies_and_control_come_in_until_the_end(state: HostState) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer")
        host = make_host(transport)
        assert host.parts.pump is not None
        host.parts.pump.start()
        host.parts.turns.start()
        asked = asyncio.ensure_future(host.request("far", Total(), int))
        await until(lambda: bool(transport.accepted()))
        for step in WAYS[state]:
            host.parts.life.move_to(step)
        source.complete(transport.accepted()[0].operation_id, b"3")
        source.control("heartbeat")
        assert await asked == 3
        await until(lambda: host.parts.pump is not None and host.parts.pump.statistics().control == 1)
        assert host.parts.jobs.in_use == 0

    run()


@pytest.mark.requirement("R120")
@virtual_time
async def test_the_same_for_who_calls_in_this_process() -> None:
    host = make_host()
    host.spot("a", Counter())
    host.spots("cart/*", Counter)
    assert (host.status().state, host.is_ready) == (S.PREPARING, False)
    assert await kind_of(host.send("a", Add(1))) is AWAY
    assert await kind_of(host.request("cart/1", Add(1))) is AWAY
    async with host:
        assert (host.status().state, host.is_ready) == (S.SERVING, True)
        assert await host.request("a", Add(1)) == 1
        assert await host.request("cart/1", Add(1)) == 1
        host.parts.life.seal()
        assert host.status().state is S.SERVING
        assert not host.status().accepting_work, "the flag goes first"
        assert await kind_of(host.send("a", Add(1))) is SHUT
    assert host.status().state is S.STOPPED
    for call in (host.send("a", Add(1)), host.request("a", Add(1)), host.publish("*", Add(1))):
        assert await kind_of(call) is SHUT


@pytest.mark.requirement("R120")
@virtual_time
async def test_a_handler_that_drains_may_reply_and_not_send() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    host = make_host(transport)
    told: list[Any] = []

    @host.on("a")
    async def slow(message: Any) -> str:
        await asyncio.sleep(2)
        told.append(host.status().state)
        told.append(await kind_of(host.send("a", "again")))
        return "done"

    await host.start()
    source.request("a", b"1", operation_id=3)
    source.request("a", b"2", operation_id=4)
    await asyncio.sleep(1)
    await host.close()
    assert told == [S.DRAINING, SHUT] * 2, "what was accepted runs"
    assert [(reply.operation_id, reply.payload) for reply in transport.accepted()] == [(3, b'"done"'), (4, b'"done"')]
    host.assert_empty()


@virtual_time
async def test_a_bug_in_the_host_ends_in_the_state_error_and_it_can_be_closed() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    host = make_host(transport)
    host.spot("a", Counter())
    await host.start()
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    assert host.parts.pump is not None
    transport.before_call = lambda call: (_ for _ in ()).throw(RuntimeError("bug")) if call.name == "take" else None
    source.one_way("a", add(), message_type="Add")
    await until(lambda: host.status().state is S.ERROR)
    assert len(failures) == 1
    assert await kind_of(host.send("a", Add(1))) is K.UNAVAILABLE
    transport.before_call = None
    await host.close()
    assert host.status().state is S.STOPPED
    host.assert_empty()


@pytest.mark.requirement("R93")
@virtual_time
async def test_replies_to_a_slow_peer_wait_in_the_lane_of_who_answers_it_and_of_nobody_else() -> None:
    transport = ScriptedTransport()
    slow, good = transport.add_source("slow"), transport.add_source("good")
    async with make_host(transport) as host:
        for spot in ("a", "b"):
            host.on(spot)(lambda message: message)
        transport.on_start = lambda outgoing: HOLD if outgoing.target == "slow" else None
        for number in range(100):
            slow.request("a", b"1", operation_id=1 + number)
        good.request("b", b"2", operation_id=1)
        await until(lambda: len(transport.accepted()) == 1)
        await asyncio.sleep(0.5)
        assert len(transport.started) == 2, "one reply at the transport, the others are not even made"
        assert host.statistics().turns.active == 1
        transport.on_start = lambda outgoing: None
        transport.started[0].refuse("timeout")
        await until(lambda: len(transport.accepted()) == 100)
        assert host.parts.drops.counts["reply", "backpressure"] == 1  # type: ignore[index]
    host.assert_empty()


@virtual_time
async def test_error_replies_that_a_peer_does_not_read_are_bounded_and_are_its_own_loss() -> None:
    transport = ScriptedTransport()
    deaf, other = transport.add_source("deaf"), transport.add_source("other")
    async with make_host(transport) as host:
        transport.on_start = lambda outgoing: HOLD if outgoing.target == "deaf" else None
        for number in range(REFUSALS_MAX + 7):
            deaf.request("nobody", b"1", operation_id=1 + number)
        await until(lambda: transport.takes("deaf") == REFUSALS_MAX + 7)
        await asyncio.sleep(0)
        assert len(transport.started) == REFUSALS_MAX
        assert host.parts.drops.counts["reply", "backpressure"] == 7  # type: ignore[index]
        other.request("nobody", b"1", operation_id=1)
        await until(lambda: [(reply.target, reply.error) for reply in transport.accepted()] == [("other", "not_found")])
        for started in transport.started:
            started.accept()
        await asyncio.sleep(0)
        deaf.request("nobody", b"1", operation_id=1_000)
        await until(lambda: transport.started[-1].outgoing.operation_id == 1_000)
        transport.started[-1].accept()
    host.assert_empty()
