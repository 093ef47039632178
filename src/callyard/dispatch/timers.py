"""The running event loop as `Timers`."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable
from time import monotonic_ns

from callyard.clock import Timer

_LONGEST_MS = 86_400_000
"""Loops refuse timers of many days; a call that pauses looks again, and pauses again."""


class LoopTimers:
    """Satisfies `callyard.clock.Timers`: CLOCK_MONOTONIC, and `call_later` of the loop that runs here."""

    def now_ms(self) -> int:
        return monotonic_ns() // 1_000_000

    def call_at(self, at_ms: int, callback: Callable[[], None], /) -> Timer:
        left_ms = at_ms - monotonic_ns() // 1_000_000
        if left_ms > _LONGEST_MS:
            left_ms = _LONGEST_MS
        return get_running_loop().call_later(left_ms / 1_000 if left_ms > 0 else 0, callback)
