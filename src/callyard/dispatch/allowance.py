"""The caller's budget of tool calls. (*Budget* alone always means running time.) Source: tool-dispatch D13, D14."""

from __future__ import annotations

from typing import Final, Literal

from callyard.policy.ranges import check_whole

CALLS_MAX: Final = 1_000_000_000
WALL_MS_MAX: Final = 30 * 86_400_000

Spent = Literal["calls", "wall_ms"]
"""Which limit is used up, as `details.limit` of `budget_exceeded` names it."""


class Allowance:
    """So many attempts, in so much time; None: no limit. One object is shared by a call and the calls nested in it.

    The wall limit runs from the first question that is asked of it (`spent` or `take`): the start of the first dispatch
    that carries it, not its making. It belongs to one event loop and is not safe for threads.
    """

    __slots__ = ("_held", "_held_at_ms", "calls", "ends_at_ms", "taken", "wall_ms")

    def __init__(self, calls: int | None = None, wall_ms: int | None = None) -> None:
        if calls is not None:
            check_whole("calls", calls, 0, CALLS_MAX)
        if wall_ms is not None:
            check_whole("wall_ms", wall_ms, 1, WALL_MS_MAX)
        self.calls = calls
        self.wall_ms = wall_ms
        self.taken = 0
        self.ends_at_ms: int | None = None
        """The wall limit as an instant on the dispatcher's clock; None: there is none, or it does not run yet."""
        self._held = 0
        self._held_at_ms = 0

    @property
    def left(self) -> int | None:
        """Attempts that may still be taken; None: no limit."""
        return None if self.calls is None else self.calls - self.taken

    def spent(self, now_ms: int) -> Spent | None:
        """The limit that is used up; None: one more may be taken. Takes nothing, but starts the wall limit."""
        if self.wall_ms is not None:
            if self.ends_at_ms is None:
                self.ends_at_ms = now_ms + self.wall_ms
            elif (self._held_at_ms if self._held else now_ms) >= self.ends_at_ms:
                return "wall_ms"
        return "calls" if self.calls is not None and self.taken >= self.calls else None

    def take(self, now_ms: int) -> bool:
        """Take one attempt. False: nothing is left, and nothing was taken."""
        if self.spent(now_ms) is not None:
            return False
        self.taken += 1
        return True

    def hold(self, now_ms: int) -> None:
        """Somebody is asked, and the wall limit does not run until as many `go_on` have come."""
        if not self._held:
            self._held_at_ms = now_ms
        self._held += 1

    def go_on(self, now_ms: int) -> None:
        self._held -= 1
        if not self._held and self.ends_at_ms is not None:
            self.ends_at_ms += now_ms - self._held_at_ms

    def give_back(self) -> None:
        """Undo one `take`: that attempt did not begin."""
        assert self.taken > 0, "an attempt came back that nobody took"
        self.taken -= 1

    def __repr__(self) -> str:
        return f"Allowance(calls={self.calls}, wall_ms={self.wall_ms}, taken={self.taken})"
