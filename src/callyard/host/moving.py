"""The ingress hold: what came for units that take nothing just now, in order, until they do.

A unit is sealed for a move, is being created, or is a session that has no connection yet; its owner's condition says
which, and the commit span looks at it. What the span does not append comes here. When the unit is open again (moved, or
not moved after all), what is held is queued in order, and until nothing is left, what comes goes behind it.

Held records are backlog, not jobs: a permit goes back once its record is held, and each takes a fresh one when it is
its turn to be queued. What this host sent to itself had none, and needs none here either. While that goes on, a record
that comes lends its permit to the head and takes the tail, and while the owner is full nothing is let in behind what is
held: so the hold only gets shorter, however much comes, and the unit opens.

Nothing that a transport brings is refused by a hold. As much as a lane would take is held without permits; what comes
beyond that keeps its own, so that who sends is slowed before memory is short, and these are the first that a replay
uses. What handlers of this host send comes by no transport: of that, a unit holds as much as a lane would, and then
there is no room. One-ways to a session without a connection wait as sends do, so long and so
many. Source: job-queue §0, §3, R22, R39, R40, R49, R114, R116, R124.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from callyard.clock import Timer, Timers
from callyard.host.config import OUTBOUND_WAITER_SLOTS, SEND_TIMEOUT_MS
from callyard.host.context import infrastructure, infrastructure_context
from callyard.host.drops import DropReason, Drops
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.jobs import JobQueue, JobWaiter, Permit
from callyard.host.ledger import Lane
from callyard.host.owners import Callback, Condition, Item, OwnerKey, Owners
from callyard.host.states import Admission, Asking
from callyard.transport.port import Record, RecordKind, SourceId

UnitState: TypeAlias = Condition
"""Of a unit that is not open."""

Origin: TypeAlias = Literal["received", "local", "backlog", "session"]
"""Where a held item came from: a transport, a handler here, its owner's own queue, a transport for a session."""


class MovingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """At one instant. All but the first three are counted since the last reset."""

    units: int
    """That have something held."""
    held: int
    permits: int
    """That held records keep."""
    replayed: int
    expired: int
    """Held past their deadlines."""
    dropped: int
    """Held, and refused by the owner that they were replayed to, or ended with their unit."""


class Held:
    """One item in a hold."""

    __slots__ = ("deadline_at_ms", "item", "needs_permit", "origin", "timer")

    def __init__(self, item: Item, origin: Origin, deadline_at_ms: int | None, *, needs_permit: bool) -> None:
        self.item = item
        self.origin = origin
        self.deadline_at_ms = deadline_at_ms
        self.needs_permit = needs_permit
        """It came with one."""
        self.timer: Timer | None = None


class _Hold:
    """Of one unit, oldest first."""

    __slots__ = (
        *("has_no_room", "is_replaying", "items", "key", "local_bytes", "local_items"),
        *("permits", "received_bytes", "received_items", "waiter"),
    )

    def __init__(self, key: OwnerKey) -> None:
        self.key = key
        self.items: OrderedDict[Held, None] = OrderedDict()
        self.local_items = 0
        self.local_bytes = 0
        self.received_items = 0
        self.received_bytes = 0
        self.permits: list[Permit] = []
        """Of what was received beyond a lane's worth."""
        self.waiter: JobWaiter | None = None
        """In line for the permit of the head."""
        self.has_no_room = False
        """The owner had none for the head: the next `give_room` goes on."""
        self.is_replaying = False

    @property
    def head(self) -> Held:
        return next(iter(self.items))


