"""A call and its life: four states, one table, one function that applies it.

A `Call` exists once for its whole life; a retry keeps its id. READY: may be bound (or waits for a retry timer).
RUNNING: an executor holds a reservation for it. WAITING: it has open requests (IO, subcalls). DONE: terminal.
Source: call-execution X3-X5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from callyard.errors import CallFailure, InvalidTransition
from callyard.ids import CallId, Digest, FunctionId, RequestId, Tenant
from callyard.scheduler.placement import DEFAULT_POOL, Placement, PoolName

if TYPE_CHECKING:
    from callyard.scheduler.executors import ExecutorState
    from callyard.scheduler.flights import Flight
    from callyard.scheduler.seats import Line, Seat
    from callyard.scheduler.tasks import Batch, Task


class CallState(IntEnum):
    READY = 0
    RUNNING = 1
    WAITING = 2
    DONE = 3


class Trigger(IntEnum):
    """What moves a call. A guard picks the trigger, the table picks the state."""

    BOUND = 1
    SUSPENDED = 2
    RESUMED = 3
    REQUEUED = 4
    """Bind failed, refused, recalled, lost before it began, or a failed attempt that may run again."""
    FINISHED = 5


class StopReason(StrEnum):
    """Why a task, or one running call, is told to stop."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SHUTTING_DOWN = "shutting_down"
    FAIL_FAST = "fail_fast"
    MAX_FAILURES = "max_failures"
    OUTPUT_BYTES_EXCEEDED = "output_bytes_exceeded"
    SINK_FAILED = "sink_failed"
    UNAVAILABLE = "unavailable"


READY, RUNNING, WAITING, DONE = CallState
BOUND, SUSPENDED, RESUMED, REQUEUED, FINISHED = Trigger

CALL_TRANSITIONS: Final[Mapping[tuple[CallState, Trigger], CallState]] = {
    (READY, BOUND): RUNNING,
    (READY, FINISHED): DONE,
    (RUNNING, SUSPENDED): WAITING,
    (RUNNING, REQUEUED): READY,
    (RUNNING, FINISHED): DONE,
    (WAITING, RESUMED): RUNNING,
    (WAITING, REQUEUED): READY,
    (WAITING, FINISHED): DONE,
}

_NEXT: Final = [[CALL_TRANSITIONS.get((state, trigger)) for trigger in (None, *Trigger)] for state in CallState]
"""The same table by index, since it is read twice for every call."""
_HISTORY_MASK: Final = (1 << 64) - 1


class FunctionTarget(msgspec.Struct, frozen=True, gc=False):
    """What the scheduler needs to know of a function, resolved when calls are prepared (X84)."""

    function_id: FunctionId
    digest: Digest
    entry_selector: str
    idempotent: bool = False
    budget_ms: int | None = None
    """Running time of one attempt; None: the task's default, 0: unlimited. A subcall runs on what it is granted."""
    pure: bool = False
    """Same input, same output: its results may be cached and shared, and it may run again."""
    exclusive: bool = False
    """A root call of it shares its executor with nothing but its own subcalls (X90)."""
    max_concurrency: int | None = None
    """Calls of it that may run at once, over all tasks and executors (X81)."""
    takes_row: bool = False
    """It has one object parameter, which takes a whole row: the same object means another thing in a subcall."""
    pool: PoolName = DEFAULT_POOL
    confined: bool = False
    """Its pool is sandboxed: an executor there serves one tenant (X92)."""
    check_only: bool = False
    """Its arguments are bound, and it is not called."""
    binary: bool = False
    """Its results may hold bytes, arrays or tables, so that who asks as Python gets others than who asks for JSON."""

    def place(self, tenant: Tenant) -> Placement:
        """Where calls of it that belong to this tenant may run."""
        return Placement(self.pool, self.digest, tenant if self.confined else None)

    @property
    def may_run_again(self) -> bool:
        return self.idempotent or self.pure


class NewCall(msgspec.Struct, frozen=True, gc=False):
    """One row of a call list before it becomes a call: a target and arguments, or the failure that the row is."""

    index: int
    target: FunctionTarget | None
    args: bytes
    strings: bool = False
    failure: CallFailure | None = None


class CallResult(msgspec.Struct, frozen=True, gc=False):
    """How one call ended: an output (JSON bytes as the executor sent them) or a failure."""

    index: int
    output: bytes | None
    failure: CallFailure | None
    attempts: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.failure is None


NO_REQUEST: Final = RequestId("")


