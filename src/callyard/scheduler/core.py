"""The scheduler: which call runs where and when.

Theory of operation. Tasks hold calls; calls that may run stand in their task's ready queue; tasks with ready calls
take turns in a ring. A decision (`try_dispatch_next`) takes the head of the next task's queue, reserves it a place at
the best executor and emits BindCall; the shell answers ExecutorBound and is told to DispatchCall. A terminal frame, a
refusal or a loss releases the reservation in one place (`_release`) and ends the attempt: the call goes back to READY
or, in one place too (`_finish`), to DONE. Whatever can change a count marks the task dirty; `flush_dirty_tasks` alone
settles batches and converges tasks. The shell runs every turn as: handle events, then `flush_dirty_tasks` and
`try_dispatch_next` until both are quiet and `is_settled`.

Calls that hang on other calls carry `Ties`: subcalls and those that make them, equal calls that share one run, calls
of a function with a limit, exclusive ones. A plain root call has none, and each step asks only that of it. Before a
tied call is bound `_look_ahead` asks whether it needs a run at all, and whether it may have one now; when it ends
`_untie` tells the others.

Nothing here waits, reads a clock or logs; `now_ms` and the random source come from outside. Identity is checked
against reservations: a frame counts only if its executor holds one, live or draining, for that call and attempt.
Source: call-execution X1-X30, X62-X85, X90.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Final, assert_never

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome, ProtocolError, fail, may_retry
from callyard.ids import CallId, Digest, ExecutorId, RequestId, TaskId
from callyard.policy.backoff import compute_backoff_ms, compute_refusal_delay_ms
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler import invariants
from callyard.scheduler.batches import PreparedBatch
from callyard.scheduler.cache import key_of
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
    Ties,
)
from callyard.scheduler.commands import SchedulerCommand
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.endings import describe_loss, describe_stop
from callyard.scheduler.epilogue import Epilogue
from callyard.scheduler.events import SchedulerEvent
from callyard.scheduler.exclusives import Exclusives
from callyard.scheduler.executors import ExecutorIndex, ExecutorState
from callyard.scheduler.flights import PASSED_ON, Sharing
from callyard.scheduler.seats import Seats
from callyard.scheduler.slots import TaskSlots
from callyard.scheduler.statistics import BundleDemand, SchedulerStatistics, TaskProgress
from callyard.scheduler.subcalls import (
    SubcallQueues,
    build_subcall,
    describe_ring,
    home_of,
    is_for_its_place,
    mark_disturbed,
    mark_effect,
    refuse,
    ties_of,
)
from callyard.scheduler.tasks import Task, TaskPlan
from callyard.scheduler.turns import Turns
from callyard.scheduler.waits import can_end

NO_COMMANDS: Final[tuple[SchedulerCommand, ...]] = ()
PASS_MAX: Final = 64
"""Calls that one decision may set aside before it is asked again."""


class Scheduler:
    """One writer: only the worker's actor may call what changes state (X2).

    `guard`, when given, is called at the start of each mutating method and raises for a foreign caller. `numbers` gives
    subcalls theirs: hand in one for the whole process when it holds several schedulers (X24).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rng: Random,
        guard: Callable[[], None] | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._config = config
        self._rng = rng
        self._guard = guard
        self._numbers = count(1) if numbers is None else numbers
        self._calls: dict[CallId, Call] = {}
        self._tasks: dict[TaskId, Task] = {}
        self._index = ExecutorIndex(config)
        self._turns = Turns(config.task_max_inflight_calls)
        self._slots = TaskSlots(config.executor_task_slots, config.waiting_tasks_max)
        self._subcalls = SubcallQueues()
        self._seats = Seats()
        self._exclusives = Exclusives(self._index, self._turns.may_take)
        self._subcall_ring = self._subcalls.ring
        self._waiting_exclusives = self._exclusives.waiting
        """Both empty in nearly every decision: to ask them costs no more than that."""
        self._counts: Counter[str] = Counter()
        self._unfinished = False
        """The last decision set aside as many calls as one may: there is more to decide."""
        self._epilogue = Epilogue(
            self._calls,
            self._tasks,
            self._turns,
            self._slots,
            self._counts,
            config.max_collected_output_bytes,
            self._finish_stopped,
        )
        self._mark_dirty = self._epilogue.mark

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
        if prepared.failed_rows and task.plan.on_failure == "fail_fast":
            self._stop(task, StopReason.FAIL_FAST)
        return True

    # --- decisions --------------------------------------------------------------------------------------------

    def try_dispatch_next(self, now_ms: int) -> list[SchedulerCommand]:
        """One admission decision: the BindCall of the next call in turn, or its end without a run, or nothing.

        Nothing means that there is nothing to decide, unless `is_settled` says otherwise. Cost does not grow with the
        number of ready calls (X7, X23).
        """
        if self._guard is not None:
            self._guard()
        turns = self._turns
        subcalls, exclusives = self._subcall_ring, self._waiting_exclusives
        self._unfinished = False
        while True:
            entered = turns.entries
            if subcalls or exclusives:
                commands = self._decide_out_of_turn(now_ms)
                if commands:
                    return commands
            for digest in turns.bundles():
                task = turns.head(digest)
                if task is None:
                    continue
                call = task.ready[0]
                if call.ties is not None:
                    commands, task = self._pass_tied(digest, now_ms)
                    if commands:
                        return commands
                    if task is None:
                        continue
                    call = task.ready[0]
                ex = self._index.select(digest, now_ms)
                if ex is None:
                    continue
                task.ready.popleft()
                turns.pass_on(digest)
                if exclusives:
                    self._exclusives.pass_over(digest)
                return [self._bind(call, ex)]
            if self._unfinished:
                return []
            # A task moved to the ring of another bundle, or what was set aside let others go on: look there too.
            if turns.entries == entered and not subcalls:
                return self._decide_exclusive(now_ms, insists=True) if exclusives else []

    def _pass_tied(self, digest: Digest, now_ms: int) -> tuple[list[SchedulerCommand], Task | None]:
        """Take calls that are not to be bound in turn off the heads of a bundle's queues (X7).

        Returns the commands of the first that ends so, or the task whose head needs an executor now.
        """
        turns = self._turns
        for _ in range(PASS_MAX):
            task = turns.head(digest) if digest in turns.rings else None
            if task is None:
                return [], None
            call = task.ready.popleft()
            commands = NO_COMMANDS if call.ties is None else self._look_ahead(call)
            if call.ties is None or (commands is None and not call.target.exclusive):
                task.ready.appendleft(call)
                return [], task
            call.queued = False
            if commands is None:
                self._exclusives.add(call)
                commands = self._decide_exclusive(now_ms)
            if commands:
                turns.pass_on(digest)
                return list(commands), None
        self._unfinished = True
        return [], None

    def _decide_out_of_turn(self, now_ms: int) -> list[SchedulerCommand]:
        """Subcalls, which no filter holds back (X80), then exclusive calls that wait for an executor."""
        subcalls = self._subcalls
        while (call := subcalls.head(now_ms)) is not None:
            subcalls.pop()
            commands = self._look_ahead(call)
            if commands is None:
                return [self._bind(call, self._place(call, now_ms))]
            if commands:
                return list(commands)
        return self._decide_exclusive(now_ms)

    def _decide_exclusive(self, now_ms: int, *, insists: bool = False) -> list[SchedulerCommand]:
        while (found := self._exclusives.head(now_ms, insists=insists)) is not None:
            call, ex = found
            commands = self._look_ahead(call)
            if commands is None:
                return [self._bind(call, ex)]
            if commands:
                return list(commands)
        return []

    def _place(self, call: Call, now_ms: int) -> ExecutorState:
        """Where a subcall runs: at its parent's executor, which always passes, or spread (X26, X30)."""
        home = home_of(call)
        if call.ties is not None and call.ties.spread:
            return self._index.select_other(call.target.digest, now_ms, home) or home
        return home

    def _look_ahead(self, call: Call) -> Sequence[SchedulerCommand] | None:
        """None: the call needs an executor now. Else it was ended, or set aside until something happens."""
        ties = call.ties
        assert ties is not None
        if ties.keyed:
            commands = self._look_for_equal(call, ties)
            if commands is not None:
                return commands
        if call.target.max_concurrency is not None and not self._seats.has_room(call):
            line = self._seats.line_of(call)
            if call.parent is not None and not can_end(call, line.holders):
                mark_disturbed(call)
                return self._fail(call, describe_ring(call), ())
            self._seats.wait(call)
            return NO_COMMANDS
        return None

    def _look_for_equal(self, call: Call, ties: Ties) -> Sequence[SchedulerCommand] | None:
        """A cached result, or an equal call that runs (X15, X16)."""
        task = call.task
        sharing = task.sharing
        if sharing is None:
            sharing = task.sharing = Sharing(self._config.cache_entries, self._config.cache_bytes_max)
        key = ties.key
        if key is None:
            key = ties.key = key_of(call)
        output = sharing.cache.get(key)
        if output is not None:
            return self._finish_shared(call, CallResult(call.index, output, None, call.attempt_count))
        flight = sharing.flights.get(key)
        if flight is None or flight.leader is call:
            return None
        if call.parent is not None:
            leader = flight.leader
            if leader.parent is None and leader.executor is None:
                sharing.take_over(flight, call)
                return None
            if not can_end(call, (leader,)):
                return None
        flight.join(call)
        self._enqueue_all(self._seats.forget(call))
        return NO_COMMANDS

    def _bind(self, call: Call, ex: ExecutorState) -> c.BindCall:
        call.apply(BOUND)
        call.queued = False
        call.attempt_seq += 1
        call.attempt_count += 1
        call.executor = ex
        ex.live[call.call_id] = call.attempt_seq
        if call.parent is None:
            call.task.inflight += 1
            ex.live_roots += 1
        ex.digest = call.target.digest
        self._index.touch(ex)
        if call.ties is not None:
            self._tie(call, call.ties, ex)
        return c.BindCall(call.call_id, ex.executor_id, call.attempt_seq, call.budget_ms)

    def _tie(self, call: Call, ties: Ties, ex: ExecutorState) -> None:
        """A new attempt: nothing is below it yet, and what it needs is taken."""
        assert not ties.children, f"{call.call_id} has subcalls of an earlier attempt"
        ties.used_ms = ties.charged_ms = 0
        ties.effect_below = ties.disturbed = False
        if ties.keyed:
            assert call.task.sharing is not None
            call.task.sharing.lead(call)
        if call.target.max_concurrency is not None:
            self._seats.take(call)
        if call.target.exclusive and call.parent is None:
            self._exclusives.begin(call, ex)

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
            case e.SubcallRequested():
                return self._on_subcall_requested(event)
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

    def _on_completed(self, event: e.CallCompleted) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is None:
            return self._release_stale(event.executor_id, event.call_id, event.attempt_seq)
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

    def _on_suspended(self, event: e.CallSuspended) -> list[SchedulerCommand]:
        call = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if call is not None:
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

    def _on_subcall_requested(self, event: e.SubcallRequested) -> list[SchedulerCommand]:
        """A late request of an old attempt is stale: nobody there waits for an answer (X25)."""
        parent = self._current(event.executor_id, event.call_id, event.attempt_seq)
        if parent is None or not self._open_request(parent, event.request_id, event.executor_id):
            return []
        refusal = refuse(parent, event, self._config.max_subcall_depth)
        if refusal is not None:
            if is_for_its_place(refusal):
                mark_disturbed(parent)
            return [self._resume(parent, event.request_id, None, refusal, 0)]
        call = build_subcall(parent, event, next(self._numbers))
        assert parent.ties is not None
        parent.ties.children[call.call_id] = call
        self._calls[call.call_id] = call
        call.batch.subcalls += 1
        self._counts["subcalls"] += 1
        self._subcalls.add(call)
        return []

    @staticmethod
    def _resume(
        parent: Call, request_id: RequestId, output: bytes | None, failure: CallFailure | None, used_ms: int
    ) -> c.ResumeParent:
        ex = parent.executor
        assert ex is not None, f"{parent.call_id} is to be resumed, but holds no reservation"
        return c.ResumeParent(parent.call_id, ex.executor_id, parent.attempt_seq, request_id, output, failure, used_ms)

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

    # --- attempts ---------------------------------------------------------------------------------------------

    def _end_attempt(
        self, call: Call, failure: CallFailure, begun: bool, now_ms: int, notes: tuple[str, ...]
    ) -> list[SchedulerCommand]:
        """An attempt of a released call failed: run it again or finish it (X12)."""
        if not begun:
            call.attempt_count -= 1
        task = call.task
        stopping = call.stopping is not None or task.stop_reason is not None
        may_run_again = call.target.may_run_again
        ties = call.ties
        effect_below = ties is not None and ties.effect_below
        retryable = may_retry(failure.kind, idempotent=may_run_again and not effect_below, begun=begun)
        if failure.kind is ErrorKind.TRANSIENT and "cause" in failure.details:  # a subcall's failure that it handed on
            failure = msgspec.structs.replace(failure, outcome=Outcome.UNKNOWN)  # it had begun, and says no more
            retryable = retryable and not effect_below
        if retryable and not stopping and call.attempt_count < call.max_attempts:
            self._counts["retried"] += 1
            call.apply(REQUEUED)
            call.effect_unknown |= failure.outcome is not Outcome.NOT_RUN or effect_below
            base = task.plan.base_backoff_ms
            delay = compute_backoff_ms(
                max(1, call.attempt_count), self._config.base_backoff_ms if base is None else base, self._rng
            )
            asked = failure.details.get("retry_after_ms")
            if isinstance(asked, int) and asked > delay:
                delay = asked
            call.retry_at_ms = now_ms + delay
            self._mark_dirty(task)
            armed = c.ArmCallRetry(call.call_id, call.retry_at_ms)
            if ties is None:
                return [armed]
            self._step_back(call)
            return [*self._cancel_subtree(ties, StopReason.CANCELLED), armed]
        return list(self._fail(call, msgspec.structs.replace(failure, retryable=retryable), notes))

    def _fail(self, call: Call, failure: CallFailure, notes: tuple[str, ...]) -> Sequence[SchedulerCommand]:
        """The final failure: `attempts` says how many had begun, and an earlier unknown effect stays unknown."""
        outcome = failure.outcome
        if outcome is Outcome.NOT_RUN and call.effect_unknown:
            outcome = Outcome.UNKNOWN
        final = msgspec.structs.replace(failure, attempts=call.attempt_count, outcome=outcome)
        return self._finish(call, CallResult(call.index, None, final, call.attempt_count, notes))

    def _requeue_unbegun(self, call: Call) -> Sequence[SchedulerCommand]:
        """The attempt provably never began: READY at no cost, whatever the promise (X62, X69)."""
        call.attempt_count -= 1
        if call.stopping is not None:
            return self._finish_stopped(call, call.stopping)
        call.apply(REQUEUED)
        self._enqueue(call)
        if call.ties is not None:
            self._step_back(call)
        return NO_COMMANDS

    def _step_back(self, call: Call) -> None:
        """It holds no place any more: a subcall that waits for its end leads instead."""
        sharing = call.task.sharing
        following = None if sharing is None else sharing.step_back(call)
        if following is not None:
            self._enqueue(following)

    def _enqueue(self, call: Call) -> None:
        """To the head of its queue."""
        self._mark_dirty(call.task)
        if call.parent is not None:
            if not ties_of(call).orphaned:  # else it is about to end with its parent
                self._subcalls.add(call, first=True)
            return
        call.queued = True
        call.task.ready.appendleft(call)
        self._turns.enter(call.task)

    def _enqueue_all(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._enqueue(call)

    def _finish_stopped(self, call: Call, reason: StopReason, *, begun: bool = False) -> Sequence[SchedulerCommand]:
        failure = describe_stop(call, reason, begun=begun)
        return self._finish(call, CallResult(call.index, None, failure, call.attempt_count))

    def _release(self, call: Call) -> c.UnbindCall:
        """Give back the call's reservation, live or draining. The one place that does (X35)."""
        ex = call.executor
        assert ex is not None, f"{call.call_id} holds no reservation"
        if ex.live.pop(call.call_id, None) is not None:
            if call.parent is None:
                ex.live_roots -= 1
            if call.state is WAITING:
                ex.waiting -= 1
            elif ex.hidden:
                ex.hidden -= 1  # what ended was running: it may have been one of those, and fewer is the safe side
        else:
            ex.draining.discard((call.call_id, call.attempt_seq))
            ex.draining_subcalls.discard((call.call_id, call.attempt_seq))
        ex.blocked_until_ms = 0
        self._index.touch(ex)
        if ex.subcalls or ex.closed:
            self._let_go_on(ex)
        unbind = c.UnbindCall(call.call_id, ex.executor_id, call.attempt_seq)
        self._detach(call)
        if call.ties is not None:
            self._enqueue_all(self._seats.leave(call))
        return unbind

    def _let_go_on(self, ex: ExecutorState) -> None:
        """A reservation was released there: what waits for that, beside root calls, may go on."""
        self._subcalls.enter(ex)
        if ex.closed:
            self._exclusives.reopen(ex)

    def _detach(self, call: Call) -> None:
        """The call belongs to no executor any more."""
        call.executor = None
        call.open_requests = None
        if call.parent is not None:
            return
        task = call.task
        task.inflight -= 1
        if not task.in_ring:
            self._turns.enter(task)

    def _drain(self, call: Call, ex: ExecutorState) -> None:
        """Its live reservation becomes a draining one, until the executor's terminal frame."""
        if ex.live.pop(call.call_id, None) is None:
            return
        if call.parent is None:
            ex.live_roots -= 1
        else:
            ex.draining_subcalls.add((call.call_id, call.attempt_seq))
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
        ex.draining_subcalls.discard((call_id, attempt_seq))
        ex.has_served = True
        ex.blocked_until_ms = 0
        self._index.touch(ex)
        self._let_go_on(ex)
        self._enqueue_all(self._seats.drained(call_id, attempt_seq))
        return [c.UnbindCall(call_id, executor_id, attempt_seq)]

    # --- ends -------------------------------------------------------------------------------------------------

    def _finish(self, call: Call, result: CallResult) -> Sequence[SchedulerCommand]:
        """To DONE, and all accounting of it. A second time changes nothing (X5)."""
        if call.state is DONE:
            return NO_COMMANDS
        call.apply(FINISHED)
        call.queued = False
        if call.parent is not None:
            return self._untie(call, ties_of(call), result)
        task = call.task
        batch = call.batch
        batch.results[call.index - batch.first_index] = result
        batch.remaining -= 1
        task.terminal_count += 1
        self._counts["finished"] += 1
        if result.failure is not None:
            task.failed_count += 1
            self._counts["failed"] += 1
            if task.stop_reason is None and task.plan.on_failure == "fail_fast":
                self._stop(task, StopReason.FAIL_FAST)
        elif result.output is not None:
            size = len(result.output)
            batch.output_bytes += size
            task.held_output_bytes += size
            limit = self._config.max_collected_output_bytes
            if limit and task.held_output_bytes > limit and task.stop_reason is None:
                self._stop(task, StopReason.OUTPUT_BYTES_EXCEEDED)
        if batch.remaining == 0 and batch.subcalls == 0:
            task.settled.append(batch)
        commands = NO_COMMANDS if call.ties is None else self._untie(call, call.ties, result)
        if not task.dirty:
            self._mark_dirty(task)
        return commands

    def _untie(self, call: Call, ties: Ties, result: CallResult) -> list[SchedulerCommand]:
        """What the end of a tied call means for others, in X83's order: cache, waiters, subtree; then its parent."""
        if ties.awaits_executor:
            self._exclusives.remove(call)
        self._enqueue_all(self._seats.forget(call))
        commands = self._tell_equals(call, ties, result) if ties.key is not None else []
        commands += self._cancel_subtree(ties, StopReason.CANCELLED)
        if call.parent is not None:
            commands += self._leave_parent(call, ties, call.parent, result)
        return commands

    def _tell_equals(self, call: Call, ties: Ties, result: CallResult) -> list[SchedulerCommand]:
        """Its result goes to the cache and to those who waited for it, or one of them leads now (X16)."""
        sharing = call.task.sharing
        assert sharing is not None
        commands: list[SchedulerCommand] = []
        failure = result.failure
        if failure is None:
            assert result.output is not None
            for waiter in sharing.succeed(call, result.output):
                shared = CallResult(waiter.index, result.output, None, waiter.attempt_count)
                commands += self._finish_shared(waiter, shared)
            return commands
        waiters, following = sharing.fail(call, failure, call.task.plan.max_attempts)
        for waiter in waiters:
            own = msgspec.structs.replace(failure, attempts=waiter.attempt_count)
            commands += self._finish_shared(waiter, CallResult(waiter.index, None, own, waiter.attempt_count))
        if following is not None:
            self._enqueue(following)
        return commands

    def _finish_shared(self, call: Call, result: CallResult) -> list[SchedulerCommand]:
        """A call ends without a run of its own: no attempt, and nothing for its parent to pay."""
        self._counts["shared"] += 1
        commands = self._finish(call, result)
        if call.parent is not None:
            return list(commands)
        return [c.CompleteCallFromCache(call.call_id, call.task.task_id), *commands]

    def _leave_parent(self, call: Call, ties: Ties, parent: Call, result: CallResult) -> Sequence[SchedulerCommand]:
        """The subcall is gone; its parent pays, and is resumed, if it still waits for it (X28)."""
        task, batch = call.task, call.batch
        del self._calls[call.call_id]
        batch.subcalls -= 1
        if batch.remaining == 0 and batch.subcalls == 0:
            task.settled.append(batch)
            self._mark_dirty(task)
        if ties.orphaned:
            return NO_COMMANDS
        above = ties_of(parent)
        del above.children[call.call_id]
        above.charged_ms += ties.used_ms
        if result.failure is not None and result.failure.kind in PASSED_ON:
            mark_disturbed(parent)
        return (self._resume(parent, ties.request_id, result.output, result.failure, ties.used_ms),)

    def _cancel_subtree(self, ties: Ties, reason: StopReason) -> list[SchedulerCommand]:
        """The attempt is over, or told to stop: so is all below it. What is bound drains; the rest ends here (X29)."""
        commands: list[SchedulerCommand] = []
        children, ties.children = ties.children, {}
        for child in children.values():
            ties_of(child).orphaned = True
        for child in children.values():
            own, ex = ties_of(child), child.executor
            if ex is None:
                commands += self._finish_stopped(child, reason)
            elif self._index.executors.get(ex.executor_id) is not ex:  # lost, together with its parent
                self._release(child)
                child.stopping = reason
                commands += self._finish_stopped(child, reason, begun=True)
            else:
                child.stopping = reason
                self._drain(child, ex)
                commands.append(c.CancelCall(child.call_id, ex.executor_id, child.attempt_seq, reason))
                commands += self._cancel_subtree(own, reason)
        return commands

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
        if ex.subcalls:
            self._subcalls.enter(ex)
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

    def flush_dirty_tasks(self, now_ms: int) -> list[SchedulerCommand]:
        """The epilogue. Call it until it returns nothing: convergence frees a slot, which may make another task active
        (X19)."""
        self._check_writer()
        return self._epilogue.flush()

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
        """Nothing changed since the last epilogue, and the last decision left nothing to decide."""
        return not (self._epilogue.dirty or self._unfinished)

    @property
    def exclusive_waiting(self) -> int:
        """Exclusive calls that are ready and have no executor: the pool grows for them (X90)."""
        return self._exclusives.count

    def starved_bundles(self) -> list[Digest]:
        """Bundles with calls to bind, and with no executor that could ever take them: all are bound to others (X92)."""
        executors = self._index.executors.values()
        open_to = {ex.digest for ex in executors if not ex.sealed}
        return [] if None in open_to else [digest for digest in self._unmet() if digest not in open_to]

    def _unmet(self) -> list[Digest]:
        waiting = (digest for digest in self._exclusives.waiting if digest not in self._turns.rings)
        return [*self._turns.bundles(), *waiting]

    def find_call(self, call_id: CallId) -> Call | None:
        """To look at, not to change; None: it is gone."""
        return self._calls.get(call_id)

    def progress(self, task_id: TaskId) -> TaskProgress | None:
        """A task's counts now; None once it converged."""
        task = self._tasks.get(task_id)
        if task is None:
            return None
        return TaskProgress(task.total_count, task.terminal_count, task.failed_count, task.inflight)

    def bundle_demand(self) -> BundleDemand:
        """Ask when a turn has settled: what then stands in a ring found no executor (X92)."""
        bound = {ex.executor_id: ex.digest for ex in self._index.executors.values()}
        return BundleDemand(self._unmet(), bound)

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
            exclusive_waiting=self._exclusives.count,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself. For tests; costs a full scan."""
        invariants.check(self)
