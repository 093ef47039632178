"""A task is stopped: what never runs, what is told to stop, what may still succeed."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.ids import TaskId
from callyard.scheduler import CallState, StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, Harness, converged, dispatches, failed, kinds, refused, settled, suspended, unbind

T = TaskId("t")


def stop(reason: StopReason = StopReason.CANCELLED, **fields) -> e.TaskStopped:
    return e.TaskStopped(T, reason, **fields)


def only(commands) -> tuple[ErrorKind, Outcome, int]:
    (result,) = settled(commands)
    assert result.failure is not None
    assert result.failure.attempts == result.attempts
    return result.failure.kind, result.failure.outcome, result.attempts


# --- cancel at each point ----------------------------------------------------------------------------------------

NOT_RUN = (ErrorKind.CANCELLED, Outcome.NOT_RUN, 0)
UNKNOWN = (ErrorKind.CANCELLED, Outcome.UNKNOWN, 1)


@pytest.mark.requirement("X68")
def test_stopped_while_ready() -> None:
    h = Harness()
    h.open()
    h.commit()
    commands = h.post(stop())
    assert kinds(commands) == [c.StopCallProduction, c.BatchSettled]
    assert only(commands) == NOT_RUN


@pytest.mark.requirement("X68")
def test_stopped_between_bind_and_bound_is_never_dispatched() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit()
    (bind,) = h.decide()
    assert h.handle(stop()) == [c.CancelCall(bind.call_id, bind.executor_id, 1, StopReason.CANCELLED)]
    released = h.handle(e.ExecutorBound(bind.call_id))
    assert released == [c.UnbindCall(bind.call_id, bind.executor_id, 1)]
    assert only(h.flush()) == NOT_RUN


@pytest.mark.requirement("X68")
def test_stopped_between_dispatch_and_outbox_is_refused_and_nobody_is_blamed() -> None:
    """The step that puts the frame into the outbox sees that it drains; the executor is not blocked for it."""
    h = Harness(executors=1)
    sent = h.start(3)
    h.start(1, name="u")
    h.post(stop())
    for call in sent[:-1]:
        assert h.post(refused(call)) == [unbind(call)]
    results = settled(h.post(refused(sent[-1])))
    assert [(result.failure.kind, result.failure.outcome, result.attempts) for result in results] == [NOT_RUN] * 3
    assert h.scheduler.statistics().refused == 0
    assert len(h.start(1, name="v")) == 1


@pytest.mark.requirement("X68")
def test_stopped_after_the_send_before_it_began() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    assert h.post(stop())[0] == c.CancelCall(sent.call_id, sent.executor_id, 1, StopReason.CANCELLED)
    assert h.state("t-0").state is CallState.RUNNING
    assert only(h.post(failed(sent, ErrorKind.CANCELLED, outcome=Outcome.NOT_RUN))) == NOT_RUN


@pytest.mark.requirement("X68")
@pytest.mark.parametrize("waits", [False, True])
def test_stopped_while_it_ran_or_waited(waits: bool) -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    if waits:
        h.post(suspended(sent))
    h.post(stop())
    commands = h.post(failed(sent, ErrorKind.CANCELLED, stack="line 9", notes=("said",)))
    assert only(commands) == UNKNOWN
    (result,) = settled(commands)
    assert result.failure is not None
    assert (result.failure.stack, result.notes) == ("line 9", ("said",))
    assert result.failure.details == {"reason": "cancelled"}


@pytest.mark.requirement("X68")
def test_a_late_success_is_a_success() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(stop())
    (result,) = settled(h.complete(sent, b"42"))
    assert (result.ok, result.output) == (True, b"42")


@pytest.mark.requirement("X68")
def test_an_end_of_its_own_is_its_own() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(stop())
    assert only(h.fail(sent, ErrorKind.INTERNAL)) == (ErrorKind.INTERNAL, Outcome.RAN, 1)


@pytest.mark.requirement("X68", "X93")
def test_given_back_while_told_to_stop() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(stop())
    assert only(h.post(failed(sent, ErrorKind.CANCELLED, recalled=True))) == NOT_RUN


@pytest.mark.requirement("X68")
def test_stopped_in_backoff() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    h.fail(sent, ErrorKind.TIMEOUT)
    commands = h.post(stop())
    assert only(commands) == UNKNOWN
    assert h.post(e.RetryDue(sent.call_id)) == []


def test_stopped_in_backoff_after_an_attempt_that_did_nothing() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.fail(sent, ErrorKind.TRANSIENT)
    assert only(h.post(stop())) == (ErrorKind.CANCELLED, Outcome.NOT_RUN, 1)


@pytest.mark.requirement("X68")
def test_no_cancel_comes_before_its_dispatch() -> None:
    """Commands of one call leave in order; a call that was never sent gets no second command after its unbind."""
    h = Harness(executors=1)
    h.open()
    h.commit(2)
    order = h.turn() + h.post(stop())
    for call_id in ("t-0", "t-1"):
        mine = [type(command) for command in order if getattr(command, "call_id", "") == call_id]
        assert mine == [c.BindCall, c.DispatchCall, c.CancelCall]


# --- the task ----------------------------------------------------------------------------------------------------


def test_a_reservation_drains_until_its_terminal_frame() -> None:
    h = Harness(executors=1, contexts=2)
    (sent,) = h.start()
    h.post(stop())
    assert (h.scheduler.statistics().inflight, h.scheduler.statistics().draining) == (0, 1)
    assert len(h.start(2, name="u")) == 1  # its context is still taken
    more = h.post(failed(sent, ErrorKind.CANCELLED))
    assert len(dispatches(more)) == 1
    assert h.scheduler.statistics().draining == 0


def test_the_rest_is_cancelled_once_nothing_is_in_flight() -> None:
    h = Harness(executors=1, contexts=1)
    (sent,) = h.start(3, end=True)
    assert kinds(h.post(stop(cancel_running=False))) == []  # production has ended, one call runs
    commands = h.complete(sent)
    assert [(result.ok, result.attempts) for result in settled(commands)] == [(True, 1), (False, 0), (False, 0)]
    assert kinds(commands) == [c.UnbindCall, c.BatchSettled, c.ConvergeTaskCalls]
    assert converged(commands) == c.ConvergeTaskCalls(T, False, [], [], StopReason.CANCELLED, 3, 2)


@pytest.mark.requirement("X77")
def test_under_fail_fast_calls_that_never_ran_are_cancelled_not_run() -> None:
    h = Harness(executors=1, contexts=1)
    (sent,) = h.start(3)
    h.post(stop(StopReason.FAIL_FAST, cancel_running=False))
    first, *rest = settled(h.fail(sent))
    assert first.failure is not None
    assert first.failure.kind is ErrorKind.INTERNAL
    for result in rest:
        failure = result.failure
        assert (failure.kind, failure.outcome, failure.attempts) == NOT_RUN
        assert failure.details == {"reason": "fail_fast"}


def test_a_second_stop_may_end_what_the_first_let_run() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(stop(StopReason.MAX_FAILURES, cancel_running=False))
    (cancel,) = h.post(stop(StopReason.CANCELLED))
    assert cancel == c.CancelCall(sent.call_id, sent.executor_id, 1, StopReason.CANCELLED)
    assert h.post(stop(StopReason.CANCELLED)) == []  # one CancelCall is enough
    commands = h.post(failed(sent, ErrorKind.CANCELLED))
    assert only(commands) == UNKNOWN
    assert converged(commands + h.stop_production()).stop_reason is StopReason.MAX_FAILURES  # the first one


def test_nothing_is_committed_after_a_stop() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(stop(cancel_running=False))
    assert not h.scheduler.has_capacity_for(T)
    assert h.commit(5) is False
    h.complete(sent)
    assert converged(h.stop_production()).total_count == 1


def test_stopped_before_the_first_batch() -> None:
    h = Harness(executors=1)
    h.open()
    assert h.post(stop()) == [c.StopCallProduction(T, StopReason.CANCELLED)]
    assert h.post(stop()) == []
    assert h.commit(1) is False
    assert h.stop_production() == [c.ConvergeTaskCalls(T, False, [], [], StopReason.CANCELLED, 0, 0)]


def test_stopping_an_ended_or_unknown_task_is_nothing() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(end=True)
    h.complete(sent)
    assert h.post(stop()) == []
    assert h.post(e.TaskStopped(TaskId("nobody"), StopReason.CANCELLED)) == []


def test_other_tasks_go_on() -> None:
    h = Harness(executors=1)
    h.start(2)
    (other,) = h.start(1, name="u", end=True)
    h.post(stop())
    assert converged(h.complete(other)).success


def test_a_stopped_task_leaves_its_turn() -> None:
    """No executor, and stopped tasks stand behind one that waits: they must not stay in the ring for ever."""
    h = Harness()
    h.start(1, name="waits")
    for number in range(50):
        h.open(f"u{number}", uses_slot=False)
        h.commit(1, name=f"u{number}")
        h.turn()
        h.handle(e.TaskStopped(TaskId(f"u{number}"), StopReason.DEADLINE))
        h.post(e.ProductionEnded(TaskId(f"u{number}")))
    assert [[lane.task.task_id for lane in ring] for ring in h.scheduler._turns.rings.values()] == [["waits"]]


# --- reasons -----------------------------------------------------------------------------------------------------


def test_a_deadline_before_it_ran() -> None:
    h = Harness()
    h.open()
    h.commit()
    (result,) = settled(h.post(stop(StopReason.DEADLINE)))
    failure = result.failure
    assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.DEADLINE, Outcome.NOT_RUN, 0)
    assert failure.details == {"limit": "deadline_ms"}


@pytest.mark.parametrize("lost", [False, True])
def test_a_deadline_while_it_ran_is_a_timeout(lost: bool) -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(stop(StopReason.DEADLINE))
    commands = h.lose(begun=["t-0"]) if lost else h.post(failed(sent, ErrorKind.CANCELLED))
    assert only(commands) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
    (result,) = settled(commands)
    assert result.failure is not None
    assert result.failure.details == {"limit": "deadline_ms"}


def test_without_any_executor_the_calls_are_unavailable_and_say_why() -> None:
    h = Harness()
    h.open()
    h.commit(2)
    results = settled(h.post(stop(StopReason.UNAVAILABLE, message="no executor for 60 s: boom")))
    assert [(result.failure.kind, result.failure.message) for result in results] == [
        (ErrorKind.UNAVAILABLE, "no executor for 60 s: boom")
    ] * 2


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_reason_ends_every_call_with_attempts_that_are_true(reason: StopReason) -> None:
    h = Harness(executors=1, contexts=2)
    running, backoff = h.start(4, target=IDEMPOTENT)
    h.handle(failed(backoff, ErrorKind.TIMEOUT))
    h.turn()
    commands = h.post(stop(reason))
    for cancel in (command for command in commands if isinstance(command, c.CancelCall)):
        commands = h.post(
            e.AttemptFailed(cancel.executor_id, cancel.call_id, cancel.attempt_seq, ErrorKind.CANCELLED, "stopped")
        )
    results = settled(commands)
    assert running.call_id == "t-0"
    assert [result.attempts for result in results] == [1, 1, 1, 0]
    assert [result.failure.outcome for result in results] == [Outcome.UNKNOWN] * 3 + [Outcome.NOT_RUN]
