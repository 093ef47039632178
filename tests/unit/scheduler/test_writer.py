"""One writer: only the worker's actor may change the scheduler."""

from __future__ import annotations

import threading
from random import Random

import pytest

from callyard.ids import CallId, TaskId
from callyard.scheduler import Scheduler, SchedulerConfig, TaskPlan, prepare_batch
from callyard.scheduler import events as e


class ForeignCaller(Exception):
    pass


def guarded() -> Scheduler:
    owner = threading.get_ident()

    def guard() -> None:
        if threading.get_ident() != owner:
            raise ForeignCaller

    return Scheduler(SchedulerConfig(), Random(1), guard)


PLAN = TaskPlan(TaskId("t"))
MUTATING = {
    "handle": lambda scheduler: scheduler.handle(e.RetryDue(CallId("t-0")), 0),
    "commit_task": lambda scheduler: scheduler.commit_task(TaskPlan(TaskId("u"))),
    "commit_batch": lambda scheduler: scheduler.commit_batch(prepare_batch(PLAN, 0, 0, [])),
    "try_dispatch_next": lambda scheduler: scheduler.try_dispatch_next(0),
    "flush_dirty_tasks": lambda scheduler: scheduler.flush_dirty_tasks(0),
}
READING = {
    "statistics",
    "wants_marks",
    "progress",
    "has_capacity_for",
    "check_invariants",
    "find_call",
    "is_settled",
    "demand",
    "exclusive_waiting",
    "find_placement",
    "has_strays",
    "tasks_waiting_for",
}


@pytest.mark.requirement("X2")
@pytest.mark.parametrize("name", MUTATING)
def test_a_foreign_caller_is_refused_and_changes_nothing(name: str) -> None:
    scheduler = guarded()
    scheduler.commit_task(PLAN)
    before = scheduler.statistics()
    caught: list[type[BaseException]] = []

    def foreign() -> None:
        try:
            MUTATING[name](scheduler)
        except ForeignCaller as error:
            caught.append(type(error))

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert caught == [ForeignCaller]
    assert scheduler.statistics() == before
    MUTATING[name](scheduler)  # the owner may


@pytest.mark.requirement("X2")
def test_no_mutating_method_is_forgotten() -> None:
    public = {name for name in dir(Scheduler) if not name.startswith("_")}
    assert public == MUTATING.keys() | READING


@pytest.mark.requirement("X22")
def test_preparing_needs_no_leave() -> None:
    guarded()
    prepared: list[object] = []
    thread = threading.Thread(target=lambda: prepared.append(prepare_batch(PLAN, 0, 0, [])))
    thread.start()
    thread.join()
    assert len(prepared) == 1
