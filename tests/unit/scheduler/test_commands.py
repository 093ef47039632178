"""The closed sets, and what the dispatch commands carry."""

from __future__ import annotations

import typing

import pytest

from callyard.errors import ErrorKind
from callyard.ids import Digest, FunctionId, TaskId
from callyard.scheduler import CallState, FunctionTarget, NewCall
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import PLAIN, Harness, dispatches


@pytest.mark.requirement("X6")
def test_commands_are_a_closed_set() -> None:
    names = {command.__name__ for command in typing.get_args(c.SchedulerCommand)}
    assert names == {
        "BindCall",
        "UnbindCall",
        "CancelCall",
        "DispatchCall",
        "ArmCallRetry",
        "CompleteCallFromCache",
        "ResumeParent",
        "BatchSettled",
        "StopCallProduction",
        "ConvergeTaskCalls",
    }
    declared = {value for value in vars(c).values() if isinstance(value, type) and issubclass(value, c.Command)}
    assert declared - {c.Command} == set(typing.get_args(c.SchedulerCommand))


@pytest.mark.requirement("X6")
def test_every_event_is_in_its_set_and_handled() -> None:
    declared = {value for value in vars(e).values() if isinstance(value, type) and issubclass(value, e.Event)}
    assert declared - {e.Event} == set(typing.get_args(e.SchedulerEvent))


@pytest.mark.requirement("X7")
def test_one_decision_binds_the_head_of_the_queue() -> None:
    h = Harness(executors=1)
    h.open(default_budget_ms=5_000)
    h.commit(2)
    assert h.decide() == [c.BindCall("t-0", "exec-0", 1, 5_000)]
    call = h.state("t-0")
    assert (call.state, call.attempt_count, call.attempt_seq) == (CallState.RUNNING, 1, 1)
    assert h.handle(e.ExecutorBound(call.call_id)) == [
        c.DispatchCall("t-0", "t", "exec-0", 1, 1, PLAIN, b"[]", False, 5_000)
    ]
    assert h.decide() == [c.BindCall("t-1", "exec-0", 1, 5_000)]
    assert h.decide() == []


@pytest.mark.requirement("X74")
@pytest.mark.parametrize(("own", "budget_ms"), [(None, 5_000), (90_000, 90_000), (0, 0)])
def test_the_budget_is_the_functions_own_or_the_tasks(own: int | None, budget_ms: int) -> None:
    h = Harness(executors=1)
    h.open(default_budget_ms=5_000)
    h.commit(1, target=FunctionTarget(FunctionId("f"), Digest("d"), "m:f", budget_ms=own))
    bind, sent = h.turn()
    assert (bind.budget_ms, sent.budget_ms) == (budget_ms, budget_ms)


def test_arguments_pass_as_they_came() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit([NewCall(0, PLAIN, b'{"n":1.50}', strings=True)])
    (sent,) = dispatches(h.turn())
    assert (sent.args, sent.strings) == (b'{"n":1.50}', True)


def test_a_frame_that_nobody_asked_for_is_no_error() -> None:
    h = Harness(executors=1)
    for event in (
        e.CallCompleted("exec-0", "x", 1, b""),
        e.AttemptFailed("exec-0", "x", 1, ErrorKind.INTERNAL, ""),
        e.CallSuspended("exec-0", "x", 1, "r"),
        e.SubcallRequested("exec-0", "x", 1, "r", PLAIN, b"[]"),
        e.CallResumed("x", 1, "r"),
        e.CallRefused("x", 1, ""),
        e.DispatchRejected("x", 1, ErrorKind.DENIED, ""),
        e.ResumeSendFailed("x", 1),
        e.RetryDue("x"),
        e.ExecutorSealed("exec-9"),
        e.ProductionEnded(TaskId("x")),
        e.BatchTaken(TaskId("x"), 0),
    ):
        assert h.post(event) == []
