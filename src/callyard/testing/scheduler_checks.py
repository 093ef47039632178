"""What a simulated scheduler must show: now, and when everything has come to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, ExecutorId
from callyard.scheduler.calls import CallResult, FunctionTarget
from callyard.scheduler.commands import BindCall
from callyard.scheduler.core import Scheduler
from callyard.scheduler.executors import is_current, score
from callyard.testing.executors import FakeExecutor, SideEffects
from callyard.testing.scheduler_workload import Job, output_of


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
    roots = sum(call.parent is None for call in scheduler._calls.values())
    assert roots <= outstanding + parked + retained, "calls_bounded"
    for executor_id, ex in scheduler._index.executors.items():
        core = dict.fromkeys(ex.live.items(), False) | dict.fromkeys(ex.draining, True)
        assert core == reserved[executor_id], f"core holds {core}, the adapter {reserved[executor_id]}"


def check_what_runs(executors: Sequence[FakeExecutor], targets: Mapping[CallId, FunctionTarget]) -> None:
    """What executors really hold: no more of a function than its limit, and nothing beside an exclusive call."""
    owners: dict[FunctionTarget, set[CallId]] = defaultdict(set)
    for executor in executors:
        held = [call_id for call_id, _ in executor.held]
        for call_id in held:
            target = targets[call_id]
            parts = call_id.split("/sub-")
            above = [CallId("/sub-".join(parts[:count])) for count in range(1, len(parts) + 1)]
            if target.max_concurrency is not None:
                owners[target].add(next(one for one in above if targets[one] == target))
            if target.exclusive and len(parts) == 1:
                assert all(one.split("/")[0] == call_id for one in held), f"{call_id} is not alone among {held}"
    for target, calls in owners.items():
        assert target.max_concurrency is not None
        assert len(calls) <= target.max_concurrency, f"max_concurrency of {target.function_id}: {sorted(calls)}"


def check_line(scheduler: Scheduler, bind: BindCall) -> None:
    """Just bound: the line at that executor is no longer than it may be (X91)."""
    call, ex = scheduler._calls[bind.call_id], scheduler._index.executors[bind.executor_id]
    if call.parent is None and scheduler._config.queue_ahead_ms:
        assert ex.unbegun <= ex.lookahead.limit, f"line_is_short: {ex.unbegun} at {bind.executor_id}"


def find_free(scheduler: Scheduler, now_ms: int) -> set[ExecutorId]:
    """Executors that hold nothing, and might take a call of what they are bound to."""
    config = scheduler._config
    return {
        executor_id
        for executor_id, ex in scheduler._index.executors.items()
        if ex.is_idle and score(ex, config) is not None and is_current(ex, now_ms)
    }


def check_nothing_waits_beside(scheduler: Scheduler, waiting: set[tuple[CallId, int]], free: set[ExecutorId]) -> None:
    """`waiting`: attempts that have stood in a line for long. Tool calls may have to: of others' half (`shares`)."""
    for call_id, attempt_seq in waiting:
        call = scheduler._calls.get(call_id)
        if call is None or call.attempt_seq != attempt_seq or call.executor is None or call.stopping is not None:
            continue
        task = call.task
        if task.stop_reason is not None or not task.plan.uses_slot or call.placement in scheduler._turns.placements():
            continue
        for executor_id in free:
            other = scheduler._index.executors[executor_id]
            assert other is call.executor or not other.fits(call.placement), (
                f"nothing_waits_beside_an_idle_one: {call_id} at {call.executor.executor_id} beside {executor_id}"
            )


def check_end(scheduler: Scheduler, jobs: Sequence[Job], effects: SideEffects) -> None:
    """When all is over: every result true, and nothing left behind."""
    for job in jobs:
        _check_job(job, effects)
    statistics = scheduler.statistics()
    assert (statistics.calls, statistics.tasks_active, statistics.tasks_waiting) == (0, 0, 0), statistics
    assert (statistics.inflight, statistics.waiting, statistics.draining) == (0, 0, 0), statistics
    assert statistics.finished == sum(len(job.results) for job in jobs), "finished_counts"
    assert not scheduler._turns.rings, "rings_empty"
    assert not scheduler._subcalls.ring, "subcall_ring_empty"
    assert not scheduler.demand().stranded, "strays_empty"
    assert not scheduler._seats.lines, "lines_empty"
    assert not scheduler._seats.draining, "seats_empty"
    assert not scheduler._exclusives.waiting, "exclusives_empty"
    assert not any(ex.closed for ex in scheduler._index.executors.values()), "all_open"
    assert not scheduler._epilogue.dirty, "dirty_empty"
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
    target = row.target
    keyed = target is not None and (job.plan.cache == "all" or (target.pure and job.plan.cache == "promised"))
    if failure is None:
        assert target is not None
        assert count >= 1 or keyed, f"{call_id}: a result of nothing"
        assert result.output == output_of(target.function_id, row.args), f"{call_id}: {result.output!r}"
        return
    assert failure.attempts == result.attempts, f"{call_id}: attempts differ in {result}"
    if keyed and failure.kind is not ErrorKind.CANCELLED:
        return  # it may be an equal call's
    if failure.outcome is Outcome.NOT_RUN:
        assert count == 0, f"{call_id}: it ran, but {failure}"
    else:
        assert begun >= 1, f"{call_id}: it never ran, but {failure}"
