"""Calls made by calls: what refuses one, what it may spend, and the queues from which they are bound.

A subcall has a *home*: the executor of the nearest call above it that is of the same pool, which is its parent's where
both are of one. It is bound there past every filter, as long as that call holds a live reservation: whatever else is
full, a call in flight can always go on, and nesting never deadlocks, from pool to pool neither. What the bind itself
refuses (a full outbox) stays at the head of that executor's queue until its block is over. The first of a family in a
pool is a *stray*: it takes any executor there whose placement fits, past every filter too; while there is none it is
stranded, and the shell must bring one. Ancestry is the scheduler's own tree; nothing that an executor says of it is
believed. Source: call-execution X24-X30, X64, X65, X80.
"""

from __future__ import annotations

from collections import deque

from callyard.errors import CallFailure, ErrorKind, Outcome, fail
from callyard.ids import CallId, RequestId
from callyard.scheduler.batches import is_keyed
from callyard.scheduler.calls import Call, FunctionTarget, Ties
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.events import SubcallRequested
from callyard.scheduler.executors import ExecutorState
from callyard.scheduler.placement import Placement
from callyard.scheduler.seats import ancestors


class SubcallQueues:
    """READY subcalls, by their home; executors with one to bind take turns. Strays, by their placement."""

    def __init__(self) -> None:
        self.ring: deque[ExecutorState] = deque()
        self._blocked: list[ExecutorState] = []
        """Those that refused, until a timer, a snapshot or a freed context."""
        self.strays: dict[Placement, deque[Call]] = {}
        self.strayed = 0
        """Strays so far; a change during a look tells that there is more to look at."""

    def add(self, call: Call, *, first: bool = False) -> None:
        home = home_of(call)
        call.queued = True
        if home is None:
            queue = self.strays.setdefault(call.placement, deque())
            self.strayed += 1
        else:
            queue = home.subcalls
        if first:
            queue.appendleft(call)
        else:
            queue.append(call)
        if home is not None:
            self.enter(home)

    def stray(self, placement: Placement) -> Call | None:
        """The next stray of a placement; those that ended where they stood are gone."""
        queue = self.strays.get(placement)
        while queue:
            if queue[0].queued:
                return queue[0]
            queue.popleft()
        self.strays.pop(placement, None)
        return None

    def pop_stray(self, placement: Placement) -> None:
        """The head was bound, or set aside."""
        queue = self.strays[placement]
        queue.popleft().queued = False
        if not queue:
            del self.strays[placement]

    def enter(self, ex: ExecutorState) -> None:
        """Look at this executor's subcalls again. A second time changes nothing."""
        if ex.subcalls and not ex.in_ring:
            ex.in_ring = True
            self.ring.append(ex)

    def head(self, now_ms: int) -> Call | None:
        """The next subcall to bind. Executors that refuse at the moment leave the ring until something frees them."""
        ring = self.ring
        while ring:
            ex = ring[0]
            while ex.subcalls and not ex.subcalls[0].queued:  # ended where it stood
                ex.subcalls.popleft()
            if ex.subcalls and now_ms >= ex.blocked_until_ms:
                return ex.subcalls[0]
            ring.popleft().in_ring = False
            if ex.subcalls:
                self._blocked.append(ex)
        return None

    def wake(self) -> None:
        """Some block may be over."""
        blocked, self._blocked = self._blocked, []
        for ex in blocked:
            self.enter(ex)

    def pop(self) -> None:
        """The head was bound, or set aside."""
        ex = self.ring[0]
        ex.subcalls.popleft().queued = False
        self.ring.rotate(-1)

    def remove(self, ex: ExecutorState) -> None:
        """The executor is gone, and with it the calls that made it the home of what stood there."""
        ex.subcalls.clear()
        if ex.in_ring:
            self.ring.remove(ex)
            ex.in_ring = False
        self._blocked = [other for other in self._blocked if other is not ex]


def home_of(call: Call) -> ExecutorState | None:
    """The executor of the nearest call above it of its pool; None: it is the first of its family there."""
    for above in ancestors(call):
        if above.placement.pool == call.placement.pool:
            home = above.executor
            assert home is not None, f"{above.call_id}, above {call.call_id}, holds no reservation"
            return home
    return None


def is_ending(call: Call) -> bool:
    """A call above the subcall has lost its reservation: it is about to end with that one."""
    return ties_of(call).orphaned or any(above.executor is None for above in ancestors(call))


def ties_of(call: Call) -> Ties:
    """Its ties, made when they are first needed."""
    ties = call.ties
    if ties is None:
        ties = call.ties = Ties()
    return ties


def budget_left_ms(call: Call) -> int:
    """What the requests of its current attempt have left of a call's budget, which must not be unlimited (X65, X85)."""
    return call.budget_ms - (0 if call.ties is None else call.ties.charged_ms)


