"""The parts of one host, put together, and the thin adapters between them.

    transport -> Pump -> Ingress -> Moving -> Owners -> Turns -> (handler) -> Replies -> transport
                  JobQueue: permits, whose pressure goes to FlowTargets
    send, publish, request -> Outbound -> (Submit of the host) -> Moving or transport

Source: job-queue §11.1, §11.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from callyard.clock import Timers
from callyard.host.config import HostConfig, JobLimits, SendFamily
from callyard.host.context import forbid_under_gate, infrastructure_context
from callyard.host.drops import DropReason, Drops
from callyard.host.errors import HostError, HostErrorKind, text_of
from callyard.host.flow import FlowTargets, wait_until_done
from callyard.host.jobs import JobQueue, Permit
from callyard.host.messages import encode
from callyard.host.moves import Moves
from callyard.host.moving import Moving
from callyard.host.outbound import Outbound
from callyard.host.owners import Callback, Item, OwnerKey, Owners, kind_for_reply
from callyard.host.pump import Pump
from callyard.host.requests import RequestTable
from callyard.host.states import HostLife, HostState
from callyard.host.status import StatusBoard
from callyard.host.turns import Turns
from callyard.host.waiters import Waiters
from callyard.transport.port import (
    Completion,
    FlowTarget,
    Outgoing,
    OutgoingKind,
    Record,
    RecordKind,
    SourceId,
    Transport,
)

_log: Final = logging.getLogger("callyard.host")

LOCAL: Final = SourceId("")
"""What this host's own records come from; no transport has a source of that name."""
REGISTER_MS: Final = 1_000
"""How long the start waits for sockets to take their first flow state."""
REFUSALS_MAX: Final = 256
"""Error replies to one source, outside of turns, that the transport has not taken. One that reads none of its replies
has no more of them; the others' do not depend on it.
"""
CANCEL: Final = "cancel"
"""The control record that ends a request which has not begun: `operation_id` of the same source."""


class SpotTable(Protocol):
    """What the parts ask of who knows the spots."""

    def prepare(self, spot: str) -> HostErrorKind | None:
        """A record comes for a spot that is not there: begin to make it, or say why not."""
        ...

    def matching(self, pattern: str) -> Sequence[str]:
        """Whom a publish is for."""
        ...

    def why_not(self, spot: str) -> str:
        """That there is no such spot, and which there could be."""
        ...

    def decode(self, record: Record) -> Any: ...

    def gone(self, spot: str) -> None:
        """Its owner was removed."""
        ...

    def give_places(self) -> None:
        """After that: one more spot may have room, and somebody may wait for it."""
        ...


