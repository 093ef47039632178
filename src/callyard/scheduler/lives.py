"""How attempts and calls end, and what that means for others: the scheduler's state, and all that gives it back.

A released reservation leaves by `_release`, a finished call by `_finish`; nothing else frees a context or sets DONE.
What the end of a tied call means for those that hang on it is in `_untie`. Commands are returned, never kept.
Source: call-execution X5, X12, X16, X28, X29, X35, X62, X64, X83.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Final

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome, may_retry
from callyard.ids import CallId, ExecutorId, RequestId, TaskId
from callyard.policy.backoff import compute_backoff_ms
from callyard.scheduler import commands as c
from callyard.scheduler.calls import DONE, FINISHED, REQUEUED, WAITING, Call, CallResult, StopReason, Ties
from callyard.scheduler.commands import SchedulerCommand
from callyard.scheduler.config import SchedulerConfig
from callyard.scheduler.endings import describe_stop
from callyard.scheduler.epilogue import Epilogue
from callyard.scheduler.exclusives import Exclusives
from callyard.scheduler.executors import ExecutorIndex, ExecutorState
from callyard.scheduler.flights import PASSED_ON
from callyard.scheduler.seats import Seats
from callyard.scheduler.shares import Shares
from callyard.scheduler.slots import TaskSlots
from callyard.scheduler.subcalls import SubcallQueues, is_ending, mark_disturbed, ties_of
from callyard.scheduler.tasks import Task
from callyard.scheduler.tenants import TenantTurns
from callyard.scheduler.turns import Turns

NO_COMMANDS: Final[tuple[SchedulerCommand, ...]] = ()


class CallLives:
    """The lowest of three layers: `Decisions` and `Scheduler` build on it.

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
        tenants = TenantTurns(config.instance_fairness_quantum, config.tenant_weights)
        self._turns = Turns(config.task_max_inflight_calls, tenants if config.instance_fairness else None)
        self._slots = TaskSlots(config.executor_task_slots, config.waiting_tasks_max)
        self._subcalls = SubcallQueues()
        self._seats = Seats()
        self._shares = Shares()
        self._exclusives = Exclusives(self._index, self._turns.may_take)
        self._subcall_ring = self._subcalls.ring
        self._strays = self._subcalls.strays
        self._waiting_exclusives = self._exclusives.waiting
        """All empty in nearly every decision: to ask them costs no more than that."""
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

    def _check_writer(self) -> None:
        if self._guard is not None:
            self._guard()

    def _stop(self, task: Task, reason: StopReason) -> None:
        """No more dispatching; what never ran is drained in the epilogue, once nothing is in flight."""
        if task.stop_reason is None:
            task.stop_reason = reason
        self._mark_dirty(task)

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
        final = _with_effect(call, final)
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
            if not is_ending(call):
                self._subcalls.add(call, first=True)
            return
        call.queued = True
        lane = call.task.lane_of(call)
        lane.calls.appendleft(call)
        self._turns.enter(lane)

    def _enqueue_all(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._enqueue(call)

    def _finish_stopped(self, call: Call, reason: StopReason, *, begun: bool = False) -> Sequence[SchedulerCommand]:
        failure = _with_effect(call, describe_stop(call, reason, begun=begun))
        return self._finish(call, CallResult(call.index, None, failure, call.attempt_count))

    def _release(self, call: Call) -> c.UnbindCall:
        """Give back the call's reservation, live or draining. The one place that does (X35)."""
        ex = call.executor
        assert ex is not None, f"{call.call_id} holds no reservation"
        if ex.live.pop(call.call_id, None) is not None:
            if call.parent is None:
                ex.live_roots -= 1
                if not call.begun:
                    ex.unbegun -= 1
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
        ex, call.executor = call.executor, None
        call.open_requests = None
        if call.parent is not None:
            return
        task = call.task
        if not task.plan.uses_slot:
            assert ex is not None
            ex.last_tool = call.target.function_id
            self._shares.give_back(ex.pool, ex.last_tool, ex.executor_id)
        self._turns.give_back(task)

    def _drain(self, call: Call, ex: ExecutorState) -> None:
        """Its live reservation becomes a draining one, until the executor's terminal frame."""
        if ex.live.pop(call.call_id, None) is None:
            return
        if call.parent is None:
            ex.live_roots -= 1
            if not call.begun:
                ex.unbegun -= 1
        else:
            ex.draining_subcalls.add((call.call_id, call.attempt_seq))
        if call.state is WAITING:
            ex.waiting -= 1
        ex.draining.add((call.call_id, call.attempt_seq))
        self._index.touch(ex)

    def _free_unused(self, ex: ExecutorState) -> None:
        """Nothing was ever sent to it: it is bound to no placement after all."""
        if not (ex.has_served or ex.live or ex.draining):
            ex.placement = None

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
        assert ties.asked_by is not None, f"{call.call_id} was asked for by nobody"
        ties.asked_by.subcall_args_bytes -= len(call.args)
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

    @staticmethod
    def _resume(
        parent: Call, request_id: RequestId, output: bytes | None, failure: CallFailure | None, used_ms: int
    ) -> c.ResumeParent:
        ex = parent.executor
        assert ex is not None, f"{parent.call_id} is to be resumed, but holds no reservation"
        return c.ResumeParent(parent.call_id, ex.executor_id, parent.attempt_seq, request_id, output, failure, used_ms)


def _with_effect(call: Call, failure: CallFailure) -> CallFailure:
    """With `details.effect_below` where whoever holds the retries must know that another attempt is not safe, whatever
    the function's own promise: this one had a call below it that must not run twice (X64)."""
    if call.ties is None or not call.ties.effect_below or failure.outcome is not Outcome.UNKNOWN:
        return failure
    return msgspec.structs.replace(failure, details={**failure.details, "effect_below": True})
