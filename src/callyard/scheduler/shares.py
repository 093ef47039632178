"""No function holds more than half of a pool's executors while another has calls.

A call that spins holds up those that share its executor until it is interrupted. So a tool call is not given an
executor on which its function has none yet when the function holds half of them already and another function has calls
that wait, or had one bound within the last second: the next one would find no executor that is free of the first. It
goes to one of those that the function holds, unless all of them are other tenants', which could never take it. An
executor that it brought down counts as one that it holds until another has taken its place: else what crashes would
take them down one after another. Call lists are one user's own work, and share nothing here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from callyard.ids import ExecutorId, FunctionId
from callyard.scheduler.placement import PoolName

RECENT_MS: Final = 1_000
"""So long after its last bind a function counts as one that has calls."""
MISSING_MS: Final = 30_000
"""So long a lost executor counts as one that will be replaced."""


class Shares:
    """Which executors the tool calls of each function stand on."""

    def __init__(self) -> None:
        self.held: dict[tuple[PoolName, FunctionId], dict[ExecutorId, int]] = {}
        """Calls by executor; none is 0, and no function is there without one."""
        self._bound: dict[PoolName, OrderedDict[FunctionId, int]] = {}
        """When a call of it was bound last: oldest first."""

        self._missing: dict[PoolName, deque[tuple[FunctionId, int]]] = {}
        """Of executors that ended by their calls and are not replaced yet: who brought each down, and when."""

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

    def blame(self, pool: PoolName, executor_id: ExecutorId, last: FunctionId | None, now_ms: int) -> None:
        """An executor ends by its calls: by the one function that has some there, or, where none has any more, by the
        last that had. Of several nobody knows which."""
        there = [function for (own, function), calls in self.held.items() if own == pool and executor_id in calls]
        if not there and last is not None:
            there = [last]
        if len(there) == 1:
            self._missing.setdefault(pool, deque()).append((there[0], now_ms))

    def replace(self, pool: PoolName) -> None:
        """An executor has come."""
        if pool in self._missing:
            self._missing[pool].popleft()
            if not self._missing[pool]:
                del self._missing[pool]

    def missing(self, pool: PoolName, now_ms: int) -> list[FunctionId]:
        """Who brought down what is not replaced yet."""
        while pool in self._missing and self._missing[pool][0][1] + MISSING_MS < now_ms:
            self.replace(pool)
        return [function for function, _ in self._missing.get(pool, ())]
