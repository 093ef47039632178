"""The runner behind a pump: one permit for each real turn of a publish, bounds at every sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from callyard.host import context
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import Permit
from callyard.host.owners import OwnerKey
from callyard.host.pump import Pump
from callyard.testing.scripted_transport import ScriptedTransport
from callyard.testing.virtual_time import virtual_time
from callyard.transport.port import Completion, Record, RecordKind, SourceId
from tests.unit.host.turns.kit import Gatekeeper, World, one_way, rest


class Host:
    """A pump, owners and turns; satisfies `Ingress`."""

    def __init__(self, jobs_max: int) -> None:
        self.world = World(jobs_max)
        self.transport = ScriptedTransport()
        self.subscribers: Sequence[OwnerKey] = ()
        self.refusals: list[tuple[str, HostErrorKind]] = []
        self.completed: list[Completion] = []
        self.on_receive: Callable[[Record], None] = lambda record: None
        self.pump = Pump(self.transport, self.world.jobs, self, self.world.timers)
        self.pump.start()

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        self.on_receive(record)
        return self.world.owners.commit(record, permit)

    def targets_of(self, record: Record) -> Sequence[OwnerKey]:
        return self.subscribers

    def control(self, record: Record) -> None: ...

    def complete(self, completion: Completion) -> None:
        self.completed.append(completion)

    def refused(self, record: Record, kind: HostErrorKind) -> None:
        self.refusals.append((record.target, kind))

    def lost(self, source: SourceId) -> None: ...


@pytest.mark.requirement("R7")
@virtual_time
async def test_a_received_publish_takes_one_permit_for_each_real_turn() -> None:
    host = Host(jobs_max=10)
    keeper = Gatekeeper()
    gate = host.world.owners.new_gate()
    for key in ("busy", "a", "b", "c"):
        host.world.add(key, keeper, gate=gate)
    host.world.add("elsewhere", keeper)
    assert host.world.owners.submit_local("busy", one_way("busy")) is None
    await rest()
    host.subscribers = ("a", "b", "c")
    host.transport.add_source("peer").publish(payload=b"news")
    await rest()
    assert host.world.in_use == (0, 3)
    held = {key: owner.ledger.application.mailbox.items for key, owner in host.world.owners._by_key.items()}
    assert held == {"busy": 0, "a": 1, "b": 1, "c": 1, "elsewhere": 0}
    keeper.let_go()
    await rest()
    assert keeper.began == [b""] + [b"news"] * 3
    host.world.check_empty()


@pytest.mark.requirement("R7")
@virtual_time
async def test_the_same_publish_made_here_takes_lanes_and_no_permit() -> None:
    host = Host(jobs_max=1)
    keeper = Gatekeeper()
    for key in ("a", "b", "c"):
        host.world.add(key, keeper)
        assert host.world.owners.submit_local(key, one_way(key)) is None
    await rest()

    async def publishes(turn: Any, value: Any) -> None:
        for key in ("a", "b", "c"):
            assert (
                host.world.owners.submit_local(key, Record(RecordKind.PUBLISH, SourceId(""), key, payload=b"n")) is None
            )

    host.world.add("publisher", publishes)
    host.transport.add_source("peer").one_way("publisher")
    await rest()
    assert host.world.in_use == (0, 0)
    ledgers = [host.world.owners.get(key).ledger.application for key in "abc"]  # type: ignore[union-attr]
    assert [(entry.mailbox.items, entry.execution.items) for entry in ledgers] == [(1, 1)] * 3
    keeper.let_go()
    await rest()
    assert keeper.began == [b""] * 3 + [b"n"] * 3
    host.world.check_empty()


@pytest.mark.requirement("R29")
@virtual_time
async def test_a_publish_never_makes_more_jobs_than_there_are_permits() -> None:
    host = Host(jobs_max=2)
    keys = [f"spot {number}" for number in range(5)]
    samples: list[tuple[int, int]] = []
    began: list[str] = []

    async def handler(turn: Any, value: Any) -> None:
        samples.append(host.world.in_use)
        began.append(turn.owner)
        await asyncio.sleep(1)

    for key in keys:
        host.world.add(key, handler)
    host.subscribers = keys
    host.on_receive = lambda record: samples.append(host.world.in_use)
    source = host.transport.add_source("peer")
    source.publish(count=3)
    while source.unread or not host.world.owners.is_quiet:
        samples.append(host.world.in_use)
        await asyncio.sleep(0.1)
    assert sorted(began) == sorted(keys * 3)
    assert max(reserved + queued for reserved, queued in samples) == 2
    host.world.check_empty()


@pytest.mark.requirement("R58", "R59")
@virtual_time
async def test_a_handler_or_gate_inside_a_receive_callback_is_an_error() -> None:
    host = Host(jobs_max=2)
    ran: list[Any] = []
    kinds: list[HostErrorKind] = []
    host.world.add("a", lambda turn, value: ran.append(value))

    def receive() -> None:
        with context.receive_callback():
            assert host.world.owners.submit_local("a", one_way("a", b"x")) is None  # takes ownership, and that is all
            assert ran == []
            try:
                host.world.owners.begin_next(0)
            except HostError as error:
                kinds.append(error.kind)

    host.world.turns.on_ready = lambda: None  # type: ignore[method-assign]
    receive()
    assert kinds == [HostErrorKind.INVALID_OPERATION]
    del host.world.turns.on_ready
    host.world.check()
    host.world.turns.on_ready()
    await rest()
    assert ran == [b"x"]
    host.world.check_empty()


@pytest.mark.requirement("R58")
@virtual_time
async def test_receiving_takes_no_longer_for_slow_handlers() -> None:
    host = Host(jobs_max=100)

    async def slow(turn: Any, value: Any) -> None:
        await asyncio.sleep(3_600)

    host.world.add("a", slow)
    host.transport.add_source("peer").one_way("a", count=50)
    began_at_ms = host.world.timers.now_ms()
    await rest()
    assert host.world.in_use == (0, 49)
    assert host.world.timers.now_ms() - began_at_ms <= 1
    await host.world.turns.stop(0)


@pytest.mark.requirement("R112")
@virtual_time
async def test_turns_that_never_wait_delay_a_completion_by_one_stretch() -> None:
    host = Host(jobs_max=1_000)
    ran: list[Any] = []
    host.world.add("a", lambda turn, value: ran.append(value))
    flood, other = host.transport.add_source("flood"), host.transport.add_source("other")
    flood.one_way("a", count=900)
    for _ in range(6):
        await asyncio.sleep(0)
    before = len(ran)
    assert 0 < before < 700
    other.complete(1)
    while not host.completed:
        await asyncio.sleep(0)
    assert len(ran) - before <= 3 * 64
    await rest()
    assert len(ran) == 900
    host.world.check_empty()
