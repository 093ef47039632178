"""All kinds of sources, one rule; and no path on which a permit is waited for under a gate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.host.errors import HostErrorKind
from callyard.host.host import Host, SpotTurn
from callyard.host.jobs import Permit
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import RecordKind, SourceKind
from tests.runtime.host.kit import Add, Counter, Total, add, kind_of, serving, until

RECORDS: dict[str, dict[str, Any]] = {
    "one_way": {"kind": RecordKind.ONE_WAY, "target": "b", "message_type": "Add", "payload": add(7)},
    "request": {
        "kind": RecordKind.REQUEST,
        "target": "b",
        "message_type": "Add",
        "payload": add(7),
        "operation_id": 4,
    },
    "publish": {"kind": RecordKind.PUBLISH, "target": "b*", "message_type": "Add", "payload": add(7)},
    "session record": {"kind": RecordKind.ONE_WAY, "target": "b", "message_type": "Add", "payload": add(7)},
    "handshake": {"kind": RecordKind.CONTROL, "message_type": "handshake"},
    "bind": {"kind": RecordKind.CONTROL, "message_type": "bind"},
    "unbind": {"kind": RecordKind.CONTROL, "message_type": "unbind"},
    "malformed": {"kind": RecordKind.MALFORMED},
}


def in_use(host: Host) -> tuple[int, int]:
    capacity = host.status().capacity
    return capacity.reserved_supply_permits, capacity.queued_application_jobs


@pytest.mark.requirement("R20")
@pytest.mark.parametrize("kind", SourceKind)
@pytest.mark.parametrize("record", RECORDS)
def test_an_ordinary_record_waits_for_its_permit_whatever_it_is_and_comes_from(kind: SourceKind, record: str) -> None:
    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer", kind)
        counter = Counter()
        async with serving(transport, jobs_max=1) as host:
            host.spot("b", counter)
            permit = host.parts.jobs.try_acquire()
            assert isinstance(permit, Permit)
            source.push(source.record(**RECORDS[record]))
            await asyncio.sleep(3_600)
            assert (transport.takes("peer"), counter.seen) == (0, []), "no permit: it is not received"
            assert host.status().capacity.capacity_waiters == 1
            permit.release()
            await until(lambda: transport.takes("peer") == 1 and in_use(host) == (0, 0))
            is_for_a_handler = RECORDS[record]["kind"] not in (RecordKind.CONTROL, RecordKind.MALFORMED)
            await until(lambda: counter.seen == [7] * is_for_a_handler)
            assert [reply.payload for reply in transport.accepted()] == [b"7"] * (record == "request")

    run()


@pytest.mark.requirement("R19")
@pytest.mark.requirement("R47")
@pytest.mark.parametrize("kind", SourceKind)
def test_a_permit_is_back_before_the_first_instruction_of_any_source(kind: SourceKind) -> None:
    seen: list[tuple[int, int]] = []

    @virtual_time
    async def run() -> None:
        transport = ScriptedTransport()
        source = transport.add_source("peer", kind)
        async with serving(transport, jobs_max=1) as host:

            @host.on("b")
            async def look(message: Any) -> None:
                seen.append(in_use(host))
                await asyncio.sleep(1)
                raise ValueError("it ends badly, and gives nothing back twice")

            for _ in range(3):
                source.one_way("b", b"1")
                await asyncio.sleep(2)

    run()
    assert seen == [(0, 0)] * 3


@pytest.mark.requirement("R49")
@virtual_time
async def test_at_one_permit_handlers_relay_publish_and_relocate_and_all_finish() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    told: list[str] = []
    async with serving(transport, jobs_max=1) as host:
        host.spots("moved/*", Counter)

        @host.on("a", str)
        async def act(turn: SpotTurn, message: str) -> None:
            match message:
                case "relay":
                    await host.send("b", "done")
                    assert await host.request("b", 1, int) == 1
                case "publish":
                    await host.publish("a", "noted")  # to itself, too
                case "relocate":
                    await host.move("moved/1")
                    await host.send("moved/1", Add(1))
            told.append(message)

        @host.on("b")
        def relayed(message: Any) -> Any:
            told.append(str(message))
            return message

        await host.send("moved/1", Add(5))
        for message in (b'"relay"', b'"publish"', b'"relocate"'):
            source.one_way("a", message, message_type="")
            source.one_way("moved/1", add(10), message_type="Add")
        await until(lambda: {"relay", "publish", "noted", "relocate", "done"} <= set(told))
        await until(lambda: transport.takes("peer") == 6)
        assert await host.request("moved/1", Total()) == 36
        assert host.statistics().moves.done == 1
    assert host.status().capacity.peak_permits_in_use == 1


@pytest.mark.requirement("R49")
@pytest.mark.requirement("R50")
@virtual_time
async def test_a_turn_that_would_wait_for_itself_is_told_so_at_once() -> None:
    told: list[HostErrorKind | None] = []
    async with serving(jobs_max=1) as host:
        host.spots("a", Busybody)

        @host.on("a", str)
        async def ask(turn: SpotTurn, message: str) -> None:
            told.append(await kind_of(host.request("a", "me")))
            told.append(await kind_of(host.move("a")))
            told.append(await kind_of(host.close()))
            with pytest.raises(Exception, match="waiting for a permit inside a turn"):
                host.parts.jobs.try_acquire()
            assert await turn.yield_while(host.request("a", Total())) == 0, (
                "with the gate open, it is no wait for itself"
            )
            told.append(None)

        await host.send("a", "go")
        await until(lambda: len(told) == 4)
    assert told == [HostErrorKind.INVALID_OPERATION] * 3 + [None]


class Busybody(Counter):
    pass


@pytest.mark.requirement("R7")
@virtual_time
async def test_a_received_publish_takes_a_permit_for_each_turn_and_a_local_one_none() -> None:
    transport = ScriptedTransport()
    source = transport.add_source("peer")
    async with serving(transport, jobs_max=10) as host:
        counters = [Counter(str(number)) for number in range(3)]
        for counter in counters:
            host.spot(f"in/{counter.spot}", counter)
            counter.gate = asyncio.Event()
            await host.send(f"in/{counter.spot}", Add(0))
        host.spot("out", Counter())
        await until(lambda: all(counter.seen for counter in counters))
        await host.publish("in/*", Add(1))
        assert in_use(host) == (0, 0)
        source.publish("in/*", add(2), message_type="Add")
        await until(lambda: transport.takes("peer") == 1)
        await until(lambda: in_use(host) == (0, 3))
        for counter in counters:
            assert counter.gate is not None
            counter.gate.set()
        await until(lambda: all(counter.seen == [0, 1, 2] for counter in counters))
