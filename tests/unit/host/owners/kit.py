"""Owners without a loop: permits that keep what became of them, events that keep what was told."""

from __future__ import annotations

from typing import Any

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue
from callyard.host.ledger import Lane, OwnerLimits
from callyard.host.owners import Callback, Item, Owner, OwnerKey, Owners, Work
from callyard.testing.clock import FakeClock
from callyard.transport.port import Record, RecordKind, SourceId


class Events:
    def __init__(self) -> None:
        self.ready = 0
        self.rooms: list[OwnerKey] = []
        self.removed: list[tuple[OwnerKey, HostErrorKind]] = []
        self.dropped: list[tuple[Item, HostErrorKind]] = []

    def on_ready(self) -> None:
        self.ready += 1

    def on_room(self, key: OwnerKey) -> None:
        self.rooms.append(key)

    def on_removed(self, key: OwnerKey, error: HostError) -> None:
        self.removed.append((key, error.kind))

    def on_dropped(self, item: Item, error: HostError) -> None:
        self.dropped.append((item, error.kind))


class Bench:
    def __init__(
        self,
        limits: OwnerLimits | None = None,
        jobs_max: int = 100,
        owners_type: type[Owners] = Owners,
        **options: Any,
    ) -> None:
        self.clock = FakeClock()
        self.jobs = JobQueue(jobs_max, clock=self.clock)
        self.events = Events()
        self.owners = owners_type(limits, **options)
        self.owners.events = self.events

    def add(self, key: OwnerKey, **options: Any) -> Owner:
        return self.owners.add(key, lambda turn, value: None, **options)

    def commit(self, record: Record) -> HostErrorKind | None:
        permit = self.jobs.try_acquire()
        assert permit is not None
        kind = self.owners.commit(record, permit)
        if kind is not None:
            permit.release()
        self.check()
        return kind

    def begin(self, now_ms: int = 0) -> Work:
        """As the runner does: the permit goes back as the handler begins."""
        work = self.owners.begin_next(now_ms)
        assert work is not None
        if work.permit is not None:
            work.permit.release()
        self.check()
        return work

    def end(self, work: Work, now_ms: int = 0) -> None:
        self.owners.end(work, now_ms)
        self.check()

    def run(self, turn_ms: int = 0, turns_max: int = 10_000) -> list[tuple[OwnerKey, str]]:
        """Turns that take `turn_ms` each, until nobody is ready; by owner and what they were."""
        ran: list[tuple[OwnerKey, str]] = []
        now_ms = 0
        while len(ran) < turns_max and (work := self.owners.begin_next(now_ms)) is not None:
            if work.permit is not None:
                work.permit.release()
            item = work.item
            ran.append((work.owner.key, item.payload.decode() if isinstance(item, Record) else "lifecycle"))
            now_ms += turn_ms
            self.owners.end(work, now_ms)
        return ran

    def lifecycle(self, key: OwnerKey, count: int = 1) -> None:
        for _ in range(count):
            assert self.owners.submit_local(key, Callback(lambda turn: None), Lane.LIFECYCLE) is None

    def check(self) -> None:
        self.owners.check_invariants()
        self.jobs.check_invariants()


def record(key: OwnerKey, payload: bytes = b"", kind: RecordKind = RecordKind.ONE_WAY, **fields: Any) -> Record:
    return Record(kind, SourceId("peer"), key, payload=payload, **fields)
