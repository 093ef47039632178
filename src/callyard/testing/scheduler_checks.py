"""What a simulated scheduler must show: now, and when everything has come to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from callyard.errors import Outcome
from callyard.ids import CallId, ExecutorId
from callyard.scheduler.calls import CallResult
from callyard.scheduler.core import Scheduler
from callyard.testing.executors import SideEffects
from callyard.testing.scheduler_workload import Job


def check_core(
    scheduler: Scheduler,
    jobs: Sequence[Job],
    reserved: Mapping[ExecutorId, Mapping[tuple[CallId, int], bool]],
    now_ms: int,
) -> None:
    """After a turn. `reserved` is the adapter's own book: reservations by call and attempt; True: it drains."""
    scheduler.check_invariants()
    for task in list(scheduler._tasks.values()):  # a full scan finds nothing that the epilogue left (X75)
        scheduler._mark_dirty(task)
    left = scheduler.flush_dirty_tasks(now_ms)
    assert not left, f"the epilogue left {left}"
    outstanding = sum(job.batch_rows * job.window.credits_max for job in jobs if job.plan.streaming)
    parked = sum(len(job.reorder) * job.batch_rows for job in jobs)
    retained = sum(len(job.rows) for job in jobs if not job.plan.streaming)
    assert len(scheduler._calls) <= outstanding + parked + retained, "calls_bounded"
    for executor_id, ex in scheduler._index.executors.items():
        core = dict.fromkeys(ex.live.items(), False) | dict.fromkeys(ex.draining, True)
        assert core == reserved[executor_id], f"core holds {core}, the adapter {reserved[executor_id]}"


def check_end(scheduler: Scheduler, jobs: Sequence[Job], effects: SideEffects) -> None:
    """When all is over: every result true, and nothing left behind."""
    for job in jobs:
        _check_job(job, effects)
    statistics = scheduler.statistics()
    assert (statistics.calls, statistics.tasks_active, statistics.tasks_waiting) == (0, 0, 0), statistics
    assert (statistics.inflight, statistics.waiting, statistics.draining) == (0, 0, 0), statistics
    assert statistics.finished == sum(len(job.results) for job in jobs), "finished_counts"
    assert not scheduler._turns.rings, "rings_empty"
    assert not scheduler._dirty, "dirty_empty"
    index = scheduler._index
    entries = [entry[5] for heap in index._heaps.values() for entry in heap]
    entries += index._touched + [entry[2] for entry in index._blocked]
    known = {id(ex) for ex in index.executors.values()}
    assert {id(ex) for ex in entries} <= known, "no_entry_of_a_gone_executor"


def _check_job(job: Job, effects: SideEffects) -> None:
    name, converged = job.plan.task_id, job.converged
    assert converged is not None
    assert job.window.outstanding == 0, f"{name}: credits still out"
    results = sorted(job.results, key=lambda result: result.index)
    if job.reorder.ordered or not job.plan.streaming:
        assert results == job.results, f"{name}: out of order"
    assert [result.index for result in results] == list(range(converged.total_count)), f"{name}: one per index"
    assert converged.total_count == job.next_row, f"{name}: every committed row counts"
    if converged.stop_reason is None:
        assert converged.total_count == len(job.rows), f"{name}: every row has a result"
    failed = sum(not result.ok for result in results)
    assert converged.failed_count == failed, f"{name}: {converged.failed_count} counted, {failed} failed"
    assert converged.success == (failed == 0 and converged.stop_reason is None), f"{name}: success"
    if not job.plan.streaming:
        assert converged.outputs == [result.output for result in results if result.ok], f"{name}: outputs"
    for result in results:
        _check_result(job, result, effects)


def _check_result(job: Job, result: CallResult, effects: SideEffects) -> None:
    """What a result says, held against what really ran."""
    row = job.rows[result.index]
    call_id = CallId(f"{job.plan.task_id}-{result.index}")
    begun, count = effects.begun[call_id], effects.effects[call_id]
    assert result.attempts == begun <= job.plan.max_attempts, f"{call_id}: {begun} began, {result}"
    idempotent = row.target is not None and row.target.idempotent
    assert idempotent or count <= 1, f"{call_id}: {count} effects without a promise"
    failure = result.failure
    if failure is None:
        assert count >= 1, f"{call_id}: a result of nothing"
        assert result.output, f"{call_id}: no output"
        return
    assert failure.attempts == result.attempts, f"{call_id}: attempts differ in {result}"
    if failure.outcome is Outcome.NOT_RUN:
        assert count == 0, f"{call_id}: it ran, but {failure}"
    else:
        assert begun >= 1, f"{call_id}: it never ran, but {failure}"
