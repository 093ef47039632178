"""What is told of the calls that one attempt makes inside its executor: when each was asked for, and how it ended.

A subcall is known by its parent and the request that its end answers; what is told are paths, `2` and `2/1` below it,
numbered in the order they were asked for. Source: tool-dispatch D48.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from callyard.errors import CallFailure, ErrorKind, fail
from callyard.functions.ports import SubcallEvent
from callyard.ids import CallId, FunctionId, RequestId

SubcallKey = tuple[CallId, RequestId]
"""The parent, and its request."""
_LEFT: Final = fail(ErrorKind.CANCELLED, "the call that made it ended first")


class _Open(msgspec.Struct, eq=False):
    path: str
    function: FunctionId
    children: int = 0


class SubcallTrail:
    """The subcalls of one attempt that are under way."""

    def __init__(self, tell: Callable[[SubcallEvent], None]) -> None:
        self._tell = tell
        self._open: dict[SubcallKey, _Open] = {}
        self._asked = 0

    def begin(self, key: SubcallKey, above: SubcallKey | None, function: FunctionId, args: bytes) -> None:
        """`above`: the subcall that asks; None: the attempt itself."""
        if key in self._open:
            return  # an executor asks twice by one request: the scheduler counts the first
        parent = None if above is None else self._open.get(above)
        if parent is None:
            self._asked += 1
            path = str(self._asked)
        else:
            parent.children += 1
            path = f"{parent.path}/{parent.children}"
        self._open[key] = _Open(path, function)
        self._tell(SubcallEvent(path, function, args))

    def end(self, key: SubcallKey, failure: CallFailure | None) -> None:
        subcall = self._open.pop(key, None)
        if subcall is not None:
            self._tell(SubcallEvent(subcall.path, subcall.function, ended=True, failure=failure))

    def close(self) -> None:
        """The attempt has ended, and with it what it did not wait for."""
        for key in reversed(list(self._open)):
            self.end(key, _LEFT)
