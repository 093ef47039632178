"""Timers that fire when a test moves the clock, in the order of their instants."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from callyard.testing.clock import FakeClock


class ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualTimers(FakeClock):
    """`callyard.clock.Timers`."""

    __slots__ = ("_heap", "_numbers", "fired")

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, ManualTimer]] = []
        self._numbers = count()
        self.fired = 0

    def call_at(self, at_ms: int, callback: Callable[[], None], /) -> ManualTimer:
        timer = ManualTimer(callback)
        heappush(self._heap, (at_ms, next(self._numbers), timer))
        return timer

    @property
    def armed(self) -> int:
        return sum(timer.callback is not None for _, _, timer in self._heap)

    def late(self, duration_ms: int) -> None:
        """Time goes by, and the loop is too busy to fire anything."""
        super().advance(duration_ms)

    def advance(self, duration_ms: int) -> int:
        until_ms = self.now_ms() + duration_ms
        while self._heap and self._heap[0][0] <= until_ms:
            at_ms, _, timer = heappop(self._heap)
            if timer.callback is not None:
                self.move_to(max(at_ms, self.now_ms()))
                self.fired += 1
                timer.callback()
        return self.move_to(until_ms)
