"""What the scheduler shows of itself."""

from __future__ import annotations

import msgspec

from callyard.ids import ExecutorId
from callyard.scheduler.placement import Placement


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """One consistent snapshot of the counts."""

    tasks_active: int
    tasks_waiting: int
    calls: int
    """Root calls and subcalls that have not settled."""
    inflight: int
    """Live reservations."""
    waiting: int
    draining: int
    """Reservations of stopped attempts that wait for their terminal frame."""
    executors: int
    finished: int
    """Indexes with a result, rows that came as failures included."""
    failed: int
    retried: int
    stale: int
    """Frames of attempts that are no longer current (X13)."""
    dropped: int
    """Late timers, and requests that were unknown or repeated (X4, X66)."""
    refused: int
    subcalls: int = 0
    """Subcalls made so far; those refused are not counted."""
    shared: int = 0
    """Calls, roots and subcalls, that ended by a cached result or an equal call's end."""
    exclusive_waiting: int = 0


class TaskProgress(msgspec.Struct, frozen=True, gc=False):
    """Root calls of one task: committed so far, ended, failed among those, and RUNNING or WAITING."""

    total_count: int
    terminal_count: int
    failed_count: int
    inflight: int


class Demand(msgspec.Struct, frozen=True):
    """Which placements lack executors; true between turns."""

    unmet: list[Placement]
    """Those of root calls that may be bound, and that no executor may take now."""
    stranded: list[Placement]
    """Those of subcalls that no executor may ever take as things stand: what holds the executors may wait for them."""
    bound: dict[ExecutorId, Placement | None]
    """Every executor, and what it is bound to; None: nothing yet."""
