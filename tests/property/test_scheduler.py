"""The scheduler against a naive model: the same rules without any index, queue, counter or epilogue."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from callyard.errors import ErrorKind, Outcome, fail, may_retry
from callyard.ids import CallId, Digest, ExecutorId, FunctionId, RequestId, TaskId
from callyard.scheduler import (
    CallState,
    FunctionTarget,
    NewCall,
    Scheduler,
    SchedulerConfig,
    StopReason,
    TaskPlan,
    prepare_batch,
)
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.executors import ExecutorSnapshot

NOT_RUN, RAN, UNKNOWN = Outcome.NOT_RUN, Outcome.RAN, Outcome.UNKNOWN
TARGETS = {
    promise: FunctionTarget(FunctionId("f"), Digest("d"), "m:f", idempotent=promise) for promise in (False, True)
}
FAILURES = [
    (ErrorKind.INTERNAL, RAN),
    (ErrorKind.SCHEMA, NOT_RUN),
    (ErrorKind.TIMEOUT, UNKNOWN),
    (ErrorKind.TRANSIENT, NOT_RUN),
    (ErrorKind.CANCELLED, UNKNOWN),
    (ErrorKind.CANCELLED, NOT_RUN),
]
REASONS = [StopReason.CANCELLED, StopReason.DEADLINE, StopReason.FAIL_FAST]


@dataclass(eq=False)
class ModelCall:
    call_id: CallId
    idempotent: bool
    max_attempts: int
    state: str = "ready"
    seq: int = 0
    count: int = 0
    executor: str | None = None
    requests: set[str] = field(default_factory=set)
    has_asked: bool = False
    stopping: StopReason | None = None
    effect_unknown: bool = False
    due_ms: int = 0
    end: tuple[ErrorKind | None, Outcome | None, int] | None = None
    """Kind and outcome of the failure, None for a success; attempts."""


@dataclass(eq=False)
class ModelTask:
    task_id: TaskId
    plan: TaskPlan
    batches: dict[int, list[ModelCall]] = field(default_factory=dict)
    """Not settled."""
    queue: list[ModelCall] = field(default_factory=list)
    rows: int = 0
    committed: int = 0
    failed: int = 0
    open: bool = True
    stop: StopReason | None = None
    told_builder: bool = False
    passed_over: int = 0

    def calls(self) -> list[ModelCall]:
        return [call for batch in self.batches.values() for call in batch]

    def inflight(self) -> int:
        return sum(call.state in ("running", "waiting") for call in self.calls())


@dataclass(eq=False)
class ModelExecutor:
    contexts: int
    sealed: bool = False
    live: dict[CallId, int] = field(default_factory=dict)
    draining: set[tuple[CallId, int]] = field(default_factory=set)
    refusals: int = 0
    blocked_until_ms: int = 0


class SchedulerAgainstModel(RuleBasedStateMachine):
    @initialize(
        inflight=st.sampled_from([1, 2, 128]),
        runnable=st.sampled_from([1, 2, 128]),
        task_inflight=st.sampled_from([1, 2, 1_024]),
        slots=st.sampled_from([1, 2, 32]),
        executors=st.integers(1, 3),
        contexts=st.integers(1, 4),
        max_attempts=st.integers(1, 3),
        rows=st.lists(st.sampled_from([True, False]), min_size=1, max_size=8),
    )
    def start(
        self,
        inflight: int,
        runnable: int,
        task_inflight: int,
        slots: int,
        executors: int,
        contexts: int,
        max_attempts: int,
        rows: list[bool | None],
    ) -> None:
        """A task that has begun, so that most steps find something to change."""
        self.config = SchedulerConfig(
            executor_max_inflight=inflight,
            executor_max_runnable=runnable,
            task_max_inflight_calls=task_inflight,
            executor_task_slots=slots,
        )
        self.scheduler = Scheduler(self.config, Random(1))
        self.now_ms = 0
        self.tasks: dict[TaskId, ModelTask] = {}
        self.started: list[TaskId] = []
        """Those that want a slot, in order: all of one tenant."""
        self.executors: dict[str, ModelExecutor] = {}
        self.every_call: list[ModelCall] = []
        self.stale = self.dropped = self.finished = 0
        self.numbers = 0
        for _ in range(executors):
            self.attach(contexts)
        self.open_task(max_attempts, True, True)
        self.commit(0, rows)
        self.decide(9)

    # --- the world --------------------------------------------------------------------------------------------

    def handle(self, event: e.SchedulerEvent) -> list[c.SchedulerCommand]:
        return self.scheduler.handle(event, self.now_ms)

    @rule(contexts=st.integers(1, 3))
    def attach(self, contexts: int) -> None:
        self.numbers += 1
        name = ExecutorId(f"exec-{self.numbers}")
        self.executors[name] = ModelExecutor(contexts)
        assert self.handle(e.ExecutorAttached(ExecutorSnapshot(name, 1, 0, available_contexts=contexts))) == []

    @precondition(lambda self: len(self.tasks) < 4)
    @rule(max_attempts=st.integers(1, 3), streaming=st.booleans(), uses_slot=st.booleans())
    def open_task(self, max_attempts: int, streaming: bool, uses_slot: bool) -> None:
        self.numbers += 1
        task_id = TaskId(f"t{self.numbers}")
        plan = TaskPlan(task_id, max_attempts=max_attempts, streaming=streaming, uses_slot=uses_slot)
        assert self.scheduler.commit_task(plan) is None
        self.tasks[task_id] = ModelTask(task_id, plan)
        if uses_slot:
            self.started.append(task_id)

    @precondition(lambda self: self.tasks)
    @rule(number=st.integers(0, 9), rows=st.lists(st.sampled_from([True, False, None]), max_size=4))
    def commit(self, number: int, rows: list[bool | None]) -> None:
        """True and False: a call with or without a promise. None: a row that is a failure."""
        task = self.task(number)
        new = [
            NewCall(index, None, b"", failure=fail(ErrorKind.SCHEMA, "bad"))
            if promise is None
            else NewCall(index, TARGETS[promise], b"[]")
            for index, promise in enumerate(rows, task.rows)
        ]
        committed = self.scheduler.commit_batch(prepare_batch(task.plan, task.committed, task.rows, new))
        assert committed == (task.open and task.stop is None)
        if not committed:
            return
        batch = []
        for row in new:
            call = ModelCall(CallId(f"{task.task_id}-{row.index}"), False, task.plan.max_attempts)
            if row.target is None:
                call.state, call.end = "done", (ErrorKind.SCHEMA, NOT_RUN, 0)
                task.failed += 1
                self.finished += 1
            else:
                call.idempotent = row.target.idempotent
                task.queue.append(call)
                self.every_call.append(call)
            batch.append(call)
        task.batches[task.committed] = batch
        task.committed += 1
        task.rows += len(new)

    def task(self, number: int) -> ModelTask:
        return list(self.tasks.values())[number % len(self.tasks)]

    @precondition(lambda self: self.tasks)
    @rule(number=st.integers(0, 9))
    def end_production(self, number: int) -> None:
        task = self.task(number)
        assert self.handle(e.ProductionEnded(task.task_id)) == []
        task.open = False

    @precondition(lambda self: self.tasks)
    @rule(number=st.integers(0, 9), reason=st.sampled_from(REASONS), cancel_running=st.booleans())
    def stop_task(self, number: int, reason: StopReason, cancel_running: bool) -> None:
        task = self.task(number)
        told = [call for call in task.calls() if call.executor is not None and call.stopping is None]
        commands = self.handle(e.TaskStopped(task.task_id, reason, cancel_running=cancel_running))
        task.stop = task.stop or reason
        if not cancel_running:
            told = []
        assert commands == [c.CancelCall(call.call_id, call.executor, call.seq, reason) for call in told]
        for call in told:
            call.stopping = reason
            executor = self.executors[call.executor]
            executor.draining.add((call.call_id, executor.live.pop(call.call_id)))

    @rule(passed_ms=st.sampled_from([1, 10, 100, 2_000]))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    # --- decisions --------------------------------------------------------------------------------------------

    def is_active(self, task: ModelTask) -> bool:
        return not task.plan.uses_slot or task.task_id in self.started[: self.config.executor_task_slots]

    def room(self, executor: ModelExecutor) -> int:
        usable = min(executor.contexts, self.config.executor_max_inflight) - len(executor.draining)
        return usable - len(executor.live)

    def runnable(self, name: str) -> int:
        return sum(call.executor == name and call.state == "running" and call.stopping is None for call in self.known())

    def known(self) -> list[ModelCall]:
        return [call for task in self.tasks.values() for call in task.calls()]

    @rule(times=st.integers(1, 9))
    def decide(self, times: int) -> None:
        for _ in range(times):
            if not self.decide_once():
                break

    def decide_once(self) -> bool:
        ready = [
            task
            for task in self.tasks.values()
            if self.is_active(task)
            and task.stop is None
            and task.queue
            and task.inflight() < self.config.task_max_inflight_calls
        ]
        eligible = [
            (self.runnable(name), len(executor.live), -self.room(executor), name)
            for name, executor in self.executors.items()
            if not executor.sealed
            and self.now_ms >= executor.blocked_until_ms
            and self.room(executor) > 0
            and self.runnable(name) < self.config.executor_max_runnable
        ]
        commands = self.scheduler.try_dispatch_next(self.now_ms)
        if not ready or not eligible:
            assert commands == []
            return False
        (bind,) = commands
        assert isinstance(bind, c.BindCall)
        assert bind.executor_id == min(eligible)[3]
        (task,) = (task for task in ready if task.queue[0].call_id == bind.call_id)
        for other in ready:
            other.passed_over = 0 if other is task else other.passed_over + 1
            assert other.passed_over <= len(self.tasks), "tasks with ready calls take turns"
        call = task.queue.pop(0)
        call.state, call.executor = "running", bind.executor_id
        call.seq += 1
        call.count += 1
        self.executors[bind.executor_id].live[call.call_id] = call.seq
        assert bind.attempt_seq == call.seq
        (sent,) = self.handle(e.ExecutorBound(call.call_id))
        assert isinstance(sent, c.DispatchCall)
        assert (sent.call_id, sent.attempt_seq, sent.attempt) == (call.call_id, call.seq, call.count)
        return True

    # --- what comes back --------------------------------------------------------------------------------------

    @precondition(lambda self: self.every_call)
    @rule(
        number=st.integers(0, 60),
        age=st.sampled_from([0, 0, 0, 0, 1]),
        foreign=st.sampled_from([False, False, False, True]),
        what=st.sampled_from(["complete", "fail", "fail", "suspend", "suspend", "give back"]),
        failure=st.sampled_from(FAILURES),
        request=st.sampled_from(["a", "b"]),
    )
    def frame(
        self,
        number: int,
        age: int,
        foreign: bool,
        what: str,
        failure: tuple[ErrorKind, Outcome],
        request: str,
    ) -> None:
        """A frame of some call, current or not, of its executor or of another."""
        held = [call for call in self.every_call if call.executor is not None]
        call = (held or self.every_call)[number % len(held or self.every_call)]
        seq = call.seq - age
        name = "exec-0" if foreign or call.executor is None else call.executor
        current = age == 0 and name == call.executor
        if what == "give back" and current and call.has_asked:
            return  # a broken executor: see the unit test
        kind, outcome = failure
        match what:
            case "complete":
                event: e.SchedulerEvent = e.CallCompleted(ExecutorId(name), call.call_id, seq, b"1")
            case "suspend":
                event = e.CallSuspended(ExecutorId(name), call.call_id, seq, RequestId(request))
            case "give back":
                event = e.AttemptFailed(
                    ExecutorId(name), call.call_id, seq, ErrorKind.CANCELLED, "", NOT_RUN, recalled=True
                )
            case _:
                event = e.AttemptFailed(ExecutorId(name), call.call_id, seq, kind, "", outcome)
        commands = self.handle(event)
        if not current:
            self.stale += 1
            drained = (call.call_id, seq) in (self.executors[name].draining if name in self.executors else set())
            if drained and what != "suspend":
                self.executors[name].draining.remove((call.call_id, seq))
                self.executors[name].blocked_until_ms = 0
                assert commands == [c.UnbindCall(call.call_id, ExecutorId(name), seq)]
            else:
                assert commands == []
            return
        self.executors[name].refusals = 0
        if what == "suspend":
            assert commands == []
            self.dropped += request in call.requests
            call.requests.add(request)
            call.has_asked = True
            call.state = "waiting"
            return
        assert commands[0] == c.UnbindCall(call.call_id, ExecutorId(name), seq)
        self.released(call)
        if what == "complete":
            self.ended(call, None, None)
        elif what == "give back":
            self.unbegun(call)
        else:
            begun = outcome is not NOT_RUN or kind is ErrorKind.TRANSIENT
            if call.stopping is not None and kind is ErrorKind.CANCELLED:
                call.count -= not begun
                self.stopped(call, call.stopping, begun)
            else:
                self.attempt_failed(call, kind, outcome, begun, commands[1:])

    def released(self, call: ModelCall) -> None:
        executor = self.executors[call.executor]
        executor.live.pop(call.call_id, None)
        executor.draining.discard((call.call_id, call.seq))
        executor.blocked_until_ms = 0
        call.executor, call.requests, call.has_asked = None, set(), False

    def attempt_failed(
        self, call: ModelCall, kind: ErrorKind, outcome: Outcome, begun: bool, commands: list[c.SchedulerCommand]
    ) -> None:
        call.count -= not begun
        (task,) = (task for task in self.tasks.values() if call in task.calls())
        again = may_retry(kind, idempotent=call.idempotent, begun=begun) and call.count < call.max_attempts
        if again and call.stopping is None and task.stop is None:
            (armed,) = commands
            assert isinstance(armed, c.ArmCallRetry)
            call.state, call.due_ms = "backoff", armed.due_at_ms
            call.effect_unknown |= outcome is not NOT_RUN
            base = 10 << max(0, call.count - 1)
            assert base <= armed.due_at_ms - self.now_ms <= base * 1.05 + 1
        else:
            assert commands == []
            self.ended(call, kind, UNKNOWN if outcome is NOT_RUN and call.effect_unknown else outcome)

    def unbegun(self, call: ModelCall) -> None:
        call.count -= 1
        if call.stopping is not None:
            self.stopped(call, call.stopping, False)
            return
        call.state = "ready"
        (task,) = (task for task in self.tasks.values() if call in task.calls())
        task.queue.insert(0, call)

    def stopped(self, call: ModelCall, reason: StopReason, begun: bool) -> None:
        kind = ErrorKind.CANCELLED
        if reason is StopReason.DEADLINE:
            kind = ErrorKind.TIMEOUT if call.count else ErrorKind.DEADLINE
        self.ended(call, kind, UNKNOWN if begun or call.effect_unknown else NOT_RUN)

    def ended(self, call: ModelCall, kind: ErrorKind | None, outcome: Outcome | None) -> None:
        assert call.end is None
        call.state, call.end = "done", (kind, outcome, call.count)
        self.finished += 1
        (task,) = (task for task in self.tasks.values() if call in task.calls())
        task.failed += kind is not None

    @precondition(lambda self: self.every_call)
    @rule(number=st.integers(0, 60), request=st.sampled_from(["a", "b"]), age=st.sampled_from([0, 0, 0, 1]))
    def resume(self, number: int, request: str, age: int) -> None:
        waiting = [call for call in self.every_call if call.requests]
        call = (waiting or self.every_call)[number % len(waiting or self.every_call)]
        assert self.handle(e.CallResumed(call.call_id, call.seq - age, RequestId(request))) == []
        self.dropped += age > 0 or request not in call.requests
        if age == 0 and request in call.requests:
            call.requests.remove(request)
            if not call.requests:
                call.state = "running"

    @precondition(lambda self: self.every_call)
    @rule(number=st.integers(0, 60))
    def resume_failed(self, number: int) -> None:
        waiting = [call for call in self.every_call if call.requests]
        call = (waiting or self.every_call)[number % len(waiting or self.every_call)]
        commands = self.handle(e.ResumeSendFailed(call.call_id, call.seq))
        if call.executor is None:
            self.stale += 1
        if call.executor is None or call.stopping is not None:
            assert commands == []
            return
        executor = self.executors[call.executor]
        executor.draining.add((call.call_id, executor.live.pop(call.call_id)))
        assert commands[0] == c.CancelCall(call.call_id, ExecutorId(call.executor), call.seq, StopReason.CANCELLED)
        call.executor, call.requests, call.has_asked = None, set(), False
        self.attempt_failed(call, ErrorKind.CRASHED, UNKNOWN, True, commands[1:])

    @precondition(lambda self: self.every_call)
    @rule(number=st.integers(0, 60), rejected=st.booleans())
    def not_sent(self, number: int, rejected: bool) -> None:
        fresh = [call for call in self.every_call if call.state == "running" and not call.has_asked]
        call = (fresh or self.every_call)[number % len(fresh or self.every_call)]
        if call.executor is not None and call.has_asked:
            return
        if rejected:
            commands = self.handle(e.DispatchRejected(call.call_id, call.seq, ErrorKind.DENIED, ""))
        else:
            commands = self.handle(e.CallRefused(call.call_id, call.seq, ""))
        if call.executor is None:
            self.stale += 1
            assert commands == []
            return
        name = call.executor
        assert commands[0] == c.UnbindCall(call.call_id, ExecutorId(name), call.seq)
        self.released(call)
        if rejected:
            call.count -= 1
            self.ended(call, ErrorKind.DENIED, UNKNOWN if call.effect_unknown else NOT_RUN)
        elif call.stopping is not None:
            self.unbegun(call)
        else:
            executor = self.executors[name]
            executor.refusals += 1
            delay_ms = 0 if executor.refusals == 1 else min(1_000, 10 * 2 ** (executor.refusals - 2))
            executor.blocked_until_ms = self.now_ms + delay_ms
            assert commands[1:] == [c.ArmCallRetry(call.call_id, executor.blocked_until_ms)]
            self.unbegun(call)

    @precondition(lambda self: self.every_call)
    @rule(number=st.integers(0, 60))
    def timer(self, number: int) -> None:
        backing_off = [call for call in self.every_call if call.state == "backoff"]
        call = (backing_off or self.every_call)[number % len(backing_off or self.every_call)]
        commands = self.handle(e.RetryDue(call.call_id))
        if call.state == "backoff" and self.now_ms < call.due_ms:
            assert commands == [c.ArmCallRetry(call.call_id, call.due_ms)]
            return
        assert commands == []
        self.dropped += call.state not in ("backoff", "ready")
        if call.state == "backoff":
            call.state = "ready"
            (task,) = (task for task in self.tasks.values() if call in task.calls())
            task.queue.insert(0, call)

    @precondition(lambda self: self.executors)
    @rule(number=st.integers(0, 9))
    def seal(self, number: int) -> None:
        name = list(self.executors)[number % len(self.executors)]
        assert self.handle(e.ExecutorSealed(ExecutorId(name))) == []
        self.executors[name].sealed = True

    @precondition(lambda self: self.executors)
    @rule(number=st.integers(0, 9), marks=st.integers(0, 255), twice=st.booleans())
    def lose(self, number: int, marks: int, twice: bool) -> None:
        name = list(self.executors)[number % len(self.executors)]
        held = [call for call in self.every_call if call.executor == name]
        begun = {call.call_id for place, call in enumerate(held) if marks >> (place % 8) & 1}
        lost = e.ExecutorLost(ExecutorId(name), "exited", "", frozenset(begun))
        commands = self.handle(lost)
        if twice:
            assert self.handle(lost) == []
        armed = {command.call_id: command for command in commands if isinstance(command, c.ArmCallRetry)}
        assert len(armed) == len(commands)
        order = [*self.executors[name].live, *(call_id for call_id, _ in sorted(self.executors[name].draining))]
        for call in sorted(held, key=lambda call: order.index(call.call_id), reverse=True):
            has_begun = call.call_id in begun or call.has_asked
            self.released(call)
            if not has_begun:
                self.unbegun(call)
            elif call.stopping is not None:
                self.stopped(call, call.stopping, True)
            else:
                own = [armed.pop(call.call_id)] if call.call_id in armed else []
                self.attempt_failed(call, ErrorKind.CRASHED, UNKNOWN, True, own)
        assert not armed
        del self.executors[name]

    @precondition(lambda self: self.tasks)
    @rule(number=st.integers(0, 9), batch=st.integers(0, 5))
    def taken(self, number: int, batch: int) -> None:
        assert self.handle(e.BatchTaken(self.task(number).task_id, batch)) == []

    # --- the epilogue -----------------------------------------------------------------------------------------

    @invariant()
    def epilogue_gives_what_a_full_scan_gives(self) -> None:
        """X75: after any event."""
        if not hasattr(self, "scheduler"):
            return
        commands = self.scheduler.flush_dirty_tasks(self.now_ms)
        for task in list(self.tasks.values()):
            mine = [command for command in commands if command.task_id == task.task_id]
            assert mine == self.scan(task, mine)
        self.scheduler.check_invariants()

    def scan(self, task: ModelTask, given: list[c.SchedulerCommand]) -> list[c.SchedulerCommand]:
        expected: list[c.SchedulerCommand] = []
        if task.stop is not None and task.open and not task.told_builder:
            task.told_builder = True
            expected.append(c.StopCallProduction(task.task_id, task.stop))
        if task.stop is not None and not task.inflight():
            for call in task.calls():
                if call.state in ("ready", "backoff"):
                    self.stopped(call, task.stop, False)
            task.queue.clear()
        for index, batch in list(task.batches.items()):
            if all(call.state == "done" for call in batch):
                del task.batches[index]
                if task.plan.streaming:
                    (settled,) = (
                        command
                        for command in given
                        if isinstance(command, c.BatchSettled) and command.batch_index == index
                    )
                    self.compare(settled.results, batch)
        expected += [command for command in given if isinstance(command, c.BatchSettled)]
        if not task.open and not task.batches:
            (done,) = (command for command in given if isinstance(command, c.ConvergeTaskCalls))
            assert (done.success, done.stop_reason) == (task.failed == 0 and task.stop is None, task.stop)
            assert (done.total_count, done.failed_count) == (task.rows, task.failed)
            if task.plan.streaming:
                assert (done.results, done.outputs) == ([], [])
            else:
                assert [result.index for result in done.results] == list(range(task.rows))
                assert done.outputs == [b"1"] * (task.rows - task.failed)
            expected.append(done)
            del self.tasks[task.task_id]
            if task.plan.uses_slot:
                self.started.remove(task.task_id)
        return expected

    def compare(self, results: list, batch: list[ModelCall]) -> None:
        assert len(results) == len(batch)
        for result, call in zip(results, batch, strict=True):
            failure = result.failure
            got = (failure and failure.kind, failure and failure.outcome, result.attempts)
            assert got == call.end, f"{call.call_id}: {got} instead of {call.end}"

    @invariant()
    def states_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        names = {"ready": "READY", "backoff": "READY", "running": "RUNNING", "waiting": "WAITING", "done": "DONE"}
        known = {call.call_id: call for call in self.known() if call in self.every_call}
        assert self.scheduler._calls.keys() == known.keys()
        for call_id, call in known.items():
            real = self.scheduler._calls[call_id]
            assert real.state is CallState[names[call.state]], call_id
            assert (real.attempt_seq, real.attempt_count) == (call.seq, call.count), call_id
            assert (real.executor and real.executor.executor_id) == call.executor, call_id
            assert (real.open_requests or set()) == call.requests, call_id
            assert real.queued == (call.state == "ready"), call_id
        for task in self.tasks.values():
            lanes = self.scheduler._tasks[task.task_id].lanes.values()
            assert [call.call_id for lane in lanes for call in lane.calls] == [call.call_id for call in task.queue]
        statistics = self.scheduler.statistics()
        assert (statistics.finished, statistics.stale, statistics.dropped) == (self.finished, self.stale, self.dropped)
        assert statistics.draining == sum(len(executor.draining) for executor in self.executors.values())


TestScheduler = SchedulerAgainstModel.TestCase
TestScheduler.settings = settings(max_examples=250, stateful_step_count=70)
TestScheduler.pytestmark = [pytest.mark.requirement("X3", "X4", "X5", "X9", "X12", "X13", "X62", "X69", "X75", "X77")]
