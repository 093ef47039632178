"""The scheduler: which call runs where and when.

Theory of operation. Tasks hold calls; calls that may run stand in their task's ready queue; tasks with ready calls
take turns in a ring. A decision (`try_dispatch_next`) takes the head of the next task's queue, reserves it a place at
the best executor and emits BindCall; the shell answers ExecutorBound and is told to DispatchCall. A terminal frame, a
refusal or a loss releases the reservation in one place (`_release`) and ends the attempt: the call goes back to READY
or, in one place too (`_finish`), to DONE. Whatever can change a count marks the task dirty; `flush_dirty_tasks` alone
settles batches and converges tasks. The shell runs every turn as: handle events, then `flush_dirty_tasks` and
`try_dispatch_next` until both are quiet.

Nothing here waits, reads a clock or logs; `now_ms` and the random source come from outside. Identity is checked
against reservations: a frame counts only if its executor holds one, live or draining, for that call and attempt.
Source: call-execution X1-X23, X62-X77.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import assert_never

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome, ProtocolError, fail, may_retry
from callyard.ids import CallId, ExecutorId, TaskId
from callyard.policy.backoff import compute_backoff_ms, compute_refusal_delay_ms
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler import invariants
from callyard.scheduler.batches import PreparedBatch
from callyard.scheduler.calls import (
    BOUND,
    DONE,
    FINISHED,
    READY,
    REQUEUED,
    RESUMED,
    RUNNING,
    SUSPENDED,
    WAITING,
    Call,
    CallResult,
    StopReason,
)
from callyard.scheduler.commands import SchedulerCommand
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.endings import describe_loss, describe_stop, discard_output
from callyard.scheduler.events import SchedulerEvent
from callyard.scheduler.executors import ExecutorIndex, ExecutorState
from callyard.scheduler.slots import TaskSlots
from callyard.scheduler.tasks import Batch, Task, TaskPlan
from callyard.scheduler.turns import Turns


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """One consistent snapshot of the counts."""

    tasks_active: int
    tasks_waiting: int
    calls: int
    inflight: int
    waiting: int
    draining: int
    """Reservations of stopped attempts that wait for their terminal frame."""
    executors: int
    finished: int
    """Indexes with a result, rows that came as failures included."""
    failed: int
    retried: int
    stale: int
    """Frames of attempts that are no longer current (X13)."""
    dropped: int
    """Late timers, and requests that were unknown or repeated (X4, X66)."""
    refused: int


class TaskProgress(msgspec.Struct, frozen=True, gc=False):
    """Root calls of one task: committed so far, ended, failed among those, and RUNNING or WAITING."""

    total_count: int
    terminal_count: int
    failed_count: int
    inflight: int


class Scheduler:
    """One writer: only the worker's actor may call what changes state (X2).

    `guard`, when given, is called at the start of each mutating method and raises for a foreign caller.
    """

    def __init__(self, config: SchedulerConfig, rng: Random, guard: Callable[[], None] | None = None) -> None:
        self._config = config
        self._rng = rng
        self._guard = guard
        self._calls: dict[CallId, Call] = {}
        self._tasks: dict[TaskId, Task] = {}
        self._index = ExecutorIndex(config)
        self._turns = Turns(config.task_max_inflight_calls)
        self._slots = TaskSlots(config.executor_task_slots, config.waiting_tasks_max)
        self._dirty: list[Task] = []
        self._counts: Counter[str] = Counter()

    # --- tasks ------------------------------------------------------------------------------------------------

    def commit_task(self, plan: TaskPlan) -> CallFailure | None:
        """Open a task for batches. Returns a failure (`unavailable`) when too many tasks wait already (X18)."""
        self._check_writer()
        assert plan.task_id not in self._tasks, f"task {plan.task_id} committed twice"
        assert plan.max_attempts >= 1, f"task {plan.task_id}: max_attempts={plan.max_attempts}"
        task = Task(plan=plan, ready=deque(), batches={})
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
        for call in batch.calls:
            assert call.call_id not in calls, f"call {call.call_id} committed twice"
            call.task = task
            call.queued = True
            calls[call.call_id] = call
        task.ready.extend(batch.calls)
        self._turns.enter(task)
        if batch.remaining == 0:
            task.settled.append(batch)
        self._mark_dirty(task)
        return True

    # --- decisions --------------------------------------------------------------------------------------------

    def try_dispatch_next(self, now_ms: int) -> list[SchedulerCommand]:
        """One admission decision: the BindCall of the next call in turn, or nothing.

        Cost does not grow with the number of ready calls (X7, X23).
        """
        if self._guard is not None:
            self._guard()
        turns = self._turns
        entered = turns.entries
        for digest in turns.bundles():
            task = turns.head(digest)
            if task is None:
                continue
            ex = self._index.select(digest, now_ms)
            if ex is None:
                continue
            call = task.ready.popleft()
            turns.pass_on(digest)
            return [self._bind(call, ex)]
        if turns.entries != entered:  # a task moved to the ring of another bundle: look there too
            return self.try_dispatch_next(now_ms)
        return []

    def _bind(self, call: Call, ex: ExecutorState) -> c.BindCall:
        task = call.task
        call.apply(BOUND)
        call.queued = False
        call.attempt_seq += 1
        call.attempt_count += 1
        call.executor = ex
        task.inflight += 1
        ex.live[call.call_id] = call.attempt_seq
        ex.live_roots += 1
        ex.digest = call.target.digest
        self._index.touch(ex)
        return c.BindCall(call.call_id, ex.executor_id, call.attempt_seq, call.budget_ms)

    # --- events -----------------------------------------------------------------------------------------------

    def handle(self, event: SchedulerEvent, now_ms: int) -> list[SchedulerCommand]:
        """Take one fact; return what it orders. Raises `ProtocolError` when a peer broke its bounds."""
        if self._guard is not None:
            self._guard()
        match event:
            case e.ExecutorBound():
                return self._on_bound(event)
            case e.CallCompleted():
                return self._on_completed(event)
            case e.AttemptFailed():
                return self._on_attempt_failed(event, now_ms)
            case e.CallSuspended():
                return self._on_suspended(event)
            case e.CallResumed():
                return self._on_resumed(event)
            case e.RetryDue():
                return self._on_retry_due(event, now_ms)
            case e.SnapshotUpdated():
                return self._on_snapshot(event)
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
                return self._on_sealed(event)
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
            self._requeue_unbegun(call)
            return [unbind]
        target = call.target
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

    def _on_completed(self, event: e.CallCompleted) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is None:
            return self._release_stale(event.executor_id, event.call_id, event.attempt_seq)
        unbind = self._release(call)
        result = CallResult(call.index, event.output, None, call.attempt_count, event.notes)
        self._finish(call, result)
        return [unbind]

    def _on_attempt_failed(self, event: e.AttemptFailed, now_ms: int) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is None:
            return self._release_stale(event.executor_id, event.call_id, event.attempt_seq)
        if event.recalled and call.open_requests is not None:
            raise ProtocolError(f"{event.executor_id} gave back call {call.call_id}, which had begun")
        commands: list[SchedulerCommand] = [self._release(call)]
        if event.recalled:
            self._requeue_unbegun(call)
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
            self._finish(call, CallResult(call.index, None, stopped, call.attempt_count, event.notes))
            return commands
        return commands + self._end_attempt(call, failure, begun, now_ms, event.notes)

    def _on_suspended(self, event: e.CallSuspended) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is None:
            return []
        requests = call.open_requests
        if requests is None:
            requests = call.open_requests = set()
        if event.request_id in requests:
            self._counts["dropped"] += 1
            return []
        if len(requests) >= self._config.open_requests_max:
            raise ProtocolError(
                f"call {call.call_id} has {len(requests)} open requests, the most is {self._config.open_requests_max}"
                f" ({event.executor_id})"
            )
        requests.add(event.request_id)
        if call.state is RUNNING:
            call.apply(SUSPENDED)
            self._count_waiting(call, 1)
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
        call = self._calls.get(event.call_id)
        if call is None or call.state is not READY:
            self._counts["dropped"] += 1
        elif call.queued:
            pass  # the wake-up after a refusal: the call is in the queue already
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
            self._requeue_unbegun(call)
            return commands
        self._counts["refused"] += 1
        ex.refusals += 1
        delay = compute_refusal_delay_ms(ex.refusals, self._config.base_backoff_ms, self._config.refusal_delay_ms_max)
        ex.blocked_until_ms = now_ms + delay
        self._index.touch(ex)
        self._requeue_unbegun(call)
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
        self._fail(call, failure, ())
        return [unbind]

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
        self._detach(call)
        failure = fail(
            ErrorKind.CRASHED,
            f"the answer to its request could not be sent to {ex.executor_id}",
            cause="resume_send_failed",
        )
        return [cancel, *self._end_attempt(call, failure, True, now_ms, ())]

    # --- attempts ---------------------------------------------------------------------------------------------

    def _end_attempt(
        self, call: Call, failure: CallFailure, begun: bool, now_ms: int, notes: tuple[str, ...]
    ) -> list[SchedulerCommand]:
        """An attempt of a released call failed: run it again or finish it (X12)."""
        if not begun:
            call.attempt_count -= 1
        task = call.task
        stopping = call.stopping is not None or task.stop_reason is not None
        retryable = may_retry(failure.kind, idempotent=call.target.idempotent, begun=begun)
        if retryable and not stopping and call.attempt_count < call.max_attempts:
            self._counts["retried"] += 1
            call.apply(REQUEUED)
            call.effect_unknown |= failure.outcome is not Outcome.NOT_RUN
            base = task.plan.base_backoff_ms
            delay = compute_backoff_ms(
                max(1, call.attempt_count), self._config.base_backoff_ms if base is None else base, self._rng
            )
            asked = failure.details.get("retry_after_ms")
            if isinstance(asked, int) and asked > delay:
                delay = asked
            call.retry_at_ms = now_ms + delay
            self._mark_dirty(task)
            return [c.ArmCallRetry(call.call_id, call.retry_at_ms)]
        self._fail(call, msgspec.structs.replace(failure, retryable=retryable), notes)
        return []

    def _fail(self, call: Call, failure: CallFailure, notes: tuple[str, ...]) -> None:
        """The final failure: `attempts` says how many had begun, and an earlier unknown effect stays unknown."""
        outcome = failure.outcome
        if outcome is Outcome.NOT_RUN and call.effect_unknown:
            outcome = Outcome.UNKNOWN
        final = msgspec.structs.replace(failure, attempts=call.attempt_count, outcome=outcome)
        self._finish(call, CallResult(call.index, None, final, call.attempt_count, notes))

    def _requeue_unbegun(self, call: Call) -> None:
        """The attempt provably never began: READY at no cost, whatever the promise (X62, X69)."""
        call.attempt_count -= 1
        if call.stopping is not None:
            self._finish_stopped(call, call.stopping)
            return
        call.apply(REQUEUED)
        self._enqueue(call)

    def _enqueue(self, call: Call) -> None:
        call.queued = True
        call.task.ready.appendleft(call)
        self._turns.enter(call.task)
        self._mark_dirty(call.task)

    def _finish_stopped(self, call: Call, reason: StopReason, *, begun: bool = False) -> None:
        failure = describe_stop(call, reason, begun=begun)
        self._finish(call, CallResult(call.index, None, failure, call.attempt_count))

    def _release(self, call: Call) -> c.UnbindCall:
        """Give back the call's reservation, live or draining. The one place that does (X35)."""
        ex = call.executor
        assert ex is not None, f"{call.call_id} holds no reservation"
        if ex.live.pop(call.call_id, None) is not None:
            ex.live_roots -= 1
            if call.state is WAITING:
                ex.waiting -= 1
            elif ex.hidden:
                ex.hidden -= 1  # what ended was running: it may have been one of those, and fewer is the safe side
        else:
            ex.draining.discard((call.call_id, call.attempt_seq))
        ex.blocked_until_ms = 0
        self._index.touch(ex)
        unbind = c.UnbindCall(call.call_id, ex.executor_id, call.attempt_seq)
        self._detach(call)
        return unbind

    def _detach(self, call: Call) -> None:
        """The call belongs to no executor any more."""
        call.executor = None
        call.open_requests = None
        task = call.task
        task.inflight -= 1
        if not task.in_ring:
            self._turns.enter(task)

    def _drain(self, call: Call, ex: ExecutorState) -> None:
        """Its live reservation becomes a draining one, until the executor's terminal frame."""
        if ex.live.pop(call.call_id, None) is None:
            return
        ex.live_roots -= 1
        if call.state is WAITING:
            ex.waiting -= 1
        ex.draining.add((call.call_id, call.attempt_seq))
        self._index.touch(ex)

    def _free_unused(self, ex: ExecutorState) -> None:
        """Nothing was ever sent to it: it is bound to no bundle after all."""
        if not (ex.has_served or ex.live or ex.draining):
            ex.digest = None

    def _release_stale(self, executor_id: ExecutorId, call_id: CallId, attempt_seq: int) -> list[SchedulerCommand]:
        """A terminal frame of an attempt that counts no more frees the reservation that still drains for it."""
        ex = self._index.executors.get(executor_id)
        if ex is None or (call_id, attempt_seq) not in ex.draining:
            return []
        ex.draining.remove((call_id, attempt_seq))
        ex.blocked_until_ms = 0
        ex.has_served = True
        self._index.touch(ex)
        return [c.UnbindCall(call_id, executor_id, attempt_seq)]

    def _finish(self, call: Call, result: CallResult) -> None:
        """To DONE, and all accounting of it. A second time changes nothing (X5)."""
        if call.state is DONE:
            return
        call.apply(FINISHED)
        call.queued = False
        task = call.task
        batch = call.batch
        batch.results[call.index - batch.first_index] = result
        batch.remaining -= 1
        task.terminal_count += 1
        self._counts["finished"] += 1
        if result.failure is not None:
            task.failed_count += 1
            self._counts["failed"] += 1
        elif result.output is not None:
            size = len(result.output)
            batch.output_bytes += size
            task.held_output_bytes += size
            limit = self._config.max_collected_output_bytes
            if limit and task.held_output_bytes > limit and task.stop_reason is None:
                self._stop(task, StopReason.OUTPUT_BYTES_EXCEEDED)
        if batch.remaining == 0:
            task.settled.append(batch)
        if not task.dirty:
            self._mark_dirty(task)

    # --- executors --------------------------------------------------------------------------------------------

    def _on_attached(self, event: e.ExecutorAttached) -> list[SchedulerCommand]:
        snapshot = event.snapshot
        assert snapshot.executor_id not in self._index.executors, f"{snapshot.executor_id} attached twice"
        self._index.add(
            ExecutorState(executor_id=snapshot.executor_id, snapshot=snapshot, sealed=snapshot.wants_replacement)
        )
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
        return []

    def _on_sealed(self, event: e.ExecutorSealed) -> list[SchedulerCommand]:
        ex = self._index.executors.get(event.executor_id)
        if ex is not None:
            ex.sealed = True
            self._index.touch(ex)
        return []

    def _on_lost(self, event: e.ExecutorLost, now_ms: int) -> list[SchedulerCommand]:
        """Its calls: those that had begun fail, the others go back to READY at no cost (X62)."""
        ex = self._index.remove(event.executor_id)
        if ex is None:
            return []
        commands: list[SchedulerCommand] = []
        held = [*ex.live, *(call_id for call_id, _ in sorted(ex.draining))]
        for call_id in reversed(held):  # each returns to the head of its queue: the first bound is first again
            call = self._calls.get(call_id)
            if call is None or call.executor is not ex:
                continue
            begun = call_id in event.begun or call.open_requests is not None  # a request proves it
            self._release(call)
            if not begun:
                self._requeue_unbegun(call)
            elif call.stopping is not None:
                self._finish_stopped(call, call.stopping, begun=True)
            else:
                failure = describe_loss(call, event)
                commands += self._end_attempt(call, failure, True, now_ms, ())
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
        return commands

    def _stop(self, task: Task, reason: StopReason) -> None:
        """No more dispatching; what never ran is drained in the epilogue, once nothing is in flight."""
        if task.stop_reason is None:
            task.stop_reason = reason
        self._mark_dirty(task)

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

    def _mark_dirty(self, task: Task) -> None:
        if not task.dirty:
            task.dirty = True
            self._dirty.append(task)

    def flush_dirty_tasks(self, now_ms: int) -> list[SchedulerCommand]:
        """The epilogue: per dirty task StopCallProduction, drain, BatchSettled, ConvergeTaskCalls (X19).

        Call it until it returns nothing: convergence frees a slot, which may make another task active.
        """
        self._check_writer()
        commands: list[SchedulerCommand] = []
        while self._dirty:
            dirty, self._dirty = self._dirty, []
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
                self._drain_ready(task, task.stop_reason)
        if task.settled:
            settled, task.settled = task.settled, []
            for batch in settled:
                self._settle_batch(task, batch, commands)
        if task.is_over:
            self._converge(task, commands)

    def _drain_ready(self, task: Task, reason: StopReason) -> None:
        for batch in task.batches.values():
            if batch.remaining:
                for call in batch.calls:
                    if call.state is READY:
                        self._finish_stopped(call, reason)
        task.ready.clear()

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
        limit = self._config.max_collected_output_bytes
        return [discard_output(result, limit) if result.ok else result for result in results]

    def _converge(self, task: Task, commands: list[SchedulerCommand]) -> None:
        del self._tasks[task.task_id]
        self._turns.leave(task)
        following = self._slots.release(task)
        if following is not None:
            self._turns.enter(following)
            self._mark_dirty(following)
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

    # --- looking ----------------------------------------------------------------------------------------------

    def _check_writer(self) -> None:
        if self._guard is not None:
            self._guard()

    def has_capacity_for(self, task_id: TaskId) -> bool:
        """Whether the task may still commit batches."""
        task = self._tasks.get(task_id)
        return task is not None and task.production_open and task.stop_reason is None

    @property
    def is_settled(self) -> bool:
        """Nothing changed since the last epilogue."""
        return not self._dirty

    def find_call(self, call_id: CallId) -> Call | None:
        """To look at, not to change; None: it is gone."""
        return self._calls.get(call_id)

    def progress(self, task_id: TaskId) -> TaskProgress | None:
        """A task's counts now; None once it converged."""
        task = self._tasks.get(task_id)
        if task is None:
            return None
        return TaskProgress(task.total_count, task.terminal_count, task.failed_count, task.inflight)

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
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself. For tests; costs a full scan."""
        invariants.check(self)
