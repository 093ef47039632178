"""Sends, received records, seals and sessions in any order, on real owners and jobs; and the request table.

Beside them a naive model: what was offered, in which order, until when. `outbound_faults.py` plants faults, and each is
found.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from callyard.host.config import SendFamily
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import Permit
from callyard.host.moving import Moving
from callyard.host.owners import Condition
from callyard.host.requests import Request, RequestTable
from callyard.host.waiters import Waiters
from callyard.transport.port import RecordKind
from tests.property import outbound_faults
from tests.unit.host.manual_timers import ManualTimers
from tests.unit.host.world import Sent, World

KEYS = ("cart", "session")
FAMILIES = (SendFamily.SPOT, SendFamily.BOUND_SESSION)
SIZES = (0, 0, 1_500)
BYTES_MAX = 2_500


class Outbound(RuleBasedStateMachine):
    waiters: type[Waiters] = Waiters
    moving: type[Moving] = Moving

    @initialize(
        jobs_max=st.integers(1, 4),
        items_max=st.sampled_from((1, 2, 4, 8)),
        slots=st.integers(1, 5),
        connects=st.booleans(),
    )
    def start(self, jobs_max: int, items_max: int, slots: int, connects: bool) -> None:
        self.world = World(
            jobs_max=jobs_max,
            items_max=items_max,
            bytes_max=BYTES_MAX,
            slots=slots,
            waiters=self.waiters,
            moving=self.moving,
        )
        self.world.spot("cart")
        self.world.spot("session")
        if not connects:
            self.world.owners.set_condition("session", Condition.NOT_CONNECTED)
        self.sends: dict[str, tuple[str, Sent, int]] = {}
        """Name to key, send, deadline."""
        self.received: dict[str, tuple[str, int | None, bool]] = {}
        """Those that were taken: name to key, deadline, whether an answer is owed."""
        self.hand: list[Permit] = []
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"n{self.count}"

    @rule(
        key=st.sampled_from(KEYS),
        family=st.sampled_from(FAMILIES),
        sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    )
    def send(self, key: str, family: SendFamily, sizes: list[int]) -> None:
        for size in sizes:
            self.send_one(key, family, size)

    def send_one(self, key: str, family: SendFamily, size: int) -> None:
        name = self.name()
        waiting = self.world.waiters.status()[family].waiting
        sent = self.world.send(name, key, family=family, size=size, timeout_ms=100)
        self.sends[name] = (key, sent, self.world.timers.now_ms() + 100)
        if sent.outcome == "DEADLINE_EXCEEDED":
            assert waiting == self.world.waiters.slots, "ended at once with places left"

    @rule()
    def acquire(self) -> None:
        """A source has its turn, and takes its record a little later."""
        permit = self.world.jobs.try_acquire()
        if permit is not None:
            self.hand.append(permit)

    @rule(
        key=st.sampled_from(KEYS),
        kind=st.sampled_from([RecordKind.ONE_WAY, RecordKind.REQUEST]),
        timeout_ms=st.sampled_from([None, 50]),
        size=st.sampled_from(SIZES),
    )
    def receive(self, key: str, kind: RecordKind, timeout_ms: int | None, size: int) -> None:
        self.receive_one(key, kind, timeout_ms, size)

    def receive_one(self, key: str, kind: RecordKind, timeout_ms: int | None, size: int) -> None:
        permit = self.hand.pop() if self.hand else self.world.jobs.try_acquire()
        if permit is None:
            return  # it stays in the transport
        name = self.name()
        deadline_at_ms = None if timeout_ms is None else self.world.timers.now_ms() + timeout_ms
        fields = {"kind": kind, "deadline_at_ms": deadline_at_ms, "size": size}
        if self.world.receive(name, key, permit=permit, **fields) is None:
            self.received[name] = (key, deadline_at_ms, kind is RecordKind.REQUEST)

    @precondition(lambda self: any(sent.outcome is None for _, sent, _ in self.sends.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [name for name, (_, sent, _) in self.sends.items() if sent.outcome is None]
        self.world.cancel(self.sends[data.draw(st.sampled_from(waiting))][1])

    @rule()
    def begin_turn(self) -> None:
        self.world.begin_turn()

    @precondition(lambda self: self.world.running)
    @rule()
    def end_turn(self) -> None:
        self.world.end_turn()

    @rule(duration_ms=st.sampled_from([1, 49, 60]))
    def wait(self, duration_ms: int) -> None:
        self.world.timers.advance(duration_ms)

    @rule(duration_ms=st.sampled_from([60, 120]))
    def be_late(self, duration_ms: int) -> None:
        self.world.timers.late(duration_ms)

    @rule(key=st.sampled_from(KEYS))
    def seal(self, key: str) -> None:
        owner = self.world.owners.get(key)
        assert owner is not None
        if owner.condition in (Condition.OPEN, Condition.REPLAYING):
            self.world.moving.seal(key)
            assert not list(owner.application)

    @rule(key=st.sampled_from(KEYS))
    def open(self, key: str) -> None:
        self.world.moving.open(key)

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 4))
    def come_meanwhile(self, key: str, count: int) -> None:
        """A whole move, and a record in the hand of its source when it is over."""
        self.seal(key)
        for _ in range(count):
            self.receive_one(key, RecordKind.ONE_WAY, None, 0)
        self.acquire()
        self.open(key)
        self.receive_one(key, RecordKind.ONE_WAY, None, 0)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.check()
        assert len(set(world.ran)) == len(world.ran), "delivered twice"
        assert world.in_use_max <= world.jobs.limit
        for name, (_, sent, deadline_at_ms) in self.sends.items():
            assert (name in world.ran) <= (sent.outcome == "taken"), f"{name} ran and {sent.outcome}"
            assert sent.outcome != "taken" or sent.ended_at_ms < deadline_at_ms, f"{name} was taken past its deadline"
        for key in KEYS:
            ran = [name for name in world.ran if name in self.sends and self.sends[name][0] == key]
            assert ran == sorted(ran, key=number), f"sends to {key} out of order: {ran}"
            ran = [name for name in world.ran if name in self.received and self.received[name][0] == key]
            assert ran == sorted(ran, key=number), f"records for {key} out of order: {ran}"
            owner = world.owners.get(key)
            waiting = [sent for at, sent, _ in self.sends.values() if at == key and sent.outcome is None]
            if owner is not None and waiting and owner.condition is Condition.OPEN:
                lane, limits = owner.ledger.application, owner.ledger.limits
                charge = owner.ledger.charge(waiting[0].item.bytes)
                fits = lane.items < limits.application_items_max and lane.bytes + charge <= BYTES_MAX
                is_late = self.sends[waiting[0].name][2] <= world.timers.now_ms()
                assert not fits or is_late, f"{waiting[0].name} waits beside room"

    def teardown(self) -> None:
        """All opens, all runs: everything has one end, and nothing is left anywhere."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for permit in self.hand:
            permit.release()
        for key in KEYS:
            world.moving.open(key)
        world.run_all()
        self.agree()
        for name, (_, sent, _) in self.sends.items():
            assert sent.outcome is not None, f"{name} waits for ever"
            assert (name in world.ran) == (sent.outcome == "taken"), f"{name} is lost: {sent.outcome}"
        answered = [name for name, _ in world.answers]
        assert len(set(answered)) == len(answered), "answered twice"
        gone = [name for name in self.received if name not in world.ran]
        assert {name for name in gone if self.received[name][2]} == set(answered), "a request without an answer"
        unseen = [name for name in gone if not self.received[name][2]]
        assert sum(world.drops.counts.values()) == len(unseen), "dropped unseen"
        assert world.moving.status().expired == len(gone), "only what is past its deadline is dropped"
        assert (world.jobs.in_use, world.jobs.waiters, len(world.waiters), world.timers.armed) == (0, 0, 0, 0)


