"""Calls that hang on calls, in any order of events, against the books of those around them.

The books know nothing of queues, flights, lines or rings: every request of an attempt that is still wanted is answered
once; what a parent was charged is what its answers said; a function's limit and an exclusive call's solitude hold over
all that was sent and has not been answered; an executor gets calls of its own pool, and of one tenant where that pool
keeps them apart; an output is its function's. And whatever happened, once nothing fails any more and every call that is
sent completes, everything comes to its end.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, Digest, ExecutorId, FunctionId, RequestId, TaskId, Tenant
from callyard.scheduler import FunctionTarget, NewCall, Scheduler, SchedulerConfig, StopReason, TaskPlan, prepare_batch
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.placement import DEFAULT_POOL, Placement, PoolName

BUDGET_MS = 100


FAR = PoolName("far")
"""A pool that keeps tenants apart; the default one does not."""


def function(name: str, **promises: object) -> FunctionTarget:
    return FunctionTarget(FunctionId(name), Digest("d"), f"m:{name}", **promises)


TARGETS = [
    function("plain"),
    function("idempotent", idempotent=True),
    function("pure", pure=True),
    function("twin", pure=True),
    function("one", max_concurrency=1),
    function("two", max_concurrency=1),
    function("few", pure=True, max_concurrency=2),
    function("alone", exclusive=True),
    function("far", pool=FAR, confined=True),
    function("far pure", pool=FAR, confined=True, pure=True),
    function("far one", pool=FAR, confined=True, max_concurrency=1),
    function("far alone", pool=FAR, confined=True, exclusive=True),
]
targets = st.sampled_from(TARGETS)
args = st.sampled_from([b"[0]", b"[1]", b"[2]"])
number = st.integers(0, 30)


def output_of(target: FunctionTarget, arguments: bytes) -> bytes:
    return target.function_id.encode() + arguments


class Families(RuleBasedStateMachine):
    @initialize(
        executors=st.integers(1, 3),
        inflight=st.sampled_from([1, 2, 128]),
        task_inflight=st.sampled_from([1, 2, 1_024]),
        depth=st.sampled_from([1, 3, 8]),
        entries=st.sampled_from([1, 65_536]),
        cache=st.sampled_from(["promised", "promised", "all", "off"]),
        on_failure=st.sampled_from(["continue", "continue", "fail_fast"]),
        max_attempts=st.integers(1, 3),
    )
    def start(
        self,
        executors: int,
        inflight: int,
        task_inflight: int,
        depth: int,
        entries: int,
        cache: str,
        on_failure: str,
        max_attempts: int,
    ) -> None:
        config = SchedulerConfig(
            executor_max_inflight=inflight,
            task_max_inflight_calls=task_inflight,
            max_subcall_depth=depth,
            cache_entries=entries,
            base_backoff_ms=0,
        )
        self.scheduler = Scheduler(config, Random(1))
        self.now_ms = 0
        self.numbers = 0
        self.executors: list[ExecutorId] = []
        self.pools: dict[ExecutorId, PoolName] = {}
        self.served: dict[ExecutorId, Placement] = {}
        """Of what came back from there."""
        self.sent: dict[tuple[CallId, int], c.DispatchCall] = {}
        """What an executor holds."""
        self.told: set[tuple[CallId, int]] = set()
        """Among them: told to stop."""
        self.requests: dict[tuple[CallId, int, RequestId], bool] = {}
        """Open requests; True: answered, and not yet flushed."""
        self.charged: Counter[tuple[CallId, int]] = Counter()
        self.armed: list[CallId] = []
        self.rows: dict[TaskId, list[NewCall]] = {}
        self.batches: Counter[TaskId] = Counter()
        self.open: set[TaskId] = set()
        self.results: dict[TaskId, list] = {}
        self.plans: dict[TaskId, TaskPlan] = {}
        for _ in range(executors):
            self.attach()
        self.attach(FAR)
        for name in ("t", "u"):
            plan = TaskPlan(
                TaskId(name),
                tenant=Tenant(f"of {name}"),
                max_attempts=max_attempts,
                default_budget_ms=BUDGET_MS,
                cache=cache,
                on_failure=on_failure,
                streaming=False,
            )
            self.plans[plan.task_id] = plan
            assert self.scheduler.commit_task(plan) is None
            self.rows[plan.task_id] = []
            self.open.add(plan.task_id)

    # --- the shell --------------------------------------------------------------------------------------------

    def post(self, event: e.SchedulerEvent) -> None:
        self.turn(self.scheduler.handle(event, self.now_ms))

    def turn(self, commands: list[c.SchedulerCommand]) -> None:
        while True:
            for command in commands:
                self.carry_out(command)
            commands = self.scheduler.flush_dirty_tasks(self.now_ms) + self.scheduler.try_dispatch_next(self.now_ms)
            if not commands and self.scheduler.is_settled:
                return

    def carry_out(self, command: c.SchedulerCommand) -> None:
        match command:
            case c.BindCall():
                for more in self.scheduler.handle(e.ExecutorBound(command.call_id), self.now_ms):
                    self.carry_out(more)
            case c.DispatchCall():
                self.sent[command.call_id, command.attempt_seq] = command
            case c.UnbindCall():
                self.sent.pop((command.call_id, command.attempt_seq), None)
            case c.CancelCall():
                key = (command.call_id, command.attempt_seq)
                assert key in self.sent
                assert key not in self.told, f"{key} is told twice"
                self.told.add(key)
            case c.ResumeParent():
                key = (command.call_id, command.attempt_seq)
                assert key in self.sent
                assert self.sent[key].executor_id == command.executor_id
                assert key not in self.told or command.failure is not None
                assert self.requests[(*key, command.request_id)] is False, "answered twice"
                self.requests[(*key, command.request_id)] = True
                self.charged[key] += command.budget_used_ms
            case c.ArmCallRetry():
                self.armed.append(command.call_id)
            case c.ConvergeTaskCalls():
                self.results[command.task_id] = command.results

    def attach(self, pool: PoolName = DEFAULT_POOL) -> None:
        self.numbers += 1
        name = ExecutorId(f"exec-{self.numbers}")
        self.executors.append(name)
        self.pools[name] = pool
        snapshot = ExecutorSnapshot(name, 1, 0, available_contexts=4)
        self.turn(self.scheduler.handle(e.ExecutorAttached(snapshot, pool), 0))

    def placement_of(self, sent: c.DispatchCall) -> Placement:
        return sent.target.place(self.plans[sent.task_id].tenant)

    def pick(self, place: int) -> c.DispatchCall | None:
        held = list(self.sent.values())
        return held[place % len(held)] if held else None

    # --- what happens -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule(place=number, calls=st.lists(st.tuples(targets, args), min_size=1, max_size=5))
    def commit(self, place: int, calls: list[tuple[FunctionTarget, bytes]]) -> None:
        task_id = sorted(self.open)[place % len(self.open)]
        first = len(self.rows[task_id])
        rows = [NewCall(first + index, target, arguments) for index, (target, arguments) in enumerate(calls)]
        if self.scheduler.commit_batch(prepare_batch(self.plans[task_id], self.batches[task_id], first, rows)):
            self.batches[task_id] += 1
            self.rows[task_id] += rows
        self.turn([])

    @precondition(lambda self: self.sent)
    @rule(place=number, called=targets, arguments=args, grant=st.sampled_from([0, 30, 900]), spread=st.booleans())
    def ask(self, place: int, called: FunctionTarget, arguments: bytes, grant: int, spread: bool) -> None:
        parent = self.pick(place)
        assert parent is not None
        self.numbers += 1
        request_id = RequestId(f"q{self.numbers}")
        key = (parent.call_id, parent.attempt_seq)
        if self.is_current(parent):
            self.requests[(*key, request_id)] = False
        before = self.charged[key]
        self.post(e.SubcallRequested(parent.executor_id, *key, request_id, called, arguments, grant, spread))
        call = self.scheduler.find_call(parent.call_id)
        if call is None or call.ties is None or not call.ties.children or not self.is_current(parent):
            return
        newest = list(call.ties.children.values())[-1]
        if newest.ties is not None and newest.ties.request_id == request_id:
            left = parent.budget_ms - before
            assert newest.budget_ms == (min(grant, left) if grant else left) > 0

    def is_current(self, sent: c.DispatchCall) -> bool:
        call = self.scheduler.find_call(sent.call_id)
        return call is not None and call.attempt_seq == sent.attempt_seq and call.executor is not None

    @precondition(lambda self: self.sent)
    @rule(place=number, used=st.sampled_from([0, 7, 60]))
    def complete(self, place: int, used: int) -> None:
        sent = self.pick(place)
        assert sent is not None
        self.end(sent, e.CallCompleted, output_of(sent.target, sent.args), budget_used_ms=used)

    @precondition(lambda self: self.sent)
    @rule(
        place=number,
        kind=st.sampled_from(
            [ErrorKind.INTERNAL, ErrorKind.TIMEOUT, ErrorKind.TRANSIENT, ErrorKind.CRASHED, ErrorKind.CANCELLED]
        ),
        begun=st.booleans(),
    )
    def fail(self, place: int, kind: ErrorKind, begun: bool) -> None:
        sent = self.pick(place)
        assert sent is not None
        self.end(sent, e.AttemptFailed, kind, "it failed", None if begun else Outcome.NOT_RUN)

    def end(self, sent: c.DispatchCall, event: type, *fields: object, **named: object) -> None:
        key = (sent.call_id, sent.attempt_seq)
        self.served[sent.executor_id] = self.placement_of(sent)
        self.post(event(sent.executor_id, *key, *fields, **named))
        assert self.sent.get(key) is not sent
        self.told.discard(key)

    @precondition(lambda self: any(self.requests.values()))
    @rule(place=number, lost=st.sampled_from([False, False, False, True]))
    def flush(self, place: int, lost: bool) -> None:
        """An answer leaves, or cannot."""
        answered = [key for key, done in self.requests.items() if done]
        key = answered[place % len(answered)]
        del self.requests[key]
        if lost:
            self.post(e.ResumeSendFailed(key[0], key[1]))
        else:
            self.post(e.CallResumed(*key))

    @precondition(lambda self: self.sent)
    @rule(place=number, what=st.sampled_from(["refused", "rejected", "given back"]))
    def not_run(self, place: int, what: str) -> None:
        sent = self.pick(place)
        assert sent is not None
        key = (sent.call_id, sent.attempt_seq)
        if not self.is_current(sent) or any(request[:2] == key for request in self.requests):
            return
        call = self.scheduler.find_call(sent.call_id)
        if call is None or call.open_requests is not None:
            return
        if what == "refused":
            self.post(e.CallRefused(*key, "full"))
        elif what == "rejected":
            self.post(e.DispatchRejected(*key, ErrorKind.DENIED, ""))
        else:
            failed = e.AttemptFailed(sent.executor_id, *key, ErrorKind.CANCELLED, "", Outcome.NOT_RUN, recalled=True)
            self.post(failed)
        self.told.discard(key)

    @precondition(lambda self: self.armed)
    @rule(place=number)
    def timer(self, place: int) -> None:
        self.now_ms += 1_000
        self.post(e.RetryDue(self.armed.pop(place % len(self.armed))))

    @rule(place=number, marks=st.integers(0, 255))
    def lose(self, place: int, marks: int) -> None:
        name = self.executors[place % len(self.executors)]
        if len(self.executors) > 1 or marks % 2:
            self.lose_one(name, marks)
        self.attach(self.pools[name])

    def lose_one(self, name: ExecutorId, marks: int) -> None:
        self.executors.remove(name)
        held = [key for key, sent in self.sent.items() if sent.executor_id == name]
        for key in held:
            del self.sent[key]
            self.told.discard(key)
        begun = {key[0] for place, key in enumerate(held) if marks >> (place % 8) & 1}
        self.post(e.ExecutorLost(name, "exited", "it died", frozenset(begun)))

    @precondition(lambda self: self.open)
    @rule(place=number, cancel=st.booleans(), reason=st.sampled_from([StopReason.CANCELLED, StopReason.DEADLINE]))
    def stop(self, place: int, cancel: bool, reason: StopReason) -> None:
        if place % 4 == 0:
            task_id = sorted(self.open)[place % len(self.open)]
            self.post(e.TaskStopped(task_id, reason, cancel_running=cancel))

    @rule(place=number)
    def seal(self, place: int) -> None:
        if place % 5 == 0:
            name = self.executors[place % len(self.executors)]
            self.post(e.ExecutorSealed(name))
            self.attach(self.pools[name])

    # --- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def state_is_consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    @invariant()
    def placements_fit(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        here: dict[ExecutorId, Placement] = {}
        for sent in self.sent.values():
            wanted = self.placement_of(sent)
            assert self.pools[sent.executor_id] == wanted.pool
            assert here.setdefault(sent.executor_id, wanted) == wanted
            assert self.served.get(sent.executor_id, wanted) == wanted

    @invariant()
    def charges_are_what_answers_said(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for key, sent in self.sent.items():
            call = self.scheduler.find_call(sent.call_id)
            if call is not None and self.is_current(sent):
                assert self.charged[key] == (0 if call.ties is None else call.ties.charged_ms)

    @invariant()
    def limits_hold_over_all_that_is_held(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        owners: dict[FunctionId, set[str]] = {}
        known = {call_id: sent.target for (call_id, _), sent in self.sent.items()}
        for call_id, _ in self.sent:
            parts = call_id.split("/sub-")
            above = ["/sub-".join(parts[:count]) for count in range(1, len(parts) + 1)]
            target = known[call_id]
            if target.max_concurrency is not None:
                mine = [one for one in above if known.get(CallId(one)) == target]
                owners.setdefault(target.function_id, set()).add(mine[0])
        for target in TARGETS:
            if target.max_concurrency is not None and self.no_orphans(target):
                assert len(owners.get(target.function_id, ())) <= target.max_concurrency
        for (call_id, _), sent in self.sent.items():
            if sent.target.exclusive and "/" not in call_id:
                beside = [other for (other, _), one in self.sent.items() if one.executor_id == sent.executor_id]
                assert all(other.split("/")[0] == call_id for other in beside)

    def no_orphans(self, target: FunctionTarget) -> bool:
        """The holder of a shared seat may be gone from these books: then they do not know whose seat it is."""
        return all(call_id.split("/sub-")[0] in {one for one, _ in self.sent} for call_id, _ in self.sent)

    def free(self) -> list[tuple[CallId, int]]:
        """What is held and waits for nothing, or was told to stop, or belongs to an attempt that is over."""
        waits = {key[:2] for key, done in self.requests.items() if not done}
        return [key for key in self.sent if key not in waits or key in self.told or not self.is_current(self.sent[key])]

    def teardown(self) -> None:
        """Nothing fails any more: everything that was begun comes to its end, without a timer but for retries."""
        if not hasattr(self, "scheduler"):
            return
        for task_id in sorted(self.open):
            self.post(e.ProductionEnded(task_id))
        for _ in range(3):
            self.attach()
        for _ in range(5_000):
            if len(self.results) == len(self.rows):
                break
            answered = [key for key, done in self.requests.items() if done]
            if answered:
                del self.requests[answered[0]]
                self.post(e.CallResumed(*answered[0]))
            elif free := self.free():
                sent = self.sent[free[-1]]
                self.end(sent, e.CallCompleted, output_of(sent.target, sent.args))
            elif self.armed:
                self.now_ms += 1_000
                self.post(e.RetryDue(self.armed.pop()))
            elif lacking := [*self.scheduler.demand().stranded, *self.scheduler.demand().unmet]:
                self.attach(lacking[0].pool)
            else:
                raise AssertionError(f"all wait: {sorted(self.sent)}; {set(self.rows) - set(self.results)} go on")
            self.scheduler.check_invariants()
        assert self.results.keys() == self.rows.keys()
        for task_id, rows in self.rows.items():
            results = self.results[task_id]
            assert [result.index for result in results] == list(range(len(rows)))
            for row, result in zip(rows, results, strict=True):
                if result.ok:
                    assert row.target is not None
                    assert result.output == output_of(row.target, row.args)
        while self.sent:  # what still drains
            sent = next(iter(self.sent.values()))
            self.end(sent, e.CallCompleted, b"")
        statistics = self.scheduler.statistics()
        assert (statistics.calls, statistics.inflight, statistics.draining) == (0, 0, 0)
        assert not self.scheduler._seats.lines
        assert not self.scheduler._exclusives.waiting


TestFamilies = Families.TestCase
TestFamilies.settings = settings(max_examples=200, stateful_step_count=50)
TestFamilies.pytestmark = [
    pytest.mark.requirement("X15", "X16", "X24", "X25", "X26", "X27", "X28", "X29", "X65", "X67", "X75", "X80", "X81"),
    pytest.mark.requirement("X85", "X90", "X92"),
]
