"""Owners: what is served in order. Who is ready, whose turn is next, and the one function that lets a record in.

An owner is idle, ready, waits for its gate, or runs. It stands in the ready set once, however much work it has; the set
is state, a wake-up only says "look again". Its work lies in two lanes of its own and is charged to its ledger until the
handler's end.

A turn in four steps, each a plain function of this thread:

    begin_next(now)   the present owner's next work if it keeps its place, else the oldest ready one's; its gate is held
    detach(work)      the handler waits: the place goes to the next ready owner, the gate stays
    release_gate, reenter    the turn yields, and comes in again at the tail as a new one
    end(work, now)    charge back, gate to who waits for it, owner to the ready tail, room to who waits for that

Pure: what happens outside is told by the callbacks in `OwnerEvents`, each called when all is consistent again.
Source: job-queue §2.1, §2.2, R17, R36-R46, R94-R98, R107, R116, R117.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum, StrEnum
from itertools import count
from typing import Any, Final, Protocol, TypeAlias

from callyard.host.context import infrastructure
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.gates import Gate, GateWaiter, Hold
from callyard.host.jobs import Permit
from callyard.host.ledger import Lane, LaneLedger, OwnerLedger, OwnerLimits
from callyard.host.states import Admission, Asking
from callyard.transport.port import Record, RecordKind, SourceId

OwnerKey: TypeAlias = str
"""A spot's id. That of a record's target."""

Handler: TypeAlias = Callable[..., Any]
"""`handler(turn, value)`: the reply of a request, or an awaitable of it."""


class Callback:
    """Work of the host for an owner: a timer's tick, a lifecycle step, what a caller in this process asks."""

    __slots__ = ("bytes", "on_end", "run")

    def __init__(self, run: Callable[..., Any], *, bytes: int = 0, on_end: Callable[[Any], None] | None = None) -> None:
        self.run = run
        """`run(turn)`, as a handler."""
        self.bytes = bytes
        self.on_end = on_end
        """Told its value or a `HostError`, once, whatever becomes of it after its acceptance."""


Item: TypeAlias = Record | Callback


class WorkState(Enum):
    MAILBOX = "mailbox"
    EXECUTION = "execution"
    ENDED = "ended"


class Work:
    """One accepted item, in its owner's lane or turn."""

    __slots__ = ("after", "before", "charge", "hold", "item", "lane", "owner", "permit", "sequence", "state", "waiter")

    def __init__(self, owner: Owner, item: Item, lane: Lane, charge: int, permit: Permit | None, sequence: int) -> None:
        self.owner = owner
        self.item: Item | None = item
        """None once it has ended: the payload is then nobody's."""
        self.lane = lane
        self.charge = charge
        self.permit = permit
        self.sequence = sequence
        """In its owner, from 1, over both lanes."""
        self.state = _MAILBOX
        self.hold: Hold | None = None
        """While its turn has the gate."""
        self.waiter: GateWaiter | None = None
        """While its turn wants the gate back."""
        self.before: Work | None = None
        self.after: Work | None = None


class WorkLine(LaneLedger):
    """One lane of an owner: its columns, and what has not begun, in order; anything can leave from the middle.

    Linked through the work itself: most are empty.
    """

    __slots__ = ("head", "tail")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        super().__init__(items_max, bytes_max)
        self.head: Work | None = None
        self.tail: Work | None = None

    def __iter__(self) -> Iterator[Work]:
        work = self.head
        while work is not None:
            following = work.after
            yield work
            work = following

    def append(self, work: Work) -> None:
        last = work.before = self.tail
        self.tail = work
        if last is None:
            self.head = work
        else:
            last.after = work

    def remove(self, work: Work) -> None:
        before, after = work.before, work.after
        if before is None:
            self.head = after
        else:
            before.after = after
        if after is None:
            self.tail = before
        else:
            after.before = before
        work.before = work.after = None


class OwnerState(Enum):
    IDLE = "idle"
    READY = "ready"
    WAITING = "waiting"
    """For its gate."""
    RUNNING = "running"
    """A turn is its own, with the gate or, having yielded, without."""


