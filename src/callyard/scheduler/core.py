"""The scheduler: which call runs where and when.

Theory of operation. Tasks hold calls; calls that may run stand in their task's ready queue; tasks with ready calls
take turns in a ring. A decision (`try_dispatch_next`) takes the head of the next task's queue, reserves it a place at
the best executor and emits BindCall; the shell answers ExecutorBound and is told to DispatchCall. A terminal frame, a
refusal or a loss releases the reservation in one place (`_release`) and ends the attempt: the call goes back to READY
or, in one place too (`_finish`), to DONE. Whatever can change a count marks the task dirty; `flush_dirty_tasks` alone
settles batches and converges tasks. The shell runs every turn as: handle events, then `flush_dirty_tasks` and
`try_dispatch_next` until both are quiet and `is_settled`.

Three layers, each of which knows only those below: `CallLives` gives back what calls hold and ends them, `Decisions`
binds them, and `Scheduler`, here, takes what happened and what is asked.

Calls that hang on other calls carry `Ties`: subcalls and those that make them, equal calls that share one run, calls
of a function with a limit, exclusive ones. A plain root call has none, and each step asks only that of it. Before a
tied call is bound `_look_ahead` asks whether it needs a run at all, and whether it may have one now; when it ends
`_untie` tells the others.

Nothing here waits, reads a clock or logs; `now_ms` and the random source come from outside. Identity is checked
against reservations: a frame counts only if its executor holds one, live or draining, for that call and attempt.
Source: call-execution X1-X30, X62-X85, X90, X91.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome, ProtocolError, fail
from callyard.ids import CallId, ExecutorId, RequestId, TaskId
from callyard.policy.backoff import compute_refusal_delay_ms
from callyard.policy.lookahead import Lookahead
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler import invariants
from callyard.scheduler.batches import PreparedBatch
from callyard.scheduler.calls import (
    READY,
    RESUMED,
    RUNNING,
    SUSPENDED,
    Call,
    CallResult,
    StopReason,
)
from callyard.scheduler.commands import SchedulerCommand
from callyard.scheduler.decisions import Decisions
from callyard.scheduler.endings import describe_loss, describe_stop
from callyard.scheduler.events import SchedulerEvent
from callyard.scheduler.executors import ExecutorState, is_eligible
from callyard.scheduler.placement import Placement, PoolName
from callyard.scheduler.statistics import Demand, SchedulerStatistics, TaskProgress
from callyard.scheduler.subcalls import (
    build_subcall,
    is_for_its_place,
    mark_disturbed,
    mark_effect,
    refuse,
    ties_of,
)
from callyard.scheduler.tasks import Lane, Task, TaskPlan

__all__ = ["Demand", "Scheduler", "SchedulerStatistics", "TaskProgress"]


class Scheduler(Decisions):
    """One writer: only the worker's actor may call what changes state (X2)."""

    # --- tasks ------------------------------------------------------------------------------------------------

    def commit_task(self, plan: TaskPlan) -> CallFailure | None:
        """Open a task for batches. Returns a failure (`unavailable`) when too many tasks wait already (X18)."""
        self._check_writer()
        assert plan.task_id not in self._tasks, f"task {plan.task_id} committed twice"
        assert plan.max_attempts >= 1, f"task {plan.task_id}: max_attempts={plan.max_attempts}"
        task = Task(plan=plan, batches={})
        failure = self._slots.admit(task)
        if failure is not None:
            return failure
        self._tasks[plan.task_id] = task
        self._mark_dirty(task)
        return None

    def commit_batch(self, prepared: PreparedBatch) -> bool:
        """Make a prepared batch's calls ready. Returns False, changing nothing, when the task stopped meanwhile."""
        self._check_writer()
        task = self._tasks.get(prepared.task_id)
        if task is None or not task.production_open or task.stop_reason is not None:
            return False
        batch = prepared.batch
        assert batch.index == task.next_batch_index, f"batch {batch.index} out of order in {task.task_id}"
        assert len(batch.results) <= self._config.batch_max_rows, f"batch of {len(batch.results)} rows"
        assert prepared.args_bytes <= self._config.batch_max_args_bytes, f"batch of {prepared.args_bytes} bytes"
        task.next_batch_index += 1
        task.total_count += len(batch.results)
        task.terminal_count += prepared.failed_rows
        task.failed_count += prepared.failed_rows
        self._counts["finished"] += prepared.failed_rows
        self._counts["failed"] += prepared.failed_rows
        task.batches[batch.index] = batch
        calls = self._calls
        lane: Lane | None = None
        placement: Placement | None = None
        for call in batch.calls:
            assert call.call_id not in calls, f"call {call.call_id} committed twice"
            call.task = task
            call.queued = True
            calls[call.call_id] = call
            if lane is None or call.placement is not placement:
                placement = call.placement
                lane = task.lane_of(call)
            lane.calls.append(call)
        self._turns.enter_all(task)
        if batch.remaining == 0:
            task.settled.append(batch)
        self._mark_dirty(task)
        if prepared.failed_rows and task.plan.on_failure == "fail_fast":
            self._stop(task, StopReason.FAIL_FAST)
        return True

    # --- events -----------------------------------------------------------------------------------------------

    def handle(self, event: SchedulerEvent, now_ms: int) -> list[SchedulerCommand]:
        """Take one fact; return what it orders. Raises `ProtocolError` when a peer broke its bounds."""
        if self._guard is not None:
            self._guard()
        match event:
            case e.ExecutorBound():
                return self._on_bound(event)
            case e.CallCompleted():
                return self._on_completed(event, now_ms)
            case e.AttemptFailed():
                return self._on_attempt_failed(event, now_ms)
            case e.CallSuspended():
                return self._on_suspended(event, now_ms)
            case e.SubcallRequested():
                return self._on_subcall_requested(event, now_ms)
            case e.CallResumed():
                return self._on_resumed(event)
            case e.RetryDue():
                return self._on_retry_due(event, now_ms)
            case e.SnapshotUpdated():
                return self._on_snapshot(event)
            case e.MarksRead():
                return self._on_marks_read(event, now_ms)
            case e.BatchTaken():
                return self._on_batch_taken(event)
            case e.CallRefused():
                return self._on_refused(event, now_ms)
            case e.DispatchRejected():
                return self._on_dispatch_rejected(event)
            case e.ResumeSendFailed():
                return self._on_resume_send_failed(event, now_ms)
            case e.ExecutorAttached():
                return self._on_attached(event)
            case e.ExecutorSealed():
                return self._on_sealed(event, now_ms)
            case e.ExecutorLost():
                return self._on_lost(event, now_ms)
            case e.TaskStopped():
                return self._on_task_stopped(event)
            case e.ProductionEnded():
                return self._on_production_ended(event)
            case _:
                assert_never(event)

    def _on_bound(self, event: e.ExecutorBound) -> list[SchedulerCommand]:
        call = self._calls[event.call_id]
        ex = call.executor
        assert ex is not None, f"{call.call_id} bound without an executor"
        if call.stopping is not None:  # stopped between bind and dispatch: it is never sent (X68)
            unbind = self._release(call)
            return [unbind, *self._requeue_unbegun(call)]
        target = call.target
        if call.parent is not None:
            return [self._dispatch_subcall(call, call.parent, ex)]
        return [
            c.DispatchCall(
                call.call_id,
                call.task.plan.task_id,
                ex.executor_id,
                call.attempt_seq,
                call.attempt_count,
                target,
                call.args,
                call.strings,
                call.budget_ms,
            )
        ]

    def _dispatch_subcall(self, call: Call, parent: Call, ex: ExecutorState) -> c.DispatchCall:
        if not call.target.may_run_again:
            mark_effect(call)
        return c.DispatchCall(
            call.call_id,
            call.task.plan.task_id,
            ex.executor_id,
            call.attempt_seq,
            call.attempt_count,
            call.target,
            call.args,
            call.strings,
            call.budget_ms,
            parent.call_id,
        )

    def _current(self, executor_id: ExecutorId, call_id: CallId, attempt_seq: int) -> Call | None:
        """The call, if this executor holds a reservation of exactly this, its current, attempt; else counted stale."""
        call = self._calls.get(call_id)
        if call is not None and call.attempt_seq == attempt_seq:
            ex = call.executor
            if ex is not None and ex.executor_id == executor_id:
                ex.refusals = 0  # it answers: what refused before was read since
                ex.has_served = True
                return call
        self._counts["stale"] += 1
        return None

    def _prove_begun(self, call: Call, ex: ExecutorState, now_ms: int) -> None:
        """Its attempt has begun, and is in its executor's line no more."""
        if call.begun:
            return
        call.begun = True
        if call.parent is None and call.stopping is None:
            ex.unbegun -= 1
            if now_ms != ex.lookahead.moved_at_ms:
                ex.lookahead.move(now_ms)
            self._index.touch(ex)

    def _on_completed(self, event: e.CallCompleted, now_ms: int) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is None:
            return self._release_stale(event.executor_id, event.call_id, event.attempt_seq)
        ex = call.executor
        assert ex is not None
        line = ex.lookahead  # by hand, for each call: as `_prove_begun` does, but for what `_release` will do
        if not call.begun and call.parent is None and now_ms != line.moved_at_ms:
            line.move(now_ms)
        if event.run_us:
            line.end(event.run_us)
        else:
            line.ended += 1
        if call.ties is not None:
            call.ties.used_ms = event.budget_used_ms
        unbind = self._release(call)
        result = CallResult(call.index, event.output, None, call.attempt_count, event.notes)
        commands = self._finish(call, result)
        return [unbind, *commands] if commands else [unbind]

    def _on_attempt_failed(self, event: e.AttemptFailed, now_ms: int) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is None:
            return self._release_stale(event.executor_id, event.call_id, event.attempt_seq)
        if event.recalled and call.open_requests is not None:
            raise ProtocolError(f"{event.executor_id} gave back call {call.call_id}, which had begun")
        if call.ties is not None:
            call.ties.used_ms = event.budget_used_ms
        if not event.recalled:
            assert call.executor is not None
            self._prove_begun(call, call.executor, now_ms)
            call.executor.lookahead.end(event.run_us)
        commands: list[SchedulerCommand] = [self._release(call)]
        if event.recalled:
            commands += self._requeue_unbegun(call)
            return commands
        rule = fail(
            event.kind,
            event.message,
            outcome=event.outcome,
            stack=event.stack,
            local_variables=event.local_variables,
        )
        failure = msgspec.structs.replace(rule, details=event.details)
        begun = failure.outcome is not Outcome.NOT_RUN or event.kind is ErrorKind.TRANSIENT
        if call.stopping is not None and event.kind is ErrorKind.CANCELLED:
            if not begun:
                call.attempt_count -= 1
            stopped = describe_stop(call, call.stopping, begun=begun)
            stopped = msgspec.structs.replace(stopped, stack=event.stack, local_variables=event.local_variables)
            commands += self._finish(call, CallResult(call.index, None, stopped, call.attempt_count, event.notes))
            return commands
        return commands + self._end_attempt(call, failure, begun, now_ms, event.notes)

    def _on_suspended(self, event: e.CallSuspended, now_ms: int) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is not None:
            assert call.executor is not None
            self._prove_begun(call, call.executor, now_ms)
            self._open_request(call, event.request_id, event.executor_id)
        return []

    def _open_request(self, call: Call, request_id: RequestId, executor_id: ExecutorId) -> bool:
        """False: it is open already. Raises `ProtocolError` above the bound."""
        requests = call.open_requests
        if requests is None:
            requests = call.open_requests = set()
        if request_id in requests:
            self._counts["dropped"] += 1
            return False
        if len(requests) >= self._config.open_requests_max:
            raise ProtocolError(
                f"call {call.call_id} has {len(requests)} open requests, the most is {self._config.open_requests_max}"
                f" ({executor_id})"
            )
        requests.add(request_id)
        if call.state is RUNNING:
            call.apply(SUSPENDED)
            self._count_waiting(call, 1)
        return True

    def _on_subcall_requested(self, event: e.SubcallRequested, now_ms: int) -> list[SchedulerCommand]:
        """A late request of an old attempt is stale: nobody there waits for an answer (X25)."""
        parent = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if parent is None:
            return []
        assert parent.executor is not None
        self._prove_begun(parent, parent.executor, now_ms)
        if not self._open_request(parent, event.request_id, event.executor_id):
            return []
        refusal = refuse(parent, event, self._config)
        if refusal is not None:
            if is_for_its_place(refusal):
                mark_disturbed(parent)
            return [self._resume(parent, event.request_id, None, refusal, 0)]
        call = build_subcall(parent, event, next(self._numbers))
        assert parent.ties is not None
        parent.ties.children[call.call_id] = call
        parent.executor.subcall_args_bytes += len(call.args)
        self._calls[call.call_id] = call
        call.batch.subcalls += 1
        self._counts["subcalls"] += 1
        self._subcalls.add(call)
        return []

    def _on_resumed(self, event: e.CallResumed) -> list[SchedulerCommand]:
        call = self._calls.get(event.call_id)
        requests = None if call is None else call.open_requests
        if (
            call is None
            or call.attempt_seq != event.attempt_seq
            or requests is None
            or event.request_id not in requests
        ):
            self._counts["dropped"] += 1
            return []
        requests.remove(event.request_id)
        if event.budget_used_ms:
            ties_of(call).charged_ms += event.budget_used_ms
        if not requests:
            call.apply(RESUMED)
            self._count_waiting(call, -1)
        return []

    def _count_waiting(self, call: Call, change: int) -> None:
        ex = call.executor
        assert ex is not None, f"{call.call_id} waits without an executor"
        if call.call_id in ex.live:
            ex.waiting += change
            self._index.touch(ex)

    def _on_retry_due(self, event: e.RetryDue, now_ms: int) -> list[SchedulerCommand]:
        self._subcalls.wake()
        call = self._calls.get(event.call_id)
        if call is None or call.state is not READY:
            self._counts["dropped"] += 1
        elif call.queued or call.is_set_aside:
            pass  # the wake-up after a refusal: the call has its place already
        elif now_ms < call.retry_at_ms:  # the timer of an earlier arming: it must not cut this wait short
            return [c.ArmCallRetry(call.call_id, call.retry_at_ms)]
        else:
            self._enqueue(call)
        return []

    def _on_refused(self, event: e.CallRefused, now_ms: int) -> list[SchedulerCommand]:
        call = self._calls.get(event.call_id)
        if call is None or call.attempt_seq != event.attempt_seq or call.executor is None:
            self._counts["stale"] += 1
            return []
        ex = call.executor
        commands: list[SchedulerCommand] = [self._release(call)]
        self._free_unused(ex)
        if call.stopping is not None:  # not sent because it was stopped: no refusal of the executor's
            commands += self._requeue_unbegun(call)
            return commands
        self._counts["refused"] += 1
        ex.refusals += 1
        delay = compute_refusal_delay_ms(ex.refusals, self._config.base_backoff_ms, self._config.refusal_delay_ms_max)
        ex.blocked_until_ms = now_ms + delay
        self._index.touch(ex)
        commands += self._requeue_unbegun(call)
        commands.append(c.ArmCallRetry(call.call_id, ex.blocked_until_ms))
        return commands

    def _on_dispatch_rejected(self, event: e.DispatchRejected) -> list[SchedulerCommand]:
        call = self._calls.get(event.call_id)
        if call is None or call.attempt_seq != event.attempt_seq or call.executor is None:
            self._counts["stale"] += 1
            return []
        ex = call.executor
        unbind = self._release(call)
        self._free_unused(ex)
        failure = fail(event.kind, event.message, outcome=Outcome.NOT_RUN)
        failure = msgspec.structs.replace(failure, details=event.details)
        call.attempt_count -= 1
        return [unbind, *self._fail(call, failure, ())]

    def _on_resume_send_failed(self, event: e.ResumeSendFailed, now_ms: int) -> list[SchedulerCommand]:
        call = self._calls.get(event.call_id)
        if call is None or call.attempt_seq != event.attempt_seq or call.executor is None:
            self._counts["stale"] += 1
            return []
        if call.stopping is not None:
            return []  # its CancelCall is out: the terminal frame, or the loss, decides
        ex = call.executor
        self._drain(call, ex)
        cancel = c.CancelCall(call.call_id, ex.executor_id, call.attempt_seq, StopReason.CANCELLED)
        if call.ties is not None:
            self._seats.drain(call)
        self._detach(call)
        failure = fail(
            ErrorKind.CRASHED,
            f"the answer to its request could not be sent to {ex.executor_id}",
            cause="resume_send_failed",
        )
        return [cancel, *self._end_attempt(call, failure, True, now_ms, ())]

    # --- executors --------------------------------------------------------------------------------------------

    def _on_attached(self, event: e.ExecutorAttached) -> list[SchedulerCommand]:
        snapshot = event.snapshot
        assert snapshot.executor_id not in self._index.executors, f"{snapshot.executor_id} attached twice"
        self._index.add(
            ExecutorState(
                executor_id=snapshot.executor_id,
                snapshot=snapshot,
                pool=event.pool,
                memory_high_watermark=event.memory_high_watermark,
                sealed=snapshot.wants_replacement,
                lookahead=Lookahead(self._config.queue_ahead_ms),
            )
        )
        self._shares.replace(event.pool)
        return []

    def _on_snapshot(self, event: e.SnapshotUpdated) -> list[SchedulerCommand]:
        snapshot = event.snapshot
        ex = self._index.executors.get(snapshot.executor_id)
        if ex is None:
            return []
        if snapshot.heartbeat_seq > ex.snapshot.heartbeat_seq:
            ex.take_heartbeat(snapshot)
        elif snapshot.heartbeat_seq == ex.snapshot.heartbeat_seq:
            ex.take_limits(snapshot)
        else:
            self._counts["stale"] += 1
            return []
        self._index.touch(ex)
        if ex.subcalls:
            self._subcalls.enter(ex)
        return []

    def _on_marks_read(self, event: e.MarksRead, now_ms: int) -> list[SchedulerCommand]:
        for marks in event.executors:
            ex = self._index.executors.get(marks.executor_id)
            if ex is None:
                continue
            ex.code_runs = marks.code_runs
            for call_id, attempt_seq in marks.begun if ex.unbegun else ():
                call = self._calls.get(call_id)
                if call is not None and call.executor is ex and call.attempt_seq == attempt_seq:
                    self._prove_begun(call, ex, now_ms)
            if ex.unbegun:
                ex.lookahead.look(now_ms)
            elif ex.live_roots and not ex.code_runs:
                ex.lookahead.find_waiting()
            self._index.touch(ex)
        return self._ask_back(now_ms)

    def _ask_back(self, now_ms: int) -> list[SchedulerCommand]:
        """What stands in line behind a call that takes long, while another executor has nothing to run and nothing
        else waits for that one: all of it, since a line is short (X91). The last comes back first: each then goes to
        the head of its queue."""
        self._index.refresh()
        ready = set(self._turns.placements())
        free = [ex for ex in self._index.executors.values() if ex.is_free]
        commands: list[SchedulerCommand] = []
        for ex in self._index.crowded.values() if free else ():
            placement = ex.placement
            assert placement is not None
            if placement in ready or not ex.lookahead.is_held_up(now_ms):
                continue
            if any(other is not ex and is_eligible(other, self._config, placement, now_ms) for other in free):
                commands += self._ask_line_back(ex)
        return commands

    def _ask_line_back(self, ex: ExecutorState) -> list[SchedulerCommand]:
        commands: list[SchedulerCommand] = []
        for call_id in reversed(ex.live) if ex.unbegun else ():
            call = self._calls[call_id]
            if call.parent is None and not (call.begun or call.asked_back or call.task.stop_reason):
                call.asked_back = True
                commands.append(c.CancelCall(call_id, ex.executor_id, call.attempt_seq, None))
        return commands

    def _on_sealed(self, event: e.ExecutorSealed, now_ms: int) -> list[SchedulerCommand]:
        ex = self._index.executors.get(event.executor_id)
        if ex is not None:
            ex.sealed = True
            self._index.touch(ex)
            if event.by_fault and not ex.blamed:
                ex.blamed = True
                self._shares.blame(ex.pool, ex.executor_id, ex.last_tool, now_ms)
            if self._config.queue_ahead_ms:
                return self._ask_line_back(ex)
        return []

    def _on_lost(self, event: e.ExecutorLost, now_ms: int) -> list[SchedulerCommand]:
        """Its calls: those that had begun fail, the others go back to READY at no cost (X62)."""
        ex = self._index.remove(event.executor_id)
        if ex is None:
            return []
        commands: list[SchedulerCommand] = []
        draining = sorted(ex.draining)
        held = [*ex.live, *(call_id for call_id, _ in draining)]
        for call_id in reversed(held):  # each returns to the head of its queue: the first bound is first again
            call = self._calls.get(call_id)
            if call is None or call.executor is not ex:
                continue
            parent = call.parent
            if parent is not None and parent.executor is ex and not ties_of(call).orphaned:
                continue  # it ends with its parent
            begun = call_id in event.begun or call.open_requests is not None  # a request proves it
            self._release(call)
            if not begun:
                commands += self._requeue_unbegun(call)
            elif call.stopping is not None:
                commands += self._finish_stopped(call, call.stopping, begun=True)
            else:
                failure = describe_loss(call, event)
                commands += self._end_attempt(call, failure, True, now_ms, ())
        for call_id, attempt_seq in draining:
            self._enqueue_all(self._seats.drained(call_id, attempt_seq))
        self._subcalls.remove(ex)
        self._exclusives.forget(ex)
        return commands

    # --- tasks end --------------------------------------------------------------------------------------------

    def _on_task_stopped(self, event: e.TaskStopped) -> list[SchedulerCommand]:
        task = self._tasks.get(event.task_id)
        if task is None:
            return []
        if task.stop_reason is None:
            task.stop_message = event.message
        self._stop(task, event.reason)
        if not event.cancel_running:
            return []
        commands: list[SchedulerCommand] = []
        for batch in task.batches.values():
            if batch.remaining == 0:
                continue
            for call in batch.calls:
                ex = call.executor
                if ex is None or call.stopping is not None:
                    continue
                call.stopping = event.reason
                self._drain(call, ex)
                commands.append(c.CancelCall(call.call_id, ex.executor_id, call.attempt_seq, event.reason))
                if call.ties is not None:
                    commands += self._cancel_subtree(call.ties, event.reason)
        return commands

    def _on_production_ended(self, event: e.ProductionEnded) -> list[SchedulerCommand]:
        task = self._tasks.get(event.task_id)
        if task is not None:
            task.production_open = False
            self._mark_dirty(task)
        return []

    def _on_batch_taken(self, event: e.BatchTaken) -> list[SchedulerCommand]:
        task = self._tasks.get(event.task_id)
        if task is not None:
            task.held_output_bytes -= task.untaken.pop(event.batch_index, 0)
        return []

    def flush_dirty_tasks(self, now_ms: int) -> list[SchedulerCommand]:
        """The epilogue. Call it until it returns nothing: convergence frees a slot, which may make another task active
        (X19)."""
        self._check_writer()
        return self._epilogue.flush()

    # --- looking ----------------------------------------------------------------------------------------------

    def has_capacity_for(self, task_id: TaskId) -> bool:
        """Whether the task may still commit batches."""
        task = self._tasks.get(task_id)
        return task is not None and task.production_open and task.stop_reason is None

    @property
    def is_settled(self) -> bool:
        """Nothing changed since the last epilogue, and the last decision left nothing to decide."""
        return not (self._epilogue.dirty or self._unfinished)

    @property
    def wants_marks(self) -> bool:
        """The pages of executors are worth a look: calls wait for a line that may have moved on unseen, or stand in one
        while another executor may have nothing to run. Answered by `MarksRead`."""
        index = self._index
        index.refresh_if_crowded()
        if not index.crowded:
            return False
        if index.held and self._turns.rings:
            return True
        return len(index.crowded) < len(index.executors) and self._config.queue_ahead_ms > 0

    def exclusive_waiting(self, pool: PoolName) -> int:
        """Exclusive calls that are ready and have no executor: their pool grows for them (X90)."""
        return self._exclusives.count(pool)

    def find_call(self, call_id: CallId) -> Call | None:
        """To look at, not to change; None: it is gone."""
        return self._calls.get(call_id)

    def progress(self, task_id: TaskId) -> TaskProgress | None:
        """A task's counts now; None once it converged."""
        task = self._tasks.get(task_id)
        if task is None:
            return None
        return TaskProgress(task.total_count, task.terminal_count, task.failed_count, task.inflight)

    @property
    def has_strays(self) -> bool:
        """Subcalls stand ready, or ended where they stood, that have no home in their pool."""
        return bool(self._strays)

    def demand(self) -> Demand:
        """Ask when a turn has settled: what then stands in a ring found no executor (X92)."""
        bound = {ex.executor_id: ex.placement for ex in self._index.executors.values()}
        ready = self._turns.placements()
        waiting = (placement for placement in self._exclusives.waiting if placement not in ready)
        return Demand([*ready, *waiting], self._stranded(), bound)

    def find_placement(self, executor_id: ExecutorId) -> Placement | None:
        """What an executor is bound to; None: nothing yet, or it is gone."""
        ex = self._index.executors.get(executor_id)
        return None if ex is None else ex.placement

    def tasks_waiting_for(self, pool: PoolName) -> set[TaskId]:
        """Tasks with a call that stands ready for an executor of this pool, or will when its retry is due."""
        calls = self._calls.values()
        return {call.task.task_id for call in calls if call.state is READY and call.placement.pool == pool}

    def statistics(self) -> SchedulerStatistics:
        executors = self._index.executors.values()
        return SchedulerStatistics(
            tasks_active=sum(task.active for task in self._tasks.values()),
            tasks_waiting=self._slots.waiting_count,
            calls=len(self._calls),
            inflight=sum(len(ex.live) for ex in executors),
            waiting=sum(ex.waiting for ex in executors),
            draining=sum(len(ex.draining) for ex in executors),
            executors=len(self._index.executors),
            finished=self._counts["finished"],
            failed=self._counts["failed"],
            retried=self._counts["retried"],
            stale=self._counts["stale"],
            dropped=self._counts["dropped"],
            refused=self._counts["refused"],
            subcalls=self._counts["subcalls"],
            shared=self._counts["shared"],
            exclusive_waiting=self._exclusives.count(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself. For tests; costs a full scan."""
        invariants.check(self)
