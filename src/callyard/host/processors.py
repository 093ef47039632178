"""What this machine gives a host to run on. Source: job-queue §5."""

from __future__ import annotations

import os

from callyard.cpus import read_cpu_quota
from callyard.host.config import ProcessorFigures


def read_processors(*, executors_max: int | None = None) -> ProcessorFigures:
    """The system's figures; what it does not tell is None."""
    quota = read_cpu_quota()
    return ProcessorFigures(
        logical=os.cpu_count(),
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        quota_us=None if quota is None else quota.quota_us,
        period_us=None if quota is None else quota.period_us,
        executors_max=executors_max,
    )
