"""When an executor counts as stalled, silent, or wedged.

A heartbeat with an old scheduler time means code that never yields: a wedge. No heartbeat at all means that even the
heartbeat thread cannot run: the GIL is held, or the process is stopped or gone. Source: call-execution X38, X73, X74.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN_MS = 5_000


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Limits in force at one executor. None: that check is off."""

    stall_ms: int | None
    heartbeat_ms: int
    heartbeat_needs_idle_cpu: bool
    """An unlimited budget has begun there: silence counts only while the process's CPU time stands still."""


def derive_stall_timeout_ms(call_deadline_ms: int, explicit_ms: int | None) -> int:
    """The wedge threshold: `call_deadline_ms` + 5000 unless a larger value is set.

    An explicit value of at most `call_deadline_ms` + 1000 would kill calls that are within their budget, and is raised.
    """
    derived = call_deadline_ms + MARGIN_MS
    if explicit_ms is None or explicit_ms <= call_deadline_ms + 1_000:
        return derived
    return explicit_ms


def compute_limits(
    stall_timeout_ms: int, heartbeat_timeout_ms: int, largest_budget_ms: int, *, unlimited: bool
) -> StallLimits:
    """Limits for an executor whose begun calls have budgets up to `largest_budget_ms` (0: none has begun)."""
    stall = max(stall_timeout_ms, largest_budget_ms + MARGIN_MS)
    heartbeat = max(heartbeat_timeout_ms, stall + MARGIN_MS)
    return StallLimits(
        stall_ms=None if unlimited else stall,
        heartbeat_ms=heartbeat,
        heartbeat_needs_idle_cpu=unlimited,
    )


def is_stalled(limits_stall_ms: int | None, running: bool, last_scheduler_active_at_ms: int, now_ms: int) -> bool:
    """Whether running code has kept its executor's scheduler from turning for longer than allowed."""
    return limits_stall_ms is not None and running and now_ms - last_scheduler_active_at_ms > limits_stall_ms
