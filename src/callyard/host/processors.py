"""What this machine gives a host to run on. Source: job-queue §5."""

from __future__ import annotations

import os

from callyard.host.config import ProcessorFigures


def read_processors(*, executors_max: int | None = None) -> ProcessorFigures:
    """The system's figures; what it does not tell is None."""
    quota_us, period_us = _read_quota()
    return ProcessorFigures(
        logical=os.cpu_count(),
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        quota_us=quota_us,
        period_us=period_us,
        executors_max=executors_max,
    )


def _read_quota() -> tuple[int | None, int | None]:
    """Of this cgroup, in microseconds of each period; none without a limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return (None, None) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        return None, None