def number(name: str) -> int:
    return int(name[1:])


class Requests(RuleBasedStateMachine):
    table: type[RequestTable] = RequestTable

    @initialize(limit=st.integers(1, 4))
    def start(self, limit: int) -> None:
        self.timers = ManualTimers()
        self.requests = self.table(self.timers, limit)
        self.open: dict[int, tuple[Request, int]] = {}
        """Not released: request, deadline."""
        self.told: dict[int, list[Any]] = {}
        self.ended: dict[int, Any] = {}
        """By the model: what each was to be told, or None for one that was withdrawn."""

    def expire(self) -> None:
        for operation_id, (_, deadline_at_ms) in self.open.items():
            if deadline_at_ms <= self.timers.now_ms():
                self.ended.setdefault(operation_id, HostErrorKind.DEADLINE_EXCEEDED)

    @rule(timeout_ms=st.sampled_from([10, 50]))
    def ask(self, timeout_ms: int) -> None:
        told: list[Any] = []

        def deliver(outcome: Any) -> bool:
            told.append(outcome.kind if isinstance(outcome, HostError) else outcome)
            return True

        deadline_at_ms = self.timers.now_ms() + timeout_ms
        if len(self.open) == self.requests.limit:
            with pytest.raises(HostError, match="nothing was sent"):
                self.requests.reserve("cart", deadline_at_ms, deliver)
            return
        request = self.requests.reserve("cart", deadline_at_ms, deliver)
        self.open[request.operation_id] = (request, deadline_at_ms)
        self.told[request.operation_id] = told

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        operation_id = data.draw(st.sampled_from(sorted(self.told)))
        is_first = operation_id not in self.ended
        assert self.requests.settle(operation_id, "reply") == is_first
        self.ended.setdefault(operation_id, "reply")

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        operation_id = data.draw(st.sampled_from(sorted(self.open)))
        request, _ = self.open.pop(operation_id)
        request.release()
        self.ended.setdefault(operation_id, None)

    @rule(duration_ms=st.sampled_from([5, 20]))
    def wait(self, duration_ms: int) -> None:
        self.timers.advance(duration_ms)
        self.expire()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "requests"):
            return
        self.requests.check_invariants()
        assert len(self.requests) == len(self.open)
        for operation_id, told in self.told.items():
            outcome = self.ended.get(operation_id)
            assert told == ([] if outcome is None else [outcome]), f"request {operation_id}"
        in_flight = sum(operation_id not in self.ended for operation_id in self.told)
        assert self.requests.status().in_flight == in_flight == self.timers.armed


TestOutbound = Outbound.TestCase
TestOutbound.settings = settings(max_examples=200, stateful_step_count=40)
TestOutbound.pytestmark = [pytest.mark.requirement("R22", "R81", "R85", "R86", "R93", "R116")]

TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40)
TestRequests.pytestmark = [pytest.mark.requirement("R81", "R119")]

FAULTY = settings(
    max_examples=2_000,
    stateful_step_count=40,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
PLANTED = [
    *((Outbound, "waiters", fault) for fault in outbound_faults.WAITERS),
    *((Outbound, "moving", fault) for fault in outbound_faults.HOLDS),
    *((Requests, "table", fault) for fault in outbound_faults.TABLES),
]


@pytest.mark.requirement("R81", "R85", "R86", "R119")
@pytest.mark.parametrize(("machine", "part", "fault"), PLANTED, ids=[fault.__name__ for _, _, fault in PLANTED])
def test_a_planted_fault_is_found(machine: type[RuleBasedStateMachine], part: str, fault: type) -> None:
    faulty = type("Faulty", (machine,), {part: fault})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(faulty, settings=FAULTY)
