"""Events in, commands out: a scheduler with a fake clock, and the turn of the worker's actor."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from callyard.errors import ErrorKind
from callyard.ids import CallId, Digest, ExecutorId, FunctionId, RequestId, TaskId
from callyard.scheduler import (
    CallResult,
    FunctionTarget,
    NewCall,
    Scheduler,
    SchedulerConfig,
    TaskPlan,
    prepare_batch,
)
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.placement import DEFAULT_POOL, PoolName

DIGEST = Digest("d")
PLAIN = FunctionTarget(FunctionId("f"), DIGEST, "m:f")
IDEMPOTENT = FunctionTarget(FunctionId("g"), DIGEST, "m:g", idempotent=True)
PURE = FunctionTarget(FunctionId("p"), DIGEST, "m:p", idempotent=True, pure=True)


def function(name: str, **promises: Any) -> FunctionTarget:
    return FunctionTarget(FunctionId(name), promises.pop("digest", DIGEST), f"m:{name}", **promises)


def rows(*calls: FunctionTarget | tuple[FunctionTarget, bytes]) -> list[NewCall]:
    """One row per target, with arguments of its own or `[]`."""
    pairs = [call if isinstance(call, tuple) else (call, b"[]") for call in calls]
    return [NewCall(index, target, args) for index, (target, args) in enumerate(pairs)]


Commands = list[c.SchedulerCommand]


class Harness:
    """`post` runs a whole turn; `handle`, `flush` and `decide` its parts. Each is followed by the invariants."""

    def __init__(self, *, seed: int = 1, executors: int = 0, contexts: int = 8, **config: Any) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**config), Random(seed))
        self.now_ms = 1_000
        self.plans: dict[str, TaskPlan] = {}
        self.rows: dict[str, int] = {}
        self.batches: dict[str, int] = {}
        self.requests = 0
        for number in range(executors):
            self.attach(f"exec-{number}", contexts=contexts)

    # --- the parts of a turn ----------------------------------------------------------------------------------

    def handle(self, event: e.SchedulerEvent) -> Commands:
        commands = self.scheduler.handle(event, self.now_ms)
        self.scheduler.check_invariants()
        return commands

    def flush(self) -> Commands:
        commands = self.scheduler.flush_dirty_tasks(self.now_ms)
        self.scheduler.check_invariants()
        self.assert_nothing_left()
        return commands

    def assert_nothing_left(self) -> None:
        """A full scan finds nothing that the epilogue left unsettled (X75)."""
        for task in list(self.scheduler._tasks.values()):
            self.scheduler._mark_dirty(task)
        assert self.scheduler.flush_dirty_tasks(self.now_ms) == []

    def decide(self) -> Commands:
        commands = self.scheduler.try_dispatch_next(self.now_ms)
        self.scheduler.check_invariants()
        return commands

    def turn(self, commands: Commands | None = None) -> Commands:
        """Settle and decide until nothing moves; BindCall is answered by ExecutorBound at once."""
        done: Commands = []
        todo = list(commands or ())
        while True:
            while todo:
                command = todo.pop(0)
                done.append(command)
                if isinstance(command, c.BindCall):
                    todo += self.handle(e.ExecutorBound(command.call_id))
            todo = self.flush() + self.decide()
            if not todo and self.scheduler.is_settled:
                return done

    def post(self, event: e.SchedulerEvent) -> Commands:
        return self.turn(self.handle(event))

    # --- the world --------------------------------------------------------------------------------------------

    def snapshot(self, name: str, *, contexts: int = 8, seq: int = 1, **fields: Any) -> ExecutorSnapshot:
        fields.setdefault("received_at_ms", self.now_ms)
        return ExecutorSnapshot(ExecutorId(name), seq, available_contexts=contexts, **fields)

    def attach(
        self, *names: str, contexts: int = 8, pool: str = DEFAULT_POOL, watermark: int | None = None, **fields: Any
    ) -> None:
        for name in names:
            snapshot = self.snapshot(name, contexts=contexts, **fields)
            assert self.handle(e.ExecutorAttached(snapshot, PoolName(pool), watermark)) == []

    def open(self, name: str = "t", **plan: Any) -> TaskPlan:
        self.plans[name] = TaskPlan(TaskId(name), **plan)
        assert self.scheduler.commit_task(self.plans[name]) is None
        self.rows[name] = self.batches[name] = 0
        return self.plans[name]

    def commit(
        self, calls: int | Iterable[NewCall] = 1, *, name: str = "t", target: FunctionTarget | None = PLAIN
    ) -> bool:
        """The task's next batch: so many calls of `target`, or these rows."""
        first = self.rows[name]
        if isinstance(calls, int):
            calls = [NewCall(index, target, b"[]") for index in range(first, first + calls)]
        prepared = prepare_batch(self.plans[name], self.batches[name], first, calls)
        committed = self.scheduler.commit_batch(prepared)
        self.scheduler.check_invariants()
        if committed:
            self.rows[name] += len(prepared.batch.results)
            self.batches[name] += 1
        return committed

    def start(
        self, rows: int = 1, *, name: str = "t", target: FunctionTarget = PLAIN, end: bool = False, **plan: Any
    ) -> list[c.DispatchCall]:
        """A task of one batch, dispatched as far as there is room."""
        self.open(name, **plan)
        assert self.commit(rows, name=name, target=target)
        commands = self.turn()
        if end:
            commands += self.post(e.ProductionEnded(TaskId(name)))
        return dispatches(commands)

    def begin(self, *calls: FunctionTarget | tuple[FunctionTarget, bytes], **plan: Any) -> Commands:
        """A task of these root calls, in one turn."""
        name = plan.pop("name", "t")
        self.open(name, **plan)
        assert self.commit(rows(*calls), name=name)
        return self.turn()

    def ask(
        self, parent: c.DispatchCall, target: FunctionTarget | None, args: bytes = b"[]", **fields: Any
    ) -> Commands:
        """A running call asks for a subcall; requests are numbered unless named."""
        self.requests += 1
        request_id = RequestId(fields.pop("request", f"q{self.requests}"))
        return self.post(
            e.SubcallRequested(
                parent.executor_id, parent.call_id, parent.attempt_seq, request_id, target, args, **fields
            )
        )

    def call(
        self, parent: c.DispatchCall, target: FunctionTarget, args: bytes = b"[]", **fields: Any
    ) -> c.DispatchCall:
        """`ask`, of which a dispatched subcall comes."""
        (sent,) = dispatches(self.ask(parent, target, args, **fields))
        return sent

    def resume(self, command: c.ResumeParent) -> Commands:
        """The answer was flushed."""
        return self.post(e.CallResumed(command.call_id, command.attempt_seq, command.request_id))

    def stop_production(self, name: str = "t") -> Commands:
        return self.post(e.ProductionEnded(TaskId(name)))

    def complete(self, sent: c.DispatchCall, output: bytes = b"1", **fields: Any) -> Commands:
        return self.post(e.CallCompleted(sent.executor_id, sent.call_id, sent.attempt_seq, output, **fields))

    def fail(self, sent: c.DispatchCall, kind: ErrorKind = ErrorKind.INTERNAL, **fields: Any) -> Commands:
        return self.post(failed(sent, kind, **fields))

    def lose(
        self, executor: str = "exec-0", *, begun: Iterable[str] = (), cause: str = "exited", **fields: Any
    ) -> Commands:
        marks = frozenset(CallId(call_id) for call_id in begun)
        return self.post(e.ExecutorLost(ExecutorId(executor), cause, "it died", marks, **fields))

    def ready_count(self, name: str = "t") -> int:
        """Calls of a task that stand in its lanes."""
        return sum(len(lane.calls) for lane in self.scheduler._tasks[TaskId(name)].lanes.values())

    def state(self, call_id: str) -> Any:
        """The call itself, to look at."""
        return self.scheduler._calls[CallId(call_id)]


