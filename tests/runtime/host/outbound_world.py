"""A host's outbound side on a scripted transport, with real owners, turns, jobs and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec

from callyard.host.config import HostConfig, SendFamily
from callyard.host.drops import Drops
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue
from callyard.host.ledger import OwnerLimits
from callyard.host.moves import Moves
from callyard.host.moving import Moving
from callyard.host.outbound import Outbound, Sending
from callyard.host.owners import Handler, Item, OwnerKey, Owners
from callyard.host.requests import RequestTable
from callyard.host.states import HostLife, HostState
from callyard.host.turns import Turns
from callyard.host.waiters import Waiters
from callyard.testing.scripted_transport import ScriptedTransport, Started
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from callyard.transport.port import Completion, Outgoing, OutgoingKind, Record, RecordKind, SourceId

P = ParamSpec("P")

LOCAL = SourceId("local")
WORLDS: ContextVar[list[OutboundWorld]] = ContextVar("worlds")


def hosted(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test in virtual time; the worlds that it made are closed after it."""

    @virtual_time
    @wraps(test)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        worlds: list[OutboundWorld] = []
        WORLDS.set(worlds)
        try:
            await test(*args, **kwargs)
        finally:
            for world in worlds:
                await world.close()

    return run


class OutboundWorld:
    def __init__(self, *, jobs_max: int = 4, items_max: int = 2, slots: int = 256, requests_max: int = 4_096) -> None:
        self.timers = VirtualTimers()
        self.transport = ScriptedTransport()
        config = HostConfig(outbound_waiter_slots=slots, requests_max=requests_max)
        self.life = HostLife()
        self.life.move_to(HostState.SERVING)
        self.jobs = JobQueue(jobs_max, clock=self.timers)
        self.drops = Drops()
        self.waiters = Waiters(self.timers, config.outbound_waiter_slots)
        self.requests = RequestTable(self.timers, config.requests_max)
        self.outbound = Outbound(config, self.timers, self.waiters, self.requests, self.drops)
        self.owners = Owners(OwnerLimits(application_items_max=items_max), admit=self.life.admit)
        self.moving = Moving(
            self.owners,
            self.jobs,
            self.timers,
            self.drops,
            answer=self._answer,
            look_again=self.waiters.admit,
            admit=self.life.admit,
        )
        self.moves = Moves(self.owners, self.moving, self.timers)
        self.turns = Turns(
            self.owners,
            decode=lambda record: record.message_type,
            replies=self,
            timers=self.timers,
            on_room=self._on_room,
            on_removed=self._on_removed,
        )
        self.turns.start()
        self.ran: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        """Handlers of these spots wait for their event."""
        WORLDS.get().append(self)

    async def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.outbound.close()
        self.moving.close()
        await self.transport.close()
        await self.turns.stop(self.timers.now_ms() + 1_000)

    # What turns ask for.

    def reply(self, record: Record, outcome: Any) -> Awaitable[None] | None:
        self.requests.settle(record.operation_id, outcome)
        return None

    def _answer(self, record: Record, error: HostError) -> None:
        self.requests.settle(record.operation_id, error)

    def _on_room(self, key: OwnerKey) -> None:
        self.moving.give_room(key)
        self.waiters.admit(key)

    def _on_removed(self, key: OwnerKey, error: HostError) -> None:
        self.moving.end(key, error)
        self.waiters.end_line(key, error.kind, error.message)

    # What a test does.

    def spot(self, key: str, handler: Handler | None = None, *, blocked: bool = False) -> None:
        if blocked:
            self.gates[key] = asyncio.Event()

        async def run(turn: Any, name: str) -> str:
            self.ran.append(name)
            if key in self.gates:
                await self.gates[key].wait()
            return f"reply to {name}"

        self.owners.add(key, handler or run)

    def record(self, name: str, key: str) -> Record:
        return Record(RecordKind.ONE_WAY, LOCAL, key, name)

    def submit(self, key: str, item: Item) -> Callable[[int], HostErrorKind | None]:
        return lambda deadline_at_ms: self.moving.submit(key, item)

    def send(self, key: str, name: str, *, family: SendFamily = SendFamily.SPOT, **settings: Any) -> Sending:
        return self.outbound.send(family, key, self.submit(key, self.record(name, key)), **settings)

    def start(
        self, target: str, name: str = "", kind: OutgoingKind = OutgoingKind.ONE_WAY
    ) -> Callable[[int], Awaitable[None]]:
        return lambda deadline_at_ms: self.transport.start(Outgoing(kind, target, name, deadline_at_ms=deadline_at_ms))

    def send_remote(self, target: str, name: str = "", **settings: Any) -> Sending:
        return self.outbound.send(SendFamily.MESH, ("remote", target), self.start(target, name), **settings)

    async def request(self, key: str, name: str, **settings: Any) -> Any:
        def submit(operation_id: int, deadline_at_ms: int) -> HostErrorKind | None:
            record = Record(
                RecordKind.REQUEST, LOCAL, key, name, operation_id=operation_id, deadline_at_ms=deadline_at_ms
            )
            return self.moving.submit(key, record)

        return await self.outbound.request(key, submit, **settings)

    async def request_remote(self, target: str, **settings: Any) -> Completion:
        def submit(operation_id: int, deadline_at_ms: int) -> Awaitable[None]:
            return self.transport.start(
                Outgoing(OutgoingKind.REQUEST, target, operation_id=operation_id, deadline_at_ms=deadline_at_ms)
            )

        reply = await self.outbound.request(target, submit, **settings)
        assert isinstance(reply, Completion)
        return reply

    def time_out(self, started: Started) -> None:
        """What a transport does with an operation that waits: its deadline ends it."""
        deadline_at_ms = started.outgoing.deadline_at_ms
        assert deadline_at_ms is not None
        self.timers.call_at(deadline_at_ms, lambda: started.refuse("timeout"))

    async def settle(self, steps: int = 20) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)

    def assert_quiet(self) -> None:
        for part in (self.jobs, self.owners, self.waiters, self.requests, self.moving):
            part.check_invariants()
        assert (self.jobs.in_use, self.jobs.waiters, len(self.waiters), len(self.requests)) == (0, 0, 0, 0)
        assert self.outbound.operations == 0


async def kind_of(awaitable: Awaitable[Any]) -> HostErrorKind | None:
    """The kind of error that something ends with; None: it ends well."""
    try:
        await awaitable
    except HostError as error:
        return error.kind
    return None
