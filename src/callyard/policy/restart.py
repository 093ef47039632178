"""Restart throttling of one pool slot.

Only failed attaches, and exits nobody asked for of a process that had finished no call, count; every other loss
restarts at once. So does a fruitless start soon after one that was not: whoever kills processes from outside meets some
before their first call. Source: call-execution X45, X72.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Final

PROGRESS_MS: Final = 5_000
"""So long after a process that had finished calls was lost, its slot counts as one that makes progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    restart_delay_ms: int = 1_000
    max_restarts: int = 10
    restart_window_ms: int = 60_000
    backoff_ms: int = 30_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0:
                raise ValueError(f"{field.name} must be at least 0, got {value}")


class RestartThrottle:
    """Counts the fruitless starts of one slot inside a sliding window."""

    __slots__ = ("_fruitless_at_ms", "_policy", "_progress_until_ms")

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._fruitless_at_ms: deque[int] = deque()
        self._progress_until_ms: int | None = None

    def record_exit(self, now_ms: int, *, made_progress: bool) -> tuple[int, bool]:
        """Delay in milliseconds before the next start, and whether the slot goes to BACKOFF."""
        if made_progress:
            self._progress_until_ms = now_ms + PROGRESS_MS
            return 0, False
        if self._progress_until_ms is not None and now_ms <= self._progress_until_ms:
            return 0, False
        policy = self._policy
        fruitless = self._fruitless_at_ms
        fruitless.append(now_ms)
        while fruitless and fruitless[0] <= now_ms - policy.restart_window_ms:
            fruitless.popleft()
        if len(fruitless) > policy.max_restarts:
            fruitless.clear()
            return policy.backoff_ms, True
        return policy.restart_delay_ms, False
