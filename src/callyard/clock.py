"""The clock, as a port: pure code is handed `now_ms`, shells read it here."""

import time
from typing import Final, Protocol


class Clock(Protocol):
    """Milliseconds from an origin that never moves."""

    def now_ms(self) -> int: ...


class MonotonicClock:
    """CLOCK_MONOTONIC in whole milliseconds: the origin that instants in frames share (X78)."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


SYSTEM_CLOCK: Final[Clock] = MonotonicClock()
