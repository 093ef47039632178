"""Seats for subcalls: a call of a call that is here always finds one in the end (X80).

Roots have `executor_max_inflight` slots of the begun-mark page to themselves; the others are seats for subcalls, taken
when one is received, or, while there is none, when another ends. Were they given to whoever comes first, calls that
wait for their own subcalls could hold them all. So a call of depth d is only seated while as many seats stay free as
levels may follow below it: of all calls that wait, the deepest can always go on, on whatever executor its subcall is.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from callyard.executor.contexts import Call
from callyard.ids import CallId

DEPTH_MAX: Final = 64
"""Deepest nesting that a worker can be set to allow."""
SUBCALL_MARK: Final = "/sub-"
"""In a call's id, once for each level (X24)."""


class Seats:
    def __init__(self, count: int) -> None:
        self.calls: Final[dict[Call, bool]] = {}
        """Every subcall that is here, and whether it has a seat."""
        self.count: Final = count
        self._free = count
        self._held: dict[int, deque[Call]] = {}
        """Those without a seat, by their depth."""

    @property
    def is_too_small(self) -> bool:
        """A chain of the greatest depth would not fit."""
        return self.count < DEPTH_MAX

    def admit(self, call: Call) -> bool:
        """True: it is seated. False: `leave` will return it when it is."""
        depth = depth_of(call.call_id)
        seated = self.calls[call] = self._fits(depth)
        if seated:
            self._free -= 1
        else:
            self._held.setdefault(depth, deque()).append(call)
        return seated

    def leave(self, call: Call) -> Call | None:
        """A subcall has ended, or was taken back. Returns the one that is seated in its place."""
        if not self.calls.pop(call):
            self._held[depth_of(call.call_id)].remove(call)
            return None
        self._free += 1
        for depth in sorted(self._held, reverse=True):
            held = self._held[depth]
            if held and self._fits(depth):
                found = held.popleft()
                self.calls[found] = True
                self._free -= 1
                return found
        return None

    def _fits(self, depth: int) -> bool:
        return self._free > DEPTH_MAX - depth


def depth_of(call_id: CallId) -> int:
    """How many calls are above it; a root's is 0."""
    return min(call_id.count(SUBCALL_MARK), DEPTH_MAX)


def ancestry_of(call_id: CallId) -> list[CallId]:
    """The call and those above it, the root first."""
    parts = call_id.split(SUBCALL_MARK)
    return [CallId(SUBCALL_MARK.join(parts[: count + 1])) for count in range(len(parts))]
