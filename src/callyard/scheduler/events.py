"""Facts told to the scheduler: a closed set. The list of its inputs is a full recording of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.ids import CallId, ExecutorId, RequestId, TaskId
from callyard.scheduler.calls import FunctionTarget, StopReason
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.placement import DEFAULT_POOL, PoolName


class Event(msgspec.Struct, frozen=True, gc=False):
    """A fact, in the past tense."""


class ExecutorBound(Event, frozen=True):
    """The shell reserved a context for the call's current attempt."""

    call_id: CallId


class CallCompleted(Event, frozen=True):
    executor_id: ExecutorId
    call_id: CallId
    attempt_seq: int
    output: bytes
    notes: tuple[str, ...] = ()
    budget_used_ms: int = 0
    """Running time it was charged with; a subcall's parent pays it."""
    run_us: int = 0
    """How long code of it ran. 0: the last of those that came with it tells that of all."""


class AttemptFailed(Event, frozen=True):
    """A terminal frame that is no success. `recalled` answers a recall of a call that had not begun (X93)."""

    executor_id: ExecutorId
    call_id: CallId
    attempt_seq: int
    kind: ErrorKind
    message: str
    outcome: Outcome | None = None
    """None: the kind's own."""
    recalled: bool = False
    details: Mapping[str, Any] = {}
    stack: str = ""
    local_variables: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    budget_used_ms: int = 0
    run_us: int = 0


class CallRefused(Event, frozen=True):
    """The bind or the send of the current attempt was refused before its frame left (X11, X70)."""

    call_id: CallId
    attempt_seq: int
    cause: str


class DispatchRejected(Event, frozen=True):
    """The attempt cannot be sent at all: outside the pinned view, above the frame cap (X84). Final."""

    call_id: CallId
    attempt_seq: int
    kind: ErrorKind
    message: str
    details: Mapping[str, Any] = {}


class CallSuspended(Event, frozen=True):
    """CallWaiting of kind io. `function_code` waits never come here (X40)."""

    executor_id: ExecutorId
    call_id: CallId
    attempt_seq: int
    request_id: RequestId


class SubcallRequested(Event, frozen=True):
    """CallWaiting of kind subcall: it opens the request too. Answered by ResumeParent, now or later."""

    executor_id: ExecutorId
    call_id: CallId
    """The parent."""
    attempt_seq: int
    request_id: RequestId
    target: FunctionTarget | None
    """From the task's pinned view; None: there is no such function."""
    args: bytes
    granted_budget_ms: int = 0
    """0: all that the parent has left."""
    spread: bool = False
    failure: CallFailure | None = None
    """Why there will be no subcall: the parent is resumed with it at once."""


class CallResumed(Event, frozen=True):
    """The ResumeCall frame was flushed."""

    call_id: CallId
    attempt_seq: int
    request_id: RequestId
    budget_used_ms: int = 0
    """What an IO request used; a subcall's is charged when it ends (ResumeParent), so leave it 0 there."""


class ResumeSendFailed(Event, frozen=True):
    """The resume could not be sent: the attempt is over (X36)."""

    call_id: CallId
    attempt_seq: int


class RetryDue(Event, frozen=True):
    """The timer of an ArmCallRetry fired."""

    call_id: CallId


class ExecutorAttached(Event, frozen=True):
    """An executor's first heartbeat."""

    snapshot: ExecutorSnapshot
    pool: PoolName = DEFAULT_POOL
    memory_high_watermark: int | None = None
    """Resident bytes from which it takes no more, 0: off; None: the setting of that name."""


class SnapshotUpdated(Event, frozen=True):
    snapshot: ExecutorSnapshot


class ExecutorMarks(msgspec.Struct, frozen=True, gc=False):
    """What the begun-mark page of one executor showed."""

    executor_id: ExecutorId
    begun: tuple[tuple[CallId, int], ...]
    """Attempts that it holds and that have begun: call and attempt_seq."""
    code_runs: bool
    """Some call's code runs; else all that have begun there wait."""


class MarksRead(Event, frozen=True):
    """The pages of executors were read, since `wants_marks` (X91)."""

    executors: tuple[ExecutorMarks, ...]


class ExecutorSealed(Event, frozen=True):
    """It takes no more calls: its loss is under way, or it will be replaced."""

    executor_id: ExecutorId
    by_fault: bool = False
    """Its calls are the reason."""


class ExecutorLost(Event, frozen=True):
    """The process is dead and reaped, its socket read to the end (X63)."""

    executor_id: ExecutorId
    cause: str
    """`exited`, `signalled`, `heartbeat`, `wedge`, `malformed_frame`, `cancel_grace`, `stopped`, …"""
    message: str
    begun: frozenset[CallId]
    """Calls whose current attempt had its begun-mark set (X62); the mark of an older one that drains does not count."""
    charged: CallId | None = None
    """The running call of a wedge: only it is charged with it (X38)."""
    details: Mapping[str, Any] = {}
    resource_limit: bool = False
    """The kernel killed it for memory."""


class TaskStopped(Event, frozen=True):
    """Stop dispatching; with `cancel_running` also stop what runs."""

    task_id: TaskId
    reason: StopReason
    cancel_running: bool = True
    message: str = ""
    """What the calls that never ran report; empty: the reason's own text."""


class ProductionEnded(Event, frozen=True):
    """The builder will commit no more batches."""

    task_id: TaskId


class BatchTaken(Event, frozen=True):
    """The sink has taken a settled batch's outputs."""

    task_id: TaskId
    batch_index: int


SchedulerEvent = (
    ExecutorBound
    | CallCompleted
    | AttemptFailed
    | CallRefused
    | DispatchRejected
    | CallSuspended
    | SubcallRequested
    | CallResumed
    | ResumeSendFailed
    | RetryDue
    | ExecutorAttached
    | SnapshotUpdated
    | MarksRead
    | ExecutorSealed
    | ExecutorLost
    | TaskStopped
    | ProductionEnded
    | BatchTaken
)
