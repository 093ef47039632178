"""No function holds more than half of a pool's executors while another has calls.

A call that spins holds up those that share its executor until it is interrupted. So a tool call is not given an
executor on which its function has none yet when the function holds half of them already and another function has calls
that wait, or had one bound within the last second: the next one would find no executor that is free of the first. It
goes to one of those that the function holds. Call lists are one user's own work, and share nothing here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from callyard.ids import ExecutorId, FunctionId
from callyard.scheduler.placement import PoolName

RECENT_MS: Final = 1_000
"""So long after its last bind a function counts as one that has calls."""


class Shares:
    """Which executors the tool calls of each function stand on."""

    def __init__(self) -> None:
        self.held: dict[tuple[PoolName, FunctionId], dict[ExecutorId, int]] = {}
        """Calls by executor; none is 0, and no function is there without one."""
        self._bound: dict[PoolName, OrderedDict[FunctionId, int]] = {}
        """When a call of it was bound last: oldest first."""

    def take(self, pool: PoolName, function: FunctionId, executor_id: ExecutorId, now_ms: int) -> None:
        calls = self.held.setdefault((pool, function), {})
        calls[executor_id] = calls.get(executor_id, 0) + 1
        bound = self._bound.setdefault(pool, OrderedDict())
        bound[function] = now_ms
        bound.move_to_end(function)
        while next(iter(bound.values())) + RECENT_MS < now_ms:
            bound.popitem(last=False)

    def give_back(self, pool: PoolName, function: FunctionId, executor_id: ExecutorId) -> None:
        calls = self.held[pool, function]
        calls[executor_id] -= 1
        if not calls[executor_id]:
            del calls[executor_id]
            if not calls:
                del self.held[pool, function]

    def is_alone(self, pool: PoolName, function: FunctionId, now_ms: int) -> bool:
        """No other function of the pool had a call bound lately."""
        for other, bound_at_ms in reversed(self._bound.get(pool, {}).items()):
            if other != function:
                return bound_at_ms + RECENT_MS < now_ms
        return True