class Condition(StrEnum):
    OPEN = "open"
    CREATING = "creating"
    """Lifecycle work runs; records are held."""
    SEALED = "sealed"
    """As creating; a running turn goes on to its end."""
    REPLAYING = "replaying"
    """All runs; what was held comes in by `replay=True`, and what is new is held behind it."""
    NOT_CONNECTED = "not_connected"
    """A session without its peer: no record comes in, the span holds none."""
    REMOVED = "removed"


# Reading a member from its class costs ten times as much as from here on Python 3.11, and each record reads a dozen.
_APPLICATION: Final = Lane.APPLICATION
_LIFECYCLE: Final = Lane.LIFECYCLE
_REQUEST: Final = RecordKind.REQUEST
_ADMIT: Final = Admission.ADMIT
_EXISTING_OWNER: Final = Asking.EXISTING_OWNER
_MAILBOX: Final = WorkState.MAILBOX
_EXECUTION: Final = WorkState.EXECUTION
_ENDED: Final = WorkState.ENDED
_IDLE: Final = OwnerState.IDLE
_READY: Final = OwnerState.READY
_RUNNING: Final = OwnerState.RUNNING
_OPEN: Final = Condition.OPEN
_NOT_CONNECTED: Final = Condition.NOT_CONNECTED
_REMOVED: Final = Condition.REMOVED

_HELD: Final = frozenset({Condition.CREATING, Condition.SEALED, Condition.REPLAYING})
_RESTING: Final = frozenset({Condition.CREATING, Condition.SEALED, Condition.REMOVED})
"""Application work does not begin."""


class Owner:
    __slots__ = (
        *("accepted_sequence", "active", "application", "current", "gate", "condition", "handler", "hold"),
        *("keeps_claim", "key", "ledger", "lifecycle", "lifecycle_run", "lines", "on_quiet", "state", "waiter"),
    )

    def __init__(self, key: OwnerKey, handler: Handler, gate: Gate, limits: OwnerLimits, *, keeps_claim: bool) -> None:
        self.key = key
        self.handler = handler
        self.gate = gate
        self.keeps_claim = keeps_claim
        """Whether a turn that yields keeps this owner's next work from beginning, as one of several on a gate does."""
        self.application = WorkLine(limits.application_items_max, limits.application_bytes_max)
        self.lifecycle = WorkLine(limits.lifecycle_items_max, limits.lifecycle_bytes_max)
        self.lines = (self.application, self.lifecycle)
        """By `Lane`."""
        self.ledger = OwnerLedger(limits, self.lines)
        self.lifecycle_run = 0
        """Lifecycle turns in a row; at `lifecycle_burst_max` an application turn is owed."""
        self.accepted_sequence = 0
        self.condition = Condition.OPEN
        self.state = OwnerState.IDLE
        self.hold: Hold | None = None
        """While it stands ready with the gate in its hand."""
        self.waiter: GateWaiter | None = None
        self.current: Work | None = None
        """The turn that it is RUNNING."""
        self.active = 0
        """Turns begun and not ended: `current`, and those that have yielded."""
        self.on_quiet: list[Callable[[], None]] | None = None

    @property
    def is_runnable(self) -> bool:
        return self.lifecycle.head is not None or (self.application.head is not None and self.condition not in _RESTING)

    def next_lane(self) -> Lane:
        """Of a runnable owner. Lifecycle first, until an application turn is owed."""
        if self.lifecycle.head is None:
            return _APPLICATION
        is_owed = (
            self.lifecycle_run >= self.ledger.limits.lifecycle_burst_max
            and self.application.head is not None
            and self.condition not in _RESTING
        )
        return _APPLICATION if is_owed else _LIFECYCLE


class OwnerEvents(Protocol):
    """Whom `Owners` tells. None of them raises."""

    def on_ready(self) -> None:
        """Somebody is in the ready set: look there, soon and outside of this call."""

    def on_room(self, key: OwnerKey) -> None:
        """An owner has more room than before, or opened: those who wait for it, oldest first."""

    def on_removed(self, key: OwnerKey, error: HostError) -> None:
        """An owner is gone: its lines end."""

    def on_dropped(self, item: Item, error: HostError) -> None:
        """Accepted, and ended before its handler began: a request is owed an answer."""


