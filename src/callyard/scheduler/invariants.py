"""What must hold between any two events, by name. The names are those of docs/design/scheduler.md.

A full scan: for tests and simulations only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from callyard.ids import ExecutorId, TaskId
from callyard.scheduler.calls import READY, RUNNING, WAITING, Call
from callyard.scheduler.tasks import Task

if TYPE_CHECKING:
    from callyard.scheduler.core import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError, with the invariant's name, when the state contradicts itself."""
    calls: dict[TaskId, list[Call]] = {task_id: [] for task_id in scheduler._tasks}
    for call in scheduler._calls.values():
        assert scheduler._tasks.get(call.task.task_id) is call.task, f"call_has_task: {call.call_id}"
        calls[call.task.task_id].append(call)
        _check_call(call)
    _check_executors(scheduler)
    for task in scheduler._tasks.values():
        _check_task(scheduler, task, calls[task.task_id])
    slots = sum(task.active and task.plan.uses_slot for task in scheduler._tasks.values())
    assert slots == scheduler._slots.taken <= scheduler._config.executor_task_slots, "slots"
    waiting = [task for queue in scheduler._slots.waiting.values() for task in queue]
    assert len(waiting) == sum(not task.active for task in scheduler._tasks.values()), "waiting_iff_inactive"
    assert len(waiting) <= scheduler._config.waiting_tasks_max, "waiting_tasks_max"
    assert all(scheduler._slots.waiting.values()), "no_empty_queue"
    in_rings = [task for ring in scheduler._turns.rings.values() for task in ring]
    assert all(scheduler._turns.rings.values()), "no_empty_ring"
    assert all(scheduler._tasks.get(task.task_id) is task for task in in_rings), "ring_tasks_live"
    dirty = [task for task in scheduler._tasks.values() if task.dirty]
    assert {id(task) for task in dirty} <= {id(task) for task in scheduler._dirty}, "dirty_listed"


def _check_call(call: Call) -> None:
    ex = call.executor
    assert (call.state in (RUNNING, WAITING)) == (ex is not None), f"reservation_iff_running: {call.call_id}"
    assert (call.state is WAITING) == bool(call.open_requests), f"waiting_iff_open: {call.call_id}"
    assert not call.queued or call.state is READY, f"queued_is_ready: {call.call_id}"
    assert call.queued or call.state is not READY or call.attempt_seq, f"unqueued_waits_for_retry: {call.call_id}"
    assert 0 <= call.attempt_count <= call.max_attempts, f"attempts_bounded: {call.call_id}"
    assert call.attempt_count <= call.attempt_seq, f"seq_covers_count: {call.call_id}"
    if ex is not None:
        drains = (call.call_id, call.attempt_seq) in ex.draining
        assert (ex.live.get(call.call_id) == call.attempt_seq) != drains, f"reservation_is_current: {call.call_id}"
        assert (call.stopping is not None) == drains, f"stopping_iff_draining: {call.call_id}"


def _check_executors(scheduler: Scheduler) -> None:
    held: Counter[ExecutorId] = Counter()
    waiting: Counter[ExecutorId] = Counter()
    for call in scheduler._calls.values():
        if call.executor is not None and call.stopping is None:
            held[call.executor.executor_id] += 1
            waiting[call.executor.executor_id] += call.state is WAITING
    executors = scheduler._index.executors
    assert held.keys() <= executors.keys(), "reservations_on_known_executors"
    for executor_id, ex in executors.items():
        assert len(ex.live) == held[executor_id] == ex.live_roots, f"live_counts: {executor_id}"
        assert ex.live_roots <= scheduler._config.executor_max_inflight, f"executor_max_inflight: {executor_id}"
        assert ex.waiting == waiting[executor_id], f"waiting_counts: {executor_id}"
        assert ex.digest is not None or not ex.live, f"bound_iff_used: {executor_id}"
        for call_id in ex.live:
            assert scheduler._calls[call_id].target.digest == ex.digest, f"one_bundle: {executor_id}"


def _check_task(scheduler: Scheduler, task: Task, calls: list[Call]) -> None:
    name = task.task_id
    inflight = sum(call.executor is not None for call in calls)
    maximum = scheduler._config.task_max_inflight_calls
    assert task.inflight == inflight <= maximum, f"task_max_inflight_calls: {name}"
    assert all(call.queued for call in task.ready), f"ready_is_queued: {name}"
    assert len(task.ready) == sum(call.queued for call in calls), f"queued_is_ready: {name}"
    assert sum(task in ring for ring in scheduler._turns.rings.values()) == task.in_ring, f"in_one_ring: {name}"
    if task.active and task.ready and task.stop_reason is None and inflight < maximum:
        assert task.in_ring, f"ready_takes_turns: {name}"
    unended = sum(batch.remaining for batch in task.batches.values())
    assert task.total_count - task.terminal_count == unended, f"remaining: {name}"
    assert task.failed_count <= task.terminal_count, f"failed_are_terminal: {name}"
    for batch in task.batches.values():
        assert batch.remaining == sum(result is None for result in batch.results), f"one_result_per_end: {name}"
    held = sum(batch.output_bytes for batch in task.batches.values()) + sum(task.untaken.values())
    held += sum(len(result.output or b"") for result in task.results)
    assert task.held_output_bytes == held, f"held_output_bytes: {name}"