def refuse(parent: Call, event: SubcallRequested, config: SchedulerConfig) -> CallFailure | None:
    """Why this call may not make this subcall; None: it may."""
    target = event.target
    if target is None or event.failure is not None:
        return event.failure or fail(ErrorKind.NOT_FOUND, "there is no such function")
    name = target.function_id
    ties = ties_of(parent)
    if parent.stopping is not None:
        message = f"{name} was not called: the call that asked is being stopped"
        return fail(ErrorKind.CANCELLED, message, outcome=Outcome.NOT_RUN, reason=parent.stopping.value)
    if target.digest != parent.target.digest:
        return _deny("bundle", f"{name} is of another bundle than {parent.target.function_id}, whose executor has one")
    if parent.target.pure and not target.pure:
        return _deny("purity", f"{parent.target.function_id} is pure, and may only call pure functions: {name} is not")
    if ties.depth >= config.max_subcall_depth:
        limit = config.max_subcall_depth
        return _deny("depth", f"{name} would be {ties.depth + 1} calls deep, max_subcall_depth={limit}")
    family = [parent, *ancestors(parent)]
    for above in family:
        if is_equal(above, target, event.args):
            return _deny("cycle", f"{name} was called with these arguments above: {above.call_id} waits for itself")
    root = family[-1].target
    if target.exclusive and not (root.exclusive and root.pool == target.pool):
        own = "shares its process: make it exclusive" if not root.exclusive else f"has one in pool {root.pool} only"
        return _deny("exclusive", f"{name} is exclusive, but {root.function_id}, which began this, {own}")
    if parent.budget_ms and budget_left_ms(parent) <= 0:
        message = f"{name} was not called: {parent.target.function_id} has used its {parent.budget_ms} ms"
        return fail(ErrorKind.TIMEOUT, message, outcome=Outcome.NOT_RUN, limit="budget_ms")
    asker = parent.executor
    assert asker is not None, f"{parent.call_id} asks without a reservation"
    size, most = asker.subcall_args_bytes + len(event.args), config.subcall_args_bytes_max
    if size > most:
        message = (
            f"{name} was not called: with it, {asker.executor_id} would wait for subcalls with {size:,} bytes of"
            f" arguments, subcall_args_bytes_max={most:,}: ask for fewer at once, or pass paths of files"
        )
        return fail(ErrorKind.RESOURCE_LIMIT, message, outcome=Outcome.NOT_RUN, limit="subcall_args_bytes_max")
    return None


def _deny(reason: str, message: str) -> CallFailure:
    return fail(ErrorKind.DENIED, message, reason=reason)


def describe_ring(call: Call) -> CallFailure:
    """Of a subcall whose wait for a seat would never end."""
    limit = call.target.max_concurrency
    message = f"all max_concurrency={limit} calls of {call.target.function_id} wait for calls above this one"
    return _deny("cycle", message)


def is_equal(call: Call, target: FunctionTarget, args: bytes) -> bool:
    """The same function with the same arguments, as X15's key has it."""
    own = call.target
    whole = call.parent is None and call.task.plan.takes_rows and own.takes_row
    return (
        own.function_id == target.function_id
        and own.digest == target.digest
        and call.args == args
        and not call.strings
        and not whole
    )


def build_subcall(parent: Call, event: SubcallRequested, number: int) -> Call:
    """The child's record. Its budget is what was granted, cut to what the parent has left (X27, X65)."""
    target = event.target
    assert target is not None
    ties = ties_of(parent)
    granted = event.granted_budget_ms
    if parent.budget_ms:
        left = budget_left_ms(parent)
        granted = min(granted, left) if granted else left
    return Call(
        call_id=CallId(f"{parent.call_id}/sub-{number}"),
        task=parent.task,
        batch=parent.batch,
        index=parent.index,
        target=target,
        placement=target.place(parent.task.plan.tenant),
        args=event.args,
        strings=False,
        max_attempts=1,
        budget_ms=granted,
        parent=parent,
        ties=Ties(
            depth=ties.depth + 1,
            request_id=RequestId(event.request_id),
            asked_by=parent.executor,
            spread=event.spread,
            keyed=is_keyed(parent.task.plan, target),
        ),
    )


def mark_effect(call: Call) -> None:
    """The subcall is sent, and must not run twice: no attempt above it may run again by itself (X64)."""
    for above in ancestors(call):
        assert above.ties is not None
        above.ties.effect_below = True


def mark_disturbed(call: Call) -> None:
    """It was told what its equals need not meet: how it and those above it end is no other call's answer."""
    for one in (call, *ancestors(call)):
        ties_of(one).disturbed = True


def is_for_its_place(refusal: CallFailure) -> bool:
    """Whether another call of the same function might not have been refused."""
    by_kind = refusal.kind in (ErrorKind.TIMEOUT, ErrorKind.RESOURCE_LIMIT)
    return by_kind or refusal.details.get("reason") in ("depth", "cycle", "exclusive")
