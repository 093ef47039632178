"""A task is over: when, and what it says."""

from __future__ import annotations

import gc
import itertools
import sys

import pytest

from callyard.errors import ErrorKind
from callyard.ids import ExecutorId, TaskId
from callyard.scheduler import StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, Harness, converged, dispatches, failed, kinds, unbind

T = TaskId("t")


@pytest.mark.requirement("X77")
@pytest.mark.parametrize("streaming", [True, False])
def test_an_empty_list_converges_at_once_successful_with_none(streaming: bool) -> None:
    h = Harness()
    h.open(streaming=streaming)
    assert h.stop_production() == [c.ConvergeTaskCalls(T, True, [], [], None, 0, 0)]
    assert h.stop_production() == []


@pytest.mark.requirement("X77")
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_outputs_come_in_list_order_whatever_the_order_of_completion(order: tuple[int, ...]) -> None:
    h = Harness(executors=1)
    h.open(streaming=False)
    h.commit(2)
    h.commit(2)
    sent = dispatches(h.turn())
    h.stop_production()
    for index in order:
        commands = h.complete(sent[index], str(index).encode())
    assert kinds(commands) == [c.UnbindCall, c.ConvergeTaskCalls]
    done = converged(commands)
    assert done.success
    assert done.outputs == [b"0", b"1", b"2", b"3"]
    assert [result.index for result in done.results] == [0, 1, 2, 3]


@pytest.mark.requirement("X77")
def test_continue_runs_every_call_and_reports_each_failure_in_its_place() -> None:
    h = Harness(executors=1)
    h.open(streaming=False)
    h.commit(3)
    first, second, third = dispatches(h.turn())
    h.stop_production()
    h.complete(first, b"a")
    h.fail(second)
    done = converged(h.complete(third, b"c"))
    assert (done.success, done.stop_reason, done.outputs) == (False, None, [b"a", b"c"])
    assert [result.ok for result in done.results] == [True, False, True]
    assert done.results[1].failure.kind is ErrorKind.INTERNAL


@pytest.mark.requirement("X19")
def test_converged_only_when_production_is_done() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    assert kinds(h.complete(sent)) == [c.UnbindCall, c.BatchSettled]
    assert h.scheduler.progress(T).terminal_count == 1
    h.commit(1)
    (sent,) = dispatches(h.turn())
    assert h.stop_production() == []
    assert kinds(h.complete(sent)) == [c.UnbindCall, c.BatchSettled, c.ConvergeTaskCalls]
    assert h.scheduler.progress(T) is None


@pytest.mark.requirement("X19")
def test_order_of_the_epilogue() -> None:
    """StopCallProduction, then the drain, then BatchSettled, then ConvergeTaskCalls, in one pass."""
    h = Harness(executors=1, contexts=1)
    (sent,) = h.start(3)
    h.handle(e.TaskStopped(T, StopReason.CANCELLED, cancel_running=False))
    assert h.flush() == [c.StopCallProduction(T, StopReason.CANCELLED)]
    h.handle(e.ProductionEnded(T))
    assert h.flush() == []
    h.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1"))
    assert kinds(h.flush()) == [c.BatchSettled, c.ConvergeTaskCalls]
    assert h.flush() == []


@pytest.mark.requirement("X19")
def test_all_of_it_in_one_pass() -> None:
    h = Harness()
    h.open()
    h.commit(2)
    h.handle(e.TaskStopped(T, StopReason.DEADLINE))
    assert kinds(h.flush()) == [c.StopCallProduction, c.BatchSettled]
    h.open("u")
    h.commit(2, name="u")
    h.handle(e.ProductionEnded(TaskId("u")))
    h.handle(e.TaskStopped(TaskId("u"), StopReason.DEADLINE))
    assert kinds(h.flush()) == [c.BatchSettled, c.ConvergeTaskCalls]  # its production had ended


@pytest.mark.requirement("X19")
def test_convergence_happens_in_the_epilogue_only() -> None:
    """No event's own commands settle or converge anything."""
    h = Harness(executors=1)
    (sent,) = h.start(end=True)
    assert h.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1")) == [unbind(sent)]
    assert T in h.scheduler._tasks
    assert kinds(h.flush()) == [c.BatchSettled, c.ConvergeTaskCalls]
    assert T not in h.scheduler._tasks


@pytest.mark.requirement("X19")
def test_the_epilogue_goes_on_until_quiet() -> None:
    """Convergence frees a slot; the task that gets it may be over as well, and so on."""
    h = Harness(executor_task_slots=1)
    for number in range(5):
        h.open(f"t{number}")
        h.handle(e.ProductionEnded(TaskId(f"t{number}")))
    assert [command.task_id for command in h.flush()] == [f"t{number}" for number in range(5)]


@pytest.mark.requirement("X75")
def test_settling_removes_the_calls_and_converging_the_task() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(end=True)
    h.complete(sent)
    scheduler = h.scheduler
    assert (scheduler._calls, scheduler._tasks, scheduler._turns.rings, scheduler._slots.waiting) == ({}, {}, {}, {})
    assert (scheduler._epilogue.dirty, scheduler._slots.taken) == ([], 0)


