"""Which failed attempt runs again, when, and what the final failure says."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.errors import KIND_RULES, ErrorKind, Outcome, Retried
from callyard.ids import CallId
from callyard.scheduler import CallState, FunctionTarget, StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, PLAIN, Harness, dispatches, failed, settled, unbind


def run_out(h: Harness, kind: ErrorKind, target: FunctionTarget, **plan: Any) -> tuple[list[int], Any]:
    """Fail every attempt: the delays before each next one, and the final failure."""
    (sent,) = h.start(target=target, **plan)
    delays: list[int] = []
    while True:
        commands = h.fail(sent, kind)
        results = settled(commands)
        if results:
            return delays, results[0].failure
        (armed,) = (command for command in commands if isinstance(command, c.ArmCallRetry))
        delays.append(armed.due_at_ms - h.now_ms)
        h.now_ms = armed.due_at_ms
        (sent,) = dispatches(h.post(e.RetryDue(sent.call_id)))


@pytest.mark.requirement("X12")
@pytest.mark.parametrize("kind", list(ErrorKind))
@pytest.mark.parametrize("target", [PLAIN, IDEMPOTENT], ids=["no promise", "idempotent"])
def test_which_kinds_are_retried(kind: ErrorKind, target: FunctionTarget) -> None:
    rule = KIND_RULES[kind]
    begun = rule.outcome is not Outcome.NOT_RUN or kind is ErrorKind.TRANSIENT
    retried = rule.retried is Retried.ALWAYS or (rule.retried is Retried.IF_IDEMPOTENT and target.idempotent)
    delays, failure = run_out(Harness(executors=1), kind, target)
    assert len(delays) == (2 if retried else 0)
    assert failure.kind is kind
    assert failure.retryable == retried
    assert failure.attempts == (3 if retried else 1 if begun else 0)
    assert failure.outcome is rule.outcome


@pytest.mark.requirement("X12")
@pytest.mark.parametrize("max_attempts", [1, 2, 5])
def test_max_attempts_comes_from_the_plan(max_attempts: int) -> None:
    delays, failure = run_out(Harness(executors=1), ErrorKind.TRANSIENT, PLAIN, max_attempts=max_attempts)
    assert len(delays) == max_attempts - 1
    assert failure.attempts == max_attempts


@pytest.mark.requirement("X12")
def test_three_attempts_by_default() -> None:
    assert len(run_out(Harness(executors=1), ErrorKind.TRANSIENT, PLAIN)[0]) == 2


@pytest.mark.requirement("X12")
def test_backoff_doubles_with_up_to_five_percent_jitter() -> None:
    h = Harness(executors=1, base_backoff_ms=1_000)
    delays, _ = run_out(h, ErrorKind.TRANSIENT, PLAIN, max_attempts=6)
    for attempt, delay in enumerate(delays, 1):
        base = 1_000 << (attempt - 1)
        assert base <= delay <= base * 1.05
    assert any(delay != 1_000 << number for number, delay in enumerate(delays))  # there is some


@pytest.mark.requirement("X12")
def test_backoff_base_of_the_plan_goes_first() -> None:
    delays, _ = run_out(Harness(executors=1, base_backoff_ms=10), ErrorKind.TRANSIENT, PLAIN, base_backoff_ms=4_000)
    assert delays[0] >= 4_000
    assert run_out(Harness(executors=1), ErrorKind.TRANSIENT, PLAIN, base_backoff_ms=0)[0] == [0, 0]


@pytest.mark.requirement("X12")
def test_a_call_in_backoff_is_not_bound_before_its_timer() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    released, armed = h.fail(sent, ErrorKind.TIMEOUT)
    assert released == unbind(sent)
    assert armed == c.ArmCallRetry(sent.call_id, armed.due_at_ms)
    assert h.state("t-0").state is CallState.READY
    assert h.turn() == []
    h.now_ms = armed.due_at_ms
    assert [type(command) for command in h.post(e.RetryDue(sent.call_id))] == [c.BindCall, c.DispatchCall]


@pytest.mark.requirement("X12")
def test_the_timer_of_an_earlier_arming_does_not_cut_a_backoff_short() -> None:
    """A refusal armed a wake-up; the call ran elsewhere and failed; the wake-up comes into its backoff."""
    h = Harness(executors=2, base_backoff_ms=1_000)
    (first,) = h.start(target=IDEMPOTENT)
    commands = h.post(e.CallRefused(first.call_id, first.attempt_seq, "full"))
    (second,) = dispatches(commands)
    released, armed = h.fail(second, ErrorKind.TIMEOUT)
    h.now_ms += 10
    assert h.post(e.RetryDue(first.call_id)) == [armed]  # not lost either: armed again for its own time
    h.now_ms = armed.due_at_ms
    assert len(dispatches(h.post(e.RetryDue(first.call_id)))) == 1
    assert h.post(e.RetryDue(first.call_id)) == []
    assert released == unbind(second)


@pytest.mark.requirement("X12")
def test_a_retry_after_of_the_function_is_obeyed() -> None:
    h = Harness(executors=1)
    (sent,) = h.start()
    commands = h.fail(sent, ErrorKind.TRANSIENT, details={"retry_after_ms": 7_000})
    assert commands[-1] == c.ArmCallRetry(sent.call_id, h.now_ms + 7_000)
    (short,) = h.start(name="u")
    commands = h.fail(short, ErrorKind.TRANSIENT, details={"retry_after_ms": 1})
    assert commands[-1].due_at_ms >= h.now_ms + 10


@pytest.mark.requirement("X12", "X68")
@pytest.mark.parametrize("cancel_running", [False, True])
def test_a_stopped_task_retries_nothing(cancel_running: bool) -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    h.post(e.TaskStopped(sent.task_id, StopReason.CANCELLED, cancel_running=cancel_running))
    (result,) = settled(h.fail(sent, ErrorKind.TIMEOUT))
    assert result.failure is not None
    assert (result.failure.kind, result.failure.attempts) == (ErrorKind.TIMEOUT, 1)


@pytest.mark.requirement("X12")
def test_a_timeout_before_it_began_is_safe_for_any_function() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=PLAIN)
    commands = h.fail(sent, ErrorKind.TIMEOUT, outcome=Outcome.NOT_RUN)
    assert isinstance(commands[-1], c.ArmCallRetry)
    assert h.state("t-0").attempt_count == 0


@pytest.mark.requirement("X12")
def test_what_an_executor_claims_to_be_retryable_does_not_matter() -> None:
    """`internal` stays final, and a timeout without a promise too: kind and promise decide, not the frame."""
    for kind in (ErrorKind.INTERNAL, ErrorKind.TIMEOUT):
        h = Harness(executors=1)
        (sent,) = h.start(target=PLAIN)
        (result,) = settled(h.fail(sent, kind, details={"retryable": True}))
        assert result.failure is not None
        assert not result.failure.retryable


@pytest.mark.requirement("D52")
@pytest.mark.parametrize("target", [PLAIN, IDEMPOTENT])
def test_a_plain_exception_is_internal_and_final_whatever_the_promise(target: FunctionTarget) -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=target)
    (result,) = settled(h.fail(sent, ErrorKind.INTERNAL, stack="line 3", local_variables={"x": "1"}, notes=("n",)))
    failure = result.failure
    assert failure is not None
    assert (failure.kind, failure.outcome, failure.attempts) == (ErrorKind.INTERNAL, Outcome.RAN, 1)
    assert (failure.stack, failure.local_variables, result.notes) == ("line 3", {"x": "1"}, ("n",))


@pytest.mark.requirement("D52")
def test_attempts_count_those_that_had_begun() -> None:
    """Refused, given back, then schema: nothing began, attempts 0. A crash before: 1."""
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    (sent,) = dispatches(h.post(e.CallRefused(sent.call_id, 1, "full")))
    (sent,) = dispatches(h.post(failed(sent, ErrorKind.CANCELLED, recalled=True)))
    assert (sent.attempt_seq, sent.attempt) == (3, 1)
    (result,) = settled(h.fail(sent, ErrorKind.SCHEMA))
    assert result.attempts == 0


def test_an_unknown_effect_of_an_earlier_attempt_stays_unknown() -> None:
    """Attempt 1 timed out and may have had its effect; attempt 2 says that it did nothing: `unknown`, not `not_run`."""
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT, max_attempts=2)
    h.fail(sent, ErrorKind.TIMEOUT)
    h.now_ms += 100
    (sent,) = dispatches(h.post(e.RetryDue(sent.call_id)))
    (result,) = settled(h.fail(sent, ErrorKind.TRANSIENT))
    assert result.failure is not None
    assert (result.failure.outcome, result.failure.attempts) == (Outcome.UNKNOWN, 2)


def test_attempts_that_did_nothing_leave_nothing() -> None:
    _, failure = run_out(Harness(executors=1), ErrorKind.TRANSIENT, PLAIN)
    assert (failure.outcome, failure.attempts) == (Outcome.NOT_RUN, 3)


def test_a_late_success_after_a_retry_counts_its_attempts() -> None:
    h = Harness(executors=1)
    (sent,) = h.start(target=IDEMPOTENT)
    h.fail(sent, ErrorKind.TIMEOUT)
    h.now_ms += 100
    (sent,) = dispatches(h.post(e.RetryDue(CallId("t-0"))))
    (result,) = settled(h.complete(sent, b"42", notes=("said",)))
    assert (result.ok, result.output, result.attempts, result.notes) == (True, b"42", 2, ("said",))
