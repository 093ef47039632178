"""How many calls may be queued ahead at an executor, by how long calls run there.

What is queued there is bound: behind a long call it waits, though another executor may be idle. So the line is held to
what its executor runs in `ahead_ms`, and one call at the least, so that it never waits for the next. Observed is
running time, told with each end: calls that wait make way at once, and the line behind them may be long. Time between
ends would not do: it is the worker's own, too, and a short line would make itself shorter. Source: call-execution X91.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_AHEAD: Final = 16
"""Calls ahead while nothing is known yet."""
AVERAGED_CALLS: Final = 16
"""Over so many ends the observed time is averaged."""
LIMIT_MAX: Final = 1 << 20
"""More than any executor is sent."""
RUN_US_MIN: Final = 1
"""No call is taken for shorter."""


@dataclass(eq=False, slots=True)
class Lookahead:
    """Of one executor."""

    ahead_ms: int
    """0: there is no limit but `LIMIT_MAX`."""
    limit: int = 1 + FIRST_AHEAD
    """A line may get one more call while it is shorter: the call that is about to begin counts."""
    per_call_us: float | None = None
    """None: no end was seen yet."""
    moved_at_ms: int = 0
    """When the line moved last."""
    ended: int = 0
    """Ends that are not in the average yet, and how long those calls ran."""
    run_us: int = 0
    squeezed: bool = False
    """The limit is for the call that holds the line up now."""

    def __post_init__(self) -> None:
        if not self.ahead_ms:
            self.limit = LIMIT_MAX

    def move(self, now_ms: int) -> None:
        """A call left the line, or came to an empty one."""
        self.moved_at_ms = now_ms
        if self.squeezed:
            self._limit_to(self.per_call_us)

    def end(self, run_us: int) -> None:
        """A call ended. `run_us`: how long it had run, with those that ended just before it and told nothing."""
        self.ended += 1
        self.run_us += run_us
        if self.ended >= AVERAGED_CALLS or self.per_call_us is None or self.run_us >= 1_000:
            sample = self.run_us / self.ended
            known = sample if self.per_call_us is None else self.per_call_us
            self.per_call_us = known + (sample - known) * min(1.0, self.ended / AVERAGED_CALLS)
            self.ended = self.run_us = 0
            self._limit_to(self.per_call_us)

    def look(self, now_ms: int) -> None:
        """Something stands in the line. While nothing leaves it, the call that holds it up counts as one that runs for
        as long as it did."""
        held_us = (now_ms - self.moved_at_ms) * 1_000
        if held_us > (self.per_call_us or 0):
            self._limit_to(held_us)
            self.squeezed = True

    def find_waiting(self) -> None:
        """All of the line has begun, and no code runs there: what the calls do is wait."""
        self.limit = min(4 * self.limit, LIMIT_MAX)
        self.squeezed = False

    def _limit_to(self, per_call_us: float | None) -> None:
        self.squeezed = False
        if not self.ahead_ms:
            return
        ahead = FIRST_AHEAD if per_call_us is None else int(self.ahead_ms * 1_000 / max(per_call_us, RUN_US_MIN))
        self.limit = 1 + max(1, ahead)

    def is_held_up(self, now_ms: int) -> bool:
        """Nothing has left the line for longer than one may wait in it."""
        return self.ahead_ms > 0 and now_ms - self.moved_at_ms >= self.ahead_ms
