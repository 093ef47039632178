"""Owners, jobs, waiters and holds wired as a host wires them, with turns that a test begins and ends by hand."""

from __future__ import annotations

from collections import deque
from typing import Any

from callyard.host.config import SendFamily
from callyard.host.drops import Drops
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue, Permit
from callyard.host.ledger import OwnerLimits
from callyard.host.moving import Moving
from callyard.host.owners import Callback, Item, OwnerKey, Owners, Work
from callyard.host.states import HostLife, HostState
from callyard.host.waiters import Waiter, Waiters
from callyard.testing.clock import FakeClock
from callyard.transport.port import Record, RecordKind, SourceId
from tests.unit.host.manual_timers import ManualTimers


class Sent:
    """One local one-way: how it ended, and where its item is."""

    def __init__(self, name: str, item: Callback) -> None:
        self.name = name
        self.item = item
        self.waiter: Waiter | None = None
        self.outcome: str | None = None
        """`taken`, `cancelled`, or the kind of its error; None: it waits."""
        self.ended_at_ms = -1


class CheckedOwners(Owners):
    """Nothing is let in past its deadline: not by a pump's commit, nor out of a hold."""

    clock: FakeClock
    let_in: set[int]
    """Those that have been; sealed before their turn, they come once more."""

    def commit(self, record: Record, permit: Permit, *, replay: bool = False) -> HostErrorKind | None:
        refused = super().commit(record, permit, replay=replay)
        if refused is None:
            is_past = record.deadline_at_ms is not None and record.deadline_at_ms <= self.clock.now_ms()
            assert not is_past or record.sequence in self.let_in, f"{record.message_type} was let in past its deadline"
            owner = self.get(record.target)
            if owner is not None and owner.application.tail is not None and owner.application.tail.item is record:
                self.let_in.add(record.sequence)
        return refused


class World:
    def __init__(
        self,
        *,
        jobs_max: int = 2,
        items_max: int = 4,
        bytes_max: int = 1 << 20,
        slots: int = 256,
        waiters: type[Waiters] = Waiters,
        moving: type[Moving] = Moving,
    ) -> None:
        self.timers = ManualTimers()
        self.life = HostLife()
        self.life.move_to(HostState.SERVING)
        self.jobs = JobQueue(jobs_max, clock=self.timers)
        self.drops = Drops()
        self.waiters = waiters(self.timers, slots)
        limits = OwnerLimits(application_items_max=items_max, application_bytes_max=bytes_max)
        self.owners = CheckedOwners(limits, admit=self.life.admit)
        self.owners.clock, self.owners.let_in = self.timers, set()
        self.owners.events = self
        self.moving = moving(
            self.owners,
            self.jobs,
            self.timers,
            self.drops,
            answer=lambda record, error: self.answers.append((name_of(record), error.kind)),
            look_again=lambda key: self.waiters.admit(key),
            admit=self.life.admit,
            session_slots=slots,
        )
        self.answers: list[tuple[str, HostErrorKind]] = []
        self.refused: list[tuple[str, HostErrorKind]] = []
        """What came for an owner and was not taken, in place of a pump."""
        self.ran: list[str] = []
        self.running: deque[Work] = deque()
        self.in_use_max = 0
        self._sequence = 0

    # Owners tell.

    def on_ready(self) -> None: ...

    def on_room(self, key: OwnerKey) -> None:
        self.moving.give_room(key)
        self.waiters.admit(key)

    def on_removed(self, key: OwnerKey, error: HostError) -> None:
        self.moving.end(key, error)
        self.waiters.end_line(key, error.kind, error.message)

    def on_dropped(self, item: Item, error: HostError) -> None:
        self.answers.append((name_of(item), error.kind))

    # What a test does.

    def spot(self, key: str = "cart") -> None:
        self.owners.add(key, lambda turn, value: None)

    def record(
        self,
        name: str,
        key: str = "cart",
        *,
        kind: RecordKind = RecordKind.ONE_WAY,
        deadline_at_ms: int | None = None,
        size: int = 0,
    ) -> Record:
        self._sequence += 1
        return Record(
            kind=kind,
            source=SourceId("peer"),
            target=key,
            message_type=name,
            payload=bytes(size),
            operation_id=self._sequence,
            sequence=self._sequence,
            deadline_at_ms=deadline_at_ms,
        )

    def receive(
        self, name: str, key: str = "cart", *, permit: Permit | None = None, **fields: Any
    ) -> HostErrorKind | None:
        """What a pump does with one record that it has a permit for."""
        permit = permit or self.jobs.try_acquire()
        assert permit is not None, "no permit is free: the record stays in the transport"
        self.note()
        record = self.record(name, key, **fields)
        refused = self.moving.commit(record, permit)
        if refused is not None:
            permit.release()
            self.refused.append((name, refused))
        self.note()
        return refused

    def send(
        self,
        name: str,
        key: str = "cart",
        *,
        size: int = 0,
        family: SendFamily = SendFamily.SPOT,
        timeout_ms: int = 1_000,
    ) -> Sent:
        """What `Outbound.send` does with one-way work of this host."""
        item = Callback(lambda turn: None, bytes=size)
        NAMES[item] = name
        sent = Sent(name, item)

        def try_admit() -> bool:
            refused = self.moving.submit(key, item)
            if refused is HostErrorKind.CAPACITY_EXCEEDED:
                return False
            assert sent.outcome is None, f"{name} ended twice"
            sent.outcome = "taken" if refused is None else refused.name
            sent.ended_at_ms = self.timers.now_ms()
            return True

        def ended(error: HostError) -> None:
            assert sent.outcome is None, f"{name} ended twice"
            sent.outcome = error.kind.name

        try:
            if self.waiters.has_line(key) or not try_admit():
                deadline_at_ms = self.timers.now_ms() + timeout_ms
                sent.waiter = self.waiters.wait(key, family, deadline_at_ms, try_admit, ended)
        except HostError as error:
            ended(error)
        return sent

    def cancel(self, sent: Sent) -> None:
        if sent.waiter is not None and sent.waiter.cancel():
            assert sent.outcome is None, f"{sent.name} ended twice"
            sent.outcome = "cancelled"

    def begin_turn(self) -> bool:
        work = self.owners.begin_next(self.timers.now_ms())
        if work is None:
            return False
        self.owners.detach(work)
        assert work.item is not None
        self.ran.append(name_of(work.item))
        if work.permit is not None:
            work.permit.release()
        self.running.append(work)
        self.note()
        return True

    def end_turn(self) -> None:
        self.owners.end(self.running.popleft(), self.timers.now_ms())
        self.note()

    def run_all(self) -> None:
        """Until nothing runs and nothing is ready."""
        while self.running or self.begin_turn():
            while self.running:
                self.end_turn()
            self.check()

    def note(self) -> None:
        self.in_use_max = max(self.in_use_max, self.jobs.in_use)

    def check(self) -> None:
        for part in (self.jobs, self.owners, self.waiters, self.moving):
            part.check_invariants()


NAMES: dict[Callback, str] = {}


def name_of(item: Item) -> str:
    return NAMES[item] if isinstance(item, Callback) else item.message_type
