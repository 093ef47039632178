"""Looking at processes: children, and whether they are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

WAIT_S = 30.0


def children_of(pid: int) -> list[int]:
    """Direct children of a process, by /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    """Runs, or is stopped; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition about another process, which has no event to wait for."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {WAIT_S} s: {what}")
        time.sleep(0.01)


def wait_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} gone")  # type: ignore[misc]


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
