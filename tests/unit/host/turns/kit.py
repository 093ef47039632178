"""Owners and a runner on virtual time, a real job queue, replies and decoding that keep what they saw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from callyard.host.errors import HostErrorKind
from callyard.host.jobs import JobQueue, Permit
from callyard.host.ledger import OwnerLimits
from callyard.host.owners import Handler, OwnerKey, Owners
from callyard.host.turns import Turns
from callyard.testing.virtual_time import VirtualTimeLoop, VirtualTimers
from callyard.transport.port import Record, RecordKind, SourceId


class Replies:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.on_reply: Callable[[Record, Any], Awaitable[None] | None] = lambda record, outcome: None

    def reply(self, record: Record, outcome: Any) -> Awaitable[None] | None:
        waiting = self.on_reply(record, outcome)
        self.sent.append((record.operation_id, getattr(outcome, "kind", outcome)))
        return waiting


class World:
    def __init__(self, jobs_max: int = 10, limits: OwnerLimits | None = None) -> None:
        self.timers = VirtualTimers()
        self.jobs = JobQueue(jobs_max, clock=self.timers)
        self.owners = Owners(limits)
        self.replies = Replies()
        self.rooms: list[OwnerKey] = []
        self.removed: list[OwnerKey] = []
        self.lost: list[tuple[RecordKind, HostErrorKind]] = []
        self.decode: Callable[[Record], Any] = lambda record: record.payload
        self.turns = Turns(
            self.owners,
            decode=lambda record: self.decode(record),
            replies=self.replies,
            timers=self.timers,
            on_room=self.rooms.append,
            on_removed=lambda key, error: self.removed.append(key),
            on_lost=lambda record, error: self.lost.append((record.kind, error.kind)),
        )
        self.turns.start()

    def add(self, key: OwnerKey, handler: Handler, **options: Any) -> None:
        self.owners.add(key, handler, **options)

    def commit(self, record: Record) -> HostErrorKind | None:
        """As a pump: a permit first, and back when the record is refused."""
        permit = self.jobs.try_acquire()
        assert permit is not None, "no permit is free"
        kind = self.owners.commit(record, permit)
        if kind is not None:
            permit.release()
        self.check()
        return kind

    def send(self, key: OwnerKey, payload: bytes = b"", **fields: Any) -> HostErrorKind | None:
        return self.commit(one_way(key, payload, **fields))

    def ask(self, key: OwnerKey, payload: bytes = b"", *, operation_id: int = 1, **fields: Any) -> HostErrorKind | None:
        return self.commit(request(key, payload, operation_id=operation_id, **fields))

    @property
    def in_use(self) -> tuple[int, int]:
        status = self.jobs.status()
        return status.reserved, status.queued

    def check(self) -> None:
        self.owners.check_invariants()
        self.jobs.check_invariants()

    def check_empty(self) -> None:
        self.check()
        assert self.in_use == (0, 0)
        assert self.owners.is_quiet
        for key in list(self.owners._by_key):
            owner = self.owners.get(key)
            assert owner is not None
            assert owner.ledger.is_empty


def one_way(key: OwnerKey, payload: bytes = b"", **fields: Any) -> Record:
    return Record(RecordKind.ONE_WAY, SourceId("peer"), key, payload=payload, **fields)


def request(key: OwnerKey, payload: bytes = b"", *, operation_id: int = 1, **fields: Any) -> Record:
    return Record(RecordKind.REQUEST, SourceId("peer"), key, payload=payload, operation_id=operation_id, **fields)


async def rest() -> None:
    """Let the loop come to rest: time moves only when nothing else can run."""
    await asyncio.sleep(0.001)


def spend(duration_ms: int) -> None:
    """Burn time inside of a handler."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._jumping.now_s += duration_ms / 1_000


class Gatekeeper:
    """A handler that waits until it is let go, and counts who is inside."""

    def __init__(self) -> None:
        self.began: list[bytes] = []
        self.ended: list[bytes] = []
        self.inside = 0
        self.inside_max = 0
        self._let_go = asyncio.Event()

    async def __call__(self, turn: Any, payload: bytes) -> bytes:
        self.began.append(payload)
        self.inside += 1
        self.inside_max = max(self.inside_max, self.inside)
        try:
            await self._let_go.wait()
        finally:
            self.inside -= 1
        self.ended.append(payload)
        return payload

    def let_go(self) -> None:
        self._let_go.set()


def held(world: World, count: int) -> list[Permit]:
    permits = [world.jobs.try_acquire() for _ in range(count)]
    assert None not in permits
    return [permit for permit in permits if permit is not None]
