"""A task: the group of calls that converges together, committed whole or batch by batch."""

from __future__ import annotations

from collections import deque

import msgspec

from callyard.ids import TaskId, Tenant
from callyard.scheduler.calls import Call, CallResult, StopReason


class TaskPlan(msgspec.Struct, frozen=True, gc=False):
    """What a task is started with."""

    task_id: TaskId
    tenant: Tenant = Tenant("default")
    max_attempts: int = 3
    base_backoff_ms: int | None = None
    """None: the scheduler's own."""
    default_budget_ms: int = 0
    """Running time of an attempt whose function names none; 0: unlimited."""
    streaming: bool = True
    """Batches settle one by one and their results leave the core; else all results leave with convergence."""
    uses_slot: bool = True
    """Call lists take one of `executor_task_slots`; tool calls do not (D39)."""


class Batch(msgspec.Struct, eq=False):
    """Rows that were committed together and settle together."""

    index: int
    results: list[CallResult | None]
    """In row order; None: not ended yet."""
    first_index: int
    remaining: int
    """Calls not DONE; the batch settles at 0."""
    calls: list[Call]
    output_bytes: int = 0


class Task(msgspec.Struct, eq=False):
    """State of one task. Only the scheduler changes it."""

    plan: TaskPlan
    ready: deque[Call]
    """READY calls that may be bound, in order."""
    batches: dict[int, Batch]
    """Batches that have not settled."""
    active: bool = False
    """In the call phase: holds a slot, or needs none."""
    in_ring: bool = False
    """In the ring of tasks that take turns."""
    inflight: int = 0
    """Root calls RUNNING or WAITING."""
    total_count: int = 0
    terminal_count: int = 0
    failed_count: int = 0
    production_open: bool = True
    """More batches may be committed."""
    stop_reason: StopReason | None = None
    """Set: no more calls are dispatched."""
    stop_message: str = ""
    production_stop_sent: bool = False
    next_batch_index: int = 0
    held_output_bytes: int = 0
    """Outputs the worker holds: of unsettled batches, and of settled ones that no sink has taken."""
    untaken: dict[int, int] = {}
    """Settled batches whose outputs no sink has taken: index to bytes."""
    settled: list[Batch] = []
    """Batches whose last call ended since the last epilogue (streaming)."""
    results: list[CallResult] = []
    """Results kept until convergence (not streaming), by batch."""
    dirty: bool = False

    @property
    def task_id(self) -> TaskId:
        return self.plan.task_id

    @property
    def is_over(self) -> bool:
        return not self.production_open and self.terminal_count == self.total_count and not self.batches
