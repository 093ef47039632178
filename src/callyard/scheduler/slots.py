"""Slots of the call phase: so many call lists at once, the others wait in turn by tenant. Source: X18."""

from __future__ import annotations

from collections import deque

from callyard.errors import CallFailure, ErrorKind, fail
from callyard.ids import Tenant
from callyard.scheduler.tasks import Task


class TaskSlots:
    """`Task.active` is kept here alone: a task is active when it holds a slot, or needs none."""

    def __init__(self, slots_max: int, waiting_max: int) -> None:
        self._slots_max = slots_max
        self._waiting_max = waiting_max
        self.taken = 0
        self.waiting: dict[Tenant, deque[Task]] = {}
        """Tasks that wait, by tenant; tenants take turns in the dict's order."""

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self.waiting.values()))

    def admit(self, task: Task) -> CallFailure | None:
        """Give the task a slot, or let it wait; a failure (`unavailable`) when too many wait already."""
        if not task.plan.uses_slot:
            task.active = True
        elif self.taken < self._slots_max:
            self._give(task)
        elif (waiting := self.waiting_count) >= self._waiting_max:
            message = f"{waiting} tasks wait for one of executor_task_slots={self._slots_max}"
            return fail(ErrorKind.UNAVAILABLE, message, retry_after_ms=1_000)
        else:
            self.waiting.setdefault(task.plan.tenant, deque()).append(task)
        return None

    def release(self, task: Task) -> Task | None:
        """The task is over. Its slot goes to the next tenant's oldest waiting task, which is returned."""
        if not task.active:
            queue = self.waiting[task.plan.tenant]
            queue.remove(task)
            if not queue:
                del self.waiting[task.plan.tenant]
            return None
        if not task.plan.uses_slot:
            return None
        self.taken -= 1
        for tenant in self.waiting:
            queue = self.waiting.pop(tenant)
            following = queue.popleft()
            if queue:
                self.waiting[tenant] = queue  # to the end: tenants take turns
            self._give(following)
            return following
        return None

    def _give(self, task: Task) -> None:
        task.active = True
        self.taken += 1
