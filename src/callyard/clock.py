"""The clock, as a port: pure code is handed `now_ms`, shells read it here, and what waits arms a timer."""

import time
from collections.abc import Callable
from typing import Final, Protocol


class Clock(Protocol):
    """Milliseconds from an origin that never moves."""

    def now_ms(self) -> int: ...


class Timer(Protocol):
    """An armed timer."""

    def cancel(self) -> None: ...


class Timers(Clock, Protocol):
    """A clock that also calls back."""

    def call_at(self, at_ms: int, callback: Callable[[], None], /) -> Timer:
        """Call once, at the instant or a little after it; at once, but never inside this call, when it has passed."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC in whole milliseconds: the origin that instants in frames share (X78)."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


SYSTEM_CLOCK: Final[Clock] = MonotonicClock()