class HostParts:
    """What one host is made of. Nothing starts before `start`."""

    def __init__(
        self, config: HostConfig, limits: JobLimits, timers: Timers, transport: Transport | None, spots: SpotTable
    ) -> None:
        self.timers = timers
        self.transport = transport
        self.spots = spots
        self._limits = config.owners
        self._spots_max = config.spots_max
        self.life = HostLife()
        self.drops = Drops(_log.warning, timers.now_ms)
        self.flow = FlowTargets(timers)
        self.jobs = JobQueue(
            limits.jobs_max,
            pause_percent=limits.config.pause_percent,
            resume_percent=limits.config.resume_percent,
            clock=timers,
            on_transition=self.flow.publish,
            may_wait=partial(forbid_under_gate, "waiting for a permit"),
        )
        self.owners = Owners(config.owners, admit=self.life.admit)
        self.waiters = Waiters(timers, config.outbound_waiter_slots)
        self.requests = RequestTable(timers, config.requests_max)
        self.outbound = Outbound(config, timers, self.waiters, self.requests, self.drops)
        self.replies = Replies(self, config)
        self.moving = Moving(
            self.owners,
            self.jobs,
            timers,
            self.drops,
            answer=self.replies.refuse,
            look_again=self.waiters.admit,
            session_slots=config.outbound_waiter_slots,
            session_timeout_ms=config.send_timeout_of(SendFamily.BOUND_SESSION),
        )
        self.moves = Moves(self.owners, self.moving, timers)
        self.turns = Turns(
            self.owners,
            decode=spots.decode,
            replies=self.replies,
            timers=timers,
            on_room=self._on_room,
            on_removed=self._on_removed,
            on_lost=self._on_lost,
            on_failure=self._on_failure,
        )
        self._registrations: list[asyncio.Task[None]] = []
        self.pump: Pump | None = None
        if transport is not None:
            self.pump = Pump(transport, self.jobs, Ingress(self), timers, on_failure=self._on_failure)
        self.board = StatusBoard(
            clock=timers,
            limits=limits,
            jobs=self.jobs,
            flow=self.flow,
            life=self.life,
            drops=self.drops,
            requests=self.requests,
            core_snapshot=dict if transport is None else transport.snapshot,
        )

    async def start(self) -> None:
        """Sockets are told the pressure first, then records come. One that does not answer in time is told later."""
        if self.transport is not None:
            loop = asyncio.get_running_loop()
            self._registrations = [
                loop.create_task(self._register(target), context=infrastructure_context())
                for target in self.transport.flow_targets()
            ]
            await wait_until_done(self._registrations, self.timers, self.timers.now_ms() + REGISTER_MS)
        self.life.move_to(HostState.SERVING)
        self.turns.start()
        if self.pump is not None:
            self.pump.start()

    async def _register(self, target: FlowTarget) -> None:
        try:
            await self.flow.register(target)
        except HostError as error:  # counted by who refused; a socket that closes is none of ours
            _log.warning("socket %r is not told of pressure: %s", target.name, error)

    def submit(self, spot: str, item: Item) -> HostErrorKind | None:
        """Into a spot of this host, by no permit. CAPACITY_EXCEEDED: no room now."""
        if spot not in self.owners and (refused := self.spots.prepare(spot)) is not None:
            return refused
        return self.moving.submit(spot, item)

    def explain(self, spot: str, kind: HostErrorKind, item: Item) -> str:
        """Why a message of this process was not taken, and what to do, for who sent it."""
        if kind is HostErrorKind.NOT_FOUND:
            return self.spots.why_not(spot)
        if kind is HostErrorKind.SHUTTING_DOWN:
            return f"the host is closing: {spot!r} takes nothing more"
        if kind is HostErrorKind.DEADLINE_EXCEEDED:
            return f"its deadline had passed before {spot!r} could take it"
        if kind is HostErrorKind.UNAVAILABLE and self.life.state is HostState.PREPARING:
            return f"the host has not started, so {spot!r} takes nothing: send inside of `async with host`"
        limits, owner = self._limits, self.owners.get(spot)
        charge = limits.fixed_work_bytes + (item.bytes if isinstance(item, Callback) else len(item.payload))
        if kind is HostErrorKind.REJECTED:
            return (
                f"it is larger than the whole queue of {spot!r}: {charge} bytes with its charge, and the queue takes "
                f"{limits.application_bytes_max} (owners: application_bytes_max)"
            )
        if kind is HostErrorKind.CAPACITY_EXCEEDED and owner is None:
            return f"{spot!r} was not made: there are {self._spots_max} spots, as many as may be (spots_max)"
        if kind is HostErrorKind.CAPACITY_EXCEEDED:
            return (
                f"{spot!r} has no room: its queue takes {limits.application_items_max} messages, and "
                f"{limits.application_bytes_max} bytes (owners). A send would wait; a request may be made again later"
            )
        return f"{spot!r} takes nothing now: the host is {self.life.state}"

    def check_invariants(self) -> None:
        """Between steps."""
        for part in (self.jobs, self.flow, self.owners, self.waiters, self.requests, self.moving):
            part.check_invariants()
        if self.pump is not None:
            self.pump.check_invariants()

    def assert_empty(self) -> None:
        """Nothing is in use, waits, is queued or held, or is under way. Raises AssertionError."""
        self.check_invariants()
        assert self.jobs.in_use == 0, f"permits_bounded: {self.jobs.status()}"
        assert self.jobs.waiters == 0, f"oldest_first: {self.jobs.waiters} wait for a permit"
        assert len(self.waiters) == 0, f"first_terminal: {len(self.waiters)} wait for room"
        assert len(self.requests) == 0, f"first_terminal: {self.requests.status()}"
        assert self.owners.is_quiet, f"ready_once: {self.owners.ready} ready, {self.owners.active} active"
        assert self.owners.is_empty, "one_charge: something is charged to an owner"
        held = self.moving.status()
        assert (held.units, held.held) == (0, 0), f"hold_in_order: {held}"
        if self.pump is not None:
            pump = self.pump.statistics()
            assert pump.waiting == pump.granted == pump.publishing == 0, f"oldest_first: {pump}"
        assert self.outbound.operations == 0, f"first_terminal: {self.outbound.operations} operations"

    def _on_room(self, key: OwnerKey) -> None:
        self.moving.give_room(key)
        self.waiters.admit(key)

    def _on_removed(self, key: OwnerKey, error: HostError) -> None:
        self.spots.gone(key)
        self.moving.end(key, error)
        self.waiters.end_line(key, error.kind, error.message)
        self.spots.give_places()

    def _on_lost(self, record: Record, error: HostError) -> None:
        self.drops.count_error(record.kind, error, record.target)

    def _on_failure(self, error: Exception) -> None:
        if self.life.state not in (HostState.STOPPED, HostState.ERROR):
            self.life.move_to(HostState.ERROR)


