"""Whose turn it is: lanes with ready calls of active tasks, in rings by their placement and, for tool calls, function.

Rings take turns, and within one lanes do, one bind each; a lane is a task's ready calls of that placement. A lane
of a task that stopped, or is at its limit, leaves its ring when its turn comes: nothing is searched in between. With
`instance_fairness` a ring is one tenant's, too, and whose rings are next is `TenantTurns`' to say.
Source: call-execution X17, X23.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from callyard.scheduler.placement import Placement
from callyard.scheduler.tasks import Lane, Task
from callyard.scheduler.tenants import Ring, TenantTurns


class Turns:
    """The rings. `Lane.in_ring`, `Task.held_back` and `Task.inflight` are kept here alone."""

    def __init__(self, task_inflight_max: int, tenants: TenantTurns | None = None) -> None:
        """`tenants`: None without `instance_fairness`."""
        self._task_inflight_max = task_inflight_max
        self.tenants = tenants
        self.rings: dict[Ring, deque[Lane]] = {}
        self.entries = 0
        """Entries so far; a change during a look tells that there is more to look at."""

    def enter(self, lane: Lane) -> None:
        """Give the lane its turns, if it has something to bind. A second time changes nothing."""
        task = lane.task
        if lane.in_ring or not lane.calls or not task.active or task.stop_reason is not None:
            return
        if task.inflight >= self._task_inflight_max:
            task.held_back = True
            return
        lane.in_ring = True
        self.entries += 1
        key = self.ring_of(lane)
        ring = self.rings.get(key)
        if ring is None:
            ring = self.rings[key] = deque()
            if self.tenants is not None:
                self.tenants.add(key)
        ring.append(lane)

    def ring_of(self, lane: Lane) -> Ring:
        """The ring in which the lane has its turns."""
        return lane.placement, lane.function, None if self.tenants is None else lane.task.plan.tenant

    def _close(self, key: Ring) -> None:
        del self.rings[key]
        if self.tenants is not None:
            self.tenants.remove(key)

    def take(self, task: Task) -> None:
        """A root call of the task is bound."""
        task.inflight += 1
        if self.tenants is not None:
            self.tenants.count(task.plan.tenant, 1)

    def give_back(self, task: Task) -> None:
        """One of them is not any more."""
        task.inflight -= 1
        if self.tenants is not None:
            self.tenants.count(task.plan.tenant, -1)
        if task.held_back:
            self.enter_all(task)

    def enter_all(self, task: Task) -> None:
        """The same for each lane of a task that may bind again."""
        task.held_back = False
        for lane in task.lanes.values():
            self.enter(lane)

    def may_take(self, task: Task) -> bool:
        """Whether a call of the task that stands elsewhere may be bound."""
        return task.stop_reason is None and task.inflight < self._task_inflight_max

    def leave(self, task: Task) -> None:
        """Of a task that ended before its turn came."""
        for lane in task.lanes.values():
            if lane.in_ring:
                key = self.ring_of(lane)
                ring = self.rings[key]
                ring.remove(lane)
                lane.in_ring = False
                if not ring:
                    self._close(key)

    def order(self) -> Iterable[Ring]:
        """Rings in the order of their turns. A visitor may close the ring that it was given, and no other."""
        return list(self.rings) if self.tenants is None else self.tenants.order()

    def placements(self) -> list[Placement]:
        """Placements with calls to bind, in turn."""
        return list(dict.fromkeys(key[0] for key in self.rings))

    def head(self, key: Ring) -> Lane | None:
        """The lane whose turn it is in a ring, after those with nothing to bind have left it."""
        ring = self.rings[key]
        while ring:
            lane = ring[0]
            task = lane.task
            if lane.calls and task.stop_reason is None:
                if task.inflight < self._task_inflight_max:
                    return lane
                task.held_back = True
            ring.popleft()
            lane.in_ring = False
        self._close(key)
        return None

    def pass_on(self, key: Ring) -> None:
        """The head took its turn: its lane and its ring go to the end, if they have more."""
        ring = self.rings[key]
        if not ring[0].calls:
            ring.popleft().in_ring = False
        elif len(ring) > 1:
            ring.rotate(-1)
        if self.tenants is not None:
            self.tenants.pass_on(key)
        if not ring:
            self._close(key)
        elif len(self.rings) > 1:
            self.rings[key] = self.rings.pop(key)
