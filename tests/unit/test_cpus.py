"""A cgroup's limit on processor time, of either version, and files that say none."""

from __future__ import annotations

from pathlib import Path

import pytest

from callyard.cpus import CpuQuota, read_cpu_quota


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


FIRST = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


@pytest.mark.requirement("X89")
@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"cpu.max": "150000 100000\n"}, CpuQuota(150_000, 100_000)),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 0\n"}, None),
        ({"cpu.max": "unreadable"}, None),
        (dict(zip(FIRST, ("50000\n", "100000\n"), strict=True)), CpuQuota(50_000, 100_000)),
        (dict(zip(FIRST, ("-1\n", "100000\n"), strict=True)), None),
        ({FIRST[0]: "50000\n"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_either_version(tmp_path: Path, files: dict[str, str], found: CpuQuota | None) -> None:
    assert read_cpu_quota(write(tmp_path, files)) == found