class IngressHold(Protocol):
    """Takes what comes for units that are sealed, unborn, or not done with what was held, and the permit that it came
    with; or says why not, and takes neither.
    """

    def __call__(self, key: OwnerKey, item: Item, lane: Lane, permit: Permit | None, /) -> HostErrorKind | None: ...


def _admit_all(asking: Asking) -> Admission | HostErrorKind:
    return Admission.HOLD if asking is Asking.SEALED_UNIT else Admission.ADMIT


class Owners:
    """All owners of one host. `admit` is the host's state: `HostLife.admit`. Without a `hold`, what it would take is
    refused.
    """

    def __init__(
        self,
        limits: OwnerLimits | None = None,
        *,
        admit: Callable[[Asking], Admission | HostErrorKind] = _admit_all,
        hold: IngressHold | None = None,
    ) -> None:
        self.limits = limits if limits is not None else OwnerLimits()
        self.events: OwnerEvents | None = None
        self._admit = admit
        self.hold = hold
        self._by_key: dict[OwnerKey, Owner] = {}
        self._leaving: dict[OwnerKey, list[Owner]] = {}
        """Removed while a turn of theirs ran: who comes under the same key enters by the same gate."""
        self._ready: OrderedDict[Owner, None] = OrderedDict()
        self._occupant: Owner | None = None
        """Who keeps its place from turn to turn."""
        self._occupied_at_ms = 0
        self._requests: dict[tuple[SourceId, int], Work] = {}
        """Those that have not begun, to be cancelled by name."""
        self._numbers = count(1)
        self._in_span = False
        self.active = 0
        """Turns begun and not ended, of all."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: OwnerKey) -> bool:
        return key in self._by_key

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def has_next(self) -> bool:
        """Whether `begin_next` is worth a try."""
        return bool(self._ready) or self._occupant is not None

    @property
    def is_quiet(self) -> bool:
        """Nothing runs, and nothing could."""
        return not self.active and not self.has_next

    @property
    def is_empty(self) -> bool:
        """Nothing is charged to anybody."""
        return not self._leaving and all(owner.ledger.is_empty for owner in self._by_key.values())

    # Owners come and go.

    def new_gate(self, *, may_yield: bool = True) -> Gate:
        """For several owners."""
        return Gate(self._numbers, may_yield=may_yield)

    def add(
        self,
        key: OwnerKey,
        handler: Handler,
        *,
        gate: Gate | None = None,
        condition: Condition = Condition.OPEN,
        limits: OwnerLimits | None = None,
    ) -> Owner:
        """A new owner, with a gate of its own unless it shares one. Raises `HostError(ALREADY_EXISTS)`."""
        if key in self._by_key:
            raise HostError(HostErrorKind.ALREADY_EXISTS, f"there is an owner {key!r} already")
        leaving = self._leaving.get(key)
        own = gate if gate is not None else leaving[-1].gate if leaving else self.new_gate()
        owner = Owner(key, handler, own, limits if limits is not None else self.limits, keeps_claim=gate is not None)
        owner.condition = condition
        self._by_key[key] = owner
        return owner

    def get(self, key: OwnerKey) -> Owner | None:
        return self._by_key.get(key)

    def remove(self, key: OwnerKey, error: HostError | None = None) -> bool:
        """Forget an owner: what has not begun ends with `error` (default: NOT_FOUND), what runs goes on to its end.
        False: it is unknown.
        """
        owner = self._by_key.pop(key, None)
        if owner is None:
            return False
        owner.condition = Condition.REMOVED
        dropped = [*owner.lifecycle, *owner.application]
        for work in dropped:
            self._unqueue(work)
        self._rest(owner)
        if owner.active:
            self._leaving.setdefault(key, []).append(owner)
        if error is None:
            error = HostError(HostErrorKind.NOT_FOUND, f"{key!r} was removed before this message's turn began")
        for work in dropped:
            self._end_dropped(work, error)
        if self.events is not None:
            self.events.on_removed(key, error)
        return True

    def set_condition(self, key: OwnerKey, condition: Condition) -> None:
        """Seal, open, replay. What is queued stays where it is, until `take_queued`."""
        assert condition is not Condition.REMOVED, "owners are removed by `remove`"
        owner = self._known(key)
        owner.condition = condition
        if owner.is_runnable:
            self._make_ready(owner)
        else:
            self._rest(owner)
        if condition is Condition.OPEN and self.events is not None:
            self.events.on_room(key)

    def when_quiet(self, key: OwnerKey, callback: Callable[[], None]) -> None:
        """Call once no turn of an owner runs: at once, or at the end of the last one, also when it was removed."""
        owner = self._known(key)
        if owner.active:
            owner.on_quiet = [*(owner.on_quiet or ()), callback]
        else:
            callback()

    def take_queued(self, key: OwnerKey) -> list[tuple[Item, bool]]:
        """The application work that has not begun, in order, out of a sealed owner: permits and charges go back.

        Each with whether it had a permit.
        """
        owner = self._known(key)
        assert owner.condition in _RESTING, f"{key!r} is {owner.condition}: seal it first"
        taken = list(owner.application)
        items = [(work.item, work.permit is not None) for work in taken if work.item is not None]
        for work in taken:
            self._unqueue(work)
        for work in taken:
            self._free(work)
        return items

    # The commit span.

    def commit(self, record: Record, permit: Permit, *, replay: bool = False) -> HostErrorKind | None:
        """Let a received record in: None, and it is its owner's, permit and all; else nothing has changed.

        Where the hold takes it, the permit is the hold's. `replay` is what the hold gives back, to a REPLAYING unit.
        The kinds are this runtime's own view: over the wire a full queue is another node's, see `kind_for_reply`.
        """
        answer = self._append(record.target, record, Lane.APPLICATION, len(record.payload), permit, replay)
        if not isinstance(answer, Admission):
            return answer
        return self._hold_back(record.target, record, Lane.APPLICATION, permit)

    def submit_local(
        self, key: OwnerKey, item: Item, lane: Lane = Lane.APPLICATION, *, replay: bool = False
    ) -> HostErrorKind | None:
        """Let in work of this process: no permit, the owner's lanes bound it. Never waits.

        CAPACITY_EXCEEDED: full. A one-way may wait, `on_room` tells; a request ends. REJECTED: it fits no empty lane.
        """
        payload_bytes = item.bytes if isinstance(item, Callback) else len(item.payload)
        answer = self._append(key, item, lane, payload_bytes, None, replay)
        return self._hold_back(key, item, lane, None) if isinstance(answer, Admission) else answer

    def _append(
        self, key: OwnerKey, item: Item, lane: Lane, payload_bytes: int, permit: Permit | None, replay: bool
    ) -> Admission | HostErrorKind | None:
        """The span: all checks, count and bytes, sequence, queue, ready set; or no change at all.

        One plain function, no code of a user's or codec's in it; who is told of the ready set comes after it.
        Returns None: it is in; HOLD: not here, but not refused; or why it is refused.
        """
        assert not self._in_span, "a commit inside a commit"
        self._in_span = True
        try:
            owner = self._by_key.get(key)
            answer = self._admit(_asks(owner, lane, replay))
            if answer is not _ADMIT and not isinstance(answer, Admission):
                return answer
            if owner is None:
                return HostErrorKind.NOT_FOUND
            line = owner.lines[lane]
            charge = owner.ledger.charge(payload_bytes)
            if charge > line.bytes_max:  # no room that comes is ever enough
                return HostErrorKind.REJECTED
            if answer is not _ADMIT:
                return answer
            if lane is _APPLICATION and owner.condition is _NOT_CONNECTED:
                return HostErrorKind.UNAVAILABLE
            if not line.try_reserve(charge):
                return HostErrorKind.CAPACITY_EXCEEDED
            if permit is not None:
                permit.to_queued()
            sequence = owner.accepted_sequence = owner.accepted_sequence + 1
            work = Work(owner, item, lane, charge, permit, sequence)
            line.append(work)
            if isinstance(item, Record) and item.kind is _REQUEST:
                self._requests[item.source, item.operation_id] = work
            is_newly_ready = owner.state is _IDLE and owner.is_runnable
            if is_newly_ready:
                owner.state = _READY
                self._ready[owner] = None
        finally:
            self._in_span = False
        if is_newly_ready:
            self._tell_ready()
        return None

    def _hold_back(self, key: OwnerKey, item: Item, lane: Lane, permit: Permit | None) -> HostErrorKind | None:
        return HostErrorKind.UNAVAILABLE if self.hold is None else self.hold(key, item, lane, permit)

    def cancel(self, source: SourceId, operation_id: int) -> bool:
        """End a request that has not begun, without an answer: who asked has gone. False: it is not there."""
        work = self._requests.get((source, operation_id))
        if work is None:
            return False
        owner = work.owner
        self._unqueue(work)
        self._rest(owner)
        self._free(work)
        return True

    def drop_all(self, kind: HostErrorKind) -> int:
        """End everything that has not begun; how many."""
        dropped = [
            work for owner in self._by_key.values() for line in (owner.lifecycle, owner.application) for work in line
        ]
        for work in dropped:
            self._unqueue(work)
            self._rest(work.owner)
        for work in dropped:
            why = "the host was closed" if kind is HostErrorKind.SHUTTING_DOWN else kind.name
            self._end_dropped(work, HostError(kind, f"{why} before this message's turn of {work.owner.key!r} began"))
        return len(dropped)

    # Turns.

    def begin_next(self, now_ms: int) -> Work | None:
        """The next turn: its owner's gate is held, its work claimed. None: nobody is ready."""
        owner = self._occupant
        if owner is None:
            owner = self._take_ready()
            if owner is None:
                return None
            self._occupant, self._occupied_at_ms = owner, now_ms
        assert owner.current is None, f"the turn of {owner.key!r} has neither ended nor been detached"
        lane = owner.next_lane()
        line = owner.lines[lane]
        work = line.head
        assert work is not None, f"nothing to run for {owner.key!r}"
        line.remove(work)
        owner.lifecycle_run = 0 if lane is _APPLICATION else owner.lifecycle_run + 1
        self._forget_request(work)
        line.claim(work.charge)
        work.state = _EXECUTION
        work.hold, owner.hold = owner.hold, None
        owner.current = work
        owner.active += 1
        self.active += 1
        return work

    def _take_ready(self) -> Owner | None:
        """The oldest that has its gate, or gets it; those that do not wait for it from here on."""
        while self._ready:
            owner = next(iter(self._ready))
            if owner.hold is None:
                owner.hold = owner.gate.try_enter()  # which may raise: nothing has changed then
            del self._ready[owner]
            if owner.hold is not None:
                owner.state = _RUNNING
                return owner
            owner.state = OwnerState.WAITING

            def granted(hold: Hold, owner: Owner = owner) -> None:
                owner.waiter, owner.hold, owner.state = None, hold, OwnerState.READY
                self._ready[owner] = None
                self._tell_ready()

            owner.waiter = owner.gate.wait(granted)
        return None

    def detach(self, work: Work) -> None:
        """The turn waits for something: it keeps its gate, and others are served meanwhile."""
        if self._occupant is work.owner and work.owner.current is work:
            self._occupant = None

    def end(self, work: Work, now_ms: int) -> None:
        """The handler's terminal, once: a second time is an error of the caller's."""
        assert work.state is _EXECUTION, f"a turn of {work.owner.key!r} ended twice"
        owner = work.owner
        work.state, work.item = _ENDED, None
        owner.lines[work.lane].give_back(work.charge, claimed=True)
        owner.active -= 1
        self.active -= 1
        if work.waiter is not None:
            work.waiter.cancel()
            work.waiter = None
        hold, work.hold = work.hold, None
        is_occupant = self._occupant is owner and owner.current is work
        if (
            is_occupant
            and hold is not None
            and owner.is_runnable
            and not owner.gate.waiters
            and now_ms - self._occupied_at_ms < owner.ledger.limits.owner_budget_ms
        ):
            owner.hold = owner.gate.renew(hold)
            owner.current = None
        else:
            if is_occupant:
                self._occupant = None
            if hold is not None:
                owner.gate.leave(hold)
            if owner.current is work:
                self._put_down(owner)
        self._after_end(owner)

    def _after_end(self, owner: Owner) -> None:
        if not owner.active:
            if owner.condition is _REMOVED:
                leaving = self._leaving[owner.key]
                leaving.remove(owner)
                if not leaving:
                    del self._leaving[owner.key]
            if owner.on_quiet is not None:
                callbacks, owner.on_quiet = owner.on_quiet, None
                for callback in callbacks:
                    callback()
        if self.events is not None and owner.condition is not _REMOVED:
            self.events.on_room(owner.key)

    def release_gate(self, work: Work) -> None:
        """The turn yields: others may enter its gate, and so may the next work where the claim is not kept."""
        hold, owner = work.hold, work.owner
        if hold is None or not hold.is_current:
            raise HostError(HostErrorKind.INVALID_OPERATION, f"this turn of {owner.key!r} does not hold its gate")
        if not owner.gate.may_yield:
            raise HostError(
                HostErrorKind.INVALID_OPERATION, f"turns of {owner.key!r} cannot yield: its gate is its own"
            )
        work.hold = None
        self.detach(work)
        owner.gate.leave(hold)
        if not owner.keeps_claim and owner.current is work:
            self._put_down(owner)

    def reenter(self, work: Work, granted: Callable[[], None]) -> bool:
        """Enter again, as a new turn at the tail. True: it is inside; else `granted` is called once it is.

        Raises `HostError(NOT_FOUND)` when its owner was removed meanwhile.
        """
        owner = work.owner
        if work.state is WorkState.ENDED:
            raise HostError(HostErrorKind.INVALID_OPERATION, f"this turn of {owner.key!r} is over")
        if owner.condition is _REMOVED:
            raise HostError(HostErrorKind.NOT_FOUND, f"{owner.key!r} was removed while a turn of it had yielded")
        work.hold = owner.gate.try_enter()
        if work.hold is not None:
            return True

        def grant(hold: Hold) -> None:
            work.waiter, work.hold = None, hold
            granted()

        work.waiter = owner.gate.wait(grant)
        return False

    def would_wait_for(self, work: Work, key: OwnerKey) -> bool:
        """Whether an answer of that owner needs what this turn holds: its gate, or its claim on the owner."""
        target = self._by_key.get(key)
        if target is None:
            return False
        hold = work.hold
        if hold is not None and hold.is_current and hold.gate is target.gate:
            return True
        return target is work.owner and target.current is work

    # Steps.

    def _known(self, key: OwnerKey) -> Owner:
        owner = self._by_key.get(key)
        if owner is None:
            raise HostError(HostErrorKind.NOT_FOUND, f"there is no owner {key!r}")
        return owner

    def _tell_ready(self) -> None:
        if self.events is not None:
            self.events.on_ready()

    def _put_down(self, owner: Owner) -> None:
        """It is not running any more."""
        owner.current = None
        owner.state = _IDLE
        if owner.is_runnable:
            self._make_ready(owner)

    def _make_ready(self, owner: Owner) -> None:
        if owner.state is _IDLE:
            owner.state = _READY
            self._ready[owner] = None
            self._tell_ready()

    def _rest(self, owner: Owner) -> None:
        """Out of the ready set and the gate's line, when there is nothing to run; a running turn is left alone."""
        if owner.is_runnable or owner.state is _IDLE or owner.current is not None:
            return
        if owner is self._occupant:  # between two of its turns
            self._occupant = None
        self._ready.pop(owner, None)
        waiter, owner.waiter = owner.waiter, None
        if waiter is not None:
            waiter.cancel()
        owner.state = _IDLE
        hold, owner.hold = owner.hold, None
        if hold is not None:
            owner.gate.leave(hold)

    def _unqueue(self, work: Work) -> None:
        """Out of its lane before it began: the charge goes back here, the permit in `_free`."""
        assert work.state is _MAILBOX, "only what has not begun leaves its lane"
        owner = work.owner
        owner.lines[work.lane].remove(work)
        owner.lines[work.lane].give_back(work.charge, claimed=False)
        work.state = _ENDED
        self._forget_request(work)

    def _forget_request(self, work: Work) -> None:
        item = work.item
        if isinstance(item, Record) and item.kind is _REQUEST:
            key = (item.source, item.operation_id)
            if self._requests.get(key) is work:
                del self._requests[key]

    def _free(self, work: Work) -> None:
        """The end of a work that never began."""
        work.item = None
        if work.permit is not None:
            with infrastructure():
                work.permit.release()
        if self.events is not None and work.owner.condition is not _REMOVED:
            self.events.on_room(work.owner.key)

    def _end_dropped(self, work: Work, error: HostError) -> None:
        item = work.item
        self._free(work)
        if self.events is not None and item is not None:
            self.events.on_dropped(item, error)

    def check_invariants(self) -> None:
        """Between steps, by the names of the design page."""
        active = 0
        requests = 0
        for owner in [*self._by_key.values(), *(owner for leaving in self._leaving.values() for owner in leaving)]:
            owner.ledger.check_invariants()
            active += owner.active
            for lane in Lane:
                queued = list(owner.lines[lane])
                mailbox = owner.ledger.lanes[lane].mailbox
                assert (len(queued), sum(work.charge for work in queued)) == mailbox, f"one_charge: {owner.key} {lane}"
                assert all(work.state is WorkState.MAILBOX for work in queued), f"one_charge: {owner.key} state"
                sequences = [work.sequence for work in queued]
                assert sequences == sorted(set(sequences)), f"all_or_nothing: {owner.key} order {sequences}"
                requests += sum(
                    isinstance(work.item, Record) and work.item.kind is RecordKind.REQUEST for work in queued
                )
            running = owner.ledger.application.execution_items + owner.ledger.lifecycle.execution_items
            assert running == owner.active, f"one_charge: {owner.key} {running} claimed, {owner.active} turns"
            assert owner.lifecycle_run >= 0, f"lane_debt: {owner.key}"
            is_ready = owner in self._ready
            assert is_ready == (owner.state is OwnerState.READY), f"ready_once: {owner.key} {owner.state}"
            assert (owner.waiter is not None) == (owner.state is OwnerState.WAITING), f"ready_once: {owner.key} waits"
            if owner.state is _IDLE:
                assert not owner.is_runnable, f"ready_once: {owner.key} has work and is idle"
            if owner.state is OwnerState.RUNNING:
                assert owner.current is not None or owner is self._occupant, f"ready_once: {owner.key} runs nothing"
            if owner.current is not None and owner.current.hold is not None:
                assert owner.current.hold.is_current, f"one_turn: {owner.key} runs without its gate"
            if owner.hold is not None:
                assert owner.hold.is_current, f"one_turn: {owner.key} has a gate that is another's"
        assert active == self.active, f"one_turn: {active} turns, {self.active} counted"
        assert requests == len(self._requests), f"one_charge: {requests} requests queued, {len(self._requests)} known"


def _asks(owner: Owner | None, lane: Lane, replay: bool) -> Asking:
    """Lifecycle work is infrastructure: units are opened and moved by it. So is a replay of what was accepted."""
    if lane is _LIFECYCLE:
        return Asking.CONTROL
    if owner is None or owner.condition is _OPEN or owner.condition not in _HELD:
        return _EXISTING_OWNER
    return Asking.CONTROL if replay and owner.condition is Condition.REPLAYING else Asking.SEALED_UNIT


def kind_for_reply(kind: HostErrorKind) -> HostErrorKind:
    """What the one who sent a request here is told: what ran out here is not theirs, so it is unavailable (R84)."""
    return HostErrorKind.UNAVAILABLE if kind is HostErrorKind.CAPACITY_EXCEEDED else kind
