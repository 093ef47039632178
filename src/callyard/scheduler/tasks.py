"""A task: the group of calls that converges together, committed whole or batch by batch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from callyard.ids import FunctionId, TaskId, Tenant
from callyard.scheduler.calls import Call, CallResult, StopReason
from callyard.scheduler.placement import Placement

if TYPE_CHECKING:
    from callyard.scheduler.flights import Sharing

CachePolicy = Literal["promised", "all", "off"]
"""Which results of a task are cached and shared among its equal calls: of `pure` functions, of all, of none."""
OnFailure = Literal["continue", "fail_fast"]
"""`fail_fast`: the first final failure of a root call stops dispatching (X14)."""


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
    cache: CachePolicy = "promised"
    on_failure: OnFailure = "continue"
    takes_rows: bool = False
    """Arguments of its root calls are rows of a call list: a function with `takes_row` takes an object whole."""
    binary: bool = False
    """Results of its root calls may have binary parts, as those of subcalls may; else they are JSON."""
    nan_null: bool = False
    """NaN and infinities in results of its root calls are null."""


@dataclass(eq=False, slots=True)
class Batch:
    """Rows that were committed together and settle together."""

    index: int
    results: list[CallResult | None]
    """In row order; None: not ended yet."""
    first_index: int
    remaining: int
    """Root calls not DONE; the batch settles at 0, once its subcalls are gone too."""
    calls: list[Call]
    output_bytes: int = 0
    subcalls: int = 0
    """Subcalls below its root calls that are not DONE."""


@dataclass(eq=False, slots=True)
class Lane:
    """A task's READY root calls of one placement, so that no call waits behind one that runs elsewhere. A tool call is
    a task of its own, and so has one function."""

    task: Task
    placement: Placement
    calls: deque[Call]
    """Those that may be bound, in order."""
    function: FunctionId | None = None
    """Whose calls these are; None: a call list's, of any function."""
    in_ring: bool = False
    """In the ring of lanes that take turns."""


@dataclass(eq=False, slots=True)
class Task:
    """State of one task. Only the scheduler changes it."""

    plan: TaskPlan
    batches: dict[int, Batch]
    """Batches that have not settled."""
    lanes: dict[Placement, Lane] = field(default_factory=dict)
    active: bool = False
    """In the call phase: holds a slot, or needs none."""
    held_back: bool = False
    """A lane of it left its ring, or did not enter it, since the task had as many calls in flight as it may."""
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
    untaken: dict[int, int] = field(default_factory=dict)
    """Settled batches whose outputs no sink has taken: index to bytes."""
    settled: list[Batch] = field(default_factory=list)
    """Batches whose last call ended since the last epilogue (streaming)."""
    results: list[CallResult] = field(default_factory=list)
    """Results kept until convergence (not streaming), by batch."""
    dirty: bool = False
    sharing: Sharing | None = None
    """Its cached results and equal calls; None: no call of it had a key yet."""

    @property
    def task_id(self) -> TaskId:
        return self.plan.task_id

    def lane_of(self, call: Call) -> Lane:
        placement = call.placement
        lane = self.lanes.get(placement)
        if lane is None:
            function = None if self.plan.uses_slot else call.target.function_id
            lane = self.lanes[placement] = Lane(self, placement, deque(), function)
        return lane

    @property
    def is_over(self) -> bool:
        return not self.production_open and self.terminal_count == self.total_count and not self.batches
