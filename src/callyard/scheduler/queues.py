"""Calls that stand aside until something is free: each task's in order, and tasks take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from callyard.ids import CallId, TaskId
from callyard.scheduler.calls import Call
from callyard.scheduler.tasks import Task


class TaskQueues:
    """Every call leaves in one step, from wherever it stands."""

    def __init__(self) -> None:
        self._queues: OrderedDict[TaskId, OrderedDict[CallId, Call]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, call: Call) -> bool:
        return call.call_id in self._queues.get(call.task.task_id, ())

    def add(self, call: Call, *, first: bool = False) -> None:
        queue = self._queues.get(call.task.task_id)
        if queue is None:
            queue = self._queues[call.task.task_id] = OrderedDict()
        queue[call.call_id] = call
        if first:
            queue.move_to_end(call.call_id, last=False)
        self._count += 1

    def remove(self, call: Call) -> None:
        task_id = call.task.task_id
        queue = self._queues[task_id]
        del queue[call.call_id]
        if not queue:
            del self._queues[task_id]
        self._count -= 1

    def pop(self, may_go: Callable[[Task], bool]) -> Call | None:
        """The next call of the next task that may go on now; its task goes to the end."""
        for task_id, queue in self._queues.items():
            call = next(iter(queue.values()))
            if may_go(call.task):
                self._queues.move_to_end(task_id)
                self.remove(call)
                return call
        return None