class Ingress:
    """Where the pump puts what it took."""

    def __init__(self, parts: HostParts) -> None:
        self._parts = parts
        self._owners = parts.owners
        self._commit = parts.moving.commit

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        if record.target not in self._owners:
            refused = self._parts.spots.prepare(record.target)
            if refused is not None:
                return refused
        return self._commit(record, permit)

    def targets_of(self, record: Record) -> Sequence[str]:
        targets = self._parts.spots.matching(record.target)
        if not targets:
            self._parts.drops.count(record.kind, DropReason.NO_HANDLER, record.target, "no spot is of that pattern")
        return targets

    def control(self, record: Record) -> None:
        if record.message_type == CANCEL:
            self._parts.moving.cancel(record.source, record.operation_id)

    def complete(self, completion: Completion) -> None:
        self._parts.outbound.complete(completion)

    def refused(self, record: Record, kind: HostErrorKind) -> None:
        if record.operation_id and record.kind in (RecordKind.REQUEST, RecordKind.MALFORMED):
            why = f"{record.target!r} did not take the request"
            self._parts.replies.refuse(record, HostError(kind, why))
        else:
            self._parts.drops.count_error(record.kind, kind, record.target)

    def lost(self, source: SourceId) -> None:
        """Nothing of a source is kept here: what it sent is its owners', and its answers find no one."""


class Replies:
    """What goes back to who asked, in this process or over the transport."""

    def __init__(self, parts: HostParts, config: HostConfig) -> None:
        self._parts = parts
        self._timeout_ms = config.send_timeout_of(SendFamily.SPOT)
        self._refusals: Counter[SourceId] = Counter()

    def reply(self, record: Record, outcome: Any) -> Awaitable[None] | None:
        """The turn that answers waits until the transport took it: so much as owners hold waits, and no more."""
        if isinstance(outcome, HostError) and outcome.kind is HostErrorKind.NOT_CONFIGURED:
            outcome = HostError(HostErrorKind.NOT_FOUND, text_of(outcome))
        if record.source == LOCAL:
            answer = outcome if isinstance(outcome, HostError) else encode(outcome)
            self._parts.requests.settle(record.operation_id, answer)
            return None
        operation = self._start(record, outcome)
        return None if operation is None or operation.done() else _wait_until_over(operation)

    def refuse(self, record: Record, error: HostError) -> None:
        """An error reply outside of any turn. Those to one source are bounded: one more is dropped, and counted."""
        if record.source == LOCAL:
            self._parts.requests.settle(record.operation_id, error)
            return
        if self._refusals[record.source] >= REFUSALS_MAX:
            why = f"{REFUSALS_MAX} error replies to it are not taken yet"
            self._parts.drops.count(OutgoingKind.REPLY, DropReason.BACKPRESSURE, record.source, why)
            return
        operation = self._start(record, HostError(kind_for_reply(error.kind), error.message))
        if operation is not None and not operation.done():
            self._refusals[record.source] += 1
            operation.add_done_callback(partial(self._end_refusal, record.source))

    def _end_refusal(self, source: SourceId, operation: asyncio.Future[None]) -> None:
        self._refusals[source] -= 1
        if not self._refusals[source]:
            del self._refusals[source]

    def _start(self, record: Record, outcome: Any) -> asyncio.Future[None] | None:
        """Raises `HostError(TYPE_MISMATCH)` for a value that cannot be sent, before anything is."""
        transport = self._parts.transport
        assert transport is not None, f"a record of {record.source!r} without a transport"
        is_error = isinstance(outcome, HostError)
        outgoing = Outgoing(
            kind=OutgoingKind.REPLY,
            target=record.source,
            message_type="",
            payload=text_of(outcome).encode() if is_error else encode(outcome),
            operation_id=record.operation_id,
            deadline_at_ms=self._parts.timers.now_ms() + self._timeout_ms,
            error=outcome.kind.name.lower() if is_error else "",
        )
        return self._parts.outbound.reply(partial(transport.start, outgoing))


async def _wait_until_over(operation: asyncio.Future[None]) -> None:
    """Cancelled, it leaves the operation alone: the reply goes on."""
    await asyncio.wait([operation])
