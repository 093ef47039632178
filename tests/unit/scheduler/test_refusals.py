"""Attempts that never left: given back, tried again soon, then ever less often."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind
from callyard.ids import ExecutorId
from callyard.scheduler import CallState
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import Harness, dispatches, refused, suspended, unbind


@pytest.mark.requirement("X11")
def test_a_failed_bind_is_armed_for_now_and_costs_no_attempt() -> None:
    h = Harness(executors=1)
    h.open()
    h.commit()
    (bind,) = h.decide()
    assert h.handle(refused(bind)) == [
        c.UnbindCall(bind.call_id, bind.executor_id, 1),
        c.ArmCallRetry(bind.call_id, h.now_ms),
    ]
    call = h.state("t-0")
    assert (call.state, call.attempt_count, call.attempt_seq) == (CallState.READY, 0, 1)
    (bind,) = h.decide()
    assert (bind.attempt_seq, call.attempt_count) == (2, 1)


@pytest.mark.requirement("X70")
def test_an_outbox_full_for_ten_seconds_at_most_twenty_tries_then_one_send() -> None:
    """The first refusal is tried again at once, the next after 10, 20, … ms up to 1 s, by the armed timers alone."""
    h = Harness(executors=1)
    full_until_ms = h.now_ms + 10_000
    (sent,) = h.start()
    tries, timers = 1, set()
    while h.now_ms < full_until_ms:
        commands = h.post(refused(sent))
        timers |= {command.due_at_ms for command in commands if isinstance(command, c.ArmCallRetry)}
        again = dispatches(commands)
        while not again:
            h.now_ms = min(timers)
            timers.discard(h.now_ms)
            again = dispatches(h.post(e.RetryDue(sent.call_id)))
        (sent,) = again
        tries += 1
        assert tries <= 20
    assert tries >= 10
    assert h.now_ms <= full_until_ms + 1_000  # the last wait is at most a second
    assert h.turn() == []  # sent once: nothing else is bound or sent
    assert h.complete(sent)[0] == unbind(sent)
    assert h.scheduler.statistics().refused == tries - 1


@pytest.mark.requirement("X70")
def test_a_snapshot_does_not_lift_the_block() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    (sent,) = dispatches(h.post(refused(sent)))
    h.post(refused(sent))  # blocked for 10 ms now
    for seq in range(2, 8):
        assert dispatches(h.post(e.SnapshotUpdated(h.snapshot("exec-0", seq=seq)))) == []
    h.now_ms += 10
    assert len(dispatches(h.turn())) == 1


@pytest.mark.requirement("X70")
def test_a_freed_context_lifts_the_block() -> None:
    h = Harness(executors=1)
    first, second = h.start(2)
    (second,) = dispatches(h.post(refused(second)))
    assert dispatches(h.post(refused(second))) == []
    assert [call.call_id for call in dispatches(h.complete(first))] == [second.call_id]


@pytest.mark.requirement("X70")
def test_a_draining_context_that_is_freed_lifts_the_block_too() -> None:
    h = Harness(executors=1)
    first, second = h.start(2)
    h.handle(suspended(first))
    h.handle(e.ResumeSendFailed(first.call_id, 1))
    (second,) = dispatches(h.post(refused(second)))
    assert dispatches(h.post(refused(second))) == []
    assert len(dispatches(h.complete(first))) == 1


@pytest.mark.requirement("X70")
def test_the_block_is_per_executor() -> None:
    h = Harness(executors=2)
    (sent,) = h.start()
    (sent,) = dispatches(h.post(refused(sent)))
    assert sent.executor_id == "exec-0"  # at once the first time
    (sent,) = dispatches(h.post(refused(sent)))
    assert sent.executor_id == "exec-1"


@pytest.mark.requirement("X70")
def test_an_answer_ends_the_row_of_refusals() -> None:
    h = Harness(executors=1)
    sent, other = h.start(2)
    for _ in range(5):
        h.handle(refused(sent))
        h.now_ms += 1_000
        (sent,) = dispatches(h.turn())
    h.complete(other)
    released, armed, *_ = h.post(refused(sent))
    assert (released, armed) == (unbind(sent), c.ArmCallRetry(sent.call_id, h.now_ms))


@pytest.mark.requirement("X70")
def test_bound_is_no_answer() -> None:
    """The reserved context says nothing of the outbox: else every refusal would count as the first, tried at once."""
    h = Harness(executors=1)
    (sent,) = h.start()
    waits = []
    for _ in range(6):
        commands = h.post(refused(sent))
        (armed,) = (command for command in commands if isinstance(command, c.ArmCallRetry))
        waits.append(armed.due_at_ms - h.now_ms)
        h.now_ms = armed.due_at_ms
        (sent,) = dispatches(commands) or dispatches(h.post(e.RetryDue(sent.call_id)))
    assert waits == [0, 10, 20, 40, 80, 160]


def test_the_longest_wait_is_a_setting() -> None:
    h = Harness(executors=1, refusal_delay_ms_max=15)
    (sent,) = h.start()
    for _ in range(4):
        h.handle(refused(sent))
        h.now_ms += 15
        (sent,) = dispatches(h.turn())
    assert h.state("t-0").attempt_count == 1


def test_refused_calls_do_not_pile_up_timers_in_the_core() -> None:
    """Many calls refused by one executor: the executor waits, the calls stand in their queue in order."""
    h = Harness(executors=1, contexts=4)
    sent = h.start(4)
    for call in sent:
        h.handle(refused(call))
    assert [call.queued for call in h.scheduler._calls.values()] == [True] * 4
    h.now_ms += 1_000
    assert len(dispatches(h.turn())) == 4
    assert h.scheduler._index._blocked == []


@pytest.mark.requirement("X84")
def test_a_rejected_dispatch_is_final() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    event = e.DispatchRejected(sent.call_id, 1, ErrorKind.DENIED, "outside the view", {"reason": "view", "line": 7})
    released, batch = h.post(event)
    assert released == unbind(sent)
    (result,) = batch.results
    failure = result.failure
    assert (failure.kind, failure.message, failure.attempts, failure.outcome) == (
        ErrorKind.DENIED,
        "outside the view",
        0,
        "not_run",
    )
    assert failure.details == {"reason": "view", "line": 7}
    assert h.post(event) == []


def test_a_refusal_of_a_lost_executor_is_stale() -> None:
    h = Harness(executors=2)
    (sent,) = h.start()
    (again,) = dispatches(h.lose(sent.executor_id))
    assert h.post(refused(sent)) == []
    assert h.post(e.DispatchRejected(sent.call_id, 1, ErrorKind.DENIED, "")) == []
    assert (h.scheduler.statistics().stale, again.executor_id) == (2, "exec-1")


def test_nothing_of_a_blocked_executor_is_left_when_it_goes() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    (sent,) = dispatches(h.post(refused(sent)))
    h.post(refused(sent))
    index = h.scheduler._index
    assert len(index._blocked) == 1
    h.handle(e.ExecutorLost(ExecutorId("exec-0"), "exited", "", frozenset()))
    assert (index._blocked, index._touched, index._heaps, index.executors) == ([], [], {}, {})
