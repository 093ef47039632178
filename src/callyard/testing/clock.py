"""A clock that moves only when it is told to."""

from __future__ import annotations


class FakeClock:
    """`callyard.clock.Clock` for tests and simulations. Starts at 0 ms unless told otherwise."""

    __slots__ = ("_now_ms",)

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, duration_ms: int) -> int:
        """Move on by `duration_ms`; returns the new time."""
        return self.move_to(self._now_ms + duration_ms)

    def move_to(self, at_ms: int) -> int:
        """Move on to an instant. A monotonic clock never goes back: an earlier one is a ValueError."""
        if at_ms < self._now_ms:
            raise ValueError(f"the clock stands at {self._now_ms} ms and cannot go back to {at_ms} ms")
        self._now_ms = at_ms
        return at_ms
