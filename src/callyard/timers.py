"""The running event loop as `Timers`. Apart from `clock`, so that who needs no loop imports none."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

from callyard.clock import Timer

LONGEST_MS: Final = 86_400_000
"""Loops refuse timers of many days; whoever waits longer looks again, and arms again."""


class LoopTimers:
    """Satisfies `callyard.clock.Timers`: CLOCK_MONOTONIC, and `call_later` of the loop that runs here."""

    def now_ms(self) -> int:
        return monotonic_ns() // 1_000_000

    def call_at(self, at_ms: int, callback: Callable[[], None], /) -> Timer:
        left_ms = at_ms - monotonic_ns() // 1_000_000
        if left_ms > LONGEST_MS:
            left_ms = LONGEST_MS
        return get_running_loop().call_later(left_ms / 1_000 if left_ms > 0 else 0, callback)