@dataclass(eq=False, slots=True)
class Ties:
    """What ties a call to others: its family, equal calls, a seat. A plain root call has none, and costs nothing here.

    What belongs to one attempt is reset when the call is bound.
    """

    # --- its family -------------------------------------------------------------------------------------------

    depth: int = 0
    """Calls above it; a root's is 0."""
    request_id: RequestId = NO_REQUEST
    """The request of its parent that its end answers."""
    asked_by: ExecutorState | None = None
    """Of a subcall: whose call asked for it."""
    spread: bool = False
    """Rather on another executor than its parent's (X30)."""
    orphaned: bool = False
    """Its parent's attempt is over: nobody waits for its end."""
    used_ms: int = 0
    """What it used of its parent's budget, by its terminal frame."""
    children: dict[CallId, Call] = field(default_factory=dict)
    """Subcalls of the current attempt that are not DONE."""
    charged_ms: int = 0
    """What requests have used of the current attempt's budget (X65, X85)."""
    effect_below: bool = False
    """The current attempt had a call below it dispatched that must not run twice (X64)."""
    disturbed: bool = False
    """The current attempt was told what another run of it need not meet: a refusal for where it stands (depth, cycle,
    budget), or a subcall's crash. How it ends is no answer to its equals."""

    # --- equal calls ------------------------------------------------------------------------------------------

    keyed: bool = False
    """Its result may be cached and shared."""
    key: bytes | None = None
    """Of function, digest and arguments; made when first needed."""
    flight: Flight | None = None
    """The equal calls that it leads, or waits among."""

    # --- limits -----------------------------------------------------------------------------------------------

    seat: Seat | None = None
    """Its own place under `max_concurrency`, or an ancestor's; held while bound."""
    line: Line | None = None
    """Set aside here until a seat is free."""
    called: Line | None = None
    """A seat of this function is kept for it until its turn comes."""
    awaits_executor: bool = False
    """Set aside until an executor is free of other calls (X90)."""


@dataclass(eq=False, slots=True)
class Call:
    """The one carrier of a call's state. Only the scheduler changes it."""

    call_id: CallId
    task: Task
    batch: Batch
    index: int
    """Place in the call list; results are reported under it."""
    target: FunctionTarget
    placement: Placement
    """Which executors may take it."""
    args: bytes
    strings: bool
    max_attempts: int
    budget_ms: int
    """Running time of each attempt; 0: unlimited."""
    state: CallState = READY
    attempt_seq: int = 0
    """Rises with every bind, never goes back (X69)."""
    attempt_count: int = 0
    """Counts against max_attempts; given back when an attempt provably never began."""
    executor: ExecutorState | None = None
    """Holds its reservation; set exactly while RUNNING or WAITING."""
    begun: bool = False
    """The current attempt is known to have begun: it ended, asked for something, or its mark was read. Of root calls;
    it may have begun without (X91)."""
    asked_back: bool = False
    """The current attempt was asked back, should it not have begun (X93)."""
    open_requests: set[RequestId] | None = None
    """Requests the executor waits for; not empty exactly while WAITING."""
    queued: bool = False
    """In its task's ready queue, or a subcall in its parent's executor's; a subset of READY. The others wait for a
    retry timer, or are set aside."""
    retry_at_ms: int = 0
    """When a READY call that is not queued may run again."""
    effect_unknown: bool = False
    """An earlier attempt began and may have had its effect: a later attempt that did not run cannot undo that."""
    stopping: StopReason | None = None
    """A CancelCall is out; its terminal frame decides."""
    history: int = 0
    """The last eight triggers, a byte each, newest lowest."""
    parent: Call | None = None
    """The call that asked for it; None: a root call."""
    ties: Ties | None = None

    def apply(self, trigger: Trigger) -> None:
        """Move by the table. Raises `InvalidTransition` with the call's history: the caller is our own code."""
        state = _NEXT[self.state][trigger]
        if state is None:
            raise InvalidTransition(
                f"call {self.call_id}: no transition from {self.state.name} by {trigger.name}"
                f" (attempt {self.attempt_seq}, history {' '.join(self.recent_triggers()) or 'none'})"
            )
        self.state = state
        self.history = (self.history << 8 | trigger) & _HISTORY_MASK

    @property
    def is_set_aside(self) -> bool:
        """READY, but something else must happen before an executor is looked for."""
        ties = self.ties
        if ties is None or self.state is not READY:
            return False
        waits = ties.flight is not None and ties.flight.leader is not self
        return waits or ties.line is not None or ties.awaits_executor

    def recent_triggers(self) -> list[str]:
        """Names of the last triggers, oldest first."""
        codes = self.history.to_bytes(8, "big").lstrip(b"\0")
        return [Trigger(code).name for code in codes]