@pytest.mark.requirement("X75")
def test_nothing_is_left_of_tasks_and_executors() -> None:
    """Retries, refusals, stops, losses, several bundles; then everything ends: what remains weighs nothing."""
    h = Harness(executors=3, contexts=2)
    for round_ in range(4):
        sent = h.start(5, name=f"a{round_}", target=IDEMPOTENT)
        h.start(5, name=f"b{round_}")
        h.handle(failed(sent[0], ErrorKind.TIMEOUT))
        h.handle(e.CallRefused(sent[1].call_id, 1, "full"))
        h.post(e.TaskStopped(TaskId(f"b{round_}"), StopReason.CANCELLED))
        for executor in list(h.scheduler._index.executors):
            h.post(e.ExecutorLost(executor, "exited", "", frozenset()))
        h.post(e.TaskStopped(TaskId(f"a{round_}"), StopReason.CANCELLED))
        h.stop_production(f"a{round_}")
        h.stop_production(f"b{round_}")
        h.attach(*(f"exec-{round_}-{number}" for number in range(3)))
    for executor in list(h.scheduler._index.executors):
        h.post(e.ExecutorLost(executor, "stopped", "", frozenset()))
    scheduler, index = h.scheduler, h.scheduler._index
    assert (scheduler._calls, scheduler._tasks, scheduler._turns.rings, scheduler._epilogue.dirty) == ({}, {}, {}, [])
    assert (index.executors, index._heaps, index._touched, index._blocked) == ({}, {}, [], [])


@pytest.mark.requirement("X83")
def test_the_order_at_a_terminal_frame() -> None:
    """Reservation released, state DONE, task dirty; then, in the epilogue, settled and converged."""
    h = Harness(executors=1)
    (sent,) = h.start(end=True)
    order: list[str] = []
    watched = {"_release", "apply", "_finish", "mark", "flush_dirty_tasks", "_settle_batch", "_converge"}

    def watch(frame, what: str, argument: object) -> None:
        name = frame.f_code.co_name
        if what == "call" and name in watched and "scheduler" in frame.f_code.co_filename:
            order.append(name)

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        h.scheduler.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1"), h.now_ms)
        h.scheduler.flush_dirty_tasks(h.now_ms)
    finally:
        sys.setprofile(previous)
    assert order == ["_release", "_finish", "apply", "mark", "flush_dirty_tasks", "_settle_batch", "_converge"]


@pytest.mark.requirement("X83")
@pytest.mark.parametrize("step", ["bind", "bound", "dispatch", "rejected", "sent", "begun"])
def test_a_fault_at_each_step_of_the_dispatch(step: str) -> None:
    """BindCall → bound → DispatchCall → sent → begun: a fault at any step leaves nothing reserved."""
    h = Harness(executors=1)
    h.open()
    h.commit(1)
    (bind,) = h.decide()
    assert isinstance(bind, c.BindCall)
    lost = e.ExecutorLost(ExecutorId("exec-0"), "exited", "", frozenset())
    match step:
        case "bind":
            h.handle(e.CallRefused(bind.call_id, 1, "no context"))
        case "bound":
            h.handle(lost)
        case _:
            (sent,) = h.handle(e.ExecutorBound(bind.call_id))
            assert isinstance(sent, c.DispatchCall)
            if step == "dispatch":
                h.handle(e.CallRefused(sent.call_id, 1, "outbox full"))
            elif step == "rejected":
                h.handle(e.DispatchRejected(sent.call_id, 1, ErrorKind.NOT_FOUND, "unknown entry"))
            elif step == "sent":
                h.handle(lost)
            else:
                h.handle(e.ExecutorLost(ExecutorId("exec-0"), "exited", "", frozenset({sent.call_id})))
    call = h.scheduler._calls["t-0"]
    assert call.executor is None
    assert call.attempt_count == (1 if step == "begun" else 0)
    assert h.scheduler.statistics().inflight == 0
    assert h.scheduler._tasks["t"].inflight == 0
    ends = [result.failure.kind for command in h.flush() for result in getattr(command, "results", ())]
    assert ends == {"rejected": [ErrorKind.NOT_FOUND], "begun": [ErrorKind.CRASHED]}.get(step, [])


@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_over_holds_no_output(streaming: bool) -> None:
    """Not even until Python looks for cycles: it counts objects, and one output may be half a gigabyte."""
    output = bytes(1000)
    gc.collect()
    gc.disable()
    try:
        held = sys.getrefcount(output)
        h = Harness(executors=1)
        h.open(streaming=streaming)
        h.commit(1)
        (sent,) = dispatches(h.turn())
        h.stop_production()
        assert c.ConvergeTaskCalls in kinds(h.complete(sent, output))
        del h, sent
        assert sys.getrefcount(output) == held
    finally:
        gc.enable()
