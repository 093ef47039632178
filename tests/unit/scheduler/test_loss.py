"""An executor is lost: who had begun, who is charged, who runs again."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind, Outcome, ProtocolError
from callyard.scheduler import CallState, StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, PLAIN, Harness, dispatches, failed, settled, suspended


@pytest.mark.requirement("X62")
@pytest.mark.parametrize("target", [PLAIN, IDEMPOTENT], ids=["no promise", "idempotent"])
def test_not_begun_goes_back_whatever_the_promise_and_at_no_attempt(target) -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=target, max_attempts=1)
    for number in range(5):  # more often than max_attempts
        assert h.lose(sent.executor_id) == []
        call = h.state("t-0")
        assert (call.state, call.attempt_count, call.queued) == (CallState.READY, 0, True)
        h.attach(f"exec-{number + 1}")
        (sent,) = dispatches(h.turn())
    (result,) = settled(h.complete(sent))
    assert (result.ok, result.attempts) == (True, 1)


@pytest.mark.requirement("X62")
def test_begun_without_a_promise_is_crashed_outcome_unknown() -> None:
    h = Harness(executors=1)
    h.start()
    (result,) = settled(h.lose(begun=["t-0"], details={"exit_code": 3}))
    failure = result.failure
    assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.CRASHED, Outcome.UNKNOWN, 1)
    assert failure.message == "it died"
    assert failure.details == {"exit_code": 3, "cause": "exited", "executor": "exec-0"}


@pytest.mark.requirement("X62")
def test_begun_and_idempotent_is_retried_until_its_attempts_are_used() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT, max_attempts=2)
    (armed,) = h.lose(begun=["t-0"])
    assert armed == c.ArmCallRetry(sent.call_id, armed.due_at_ms)
    h.attach("exec-1")
    h.now_ms = armed.due_at_ms
    (sent,) = dispatches(h.post(e.RetryDue(sent.call_id)))
    (result,) = settled(h.lose("exec-1", begun=["t-0"]))
    assert (result.failure.kind, result.attempts) == (ErrorKind.CRASHED, 2)


@pytest.mark.requirement("X62")
def test_128_calls_killed_after_the_third_began() -> None:
    """Those begun are crashed; the rest run once each, in their order, elsewhere."""
    h = Harness(executors=1, contexts=128)
    sent = h.start(128, end=True)
    assert len(sent) == 128
    begun = ["t-0", "t-1", "t-2"]
    assert h.lose(begun=begun) == []
    h.attach("exec-1", contexts=128)
    again = dispatches(h.turn())
    assert [call.call_id for call in again] == [f"t-{number}" for number in range(3, 128)]
    results = [result for call in again for result in settled(h.complete(call))]
    assert [result.ok for result in results] == [False] * 3 + [True] * 125
    assert {result.attempts for result in results} == {1}


@pytest.mark.requirement("X62")
def test_a_call_that_asked_for_something_has_begun_whatever_the_page_says() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(suspended(sent))
    (result,) = settled(h.lose(begun=[]))
    assert result.failure.kind is ErrorKind.CRASHED


@pytest.mark.requirement("X62", "X93")
def test_a_call_that_has_begun_cannot_be_given_back() -> None:
    """It would run twice without a promise."""
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(suspended(sent))
    with pytest.raises(ProtocolError, match="exec-0 gave back call t-0, which had begun"):
        h.handle(failed(sent, ErrorKind.CANCELLED, recalled=True))
    h.scheduler.check_invariants()
    (result,) = settled(h.lose())
    assert result.failure.kind is ErrorKind.CRASHED


@pytest.mark.requirement("X62")
def test_a_call_given_back_goes_to_the_head_at_no_attempt() -> None:
    h = Harness(executors=1, contexts=1)
    h.open()
    h.commit(3)
    (sent,) = dispatches(h.turn())
    (again,) = dispatches(h.post(failed(sent, ErrorKind.CANCELLED, recalled=True)))
    assert (again.call_id, again.attempt, again.attempt_seq) == ("t-0", 1, 2)


@pytest.mark.requirement("X63")
def test_nothing_is_retried_or_reported_before_the_loss_is_told() -> None:
    """While it is killed and reaped the executor is sealed: no new call goes there, and what it held stays."""
    h = Harness(executors=2)
    first, second = h.start(2, target=IDEMPOTENT)
    assert (first.executor_id, second.executor_id) == ("exec-0", "exec-1")
    assert h.post(e.ExecutorSealed(first.executor_id)) == []
    assert h.state("t-0").state is CallState.RUNNING
    for name in ("u", "v", "w"):
        assert [call.executor_id for call in h.start(name=name)] == ["exec-1"]
    (result, *_) = [h.complete(first)]  # its last frames still count: the socket is read to the end
    assert result[0] == c.UnbindCall(first.call_id, first.executor_id, 1)
    assert h.lose("exec-0", begun=["t-0"]) == []


@pytest.mark.requirement("X63", "X13")
def test_after_the_loss_its_frames_are_stale() -> None:
    """SIGSTOP past the timeout, then SIGCONT: what it held goes on nowhere beside the new attempt."""
    h = Harness(executors=2)
    (sent,) = h.start(target=IDEMPOTENT)
    (armed,) = h.lose(begun=["t-0"], cause="heartbeat")
    h.now_ms = armed.due_at_ms
    (again,) = dispatches(h.post(e.RetryDue(sent.call_id)))
    assert h.complete(sent, b"from the dead") == []
    assert h.post(suspended(sent)) == []
    (result,) = settled(h.complete(again))
    assert (result.output, result.attempts) == (b"1", 2)


@pytest.mark.requirement("X63")
def test_lost_twice_is_lost_once() -> None:
    h = Harness(executors=1)
    h.start(2, target=IDEMPOTENT)
    assert len(h.lose(begun=["t-0", "t-1"])) == 2
    assert h.lose(begun=["t-0", "t-1"]) == []
    assert h.scheduler.statistics().executors == 0
    assert h.lose("exec-9") == []


@pytest.mark.requirement("X45")
def test_a_crash_costs_only_the_calls_it_was_running() -> None:
    h = Harness(executors=2)
    sent = h.start(6)
    mine = [call.call_id for call in sent if call.executor_id == "exec-0"]
    theirs = [call for call in sent if call.executor_id == "exec-1"]
    assert (len(mine), len(theirs)) == (3, 3)
    moved = dispatches(h.lose(begun=[mine[0]]))
    assert [call.call_id for call in moved] == mine[1:]
    assert {call.executor_id for call in moved} == {"exec-1"}
    for call in [*theirs, *moved]:
        commands = h.complete(call)
    results = settled(commands)
    assert sorted(result.index for result in results if not result.ok) == [0]


@pytest.mark.requirement("X38")
def test_only_the_running_call_is_charged_with_a_wedge() -> None:
    h = Harness(executors=1)
    h.start(4)
    commands = h.lose(
        begun=["t-0", "t-1"], cause="wedge", charged="t-1", details={"limit": "wedge", "stalled_ms": 10_000}
    )
    assert commands == []
    h.attach("exec-1")
    for call in dispatches(h.turn()):  # t-2 and t-3 had not begun
        commands = h.complete(call)
    wedged, neighbour = (settled(commands)[index].failure for index in (1, 0))
    assert wedged.kind is neighbour.kind is ErrorKind.CRASHED
    assert wedged.details == {"cause": "wedge", "executor": "exec-0", "limit": "wedge", "stalled_ms": 10_000}
    assert neighbour.details == {"cause": "neighbour", "executor": "exec-0", "stalled_ms": 10_000}
    assert "another call" in neighbour.message


@pytest.mark.requirement("X38")
def test_neighbours_of_a_wedge_follow_their_promise() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit(2, target=IDEMPOTENT)
    h.turn()
    (result_of_charged, other) = h.lose(begun=["t-0", "t-1"], cause="wedge", charged="t-0")
    assert {result_of_charged.call_id, other.call_id} == {"t-0", "t-1"}  # both may run again: both promised


def test_a_kill_for_memory_is_a_resource_limit_and_final() -> None:
    h = Harness(executors=1)
    h.start(target=IDEMPOTENT)
    (result,) = settled(h.lose(begun=["t-0"], cause="signalled", resource_limit=True))
    assert result.failure.kind is ErrorKind.RESOURCE_LIMIT


@pytest.mark.requirement("X62", "X68")
@pytest.mark.parametrize("begun", [True, False])
def test_lost_while_told_to_stop(begun: bool) -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    h.post(e.TaskStopped(sent.task_id, StopReason.CANCELLED))
    (result,) = settled(h.lose(begun=["t-0"] if begun else []))
    failure = result.failure
    assert (failure.kind, failure.outcome, failure.attempts) == (
        ErrorKind.CANCELLED,
        Outcome.UNKNOWN if begun else Outcome.NOT_RUN,
        int(begun),
    )


def test_calls_that_come_back_keep_their_order_and_stand_before_the_others() -> None:
    h = Harness(executors=1, contexts=3)
    h.open()
    h.commit(5)
    assert [call.call_id for call in dispatches(h.turn())] == ["t-0", "t-1", "t-2"]
    h.lose()
    h.attach("exec-1", contexts=5)
    assert [call.call_id for call in dispatches(h.turn())] == [f"t-{number}" for number in range(5)]


def test_a_draining_attempt_of_a_retried_call_dies_unnoticed() -> None:
    """The call runs elsewhere by now: only the reservation goes."""
    h = Harness(executors=2)
    (first,) = h.start(target=IDEMPOTENT)
    h.post(suspended(first))
    _, armed = h.post(e.ResumeSendFailed(first.call_id, 1))
    h.now_ms = armed.due_at_ms
    h.handle(e.ExecutorSealed(first.executor_id))
    (second,) = dispatches(h.post(e.RetryDue(first.call_id)))
    assert second.executor_id == "exec-1"
    assert h.lose(first.executor_id, begun=[]) == []
    assert h.state("t-0").state is CallState.RUNNING
    assert settled(h.complete(second))[0].attempts == 2


def test_an_executor_id_may_come_back_after_its_loss() -> None:
    h = Harness(executors=1)
    h.start()
    h.lose()
    h.attach("exec-0")
    assert [call.executor_id for call in dispatches(h.turn())] == ["exec-0"]
    with pytest.raises(AssertionError, match="exec-0 attached twice"):
        h.attach("exec-0")
