"""Benchmarks: seeded workloads, speed as ratios measured side by side in one run. See CONTRIBUTING.md."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table


def describe_machine() -> str:
    """What the figures were taken on: CPUs that this process may use, kind, Python."""
    cpus = len(usable_cpus())
    return (
        f"{cpus} CPU{'s' * (cpus != 1)} {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    )


def usable_cpus() -> list[int]:
    """The CPUs of this process's affinity, in order; on systems without affinity all there are."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def pinned(*processes: tuple[int, int]) -> Iterator[None]:
    """Hold each (process id, cpu) to its CPU for a while; id 0 is this process, whose affinity comes back after."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        for process_id, cpu in processes:
            os.sched_setaffinity(process_id, {cpu})
        yield
    finally:
        os.sched_setaffinity(0, before)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; of fewer than 100 values the largest."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column names, the others are figures."""
    table = Table(title=title, title_justify="left", caption=describe_machine(), caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def thousands(per_second: float) -> str:
    return f"{per_second / 1000:,.1f} k/s"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"
