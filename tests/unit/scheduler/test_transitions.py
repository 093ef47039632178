"""States, the one table, the one terminal."""

from __future__ import annotations

import itertools

import pytest

from callyard.errors import ErrorKind, InvalidTransition
from callyard.scheduler import CallState
from callyard.scheduler import events as e
from callyard.scheduler.calls import CALL_TRANSITIONS, Trigger
from callyard.scheduler.core import Scheduler

from .harness import IDEMPOTENT, Harness, failed, resumed, suspended, unbind

READY, RUNNING, WAITING, DONE = CallState


@pytest.mark.requirement("X4")
def test_table_has_exactly_the_transitions_of_the_specification() -> None:
    arrows = {(before, after) for (before, _), after in CALL_TRANSITIONS.items()}
    assert arrows == {
        (READY, RUNNING),
        (READY, DONE),
        (RUNNING, READY),
        (RUNNING, WAITING),
        (RUNNING, DONE),
        (WAITING, RUNNING),
        (WAITING, READY),
        (WAITING, DONE),
    }


@pytest.mark.requirement("X4", "X5")
@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(CallState, Trigger)))
def test_every_state_times_every_trigger(state: CallState, trigger: Trigger) -> None:
    h = Harness()
    h.open()
    h.commit(1)
    call = h.state("t-0")
    call.state = state
    expected = CALL_TRANSITIONS.get((state, trigger))
    if expected is not None:
        assert state is not DONE  # the only terminal
        call.apply(trigger)
        assert call.state is expected
        return
    with pytest.raises(InvalidTransition) as caught:
        call.apply(trigger)
    assert call.state is state
    for part in ("t-0", state.name, trigger.name):
        assert part in str(caught.value)


@pytest.mark.requirement("X4")
def test_an_invalid_transition_tells_the_recent_history() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.handle(suspended(sent))
    h.handle(resumed(sent))
    with pytest.raises(InvalidTransition, match=r"RUNNING by BOUND .*history BOUND SUSPENDED RESUMED"):
        h.state("t-0").apply(Trigger.BOUND)


def test_the_history_is_bounded() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    for number in range(20):
        h.handle(suspended(sent, f"r{number}"))
        h.handle(resumed(sent, f"r{number}"))
    assert h.state("t-0").recent_triggers() == ["SUSPENDED", "RESUMED"] * 4


@pytest.mark.requirement("X3")
def test_a_call_keeps_its_carrier_and_id_through_retries() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    call = h.state("t-0")
    for attempt in (1, 2):
        assert (sent.call_id, sent.attempt, call.attempt_count) == ("t-0", attempt, attempt)
        h.fail(sent, ErrorKind.TIMEOUT)
        h.now_ms += 1_000
        commands = h.post(e.RetryDue(sent.call_id))
        sent = commands[-1]
    assert h.state("t-0") is call
    assert (sent.call_id, call.attempt_count) == ("t-0", 3)


@pytest.mark.requirement("X5")
def test_done_is_set_once_and_accounted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one function that sets DONE changes nothing when called again."""
    h = Harness(executors=1)
    (sent,) = h.start(end=False)
    call = h.state("t-0")
    finish = Scheduler._finish
    again: list[bool] = []

    def twice(scheduler: Scheduler, call: object, result: object) -> None:
        finish(scheduler, call, result)
        before = (scheduler.statistics(), scheduler.progress(sent.task_id))
        finish(scheduler, call, result)
        again.append((scheduler.statistics(), scheduler.progress(sent.task_id)) == before)

    monkeypatch.setattr(Scheduler, "_finish", twice)
    h.handle(e.CallCompleted(sent.executor_id, sent.call_id, 1, b"1"))
    assert again == [True]
    assert call.state is DONE
    assert h.scheduler.statistics().finished == 1


@pytest.mark.requirement("X4", "X5")
@pytest.mark.parametrize("state", ["READY", "BACKOFF", "RUNNING", "WAITING", "DONE", "REMOVED"])
def test_what_frames_and_late_timers_do_in_every_state(state: str) -> None:
    """A pair outside the table that comes from outside is counted and dropped; it never raises."""
    h = Harness(executors=1, contexts=1)
    h.open()
    h.commit(1, target=IDEMPOTENT)
    if state != "READY":
        h.turn()
    call, executor = h.state("t-0"), "exec-0"
    attempt = max(1, call.attempt_seq)
    completed = e.CallCompleted(executor, call.call_id, attempt, b"1")
    if state == "BACKOFF":
        h.handle(e.AttemptFailed(executor, call.call_id, 1, ErrorKind.TIMEOUT, ""))
    elif state == "WAITING":
        h.handle(e.CallSuspended(executor, call.call_id, 1, "r"))
    elif state in ("DONE", "REMOVED"):
        h.handle(completed)
    if state == "REMOVED":
        h.flush()
    before = call.state
    statistics = h.scheduler.statistics()
    foreign = [
        e.CallCompleted("exec-9", call.call_id, attempt, b"1"),
        e.CallCompleted(executor, call.call_id, attempt + 7, b"1"),
        e.AttemptFailed("exec-9", call.call_id, attempt, ErrorKind.INTERNAL, ""),
        e.CallSuspended("exec-9", call.call_id, attempt, "r9"),
        e.CallRefused(call.call_id, attempt + 7, ""),
        e.DispatchRejected(call.call_id, attempt + 7, ErrorKind.DENIED, ""),
        e.ResumeSendFailed(call.call_id, attempt + 7),
    ]
    unknown = [e.CallResumed(call.call_id, attempt, "r9"), e.CallResumed(call.call_id, attempt + 7, "r")]
    for event in [*foreign, *unknown]:
        assert h.handle(event) == []
    late_timer = state in ("RUNNING", "WAITING", "DONE", "REMOVED")
    if late_timer:
        assert h.handle(e.RetryDue(call.call_id)) == []
    after = h.scheduler.statistics()
    assert call.state is before
    assert after.stale - statistics.stale == len(foreign)
    assert after.dropped - statistics.dropped == len(unknown) + late_timer
    if state in ("READY", "BACKOFF", "DONE", "REMOVED"):  # nothing holds a reservation: its own frames are stale too
        assert h.handle(completed) == []
        assert call.state is before


def test_a_failure_frame_ends_the_call_once() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(end=False)
    assert h.handle(failed(sent)) == [unbind(sent)]
    assert h.handle(failed(sent)) == []
    assert h.scheduler.statistics().failed == 1
