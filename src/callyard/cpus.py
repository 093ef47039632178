"""How much of the processors a cgroup leaves this process. Source: call-execution X89, job-queue §5."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class CpuQuota(NamedTuple):
    """So many microseconds of processor time in each period."""

    quota_us: int
    period_us: int


def read_cpu_quota(root: Path | str = "/sys/fs/cgroup") -> CpuQuota | None:
    """The limit of the cgroup mounted at `root`, of either version; None: no limit, or none that can be read."""
    try:
        quota, period = Path(root, "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = Path(root, "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = Path(root, "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max", and -1 in the first version
        return None
    return CpuQuota(int(quota), int(period))