def failed(sent: c.DispatchCall, kind: ErrorKind = ErrorKind.INTERNAL, **fields: Any) -> e.AttemptFailed:
    return e.AttemptFailed(sent.executor_id, sent.call_id, sent.attempt_seq, kind, "it failed", **fields)


def suspended(sent: c.DispatchCall, request: str = "r1") -> e.CallSuspended:
    return e.CallSuspended(sent.executor_id, sent.call_id, sent.attempt_seq, RequestId(request))


def resumed(sent: c.DispatchCall, request: str = "r1") -> e.CallResumed:
    return e.CallResumed(sent.call_id, sent.attempt_seq, RequestId(request))


def refused(sent: c.DispatchCall | c.BindCall) -> e.CallRefused:
    return e.CallRefused(sent.call_id, sent.attempt_seq, "outbox full")


def unbind(sent: c.DispatchCall) -> c.UnbindCall:
    return c.UnbindCall(sent.call_id, sent.executor_id, sent.attempt_seq)


def dispatches(commands: Commands) -> list[c.DispatchCall]:
    return [command for command in commands if isinstance(command, c.DispatchCall)]


def resumes(commands: Commands) -> list[c.ResumeParent]:
    return [command for command in commands if isinstance(command, c.ResumeParent)]


def cancels(commands: Commands) -> list[str]:
    return [command.call_id for command in commands if isinstance(command, c.CancelCall)]


def settled(commands: Commands) -> list[CallResult]:
    """The results of the BatchSettled among these, in order."""
    return [result for command in commands if isinstance(command, c.BatchSettled) for result in command.results]


def kinds(commands: Commands) -> list[type]:
    return [type(command) for command in commands]


def converged(commands: Commands) -> c.ConvergeTaskCalls:
    (command,) = (command for command in commands if isinstance(command, c.ConvergeTaskCalls))
    return command
