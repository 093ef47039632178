"""Whose turn it is: active tasks with ready calls, in rings by the bundle of their next call.

Bundles take turns, and within a bundle tasks do, one bind each. A task that stopped, is at its limit, or whose next
call belongs to another bundle leaves its ring when its turn comes: nothing is searched in between.
Source: call-execution X17 (without `instance_fairness`), X23.
"""

from __future__ import annotations

from collections import deque

from callyard.ids import Digest
from callyard.scheduler.tasks import Task


class Turns:
    """The rings. `Task.in_ring` is kept here alone."""

    def __init__(self, task_inflight_max: int) -> None:
        self._task_inflight_max = task_inflight_max
        self.rings: dict[Digest, deque[Task]] = {}
        self.entries = 0
        """Entries so far; a change during a look tells that a task moved to another bundle's ring."""

    def enter(self, task: Task) -> None:
        """Give the task its turns, if it has something to bind. A second time changes nothing."""
        if not task.in_ring and task.active and self._can_bind(task):
            task.in_ring = True
            self.entries += 1
            self.rings.setdefault(task.ready[0].target.digest, deque()).append(task)

    def _can_bind(self, task: Task) -> bool:
        return bool(task.ready) and task.stop_reason is None and task.inflight < self._task_inflight_max

    def may_take(self, task: Task) -> bool:
        """Whether a call of the task that stands elsewhere may be bound."""
        return task.stop_reason is None and task.inflight < self._task_inflight_max

    def leave(self, task: Task) -> None:
        """Of a task that ended before its turn came."""
        if not task.in_ring:
            return
        for digest, ring in self.rings.items():
            if task in ring:
                ring.remove(task)
                if not ring:
                    del self.rings[digest]
                break
        task.in_ring = False

    def bundles(self) -> list[Digest]:
        """Bundles with calls to bind, in turn."""
        return list(self.rings)

    def head(self, digest: Digest) -> Task | None:
        """The task whose turn it is in a bundle's ring, after those with nothing to bind have left it."""
        ring = self.rings[digest]
        while ring:
            task = ring[0]
            if self._can_bind(task) and task.ready[0].target.digest == digest:
                return task
            ring.popleft()
            task.in_ring = False
            self.enter(task)
        del self.rings[digest]
        return None

    def pass_on(self, digest: Digest) -> None:
        """The head took its turn: its task and its bundle go to the end, if they have more."""
        ring = self.rings[digest]
        if not ring[0].ready:
            ring.popleft().in_ring = False
        elif len(ring) > 1:
            ring.rotate(-1)
        if not ring:
            del self.rings[digest]
        elif len(self.rings) > 1:
            self.rings[digest] = self.rings.pop(digest)
