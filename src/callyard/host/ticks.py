"""Timers of spots: when one is due, its message comes as a turn, behind what the spot has to do already.

A timer belongs to the spot's id, not to its object: it outlives a move and being put away, and ends with the spot. A
recurring one has one message under way at most; ticks that fall due meanwhile are left out, and it does not drift.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from callyard.clock import Timer, Timers
from callyard.host.context import infrastructure_context
from callyard.host.errors import HostError, HostErrorKind

TIMERS_MAX: Final = 1_024
"""Of one spot."""

Tick = Callable[[Callable[[], None]], None]
"""Submit the message; the argument is called once its turn is over, or will not be."""


class SpotTimer:
    """An armed timer of a spot."""

    __slots__ = ("_at_ms", "_every_ms", "_is_under_way", "_of", "_tick", "_timer", "spot")

    def __init__(self, of: SpotTimers, spot: str, at_ms: int, every_ms: int | None, tick: Tick) -> None:
        self.spot = spot
        self._of = of
        self._at_ms = at_ms
        self._every_ms = every_ms
        self._tick = tick
        self._is_under_way = False
        self._timer: Timer | None = None

    def cancel(self) -> None:
        """No further message; one that is under way comes. A second time changes nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._of._forget(self)

    def _arm(self) -> None:
        self._timer = infrastructure_context().run(self._of._timers.call_at, self._at_ms, self._fire)

    def _fire(self) -> None:
        now_ms = self._of._timers.now_ms()
        if now_ms < self._at_ms:  # no timer of a loop runs for weeks
            self._arm()
            return
        if self._every_ms is None:
            self._of._forget(self)
        else:
            self._at_ms += self._every_ms * ((now_ms - self._at_ms) // self._every_ms + 1)
            self._arm()
        if not self._is_under_way:
            self._is_under_way = True
            self._tick(self._over)

    def _over(self) -> None:
        self._is_under_way = False


class SpotTimers:
    """Of one host."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._by_spot: dict[str, set[SpotTimer]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._by_spot.values()))

    def arm(self, spot: str, after_ms: int, every_ms: int | None, tick: Tick) -> SpotTimer:
        """Raises `HostError`: CAPACITY_EXCEEDED, SHUTTING_DOWN."""
        if self._is_closed:
            raise HostError(HostErrorKind.SHUTTING_DOWN, f"the host is closing: no timer for {spot!r}")
        armed = self._by_spot.setdefault(spot, set())
        if len(armed) >= TIMERS_MAX:
            raise HostError(HostErrorKind.CAPACITY_EXCEEDED, f"{spot!r} has {TIMERS_MAX} timers already")
        timer = SpotTimer(self, spot, self._timers.now_ms() + after_ms, every_ms, tick)
        armed.add(timer)
        timer._arm()
        return timer

    def end(self, spot: str) -> None:
        for timer in list(self._by_spot.get(spot, ())):
            timer.cancel()

    def close(self) -> None:
        self._is_closed = True
        for spot in list(self._by_spot):
            self.end(spot)

    def _forget(self, timer: SpotTimer) -> None:
        armed = self._by_spot.get(timer.spot)
        if armed is not None:
            armed.discard(timer)
            if not armed:
                del self._by_spot[timer.spot]