class Moving:
    """All holds of a host. Its `commit` and `submit` stand before those of the owners, its `hold` behind them.

    `answer` sends the error of a request that was held. `look_again` is told of each unit that is sealed: the hold
    takes those who wait in line for its room. `admit` is the host's state, as the owners have it.
    """

    def __init__(
        self,
        owners: Owners,
        jobs: JobQueue,
        timers: Timers,
        drops: Drops,
        *,
        answer: Callable[[Record, HostError], None],
        look_again: Callable[[OwnerKey], None],
        admit: Callable[[Asking], Admission | HostErrorKind] = lambda asking: Admission.ADMIT,
        session_slots: int = OUTBOUND_WAITER_SLOTS,
        session_timeout_ms: int = SEND_TIMEOUT_MS,
    ) -> None:
        self._owners = owners
        self._jobs = jobs
        self._timers = timers
        self._drops = drops
        self._answer = answer
        self._look_again = look_again
        self._admit = admit
        self._session_slots = session_slots
        self._session_timeout_ms = session_timeout_ms
        self._holds: dict[OwnerKey, _Hold] = {}
        """Of units with something held, and of those that are being opened."""
        self._requests: dict[tuple[SourceId, int], Held] = {}
        """Those that are held, to be cancelled by name."""
        self._slots_used = 0
        """By one-ways to sessions without a connection, of all sessions."""
        self._origin: Origin = "received"
        """Of what the owners hand to `hold` in the call that is made now."""
        self._replayed = self._expired = self._dropped = 0
        owners.hold = self.hold

    # --- what comes ---

    def commit(self, record: Record, permit: Permit) -> HostErrorKind | None:
        """Into the owner's queue, or into the hold, or why not; then nothing has changed, the permit included.

        One plain function. A held record's permit is given back in here.
        """
        hold = self._holds.get(record.target)
        if hold is not None and self._is_replaying(hold):
            return self._lend(hold, record, permit)
        refused = self._owners.commit(record, permit)
        if (
            refused is HostErrorKind.UNAVAILABLE
            and record.kind is not RecordKind.REQUEST
            and self._waits_for_connection(record.target)
        ):
            return self._hold_for_session(record, permit)
        return refused

    def submit(self, key: OwnerKey, item: Item, lane: Lane = Lane.APPLICATION) -> HostErrorKind | None:
        """The same for work of this host, which takes no permit; lifecycle work is never held.

        CAPACITY_EXCEEDED says that a one-way waits for room, or for its session's connection, and tries again.
        """
        hold = self._holds.get(key)
        if hold is not None and lane is Lane.APPLICATION and not self._fits(hold, item):
            return HostErrorKind.CAPACITY_EXCEEDED  # of a replay too: as of any owner whose queue is full
        self._origin = "local"
        try:
            refused = self._owners.submit_local(key, item, lane)
        finally:
            self._origin = "received"
        if refused is HostErrorKind.UNAVAILABLE and not expects_answer(item) and self._waits_for_connection(key):
            return HostErrorKind.CAPACITY_EXCEEDED
        return refused

    def hold(self, key: OwnerKey, item: Item, lane: Lane, permit: Permit | None) -> HostErrorKind | None:
        """For the owners: their span found the unit sealed, unborn, or not done with what was held."""
        assert lane is Lane.APPLICATION, f"hold_in_order: {lane.name} work is never held"
        deadline_at_ms = item.deadline_at_ms if isinstance(item, Record) else None
        if self._is_past(deadline_at_ms):
            return HostErrorKind.DEADLINE_EXCEEDED
        hold = self._hold_of(key)
        self._append(hold, Held(item, self._origin, deadline_at_ms, needs_permit=permit is not None))
        if permit is not None:
            hold.permits.append(permit)
            self._give_permits_back(hold)
        return None

    def cancel(self, source: SourceId, operation_id: int) -> bool:
        """End a request that has not begun, held or queued, without an answer: who asked has gone. False: none such."""
        held = self._requests.get((source, operation_id))
        if held is None:
            return self._owners.cancel(source, operation_id)
        assert isinstance(held.item, Record), "a request is a record"
        self._leave(self._holds[held.item.target], held)
        return True

    def give_room(self, key: OwnerKey) -> None:
        """An owner has given room back (`on_room`): this comes before those who wait in line for it."""
        hold = self._holds.get(key)
        if hold is not None and hold.has_no_room:
            hold.has_no_room = False
            self._go_on(hold)

    # --- what becomes of units ---

    def begin(self, key: OwnerKey, state: UnitState) -> None:
        """From here on an open unit takes nothing: it is being created, a session without a connection, or sealed.

        Raises `HostError`: NOT_FOUND, and INVALID_OPERATION when it is not open.
        """
        if state is Condition.SEALED:
            self.seal(key)
            return
        assert state in (Condition.CREATING, Condition.NOT_CONNECTED), f"no unit begins to be {state}"
        self._check_condition(key, state, Condition.OPEN)
        self._owners.set_condition(key, state)

    def seal(self, key: OwnerKey) -> None:
        """From here on the owner gets nothing; what it has not begun is backlog, ahead of all that comes.

        Raises `HostError`: NOT_FOUND, and INVALID_OPERATION unless it is open, or its hold is being replayed.
        """
        self._check_condition(key, Condition.SEALED, Condition.OPEN, Condition.REPLAYING)
        hold = self._hold_of(key)
        self._stop_replay(hold)
        self._owners.set_condition(key, Condition.SEALED)
        queued = self._owners.take_queued(key)
        backlog = [Held(item, "backlog", None, needs_permit=had_permit) for item, had_permit in queued]
        for held in reversed(backlog):  # to give charges back makes room: who waited for it may be held by now
            self._append(hold, held)
            hold.items.move_to_end(held, last=False)
        self._look_again(key)

    def open(self, key: OwnerKey) -> None:
        """The unit is there, connected, or at its new owner: what is held is queued, in order, then it is open.

        Nothing happens if it is open. An owner that is not there any more ends what is held for it.
        """
        condition = self._condition(key)
        if condition is None:
            self.end(key, HostError(HostErrorKind.NOT_FOUND, f"{key!r} was removed while it took nothing"))
        elif condition not in (Condition.OPEN, Condition.REPLAYING):
            hold = self._hold_of(key)
            self._owners.set_condition(key, Condition.REPLAYING)
            self._go_on(hold)

    def end(self, key: OwnerKey, error: HostError) -> None:
        """An owner is gone (`on_removed`): what is held for it ends, requests with `error`."""
        hold = self._holds.pop(key, None)
        if hold is not None:
            self._stop_replay(hold)
            for held in list(hold.items):
                self._remove(hold, held)
                self._drop(held, error)
            self._give_permits_back(hold)

    def close(self) -> None:
        for key in list(self._holds):
            self.end(key, _closed(key))

    # --- seeing ---

    def held(self, key: OwnerKey) -> int:
        hold = self._holds.get(key)
        return 0 if hold is None else len(hold.items)

    def status(self) -> MovingStatus:
        return MovingStatus(
            units=sum(bool(hold.items) for hold in self._holds.values()),
            held=sum(len(hold.items) for hold in self._holds.values()),
            permits=sum(len(hold.permits) for hold in self._holds.values()),
            replayed=self._replayed,
            expired=self._expired,
            dropped=self._dropped,
        )

    def reset_metrics(self) -> None:
        self._replayed = self._expired = self._dropped = 0

    def check_invariants(self) -> None:
        """Between steps, by the names of the design page."""
        slots = 0
        limits = self._owners.limits
        for key, hold in self._holds.items():
            assert hold.key == key, f"hold_in_order: {hold.key!r} at {key!r}"
            local = [held for held in hold.items if held.origin == "local"]
            assert hold.local_items == len(local) <= limits.application_items_max, f"hold_bounded: {key!r} items"
            charged = sum(self._charge(held.item) for held in local)
            assert hold.local_bytes == charged <= limits.application_bytes_max, f"hold_bounded: {key!r} bytes"
            received = [self._charge(held.item) for held in hold.items if held.origin == "received"]
            assert (hold.received_items, hold.received_bytes) == (len(received), sum(received)), (
                f"hold_bounded: {key!r}"
            )
            is_over = self._is_over(hold)
            assert is_over or not hold.permits, f"permit_once: {key!r} keeps {len(hold.permits)} permits for nothing"
            slots += sum(held.origin == "session" for held in hold.items)
            condition = self._condition(key)
            if condition is Condition.REPLAYING:
                assert hold.items, f"hold_in_order: {key!r} has nothing held and is not open"
                assert hold.waiter is not None or hold.has_no_room, f"hold_in_order: nobody replays {key!r}"
            else:
                assert condition not in (None, Condition.OPEN), f"hold_in_order: a hold for {key!r}, {condition}"
                assert hold.waiter is None, f"hold_in_order: {key!r} is {condition} and waits for a permit"
        assert slots == self._slots_used <= self._session_slots, f"hold_bounded: {self._slots_used} slots"

    # --- replay ---

    def _condition(self, key: OwnerKey) -> Condition | None:
        owner = self._owners.get(key)
        return None if owner is None else owner.condition

    def _check_condition(self, key: OwnerKey, wanted: Condition, *allowed: Condition) -> None:
        condition = self._condition(key)
        if condition is None:
            raise HostError(HostErrorKind.NOT_FOUND, f"there is no owner {key!r}")
        if condition not in allowed:
            raise HostError(HostErrorKind.INVALID_OPERATION, f"{key!r} cannot become {wanted}: it is {condition}")

    def _waits_for_connection(self, key: OwnerKey) -> bool:
        """A session without a connection, in a host that takes something for it."""
        return self._condition(key) is Condition.NOT_CONNECTED and isinstance(
            self._admit(Asking.EXISTING_OWNER), Admission
        )

    def _is_replaying(self, hold: _Hold) -> bool:
        return self._condition(hold.key) is Condition.REPLAYING

    def _lend(self, hold: _Hold, record: Record, permit: Permit) -> HostErrorKind | None:
        """The head runs by the permit of a record that comes, which takes the tail."""
        if self._is_past(record.deadline_at_ms):
            return HostErrorKind.DEADLINE_EXCEEDED
        if self._use(hold, permit):
            self._append(hold, Held(record, "received", record.deadline_at_ms, needs_permit=True))
            self._go_on(hold)
            return None
        if hold.has_no_room:
            self._give_permits_back(hold)
            return HostErrorKind.CAPACITY_EXCEEDED  # as of any owner whose queue is full
        self._finish(hold)
        return self._owners.commit(record, permit)

    def _go_on(self, hold: _Hold) -> None:
        infrastructure_context().run(self._replay, hold)  # no part of the turn that gives room: it acquires permits

    def _granted(self, hold: _Hold, permit: Permit) -> None:
        hold.waiter = None
        if not self._use(hold, permit):
            permit.release()
        self._replay(hold)

    def _use(self, hold: _Hold, permit: Permit) -> bool:
        """Queue one record by this permit, and what needs none before it; False: the permit is as it was."""
        while hold.items and not hold.has_no_room and self._is_replaying(hold):
            if self._try_head(hold, permit):
                return True
        return False

    def _replay(self, hold: _Hold) -> None:
        """Queue what can be queued; then stand in line for the next permit, wait for room, or be done."""
        if hold.is_replaying:  # further out
            return
        hold.is_replaying = True
        try:
            while hold.items and not hold.has_no_room and self._is_replaying(hold):
                if not hold.head.needs_permit:
                    self._try_head(hold, None)
                    continue
                if hold.waiter is not None:
                    return
                permit = hold.permits.pop() if hold.permits else self._jobs.try_acquire()
                if permit is None:
                    self._stand_in_line(hold)
                    return
                if not self._use(hold, permit):
                    permit.release()
        finally:
            hold.is_replaying = False
            self._give_permits_back(hold)
        self._finish(hold)

    def _stand_in_line(self, hold: _Hold) -> None:
        if self._jobs.is_closed:
            self.end(hold.key, _closed(hold.key))
            return

        def closed() -> None:
            self.end(hold.key, _closed(hold.key))

        hold.waiter = self._jobs.wait(("replay", hold.key), partial(self._granted, hold), closed=closed)

    def _try_head(self, hold: _Hold, permit: Permit | None) -> bool:
        """Whether the permit was used. The head leaves the hold unless its owner has no room for it; `permit` may be
        None where it needs none.
        """
        held = hold.head
        if self._is_past(held.deadline_at_ms):
            self._expire(hold, held)
            return False
        self._remove(hold, held)  # first: nothing that the commit causes meets it here
        refused = self._give(hold.key, held, permit)
        if refused is None:
            self._replayed += 1
            return held.needs_permit
        if refused is HostErrorKind.CAPACITY_EXCEEDED:
            hold.has_no_room = True
            self._append(hold, held)
            hold.items.move_to_end(held, last=False)
        else:
            self._drop(held, HostError(refused, f"{hold.key!r} did not take what was held for it"))
        return False

    def _give(self, key: OwnerKey, held: Held, permit: Permit | None) -> HostErrorKind | None:
        item = held.item
        if not held.needs_permit:
            return self._owners.submit_local(key, item, replay=True)
        assert permit is not None, "permits_bounded: a held record is queued without a permit"
        assert isinstance(item, Record), "permits_bounded: a callback came with a permit"
        return self._owners.commit(item, permit, replay=True)

    def _finish(self, hold: _Hold) -> None:
        """Nothing is held any more: the unit is open."""
        if hold.items or self._holds.get(hold.key) is not hold or not self._is_replaying(hold):
            return
        del self._holds[hold.key]
        self._stop_replay(hold)
        self._give_permits_back(hold)
        self._owners.set_condition(hold.key, Condition.OPEN)  # and who waits in line is told

    def _stop_replay(self, hold: _Hold) -> None:
        hold.has_no_room = False
        waiter, hold.waiter = hold.waiter, None
        if waiter is not None:
            waiter.cancel()

    # --- the hold ---

    def _hold_of(self, key: OwnerKey) -> _Hold:
        hold = self._holds.get(key)
        if hold is None:
            hold = self._holds[key] = _Hold(key)
        return hold

    def _hold_for_session(self, record: Record, permit: Permit) -> HostErrorKind | None:
        if self._slots_used >= self._session_slots or self._is_past(record.deadline_at_ms):
            return HostErrorKind.DEADLINE_EXCEEDED
        deadline_at_ms = self._timers.now_ms() + self._session_timeout_ms
        if record.deadline_at_ms is not None:
            deadline_at_ms = min(deadline_at_ms, record.deadline_at_ms)
        self._append(self._hold_of(record.target), Held(record, "session", deadline_at_ms, needs_permit=True))
        permit.release()
        return None

    def _is_past(self, deadline_at_ms: int | None) -> bool:
        return deadline_at_ms is not None and deadline_at_ms <= self._timers.now_ms()

    def _charge(self, item: Item) -> int:
        return self._owners.limits.fixed_work_bytes + (item.bytes if isinstance(item, Callback) else len(item.payload))

    def _fits(self, hold: _Hold, item: Item) -> bool:
        """Whether a lane's bounds have room for one more item of this host's; what never fits is for the owner."""
        limits, charge = self._owners.limits, self._charge(item)
        return charge > limits.application_bytes_max or (
            not hold.has_no_room
            and hold.local_items < limits.application_items_max
            and hold.local_bytes + charge <= limits.application_bytes_max
        )

    def _is_over(self, hold: _Hold) -> bool:
        """Whether more was received than a lane would take."""
        limits = self._owners.limits
        return hold.received_items > limits.application_items_max or hold.received_bytes > limits.application_bytes_max

    def _give_permits_back(self, hold: _Hold) -> None:
        if hold.permits and not self._is_over(hold):
            permits, hold.permits = hold.permits, []
            with infrastructure():
                for permit in permits:
                    permit.release()

    def _append(self, hold: _Hold, held: Held) -> None:
        hold.items[held] = None
        if held.origin == "local":
            hold.local_items += 1
            hold.local_bytes += self._charge(held.item)
        elif held.origin == "received":
            hold.received_items += 1
            hold.received_bytes += self._charge(held.item)
        self._slots_used += held.origin == "session"
        name = _request_name(held.item)
        if name is not None:
            self._requests[name] = held
        if held.deadline_at_ms is not None:
            self._arm(hold, held, held.deadline_at_ms)

    def _remove(self, hold: _Hold, held: Held) -> None:
        del hold.items[held]
        if held.origin == "local":
            hold.local_items -= 1
            hold.local_bytes -= self._charge(held.item)
        elif held.origin == "received":
            hold.received_items -= 1
            hold.received_bytes -= self._charge(held.item)
        self._slots_used -= held.origin == "session"
        name = _request_name(held.item)
        if name is not None and self._requests.get(name) is held:
            del self._requests[name]
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None

    def _arm(self, hold: _Hold, held: Held, deadline_at_ms: int) -> None:
        held.timer = self._timers.call_at(deadline_at_ms, partial(self._look_at_deadline, hold, held, deadline_at_ms))

    def _look_at_deadline(self, hold: _Hold, held: Held, deadline_at_ms: int) -> None:
        if held not in hold.items:
            return
        if self._timers.now_ms() < deadline_at_ms:  # no timer of a loop runs for weeks
            self._arm(hold, held, deadline_at_ms)
            return
        self._leave(hold, held)
        self._expired += 1
        self._end_held(held, _expired(hold.key))

    def _leave(self, hold: _Hold, held: Held) -> None:
        """Out of the hold, not through its head; and what that was in the way of goes on."""
        was_head = hold.head is held
        self._remove(hold, held)
        self._give_permits_back(hold)
        if was_head and self._is_replaying(hold):
            hold.has_no_room = False  # what was too large for the room there is no longer in front
            self._go_on(hold)
        self._look_again(hold.key)  # the hold may have room for one more of this host's

    def _expire(self, hold: _Hold, held: Held) -> None:
        self._remove(hold, held)
        self._expired += 1
        self._end_held(held, _expired(hold.key))

    def _drop(self, held: Held, error: HostError) -> None:
        self._dropped += 1
        self._end_held(held, error)

    def _end_held(self, held: Held, error: HostError) -> None:
        """Tell who waits for an answer. Nobody does: its caller's call ended well long ago, so it is counted (R114)."""
        item = held.item
        if isinstance(item, Callback):
            if item.on_end is not None:
                item.on_end(error)
                return
        elif item.kind is RecordKind.REQUEST:
            self._answer(item, error)
            return
        message_kind, target = (RecordKind.ONE_WAY, "") if isinstance(item, Callback) else (item.kind, item.target)
        if error.kind in (HostErrorKind.SHUTTING_DOWN, HostErrorKind.REJECTED):
            self._drops.count_error(message_kind, error, target)
        else:
            self._drops.count(message_kind, DropReason.STALE_TARGET, target, error.message)


def _closed(key: OwnerKey) -> HostError:
    return HostError(HostErrorKind.SHUTTING_DOWN, f"the host was closed before {key!r} took what was held for it")


def _expired(key: OwnerKey) -> HostError:
    return HostError(HostErrorKind.DEADLINE_EXCEEDED, f"its deadline passed while it was held for {key!r}")


def _request_name(item: Item) -> tuple[SourceId, int] | None:
    return (item.source, item.operation_id) if isinstance(item, Record) and item.kind is RecordKind.REQUEST else None


def expects_answer(item: Item) -> bool:
    return item.on_end is not None if isinstance(item, Callback) else item.kind is RecordKind.REQUEST
