"""Calls that share an executor with no other call.

An exclusive root call is set aside when its turn comes, so that it holds nobody back, and is bound to an executor on
which nothing is live or draining, which then takes no other root call until all of it is released. When others keep
every executor busy, after `PASSED_MAX` binds of theirs one executor is *reserved*: it takes no new root call until it
is empty. After an exclusive call the others have their turn, up to the same number. Source: call-execution X90.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from callyard.scheduler.calls import Call
from callyard.scheduler.executors import ExecutorIndex, ExecutorState, is_current
from callyard.scheduler.placement import Placement, PoolName
from callyard.scheduler.queues import TaskQueues
from callyard.scheduler.tasks import Task

PASSED_MAX: Final = 32


class Exclusives:
    """`ExecutorState.closed` is kept here alone."""

    def __init__(self, index: ExecutorIndex, may_go: Callable[[Task], bool]) -> None:
        self._index = index
        self._may_go = may_go
        self.waiting: dict[Placement, TaskQueues] = {}
        self.reserved: dict[Placement, ExecutorState] = {}
        self._passed: dict[Placement, int] = {}
        """Binds of other calls since the last exclusive one, while one waits."""
        self._yields: set[Placement] = set()
        """Placements whose other calls go first now."""

    def count(self, pool: PoolName | None = None) -> int:
        """Calls that wait, in one pool or in all."""
        return sum(len(queues) for placement, queues in self.waiting.items() if pool in (None, placement.pool))

    def hold(self, ex: ExecutorState) -> bool:
        """An exclusive call is there, or what is left of one."""
        return ex.closed and ex not in self.reserved.values()

    def add(self, call: Call) -> None:
        assert call.ties is not None
        call.ties.awaits_executor = True
        queues = self.waiting.get(call.placement)
        if queues is None:
            queues = self.waiting[call.placement] = TaskQueues()
        queues.add(call)

    def remove(self, call: Call) -> None:
        """It ended, or is bound."""
        assert call.ties is not None
        call.ties.awaits_executor = False
        placement = call.placement
        self.waiting[placement].remove(call)
        self._close(placement)

    def _close(self, placement: Placement) -> None:
        if not self.waiting[placement]:
            del self.waiting[placement]
            self._passed.pop(placement, None)
            self._give_up(placement)

    def pass_over(self, placement: Placement) -> None:
        """Another call of that placement was bound."""
        if placement in self.waiting:
            self._passed[placement] = self._passed.get(placement, 0) + 1

    def head(self, now_ms: int, *, insists: bool = False) -> tuple[Call, ExecutorState] | None:
        """The next exclusive call that can be bound, taken out of its queue, and where.

        `insists`: nobody else has anything to bind, so that nothing is to be yielded.
        """
        for placement, queues in list(self.waiting.items()):
            passed = self._passed.get(placement, 0)
            if placement in self._yields and passed < PASSED_MAX and not insists:
                continue
            ex = self._find(placement, now_ms)
            if ex is None:
                continue
            if ex.is_idle:
                call = queues.pop(self._may_go)
                if call is None:  # all of tasks that are stopped, or at their limit
                    self._give_up(placement)
                    continue
                assert call.ties is not None
                call.ties.awaits_executor = False
                self._close(placement)
                return call, ex
            if passed >= PASSED_MAX and placement not in self.reserved:
                self.reserved[placement] = ex
                ex.closed = True
                self._index.touch(ex)
        return None

    def _find(self, placement: Placement, now_ms: int) -> ExecutorState | None:
        """The reserved executor when it is empty, else the one that an ordinary call would get."""
        reserved = self.reserved.get(placement)
        if reserved is not None and reserved.sealed:
            self._give_up(placement)
        elif reserved is not None and reserved.is_idle and is_current(reserved, now_ms):
            return reserved
        return self._index.select(placement, now_ms)

    def begin(self, call: Call, ex: ExecutorState) -> None:
        """An exclusive call is bound there."""
        placement = call.placement
        self._give_up(placement)
        ex.closed = True
        self._index.touch(ex)
        self._yields.add(placement)
        self._passed.pop(placement, None)

    def reopen(self, ex: ExecutorState) -> None:
        """A reservation of a closed executor was released: it takes others again once it is empty, if not reserved."""
        if ex.is_idle and ex not in self.reserved.values():
            ex.closed = False
            self._index.touch(ex)

    def forget(self, ex: ExecutorState) -> None:
        """The executor is gone."""
        if ex.placement is not None:
            self._yields.discard(ex.placement)  # tenants come and go: what nobody serves is not remembered
        for placement in [placement for placement, reserved in self.reserved.items() if reserved is ex]:
            del self.reserved[placement]

    def _give_up(self, placement: Placement) -> None:
        ex = self.reserved.pop(placement, None)
        if ex is not None:
            ex.closed = False
            self._index.touch(ex)
