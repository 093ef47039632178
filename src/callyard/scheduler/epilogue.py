"""The end of every turn: batches settle, tasks converge, and nothing else decides that.

Whatever can change a count marks its task dirty; `flush` looks at dirty tasks until none is left. Per task:
StopCallProduction, drain, BatchSettled, ConvergeTaskCalls. Source: call-execution X19, X75, X77.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from callyard.ids import CallId, TaskId
from callyard.scheduler import commands as c
from callyard.scheduler.calls import READY, Call, CallResult, StopReason
from callyard.scheduler.commands import SchedulerCommand
from callyard.scheduler.endings import discard_output
from callyard.scheduler.slots import TaskSlots
from callyard.scheduler.tasks import Batch, Task
from callyard.scheduler.turns import Turns

FinishStopped = Callable[[Call, StopReason], Sequence[SchedulerCommand]]


class Epilogue:
    """Shares the scheduler's books of calls, tasks and counts."""

    def __init__(
        self,
        calls: dict[CallId, Call],
        tasks: dict[TaskId, Task],
        turns: Turns,
        slots: TaskSlots,
        counts: Counter[str],
        output_bytes_max: int,
        finish_stopped: FinishStopped,
    ) -> None:
        self._calls = calls
        self._tasks = tasks
        self._turns = turns
        self._slots = slots
        self._counts = counts
        self._output_bytes_max = output_bytes_max
        self._finish_stopped = finish_stopped
        self.dirty: list[Task] = []

    def mark(self, task: Task) -> None:
        """Something of the task changed."""
        if not task.dirty:
            task.dirty = True
            self.dirty.append(task)

    def flush(self) -> list[SchedulerCommand]:
        commands: list[SchedulerCommand] = []
        while self.dirty:
            dirty, self.dirty = self.dirty, []
            for task in dirty:
                self._settle_task(task, commands)
                task.dirty = False  # last: what the drain ends is settled in the same pass
        return commands

    def _settle_task(self, task: Task, commands: list[SchedulerCommand]) -> None:
        if task.stop_reason is not None:
            if task.production_open and not task.production_stop_sent:
                task.production_stop_sent = True
                commands.append(c.StopCallProduction(task.task_id, task.stop_reason))
            if task.inflight == 0:
                self._drain_ready(task, task.stop_reason, commands)
        if task.settled:
            settled, task.settled = task.settled, []
            for batch in settled:
                self._settle_batch(task, batch, commands)
        if task.is_over:
            self._converge(task, commands)

    def _drain_ready(self, task: Task, reason: StopReason, commands: list[SchedulerCommand]) -> None:
        """End what never ran, once nothing of the task is in flight."""
        for batch in task.batches.values():
            if batch.remaining:
                for call in batch.calls:
                    if call.state is READY:
                        commands += self._finish_stopped(call, reason)
        for lane in task.lanes.values():
            lane.calls.clear()

    def _settle_batch(self, task: Task, batch: Batch, commands: list[SchedulerCommand]) -> None:
        del task.batches[batch.index]
        for call in batch.calls:
            del self._calls[call.call_id]
        batch.calls = []
        results: list[CallResult] = batch.results  # type: ignore[assignment]  # each has ended
        discard = task.stop_reason is StopReason.OUTPUT_BYTES_EXCEEDED
        if discard:
            results = self._discard(task, results)
            task.held_output_bytes -= batch.output_bytes
            batch.output_bytes = 0
        if task.plan.streaming:
            task.untaken[batch.index] = batch.output_bytes
            commands.append(c.BatchSettled(task.task_id, batch.index, results, batch.output_bytes))
        else:
            task.results += results

    def _discard(self, task: Task, results: list[CallResult]) -> list[CallResult]:
        """Over max_collected_output_bytes the task's outputs are discarded (X21, X77)."""
        discarded = sum(result.ok for result in results)
        task.failed_count += discarded
        self._counts["failed"] += discarded
        return [discard_output(result, self._output_bytes_max) if result.ok else result for result in results]

    def _converge(self, task: Task, commands: list[SchedulerCommand]) -> None:
        del self._tasks[task.task_id]
        self._turns.leave(task)
        task.lanes.clear()  # they name it: its results would stay until Python looks for cycles
        following = self._slots.release(task)
        if following is not None:
            self._turns.enter_all(following)
            self.mark(following)
        results = sorted(task.results, key=lambda result: result.index)
        if task.stop_reason is StopReason.OUTPUT_BYTES_EXCEEDED:
            results = self._discard(task, results)
        commands.append(
            c.ConvergeTaskCalls(
                task_id=task.task_id,
                success=task.failed_count == 0 and task.stop_reason is None,
                outputs=[result.output for result in results if result.output is not None],
                results=results,
                stop_reason=task.stop_reason,
                total_count=task.total_count,
                failed_count=task.failed_count,
            )
        )
