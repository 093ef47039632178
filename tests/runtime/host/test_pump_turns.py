"""From a source to a handler: the pump with real owners and turns, and nothing between them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from callyard.host.context import forbid_in_receive_callback, forbid_under_gate
from callyard.host.errors import HostErrorKind
from callyard.host.jobs import JobQueue, Permit
from callyard.host.owners import Owners
from callyard.host.pump import Pump
from callyard.host.turns import Turn, Turns
from callyard.testing.scripted_transport import Call, ScriptedTransport
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from callyard.transport.port import Record, SourceKind
from tests.runtime.host.test_pump import rest
from tests.unit.host.pump.kit import FakeIngress


class OwnersIngress(FakeIngress):
    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self._owners = owners

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        return self._owners.commit(record, permit)


class Host:
    """As little of a host as lets records run."""

    def __init__(self, jobs_max: int) -> None:
        self.transport = ScriptedTransport()
        self.jobs = JobQueue(jobs_max, clock=VirtualTimers(), may_wait=self._may_wait)
        self.owners = Owners()
        self.ingress = OwnersIngress(self.owners)
        self.turns = Turns(self.owners, decode=lambda record: record.payload, replies=self, timers=VirtualTimers())
        self.pump = Pump(self.transport, self.jobs, self.ingress, VirtualTimers())
        self.replied: list[tuple[int, Any]] = []
        self.turns.start()
        self.pump.start()

    def reply(self, record: Record, outcome: Any) -> None:
        self.replied.append((record.operation_id, outcome))

    def _may_wait(self) -> None:
        forbid_under_gate("waiting for a permit")
        forbid_in_receive_callback("waiting for a permit")

    async def stop(self) -> None:
        self.pump.stop_receiving()
        await self.turns.stop(VirtualTimers().now_ms() + 1_000)
        self.pump.close()


@pytest.mark.requirement("R17", "R58", "R59", "R99")
@pytest.mark.parametrize("kind", list(SourceKind))
@pytest.mark.parametrize("jobs_max", [1, 3, 128])
def test_records_of_every_source_reach_their_handlers_in_order(kind: SourceKind, jobs_max: int) -> None:
    @virtual_time
    async def run() -> None:
        host = Host(jobs_max)
        seen: dict[str, list[bytes]] = {"s0": [], "s1": [], "s2": []}
        queued_at_start: list[int] = []

        def handler(turn: Turn, payload: bytes) -> bytes:
            queued_at_start.append(host.jobs.status().queued)
            seen[turn.owner].append(payload)
            return payload.upper()

        for key in seen:
            host.owners.add(key, handler)
        source = host.transport.add_source("a", kind)
        for n in range(90):
            source.request(f"s{n % 3}", b"%d" % n, operation_id=n + 1)
        source.one_way("nobody")
        source.control()
        await rest()
        assert seen == {f"s{k}": [b"%d" % n for n in range(k, 90, 3)] for k in range(3)}
        assert len(host.replied) == 90
        assert max(queued_at_start) < jobs_max  # its own permit went back before the first instruction
        assert [kind for _, kind in host.ingress.refusals] == [HostErrorKind.NOT_FOUND]
        assert host.jobs.status().in_use == 0
        await host.stop()

    run()


@pytest.mark.requirement("R32", "R15")
def test_what_is_taken_and_not_begun_never_exceeds_the_permits() -> None:
    @virtual_time
    async def run() -> None:
        host = Host(jobs_max=5)
        begun: Counter[str] = Counter()
        open_gates: list[asyncio.Future[None]] = []

        async def stuck(turn: Turn, payload: bytes) -> None:
            begun[turn.owner] += 1
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            open_gates.append(gate)
            await gate

        def watch(call: Call) -> None:
            taken = host.transport.counts["take"]  # this one included
            assert taken - sum(begun.values()) <= 5

        host.transport.before_call = watch
        for key in ("s0", "s1"):
            host.owners.add(key, stuck)
        sources = [host.transport.add_source(name) for name in ("a", "b")]
        for source in sources:
            for n in range(20):
                source.one_way(f"s{n % 2}")
        await rest()
        assert sum(begun.values()) == 2
        assert host.transport.counts["take"] == 7  # two run without a permit, five wait with one
        while open_gates:
            open_gates.pop().set_result(None)
            await rest()
        assert sum(begun.values()) == 40
        await host.stop()

    run()


@pytest.mark.requirement("R58")
def test_receiving_does_not_take_as_long_as_handlers_do() -> None:
    @virtual_time
    async def run() -> None:
        host = Host(jobs_max=100)
        ended: list[float] = []

        async def slow(turn: Turn, payload: bytes) -> None:
            await asyncio.sleep(60)
            ended.append(asyncio.get_running_loop().time())

        host.owners.add("s0", slow)
        source = host.transport.add_source("a")
        source.one_way("s0", count=3)
        source.control()
        await rest()
        assert host.transport.counts["take"] == 4
        assert len(host.ingress.controlled) == 1
        assert ended == []
        await asyncio.sleep(200)
        assert len(ended) == 3
        await host.stop()

    run()


@pytest.mark.requirement("R49")
def test_a_handler_that_sends_to_its_own_host_at_one_permit_ends() -> None:
    @virtual_time
    async def run() -> None:
        host = Host(jobs_max=1)
        seen: list[str] = []
        back = host.transport.add_source("loopback")

        def relay(turn: Turn, payload: bytes) -> None:
            seen.append(turn.owner)
            if turn.owner == "s0":
                back.one_way("s1")  # readable inside a turn that holds its gate

        host.owners.add("s0", relay)
        host.owners.add("s1", relay)
        host.transport.add_source("a").one_way("s0", count=3)
        await rest()
        assert sorted(seen) == ["s0"] * 3 + ["s1"] * 3
        assert host.pump.failure is None
        await host.stop()

    run()
