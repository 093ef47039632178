"""Requests of a running call: WAITING while one is open, whatever overtakes what."""

from __future__ import annotations

import itertools

import pytest

from callyard.errors import ErrorKind, ProtocolError
from callyard.scheduler import CallState, StopReason
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, Harness, dispatches, failed, resumed, settled, suspended, unbind

READY, RUNNING, WAITING, DONE = CallState


@pytest.mark.requirement("X66")
def test_waiting_while_one_request_is_open() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    call = h.state("t-0")
    states = []
    for event in (
        suspended(sent, "a"),
        suspended(sent, "b"),
        resumed(sent, "a"),
        suspended(sent, "c"),
        resumed(sent, "c"),
        resumed(sent, "b"),
        suspended(sent, "d"),
        resumed(sent, "d"),
    ):
        assert h.post(event) == []
        states.append(call.state)
    assert states == [WAITING, WAITING, WAITING, WAITING, WAITING, RUNNING, WAITING, RUNNING]


@pytest.mark.requirement("X66")
@pytest.mark.parametrize("order", list(itertools.permutations(["resumed", "waiting", "completed"])))
def test_every_order_of_resumed_waiting_completed(order: tuple[str, ...]) -> None:
    """Request r1 is open. Its resumed event, a second request and the completion come in any order.

    Whatever the executor sent is true: what overtook the resumed event is handled as if after it.
    """
    h = Harness(executors=1, contexts=1)
    (sent,) = h.start()
    h.post(suspended(sent, "r1"))
    call = h.state("t-0")
    events = {
        "resumed": resumed(sent, "r1"),
        "waiting": suspended(sent, "r2"),
        "completed": e.CallCompleted(sent.executor_id, sent.call_id, 1, b"42"),
    }
    results = []
    for position, name in enumerate(order):
        commands = h.post(events[name])
        results += settled(commands)
        if "completed" in order[: position + 1]:
            assert call.state is DONE
            assert commands[:1] == ([unbind(sent)] if name == "completed" else [])
        else:
            assert call.state is (RUNNING if order[: position + 1] == ("resumed",) else WAITING)
    assert [(result.output, result.attempts) for result in results] == [(b"42", 1)]
    statistics = h.scheduler.statistics()
    late = order[order.index("completed") + 1 :]
    assert (statistics.stale, statistics.dropped) == ("waiting" in late, "resumed" in late)
    assert (statistics.inflight, statistics.waiting) == (0, 0)


@pytest.mark.requirement("X66")
def test_a_failure_that_overtakes_the_resumed_event() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    h.post(suspended(sent))
    h.post(failed(sent, ErrorKind.TIMEOUT))
    assert h.state("t-0").state is READY
    assert h.post(resumed(sent)) == []
    h.now_ms += 100
    (again,) = dispatches(h.post(e.RetryDue(sent.call_id)))
    h.post(suspended(again))
    assert h.post(resumed(sent)) == []  # of attempt 1: the same request name of attempt 2 stays open
    assert h.state("t-0").state is WAITING
    assert h.scheduler.statistics().dropped == 2


@pytest.mark.requirement("X66")
def test_a_second_request_that_overtakes_the_first_ones_resumed_event() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(suspended(sent, "r1"))
    h.post(suspended(sent, "r2"))
    h.post(resumed(sent, "r1"))
    assert h.state("t-0").state is WAITING
    h.post(resumed(sent, "r2"))
    assert h.state("t-0").state is RUNNING


@pytest.mark.requirement("X66")
def test_unknown_and_repeated_requests_are_counted_and_dropped() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(suspended(sent, "r1"))
    for event in (suspended(sent, "r1"), resumed(sent, "r9"), e.CallResumed(sent.call_id, 9, "r1")):
        assert h.post(event) == []
    assert h.scheduler.statistics().dropped == 3
    h.post(resumed(sent, "r1"))
    assert h.post(resumed(sent, "r1")) == []
    assert (h.state("t-0").state, h.scheduler.statistics().dropped) == (RUNNING, 4)


