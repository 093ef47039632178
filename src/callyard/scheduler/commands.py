"""Orders from the scheduler: a closed set, matched exhaustively by the shell (X6)."""

from __future__ import annotations

import msgspec

from callyard.errors import CallFailure
from callyard.ids import CallId, ExecutorId, RequestId, TaskId
from callyard.scheduler.calls import CallResult, FunctionTarget, StopReason


class Command(msgspec.Struct, frozen=True, gc=False):
    """An order, in the imperative."""


class BindCall(Command, frozen=True):
    """Reserve a context; answer with ExecutorBound or CallRefused in the same turn."""

    call_id: CallId
    executor_id: ExecutorId
    attempt_seq: int
    budget_ms: int


class UnbindCall(Command, frozen=True):
    """Release the reservation. Idempotent."""

    call_id: CallId
    executor_id: ExecutorId
    attempt_seq: int


class CancelCall(Command, frozen=True):
    """Tell the executor to stop this attempt; its reservation drains until the terminal frame.

    Without a reason it is only asked back: one that has begun goes on, and its reservation stays as it is (X93).
    """

    call_id: CallId
    executor_id: ExecutorId
    attempt_seq: int
    reason: StopReason | None


class DispatchCall(Command, frozen=True):
    """Send the attempt to its executor, or answer CallRefused or DispatchRejected."""

    call_id: CallId
    task_id: TaskId
    executor_id: ExecutorId
    attempt_seq: int
    attempt: int
    """From 1; what the function sees."""
    target: FunctionTarget
    args: bytes
    strings: bool
    budget_ms: int
    parent_call_id: CallId = CallId("")
    """The call that asked for this subcall; empty: a root call."""


class ArmCallRetry(Command, frozen=True):
    """Post RetryDue for this call at `due_at_ms`."""

    call_id: CallId
    due_at_ms: int


class CompleteCallFromCache(Command, frozen=True):
    """A cached or shared result ended a root call without a run."""

    call_id: CallId
    task_id: TaskId


class ResumeParent(Command, frozen=True):
    """Answer a call's request with how its subcall ended: send ResumeCall, then CallResumed, or ResumeSendFailed."""

    call_id: CallId
    """The parent."""
    executor_id: ExecutorId
    attempt_seq: int
    request_id: RequestId
    output: bytes | None
    failure: CallFailure | None
    budget_used_ms: int
    """What the parent pays; already charged here."""


class BatchSettled(Command, frozen=True):
    """A batch is all terminal; its results leave the core here."""

    task_id: TaskId
    batch_index: int
    results: list[CallResult]
    output_bytes: int


class StopCallProduction(Command, frozen=True):
    """The builder must commit no more batches."""

    task_id: TaskId
    reason: StopReason


class ConvergeTaskCalls(Command, frozen=True):
    """The task is over."""

    task_id: TaskId
    success: bool
    """No root failed and nothing stopped it."""
    outputs: list[bytes]
    """Of the successful roots in list order; empty for a streaming task, whose outputs left by batch."""
    results: list[CallResult]
    """One per index in list order; empty for a streaming task."""
    stop_reason: StopReason | None
    total_count: int
    failed_count: int


SchedulerCommand = (
    BindCall
    | UnbindCall
    | CancelCall
    | DispatchCall
    | ArmCallRetry
    | CompleteCallFromCache
    | ResumeParent
    | BatchSettled
    | StopCallProduction
    | ConvergeTaskCalls
)
