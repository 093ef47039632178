"""What a decision costs, counted, not timed: bytecodes executed inside the scheduler and the policies.

Equal work is equal to the last bytecode; what grows with executors and tasks must grow like their logarithm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest

from callyard.errors import ErrorKind
from callyard.ids import Digest, ExecutorId, FunctionId, TaskId
from callyard.scheduler import FunctionTarget, NewCall, Scheduler, SchedulerConfig, StopReason, TaskPlan, prepare_batch
from callyard.scheduler import commands as c
from callyard.scheduler import events as e
from callyard.scheduler.executors import ExecutorSnapshot
from callyard.scheduler.placement import DEFAULT_POOL, Placement

from .harness import DIGEST, PLAIN


def bytecodes(run: Callable[[], Any]) -> int:
    """How many bytecodes `run` executes in our modules; the same on every machine and under any load."""
    count = 0

    def trace(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal count
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("callyard."):
            return None
        frame.f_trace_opcodes = True
        count += what == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(previous)
    return count


class Yard:
    """A scheduler with many of something, and one decision after another."""

    def __init__(self, *, executors: int = 2, ready: int = 1_000, tasks: int = 1, free: bool = True, **config: Any):
        self.scheduler = Scheduler(
            SchedulerConfig(task_max_inflight_calls=10_000, executor_task_slots=5_000, **config), Random(1)
        )
        for number in range(executors):
            snapshot = ExecutorSnapshot(ExecutorId(f"exec-{number}"), 1, 0, available_contexts=128 if free else 0)
            self.scheduler.handle(e.ExecutorAttached(snapshot), 0)
        for number in range(tasks):
            plan = TaskPlan(TaskId(f"t{number}"))
            self.scheduler.commit_task(plan)
            for first in range(0, ready // tasks, 5_000):
                last = min(first + 5_000, ready // tasks)
                rows = [NewCall(index, PLAIN, b"[]") for index in range(first, last)]
                self.scheduler.commit_batch(prepare_batch(plan, first // 5_000, first, rows))
        self.sent: list[c.DispatchCall] = []
        self.scheduler.flush_dirty_tasks(0)
        for _ in range(20):
            self.decide()

    def decide(self) -> None:
        for command in self.scheduler.try_dispatch_next(0):
            assert isinstance(command, c.BindCall)
            self.sent += self.scheduler.handle(e.ExecutorBound(command.call_id), 0)

    def complete(self) -> None:
        sent = self.sent.pop()
        self.scheduler.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1"), 0)
        self.scheduler.flush_dirty_tasks(0)

    def per_decision(self, rounds: int = 40) -> float:
        """A completion and the decision that follows it, on average: the index cleans its heap now and then."""
        return sum(bytecodes(lambda: (self.complete(), self.decide())) for _ in range(rounds)) / rounds


@pytest.mark.requirement("X23", "X7")
def test_a_decision_does_not_depend_on_the_number_of_ready_calls() -> None:
    few, many = Yard(ready=1_000), Yard(ready=100_000)
    assert [bytecodes(few.decide) for _ in range(30)] == [bytecodes(many.decide) for _ in range(30)]
    assert few.per_decision() == many.per_decision()


@pytest.mark.requirement("X23")
def test_a_decision_grows_at_most_logarithmically_with_executors() -> None:
    few, many = Yard(executors=10).per_decision(), Yard(executors=1_000).per_decision()
    assert many <= 2 * few  # log2(1000) is three times log2(10); a scan would be a hundred times


@pytest.mark.requirement("X23")
def test_a_sampled_decision_too() -> None:
    few = Yard(executors=10, executor_selection_sample_size=2).per_decision()
    many = Yard(executors=1_000, executor_selection_sample_size=2).per_decision()
    assert many <= 2 * few


@pytest.mark.requirement("X23")
def test_a_decision_does_not_depend_on_the_number_of_tasks() -> None:
    few, many = Yard(tasks=10, ready=10_000).per_decision(), Yard(tasks=1_000, ready=10_000).per_decision()
    assert many <= 1.1 * few


@pytest.mark.requirement("X23")
@pytest.mark.parametrize("sample", [0, 2])
def test_no_decision_when_all_are_full_does_not_scan_them(sample: int) -> None:
    few = Yard(executors=10, free=False, executor_selection_sample_size=sample)
    many = Yard(executors=1_000, free=False, executor_selection_sample_size=sample)
    assert bytecodes(few.decide) == bytecodes(many.decide)


@pytest.mark.requirement("X23")
@pytest.mark.parametrize("sample", [0, 2])
def test_executors_that_the_clock_rules_out_cost_once_not_at_every_decision(sample: int) -> None:
    """All but two are silent or stalled: they leave the index and come back with their next change."""

    def yard(executors: int) -> Yard:
        yard = Yard(executors=2, executor_selection_sample_size=sample)
        for number in range(executors):
            fields = ({"heartbeat_timeout_ms": 1}, {"running": True, "stall_ms": -1})[number % 2]
            snapshot = ExecutorSnapshot(ExecutorId(f"a-{number}"), 1, -50, available_contexts=200, **fields)
            yard.scheduler.handle(e.ExecutorAttached(snapshot), 0)
        yard.decide()
        return yard

    few, many = yard(10).per_decision(), yard(1_000).per_decision()
    assert many <= 1.5 * few


@pytest.mark.requirement("X23")
def test_blocked_executors_cost_nothing_until_their_time() -> None:
    yard = Yard(executors=200, ready=2_000)
    scheduler = yard.scheduler
    for _ in range(180):
        yard.decide()
    held = [yard.sent.pop() for _ in range(198)]
    for sent in held:
        scheduler.handle(e.CallRefused(sent.call_id, sent.attempt_seq, "full"), 0)
        ex = scheduler._index.executors[sent.executor_id]
        ex.blocked_until_ms = 1_000
        scheduler._index.touch(ex)
    yard.decide()
    assert yard.per_decision() <= 2 * Yard(executors=2, ready=2_000).per_decision()


@pytest.mark.requirement("X23")
def test_the_index_stays_small() -> None:
    """Entries of older versions are thrown away before they pile up."""
    yard = Yard(executors=4)
    scheduler = yard.scheduler
    for seq in range(2, 3_000):
        for number in range(4):
            snapshot = ExecutorSnapshot(ExecutorId(f"exec-{number}"), seq, 0, available_contexts=100 + seq % 28)
            scheduler.handle(e.SnapshotUpdated(snapshot), 0)
        scheduler._index.select(Placement(DEFAULT_POOL, DIGEST), 0)
        assert sum(map(len, scheduler._index._heaps.values())) <= 2 * (64 + 4 * 4) + 1


@pytest.mark.requirement("X23")
def test_a_frame_costs_the_same_however_much_there_is() -> None:
    small, big = Yard(ready=1_000, executors=2), Yard(ready=100_000, executors=500, tasks=500)
    for event in (
        lambda sent: e.CallSuspended(sent.executor_id, sent.call_id, 1, "r"),
        lambda sent: e.CallResumed(sent.call_id, 1, "r"),
        lambda sent: e.AttemptFailed(sent.executor_id, sent.call_id, 1, ErrorKind.INTERNAL, ""),
        lambda sent: e.CallCompleted(sent.executor_id, sent.call_id, 1, b""),  # stale by now
    ):
        costs = [bytecodes(lambda y=y, event=event: y.scheduler.handle(event(y.sent[3]), 0)) for y in (small, big)]
        assert costs[1] <= 1.2 * costs[0]


def test_stopping_a_task_costs_its_own_calls_only() -> None:
    def cost(others: int) -> int:
        yard = Yard(ready=100 * others, tasks=others)
        event = e.TaskStopped(TaskId("t0"), StopReason.CANCELLED, cancel_running=False)
        return bytecodes(lambda: (yard.scheduler.handle(event, 0), yard.scheduler.flush_dirty_tasks(0)))

    assert cost(500) <= 1.5 * cost(50)


def test_a_bundle_without_executor_costs_one_look() -> None:
    yard = Yard()
    stuck = FunctionTarget(FunctionId("f"), Digest("nobody"), "m:f")
    for number in range(2):
        snapshot = ExecutorSnapshot(ExecutorId(f"exec-{number}"), 2, 0, available_contexts=0)
        yard.scheduler.handle(e.SnapshotUpdated(snapshot), 0)
    plan = TaskPlan(TaskId("stuck"))
    yard.scheduler.commit_task(plan)
    yard.scheduler.commit_batch(prepare_batch(plan, 0, 0, [NewCall(index, stuck, b"[]") for index in range(5_000)]))
    yard.decide()
    assert bytecodes(yard.decide) < 400


def tied(yard: Yard, target: FunctionTarget, calls: int, name: str = "tied") -> None:
    plan = TaskPlan(TaskId(name))
    yard.scheduler.commit_task(plan)
    for first in range(0, calls, 5_000):
        rows = [NewCall(index, target, b"[%d]" % index) for index in range(first, min(first + 5_000, calls))]
        yard.scheduler.commit_batch(prepare_batch(plan, first // 5_000, first, rows))


def settle(yard: Yard) -> None:
    """Decide until nothing is left that can be decided."""
    sent = -1
    while sent != len(yard.sent) or not yard.scheduler.is_settled:
        sent = len(yard.sent)
        yard.decide()
        yard.scheduler.flush_dirty_tasks(0)


@pytest.mark.requirement("X23", "X81")
def test_calls_set_aside_cost_nothing_until_a_seat_is_free() -> None:
    limited = FunctionTarget(FunctionId("l"), DIGEST, "m:l", max_concurrency=1)

    def yard(waiting: int) -> Yard:
        yard = Yard(ready=100, executor_max_runnable=1_000, executor_max_inflight=120)
        tied(yard, limited, waiting)
        settle(yard)
        return yard

    few, many = yard(10), yard(5_000)
    holders = [next(sent for sent in yard.sent if sent.target is limited) for yard in (few, many)]
    assert bytecodes(few.decide) == bytecodes(many.decide)

    def turn(yard: Yard, sent: c.DispatchCall) -> None:
        yard.scheduler.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1"), 0)
        yard.scheduler.flush_dirty_tasks(0)
        yard.decide()

    costs = [bytecodes(lambda y=y, s=s: turn(y, s)) for y, s in zip((few, many), holders, strict=True)]
    assert costs[0] == costs[1]
    assert [yard.sent[-1].target for yard in (few, many)] == [limited, limited]


@pytest.mark.requirement("X23", "X16")
def test_one_decision_sets_aside_a_bounded_number() -> None:
    pure = FunctionTarget(FunctionId("p"), DIGEST, "m:p", pure=True)
    costs = []
    for equal in (200, 5_000):
        yard = Yard(ready=20)
        plan = TaskPlan(TaskId("equal"))
        yard.scheduler.commit_task(plan)
        rows = [NewCall(index, pure, b"[]") for index in range(equal)]
        yard.scheduler.commit_batch(prepare_batch(plan, 0, 0, rows))
        yard.decide()
        costs.append(bytecodes(yard.decide))
        assert not yard.scheduler.is_settled
    assert costs[0] == costs[1]


@pytest.mark.requirement("X23", "X26")
def test_a_subcall_costs_the_same_however_much_there_is() -> None:
    def cost(yard: Yard) -> int:
        sent = yard.sent[3]
        event = e.SubcallRequested(sent.executor_id, sent.call_id, 1, "r", PLAIN, b"[7]")
        return bytecodes(lambda: (yard.scheduler.handle(event, 0), yard.decide()))

    small, big = Yard(ready=1_000), Yard(ready=100_000, executors=500, tasks=500)
    assert cost(big) <= 1.2 * cost(small)