@pytest.mark.requirement("X66", "X82")
def test_more_than_1024_open_requests_is_a_protocol_error() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    for number in range(1_024):
        h.scheduler.handle(suspended(sent, f"r{number}"), h.now_ms)
    with pytest.raises(ProtocolError, match=r"t-0 has 1024 open requests, the most is 1024 \(exec-0\)"):
        h.scheduler.handle(suspended(sent, "one more"), h.now_ms)
    h.scheduler.check_invariants()
    assert len(h.state("t-0").open_requests) == 1_024
    (result,) = settled(h.lose(begun=["t-0"], cause="malformed_frame"))  # the shell closes that connection
    assert result.failure is not None
    assert result.failure.details["cause"] == "malformed_frame"


@pytest.mark.requirement("X82")
def test_a_flood_of_requests_holds_at_most_the_bound() -> None:
    """A fake executor sends requests without end for every call it holds: one set of the bound each, no more."""
    h = Harness(executors=1, contexts=4, open_requests_max=10)
    sent = h.start(4)
    errors = 0
    for number in range(1_000):
        try:
            h.scheduler.handle(suspended(sent[number % 4], f"r{number}"), h.now_ms)
        except ProtocolError:
            errors += 1
    held = sum(len(call.open_requests) for call in h.scheduler._calls.values())
    assert (held, errors) == (40, 960)


@pytest.mark.requirement("X36")
def test_a_resume_that_cannot_be_sent_ends_the_attempt() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(suspended(sent))
    cancel, batch = h.post(e.ResumeSendFailed(sent.call_id, 1))
    assert (cancel.call_id, cancel.executor_id, cancel.attempt_seq) == ("t-0", "exec-0", 1)
    (result,) = batch.results
    failure = result.failure
    assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.CRASHED, "unknown", 1)
    assert failure.details == {"cause": "resume_send_failed"}
    assert h.post(e.ResumeSendFailed(sent.call_id, 1)) == []
    assert h.scheduler.statistics().draining == 1
    assert h.complete(sent) == [unbind(sent)]  # too late, and its context is free again
    assert h.scheduler.statistics().draining == 0


@pytest.mark.requirement("X36")
def test_a_resume_that_cannot_be_sent_is_retried_with_a_promise() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    h.post(suspended(sent))
    cancel, armed = h.post(e.ResumeSendFailed(sent.call_id, 1))
    h.now_ms = armed.due_at_ms
    (again,) = dispatches(h.post(e.RetryDue(sent.call_id)))
    assert (cancel.attempt_seq, again.attempt_seq, again.attempt) == (1, 2, 2)


def test_a_resume_that_cannot_be_sent_to_a_stopped_call_changes_nothing() -> None:
    """Its CancelCall is out; one is enough, and the terminal frame decides."""
    h = Harness(executors=1)
    (sent,) = h.start()
    h.post(suspended(sent))
    h.post(e.TaskStopped(sent.task_id, StopReason.CANCELLED))
    assert h.post(e.ResumeSendFailed(sent.call_id, 1)) == []
    (result,) = settled(h.post(failed(sent, ErrorKind.CANCELLED)))
    assert result.failure is not None
    assert result.failure.kind is ErrorKind.CANCELLED


def test_a_suspended_call_that_goes_gives_its_waiting_seat_back() -> None:
    h = Harness(executors=1)
    sent = h.start(3)
    for call in sent:
        h.post(suspended(call))
    h.complete(sent[0])
    h.post(failed(sent[1]))
    h.post(e.TaskStopped(sent[2].task_id, StopReason.CANCELLED))
    assert h.scheduler.statistics().waiting == 0
    h.post(resumed(sent[2]))
    h.post(suspended(sent[2], "r2"))
    assert h.scheduler.statistics().waiting == 0  # it drains: no longer among those that count
    assert h.state("t-2").state is WAITING
