"""Calls that share an executor with no other call.

An exclusive root call is set aside when its turn comes, so that it holds nobody back, and is bound to an executor on
which nothing is live or draining, which then takes no other root call until all of it is released. When others keep
every executor busy, after `PASSED_MAX` binds of theirs one executor is *reserved*: it takes no new root call until it
is empty. After an exclusive call the others have their turn, up to the same number. Source: call-execution X90.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from callyard.ids import Digest
from callyard.scheduler.calls import Call
from callyard.scheduler.executors import ExecutorIndex, ExecutorState, is_current
from callyard.scheduler.queues import TaskQueues
from callyard.scheduler.tasks import Task

PASSED_MAX: Final = 32


class Exclusives:
    """`ExecutorState.closed` is kept here alone."""

    def __init__(self, index: ExecutorIndex, may_go: Callable[[Task], bool]) -> None:
        self._index = index
        self._may_go = may_go
        self.waiting: dict[Digest, TaskQueues] = {}
        self.reserved: dict[Digest, ExecutorState] = {}
        self._passed: dict[Digest, int] = {}
        """Binds of other calls since the last exclusive one, while one waits."""
        self._yields: set[Digest] = set()
        """Bundles whose other calls go first now."""

    @property
    def count(self) -> int:
        return sum(map(len, self.waiting.values()))

    def add(self, call: Call) -> None:
        assert call.ties is not None
        call.ties.awaits_executor = True
        queues = self.waiting.get(call.target.digest)
        if queues is None:
            queues = self.waiting[call.target.digest] = TaskQueues()
        queues.add(call)

    def remove(self, call: Call) -> None:
        """It ended, or is bound."""
        assert call.ties is not None
        call.ties.awaits_executor = False
        digest = call.target.digest
        self.waiting[digest].remove(call)
        self._close(digest)

    def _close(self, digest: Digest) -> None:
        if not self.waiting[digest]:
            del self.waiting[digest]
            self._passed.pop(digest, None)
            self._give_up(digest)

    def pass_over(self, digest: Digest) -> None:
        """Another call of the bundle was bound."""
        if digest in self.waiting:
            self._passed[digest] = self._passed.get(digest, 0) + 1

    def head(self, now_ms: int, *, insists: bool = False) -> tuple[Call, ExecutorState] | None:
        """The next exclusive call that can be bound, taken out of its queue, and where.

        `insists`: nobody else has anything to bind, so that nothing is to be yielded.
        """
        for digest, queues in list(self.waiting.items()):
            passed = self._passed.get(digest, 0)
            if digest in self._yields and passed < PASSED_MAX and not insists:
                continue
            ex = self._find(digest, now_ms)
            if ex is None:
                continue
            if ex.is_idle:
                call = queues.pop(self._may_go)
                if call is None:  # all of tasks that are stopped, or at their limit
                    self._give_up(digest)
                    continue
                assert call.ties is not None
                call.ties.awaits_executor = False
                self._close(digest)
                return call, ex
            if passed >= PASSED_MAX and digest not in self.reserved:
                self.reserved[digest] = ex
                ex.closed = True
                self._index.touch(ex)
        return None

    def _find(self, digest: Digest, now_ms: int) -> ExecutorState | None:
        """The reserved executor when it is empty, else the one that an ordinary call would get."""
        reserved = self.reserved.get(digest)
        if reserved is not None and reserved.sealed:
            self._give_up(digest)
        elif reserved is not None and reserved.is_idle and is_current(reserved, now_ms):
            return reserved
        return self._index.select(digest, now_ms)

    def begin(self, call: Call, ex: ExecutorState) -> None:
        """An exclusive call is bound there."""
        digest = call.target.digest
        self._give_up(digest)
        ex.closed = True
        self._index.touch(ex)
        self._yields.add(digest)
        self._passed.pop(digest, None)

    def reopen(self, ex: ExecutorState) -> None:
        """A reservation of a closed executor was released: it takes others again once it is empty, if not reserved."""
        if ex.is_idle and ex not in self.reserved.values():
            ex.closed = False
            self._index.touch(ex)

    def forget(self, ex: ExecutorState) -> None:
        """The executor is gone."""
        for digest in [digest for digest, reserved in self.reserved.items() if reserved is ex]:
            del self.reserved[digest]

    def _give_up(self, digest: Digest) -> None:
        ex = self.reserved.pop(digest, None)
        if ex is not None:
            ex.closed = False
            self._index.touch(ex)
