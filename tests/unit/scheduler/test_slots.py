"""How many tasks are in the call phase, how many wait, and how many calls one may have in flight."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.ids import TaskId, Tenant
from callyard.scheduler import StopReason, TaskPlan
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import Harness, converged, dispatches, kinds, suspended


@pytest.mark.requirement("X18")
def test_defaults() -> None:
    config = Harness().scheduler._config
    assert (config.task_max_inflight_calls, config.executor_task_slots, config.waiting_tasks_max) == (1_024, 32, 1_024)


@pytest.mark.requirement("X18")
def test_running_and_waiting_calls_of_a_task_are_bounded() -> None:
    h = Harness(executors=1, contexts=128, task_max_inflight_calls=3)
    sent = h.start(10)
    assert len(sent) == 3
    h.post(suspended(sent[0]))
    assert h.turn() == []  # WAITING counts too
    for call in sent:
        assert len(dispatches(h.complete(call))) == 1


@pytest.mark.requirement("X18")
def test_a_draining_call_counts_until_it_ends() -> None:
    h = Harness(executors=1, contexts=128, task_max_inflight_calls=2)
    h.start(5)
    h.start(5, name="u")
    h.post(e.TaskStopped(TaskId("t"), StopReason.CANCELLED))
    assert h.scheduler.progress(TaskId("t")).inflight == 2


@pytest.mark.requirement("X18")
def test_a_task_at_its_limit_does_not_hold_back_others() -> None:
    h = Harness(executors=1, contexts=128, task_max_inflight_calls=1)
    h.start(5)
    assert [call.task_id for call in h.start(1, name="u")] == ["u"]


@pytest.mark.requirement("X18")
def test_so_many_tasks_at_once_the_others_wait() -> None:
    h = Harness(executors=1, contexts=128, executor_task_slots=2)
    (first,) = h.start(1, name="a", end=True)
    h.start(1, name="b")
    assert h.start(1, name="c") == []
    statistics = h.scheduler.statistics()
    assert (statistics.tasks_active, statistics.tasks_waiting) == (2, 1)
    commands = h.complete(first)
    assert converged(commands).task_id == "a"
    assert [call.task_id for call in dispatches(commands)] == ["c"]


@pytest.mark.requirement("X18", "X82")
def test_more_than_the_waiting_ones_is_unavailable() -> None:
    h = Harness(executor_task_slots=1, waiting_tasks_max=3)
    for number in range(4):
        h.open(f"t{number}")
    for _ in range(2):
        failure = h.scheduler.commit_task(TaskPlan(TaskId("one-more")))
        assert failure is not None
        assert (failure.kind, failure.outcome) == (ErrorKind.UNAVAILABLE, Outcome.NOT_RUN)
        assert failure.details["retry_after_ms"] > 0
        assert failure.message == "3 tasks wait for one of executor_task_slots=1"
    assert (len(h.scheduler._tasks), h.scheduler.statistics().tasks_waiting) == (4, 3)
    h.handle(e.ProductionEnded(TaskId("t0")))
    h.flush()
    assert h.scheduler.commit_task(TaskPlan(TaskId("one-more"))) is None


@pytest.mark.requirement("X82")
def test_waiting_tasks_are_bounded_at_1024_by_default() -> None:
    h = Harness()
    for number in range(32 + 1_024):
        assert h.scheduler.commit_task(TaskPlan(TaskId(f"t{number}"), tenant=Tenant(f"x{number % 7}"))) is None
    failure = h.scheduler.commit_task(TaskPlan(TaskId("more")))
    assert failure is not None
    assert failure.kind is ErrorKind.UNAVAILABLE
    h.scheduler.check_invariants()


@pytest.mark.requirement("X18")
def test_waiting_tasks_get_slots_in_turn_by_tenant() -> None:
    """Tenant A brought four tasks before B and C brought theirs: B and C are not behind all of A's."""
    h = Harness(executor_task_slots=1)
    names = ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
    for name in ["first", *names]:
        h.open(name, tenant=Tenant(name[0]))
    order = []
    current = "first"
    for _ in names:
        h.handle(e.ProductionEnded(TaskId(current)))
        h.flush()
        (current,) = (task.task_id for task in h.scheduler._tasks.values() if task.active)
        order.append(current)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


@pytest.mark.requirement("X18")
def test_tool_calls_use_no_slot() -> None:
    h = Harness(executors=1, contexts=300, executor_task_slots=1, executor_max_inflight=300, executor_max_runnable=300)
    h.start(1, name="list")
    for number in range(200):
        assert len(h.start(1, name=f"tool-{number}", uses_slot=False)) == 1
    assert h.scheduler.statistics().tasks_waiting == 0


def test_batches_may_be_committed_while_the_task_waits() -> None:
    h = Harness(executors=1, executor_task_slots=1)
    h.open("a")
    h.open("b")
    assert h.commit(2, name="b")
    assert h.turn() == []
    commands = h.stop_production("a")
    assert [call.call_id for call in dispatches(commands)] == ["b-0", "b-1"]


def test_a_waiting_task_that_is_stopped_gives_its_place_back() -> None:
    h = Harness(executors=1, executor_task_slots=1, waiting_tasks_max=1)
    h.open("a")
    h.open("b")
    h.commit(2, name="b")
    commands = h.post(e.TaskStopped(TaskId("b"), StopReason.CANCELLED))
    assert kinds(commands) == [c.StopCallProduction, c.BatchSettled]
    assert converged(h.stop_production("b")).failed_count == 2
    assert h.scheduler._slots.waiting == {}
    h.open("c")
    assert h.scheduler.statistics().tasks_waiting == 1


def test_a_waiting_task_that_is_stopped_and_then_gets_the_slot() -> None:
    """Stopped, its builder not yet done: the slot passes through it and on to the next."""
    h = Harness(executors=1, executor_task_slots=1)
    for name in "abc":
        h.open(name)
    h.commit(1, name="b")
    h.commit(1, name="c")
    h.post(e.TaskStopped(TaskId("b"), StopReason.CANCELLED))
    assert dispatches(h.stop_production("a")) == []
    commands = h.stop_production("b")
    assert converged(commands).task_id == "b"
    assert [call.call_id for call in dispatches(commands)] == ["c-0"]


def test_an_empty_waiting_task_converges_without_a_slot() -> None:
    h = Harness(executor_task_slots=1)
    h.open("a")
    h.open("b")
    assert converged(h.stop_production("b")).success
    assert h.scheduler.statistics().tasks_active == 1


def test_a_task_is_committed_once() -> None:
    h = Harness()
    h.open()
    with pytest.raises(AssertionError, match="task t committed twice"):
        h.scheduler.commit_task(TaskPlan(TaskId("t")))
    with pytest.raises(AssertionError, match="task u: max_attempts=0"):
        h.scheduler.commit_task(TaskPlan(TaskId("u"), max_attempts=0))
