"""Frames of attempts that are no longer current."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind
from callyard.scheduler import CallState
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, Harness, dispatches, failed, refused, resumed, settled, suspended, unbind


def two_attempts(h: Harness):
    """A call whose first attempt failed and whose second runs."""
    (first,) = h.start(target=IDEMPOTENT)
    h.fail(first, ErrorKind.TIMEOUT)
    h.now_ms += 100
    (second,) = dispatches(h.post(e.RetryDue(first.call_id)))
    return first, second


@pytest.mark.requirement("X13")
@pytest.mark.parametrize("executors", [1, 2], ids=["same executor", "other executor"])
def test_a_completion_of_attempt_1_while_attempt_2_runs(executors: int) -> None:
    h = Harness(executors=executors)
    first, second = two_attempts(h)
    assert h.complete(first, b"late") == []
    assert h.state("t-0").state is CallState.RUNNING
    assert h.scheduler.statistics().stale == 1
    (result,) = settled(h.complete(second, b"right"))
    assert result.output == b"right"


@pytest.mark.requirement("X13")
def test_any_frame_of_an_old_attempt_is_stale() -> None:
    h = Harness(executors=1)
    first, _ = two_attempts(h)
    for event in (failed(first), suspended(first), e.CallCompleted(first.executor_id, first.call_id, 1, b"1")):
        assert h.post(event) == []
    assert h.post(resumed(first)) == []
    assert h.state("t-0").state is CallState.RUNNING
    assert (h.scheduler.statistics().stale, h.scheduler.statistics().dropped) == (3, 1)


@pytest.mark.requirement("X13")
def test_a_frame_of_a_connection_that_holds_no_reservation_is_stale() -> None:
    """Right call, right attempt, wrong executor: it cannot answer for another."""
    h = Harness(executors=2)
    (sent,) = h.start()
    for event in (
        e.CallCompleted("exec-1", sent.call_id, 1, b"forged"),
        e.AttemptFailed("exec-1", sent.call_id, 1, ErrorKind.INTERNAL, "forged"),
        e.CallSuspended("exec-1", sent.call_id, 1, "r"),
        e.CallCompleted("exec-7", sent.call_id, 1, b"from nobody"),
    ):
        assert h.post(event) == []
    assert h.state("t-0").state is CallState.RUNNING
    assert h.scheduler.statistics().stale == 4


@pytest.mark.requirement("X13")
def test_a_failure_for_a_call_in_backoff_is_stale() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    h.fail(sent, ErrorKind.TIMEOUT)
    assert h.fail(sent, ErrorKind.TIMEOUT) == []
    assert (h.state("t-0").attempt_count, h.scheduler.statistics().stale) == (1, 1)


@pytest.mark.requirement("X13")
def test_done_and_removed_calls_ignore_every_late_event() -> None:
    h = Harness(executors=1)
    sent, other = h.start(2)
    h.complete(sent)  # done; its batch is not settled
    for _ in range(2):
        for event in (failed(sent), suspended(sent), refused(sent), e.ResumeSendFailed(sent.call_id, 1)):
            assert h.post(event) == []
        assert h.complete(sent, b"again") == []
        assert h.post(e.RetryDue(sent.call_id)) == []
        if other is not None:
            results = settled(h.complete(other))  # and removed, the second time round
            assert [result.output for result in results] == [b"1", b"1"]
            other = None
    assert h.scheduler.statistics().stale == 10


@pytest.mark.requirement("X69", "X70")
def test_bind_refused_send_bind_again_then_the_late_failure_of_the_first_send() -> None:
    h = Harness(executors=1)
    (first,) = h.start()
    (second,) = dispatches(h.post(refused(first)))
    assert (first.attempt_seq, second.attempt_seq) == (1, 2)
    assert (first.attempt, second.attempt) == (1, 1)
    assert h.fail(first) == []
    assert h.post(refused(first)) == []
    assert h.state("t-0").state is CallState.RUNNING
    (result,) = settled(h.complete(second))
    assert (result.ok, result.attempts) == (True, 1)


@pytest.mark.requirement("X69")
def test_attempt_seq_never_goes_back() -> None:
    h = Harness(executors=2)
    (sent,) = h.start(target=IDEMPOTENT)
    seen = [sent.attempt_seq]
    for number in range(6):
        if number % 3 == 0:
            commands = h.post(refused(sent))
        elif number % 3 == 1:
            commands = h.post(failed(sent, ErrorKind.CANCELLED, recalled=True))
        else:
            commands = h.lose(sent.executor_id)
        (sent,) = dispatches(commands) or dispatches(h.post(e.RetryDue(sent.call_id)))
        h.attach(f"exec-{number + 5}")
        h.now_ms += 1_000
        seen.append(sent.attempt_seq)
    assert seen == list(range(1, 8))
    assert h.state("t-0").attempt_count == 1


@pytest.mark.requirement("X13")
def test_a_frame_of_a_draining_attempt_frees_its_context_and_nothing_else() -> None:
    """Rebound to the same executor while the old reservation drains: each frame finds its own attempt."""
    h = Harness(executors=1, contexts=2)
    (first,) = h.start(target=IDEMPOTENT)
    h.handle(suspended(first))
    h.post(e.ResumeSendFailed(first.call_id, 1))
    h.now_ms += 100
    (second,) = dispatches(h.post(e.RetryDue(first.call_id)))
    assert second.executor_id == first.executor_id
    executor = h.scheduler._index.executors["exec-0"]
    assert (dict(executor.live), set(executor.draining)) == ({"t-0": 2}, {("t-0", 1)})
    assert h.post(failed(first, ErrorKind.CANCELLED)) == [unbind(first)]
    assert (dict(executor.live), set(executor.draining)) == ({"t-0": 2}, set())
    assert h.post(failed(first, ErrorKind.CANCELLED)) == []
    (result,) = settled(h.complete(second))
    assert (result.ok, result.attempts) == (True, 2)
