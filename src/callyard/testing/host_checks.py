"""What a simulated host must show. A naive recorder stands beside the parts: it keeps lists where they keep counts, and
looks at each step that they take; names of what is checked are those of the host's design page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from callyard.clock import Timers
from callyard.host.context import current_turn
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.gates import Gate
from callyard.host.jobs import JobQueue, JobQueueStatus, JobWaiter, Permit, PermitState, Transition, WaiterState
from callyard.host.ledger import Lane, OwnerLimits
from callyard.host.moving import Held, Moving
from callyard.host.outbound import Sending
from callyard.host.owners import Condition, Item, Owner, OwnerKey, Owners, Work
from callyard.host.states import Admission
from callyard.testing.host_workload import Cargo, CargoKind
from callyard.transport.port import FlowState, Outgoing, Record

Delivery = tuple[str, OwnerKey]
"""A message's name, and one owner that it is for; of what is for no owner: ""."""

ANSWERED = ("begun", "unread", "dropped", "refused", "held")
"""Fates of a request that its sender is told of."""

P = ParamSpec("P")
T = TypeVar("T")


class Watch(Protocol):
    @property
    def broken(self) -> list[str]: ...


W = TypeVar("W", bound=Watch)


def noted(step: Callable[Concatenate[W, P], T], /) -> Callable[Concatenate[W, P], T]:
    """What fails in a step is kept: whoever made it may contain whatever is raised."""

    @wraps(step)
    def run(watch: W, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return step(watch, *args, **options)
        except AssertionError as error:
            watch.broken.append(str(error))
            raise

    return run


class Operation(msgspec.Struct, eq=False):
    """One send or request of this host, as its caller sees it."""

    cargo: Cargo
    target: OwnerKey
    began_at_ms: int
    deadline_at_ms: int
    jumped_ms: int
    """How far the clock had jumped, all in all."""
    admitted: bool = False
    outcome: str = ""
    """`done`, `cancelled`, or the kind of an error."""


class HostBook:
    """Everything that was ever sent, and what became of it."""

    def __init__(self, timers: Timers, limits: OwnerLimits) -> None:
        self.timers = timers
        self.caps = {
            Lane.APPLICATION: (limits.application_items_max, limits.application_bytes_max),
            Lane.LIFECYCLE: (limits.lifecycle_items_max, limits.lifecycle_bytes_max),
        }
        self.broken: list[str] = []
        self.jumped_ms = 0
        self.due: dict[Delivery, None] = {}
        """Each of them has one fate in the end."""
        self.fates: dict[Delivery, str] = {}
        self.begun: dict[tuple[OwnerKey, str], int] = {}
        """By owner and stream: the last number that began there."""
        self.operations: dict[str, Operation] = {}
        self.waiting: dict[OwnerKey, dict[Operation, Sending]] = defaultdict(dict)
        self.asked: dict[tuple[str, int], Delivery] = {}
        """Requests that came, by source and operation id."""
        self.replies: Counter[tuple[str, int]] = Counter()
        self.ledger: dict[Owner, dict[Work, int]] = defaultdict(dict)
        """Charges of what was accepted and has not ended."""
        self.lanes: dict[tuple[Owner, Lane], dict[Work, None]] = defaultdict(dict)
        """What was accepted and has not begun."""
        self.queued: dict[Work, None] = {}
        """Accepted with a permit, which has not come back."""
        self.work_of: dict[Item, Work] = {}
        self.inside: dict[Gate, Work] = {}
        self.lifecycle_run: Counter[Owner] = Counter()
        self.turn_numbers: dict[Gate, int] = {}
        self.turned_at_ms = 0
        self.transitions: list[Transition] = [Transition(0, FlowState.RUNNING)]

    # Messages.

    @noted
    def expect(self, cargo: Cargo, target: OwnerKey = "") -> None:
        assert (cargo.name, target) not in self.due, f"the world sends {cargo.name} twice to {target!r}"
        self.due[cargo.name, target] = None

    @noted
    def end(self, cargo: Cargo, target: OwnerKey, fate: str) -> None:
        delivery = (cargo.name, target)
        assert delivery in self.due, f"nothing_late: {delivery} {fate}, and was never sent"
        before = self.fates.get(delivery)
        assert before is None, f"nothing_late: {delivery} {fate}, after it was {before}"
        self.fates[delivery] = fate

    @noted
    def start(self, work: Work, cargo: Cargo, jobs: JobQueue) -> None:
        """The handler's first instruction."""
        key = work.owner.key
        self.end(cargo, key, "begun")
        assert self.inside.get(work.owner.gate) is work, f"one_turn: {cargo.name} began outside of {key}'s gate"
        operation = self.operations.get(cargo.name)
        if operation is not None:
            assert operation.admitted, f"nothing_late: {cargo.name} began and was not admitted"
        if work.lane is Lane.APPLICATION and (operation is None or cargo.kind is CargoKind.ONE_WAY):
            before = self.begun.get((key, cargo.stream), 0)
            assert before < cargo.number, f"hold_in_order: {cargo.name} began at {key} after {before}"
            self.begun[key, cargo.stream] = cargo.number
        if work.permit is not None:
            assert work.permit.state is PermitState.RELEASED, f"permit_once: {cargo.name} began with its permit"
        self.queued.pop(work, None)
        self.check_queued(jobs)
        self.check_ledger(work.owner)

    @noted
    def lost(self, record: Record, kind: HostErrorKind) -> None:
        """Accepted, and ended before its handler."""
        work = self.work_of[record]
        self.queued.pop(work, None)
        fate = "unread" if work in self.ledger[work.owner] else "dropped"
        self.end(Cargo.peek(record.payload), record.target, fate)

    @noted
    def reply(self, outgoing: Outgoing) -> None:
        asked = (outgoing.target, outgoing.operation_id)
        assert asked in self.asked, f"first_terminal: a reply to {asked}, which was not asked"
        fate = self.fates.get(self.asked[asked])
        assert fate in ANSWERED, f"first_terminal: an answer to {self.asked[asked]}, which was {fate}"
        self.replies[asked] += 1
        assert self.replies[asked] == 1, f"first_terminal: {self.asked[asked]} is answered again: {outgoing}"

    # Operations of this host.

    @noted
    def begin(self, cargo: Cargo, target: OwnerKey, timeout_ms: int) -> Operation:
        now_ms = self.timers.now_ms()
        operation = self.operations[cargo.name] = Operation(cargo, target, now_ms, now_ms + timeout_ms, self.jumped_ms)
        return operation

    @noted
    def admit(self, operation: Operation) -> None:
        name = operation.cargo.name
        assert not operation.admitted, f"first_terminal: {name} was admitted twice"
        assert not operation.outcome, f"nothing_late: {name} was admitted after it had ended {operation.outcome}"
        now_ms = self.timers.now_ms()
        assert now_ms < operation.deadline_at_ms, f"nothing_late: {name} was admitted {now_ms}, after its deadline"
        self._check_line(operation)
        operation.admitted = True
        if operation.target:
            self.expect(operation.cargo, operation.target)

    @noted
    def wait(self, operation: Operation, sending: Sending) -> None:
        """For room at its target."""
        self.waiting[operation.target][operation] = sending

    def _check_line(self, operation: Operation) -> None:
        line = self.waiting[operation.target]
        for each, sending in list(line.items()):
            if sending._waiter is None or sending._waiter.state == "ended":
                del line[each]
        if operation.cargo.kind is CargoKind.ONE_WAY and line:
            head = next(iter(line))
            assert head is operation, f"oldest_first: {operation.cargo.name} is admitted before {head.cargo.name}"
            del line[operation]

    @noted
    def finish(self, operation: Operation, outcome: str) -> None:
        name = operation.cargo.name
        assert not operation.outcome, f"first_terminal: {name} ended {operation.outcome}, and again {outcome}"
        operation.outcome = outcome
        late_ms = self.timers.now_ms() - operation.deadline_at_ms - (self.jumped_ms - operation.jumped_ms)
        assert late_ms <= 0, f"first_terminal: {name} ended {outcome}, {late_ms} ms after its deadline"
        assert outcome != "done" or operation.admitted, f"first_terminal: {name} is done, and was not admitted"

    # Owners' steps.

    @noted
    def accept(self, work: Work, charge: int) -> None:
        self.ledger[work.owner][work] = charge
        self.lanes[work.owner, work.lane][work] = None
        if work.item is not None:
            self.work_of[work.item] = work
        if work.permit is not None:
            self.queued[work] = None

    @noted
    def leave_lane(self, work: Work) -> None:
        """It ended before it began, or goes into a hold."""
        del self.lanes[work.owner, work.lane][work]
        del self.ledger[work.owner][work]
        self.queued.pop(work, None)

    @noted
    def begin_turn(self, work: Work) -> None:
        owner = work.owner
        line = self.lanes[owner, work.lane]
        assert next(iter(line), None) is work, f"hold_in_order: {owner.key} begins what is not at the head of its lane"
        run, burst_max = self.lifecycle_run[owner], owner.ledger.limits.lifecycle_burst_max
        if work.lane is Lane.APPLICATION:
            overtaken = self.lanes[owner, Lane.LIFECYCLE]
            assert not overtaken or run >= burst_max, f"lane_debt: {owner.key} begins application work too early"
            self.lifecycle_run[owner] = 0
        else:
            waits = self.lanes[owner, Lane.APPLICATION] and owner.condition in (Condition.OPEN, Condition.REPLAYING)
            assert not waits or run < burst_max, f"lane_debt: {run} lifecycle turns of {owner.key}, and another"
            self.lifecycle_run[owner] += 1
        del line[work]
        self.enter(work)

    @noted
    def enter(self, work: Work) -> None:
        other = self.inside.get(work.owner.gate)
        if other is not None:
            raise AssertionError(f"one_turn: {work.owner.key} enters beside a turn of {other.owner.key}")
        self.inside[work.owner.gate] = work
        assert work.hold is not None, f"one_turn: {work.owner.key} enters without a number"
        before = self.turn_numbers.get(work.owner.gate, 0)
        assert work.hold.number > before, f"one_turn: turn {work.hold.number} of {work.owner.key} after {before}"
        self.turn_numbers[work.owner.gate] = work.hold.number

    @noted
    def exit(self, work: Work) -> bool:
        if self.inside.get(work.owner.gate) is work:
            del self.inside[work.owner.gate]
            return True
        return False

    @noted
    def end_turn(self, work: Work) -> None:
        assert work in self.ledger[work.owner], f"one_charge: a turn of {work.owner.key} ends twice"
        del self.ledger[work.owner][work]
        self.exit(work)

    @noted
    def turn_to(self, transition: Transition) -> None:
        last = self.transitions[-1]
        assert transition.number == last.number + 1, f"hysteresis: transition {transition} after {last}"
        assert transition.state is not last.state, f"hysteresis: {transition.state} again"
        self.transitions.append(transition)
        self.turned_at_ms = self.timers.now_ms()

    @noted
    def check_pause(self, status: JobQueueStatus) -> None:
        is_paused = self.transitions[-1].state is FlowState.PAUSED
        paused_ms = self.timers.now_ms() - self.turned_at_ms if is_paused else 0
        assert status.pause_current_ms == paused_ms, f"hysteresis: paused {status.pause_current_ms}, not {paused_ms} ms"

    # Checks.

    @noted
    def check_queued(self, jobs: JobQueue) -> None:
        """Taken out and not begun."""
        assert jobs._queued == len(self.queued), f"permit_once: {jobs._queued} queued, there are {len(self.queued)}"
        assert len(self.queued) <= jobs.in_use <= jobs.limit, f"permits_bounded: {jobs.in_use} of {jobs.limit}"

    @noted
    def check_ledger(self, owner: Owner) -> None:
        charges = self.ledger[owner]
        for lane in Lane:
            of_lane = [charge for work, charge in charges.items() if work.lane is lane]
            entry = owner.ledger.lanes[lane]
            items_max, bytes_max = self.caps[lane]
            assert len(of_lane) <= items_max, f"one_charge: {owner.key} has {len(of_lane)} items of {items_max}"
            assert sum(of_lane) <= bytes_max, f"one_charge: {owner.key} has {sum(of_lane)} bytes of {bytes_max}"
            naive, counted = (len(of_lane), sum(of_lane)), (entry.items, entry.bytes)
            assert naive == counted, f"one_charge: {owner.key} {lane.name} has {counted}, not {naive}"
            waiting = list(self.lanes[owner, lane])
            assert waiting == list(owner.lines[lane]), f"all_or_nothing: {owner.key} {lane.name} has not what it took"

    @noted
    def check_end(self, replies_dropped: int) -> None:
        missing = [delivery for delivery in self.due if delivery not in self.fates]
        assert not missing, f"nothing may vanish: no fate of {missing[:5]}"
        owed = [asked for asked, delivery in self.asked.items() if self.fates[delivery] in ANSWERED]
        unanswered = [self.asked[asked] for asked in owed if not self.replies[asked]]
        assert len(unanswered) <= replies_dropped, f"first_terminal: no answer to {unanswered[:5]}"
        endless = [name for name, operation in self.operations.items() if not operation.outcome]
        assert not endless, f"first_terminal: no outcome of {endless[:5]}"
        assert not self.queued, f"permit_once: {len(self.queued)} never began"
        assert not self.inside, "one_turn: somebody is inside a gate"
        left = {owner.key: len(charges) for owner, charges in self.ledger.items() if charges}
        assert not left, f"one_charge: {left}"


class WatchedJobs(JobQueue):
    """Who waits is in a list of the book's, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.line: dict[Hashable, JobWaiter] = {}
        """Waiting, or granted and not told."""
        self.broken: list[str] = []
        self._kept = (self.pause_permits, self.resume_permits)

    @noted
    def wait(
        self, key: Hashable, granted: Callable[[Permit], None], *, closed: Callable[[], None] | None = None
    ) -> JobWaiter:
        if self.is_in_line(key):
            return super().wait(key, granted, closed=closed)

        def told(permit: Permit) -> None:
            self._tell_line(key)
            granted(permit)

        waiter = super().wait(key, told, closed=closed)
        _check_no_gate("waited")
        if waiter.state in (WaiterState.WAITING, WaiterState.GRANTED):
            self.line[key] = waiter
        return waiter

    @noted
    def _turn_to(self, state: FlowState) -> None:
        if state is FlowState.PAUSED:
            assert self.in_use >= self._kept[0], f"hysteresis: paused at {self.in_use} of {self.limit}"
        else:
            waiting = len(self._line)
            assert self.in_use <= self._kept[1], f"hysteresis: running at {self.in_use} of {self.limit}"
            assert not waiting, f"hysteresis: running, and {waiting} wait"
        super()._turn_to(state)

    @noted
    def _tell_line(self, key: Hashable) -> None:
        if self.line:
            head = next(iter(self.line))
            assert head == key, f"oldest_first: {key!r} has a permit before {head!r}"
            del self.line[key]

    @noted
    def try_acquire(self) -> Permit | None:
        waiting = [key for key, waiter in self.line.items() if waiter.state is WaiterState.WAITING]
        permit = super().try_acquire()
        assert permit is None or not waiting, f"oldest_first: a newcomer has a permit before {waiting}"
        _check_no_gate("asked")
        return permit

    def close(self) -> None:
        self.line.clear()
        super().close()

    def _cancel(self, waiter: JobWaiter) -> bool:
        if self.line.get(waiter.key) is waiter:
            del self.line[waiter.key]
        return super()._cancel(waiter)


def _check_no_gate(did: str) -> None:
    turn = current_turn()
    assert turn is None or not turn.holds_gate, f"no_wait_under_gate: {did} for a permit in a turn of {turn.owner}"


class WatchedOwners(Owners):
    """Each step is in the book, too."""

    book: HostBook

    @property
    def broken(self) -> list[str]:
        return self.book.broken

    def _picture(self, key: OwnerKey) -> tuple[int, ...]:
        owner = self._by_key.get(key)
        if owner is None:
            return ()
        lanes = [owner.ledger.lanes[lane] for lane in Lane]
        counts = [figure for entry in lanes for figure in (entry.items, entry.bytes, *entry.execution)]
        lines = [sum(1 for _ in owner.lines[lane]) for lane in Lane]
        return (owner.accepted_sequence, *counts, *lines)

    @noted
    def _append(
        self, key: OwnerKey, item: Item, lane: Lane, payload_bytes: int, permit: Permit | None, replay: bool
    ) -> Admission | HostErrorKind | None:
        before = self._picture(key)
        state = None if permit is None else permit.state
        answer = super()._append(key, item, lane, payload_bytes, permit, replay)
        if answer is not None:
            assert self._picture(key) == before, f"all_or_nothing: {key} refused, {before} is {self._picture(key)}"
            assert permit is None or permit.state is state, f"all_or_nothing: {key} refused, and took the permit"
            return answer
        owner = self._by_key[key]
        work = owner.lines[lane].tail
        assert work is not None, f"all_or_nothing: {key} accepted nothing"
        assert (work.item, work.permit) == (item, permit), f"all_or_nothing: {key} accepted something else"
        assert owner.accepted_sequence == before[0] + 1, f"all_or_nothing: {key} skips a number"
        assert permit is None or permit.state is PermitState.QUEUED, f"permit_once: {permit} in {key}"
        self.book.accept(work, payload_bytes + owner.ledger.limits.fixed_work_bytes)
        self.book.check_ledger(owner)
        return None

    def begin_next(self, now_ms: int) -> Work | None:
        work = super().begin_next(now_ms)
        if work is not None:
            self.book.begin_turn(work)
        return work

    def end(self, work: Work, now_ms: int) -> None:
        self.book.end_turn(work)
        super().end(work, now_ms)

    def _unqueue(self, work: Work) -> None:
        self.book.leave_lane(work)
        super()._unqueue(work)

    def release_gate(self, work: Work) -> None:
        was_inside = self.book.exit(work)
        try:
            super().release_gate(work)
        except BaseException:
            if was_inside:
                self.book.inside[work.owner.gate] = work
            raise

    def reenter(self, work: Work, granted: Callable[[], None]) -> bool:
        def inside() -> None:
            self.book.enter(work)
            granted()

        is_inside = super().reenter(work, inside)
        if is_inside:
            self.book.enter(work)
        return is_inside

    def cancel(self, source: Any, operation_id: int) -> bool:
        work = self._requests.get((source, operation_id))
        record = None if work is None else work.item
        if not super().cancel(source, operation_id):
            return False
        assert isinstance(record, Record)
        self.book.end(Cargo.peek(record.payload), record.target, "cancelled")
        return True


class WatchedMoving(Moving):
    """What ends in a hold is in the book, too."""

    book: HostBook

    def cancel(self, source: Any, operation_id: int) -> bool:
        held = self._requests.get((source, operation_id))
        if held is not None:
            assert isinstance(held.item, Record), "a request is a record"
            self.book.end(Cargo.peek(held.item.payload), held.item.target, "cancelled")
        return super().cancel(source, operation_id)

    def _end_held(self, held: Held, error: HostError) -> None:
        if isinstance(held.item, Record):
            self.book.end(Cargo.peek(held.item.payload), held.item.target, "held")
        super()._end_held(held, error)
