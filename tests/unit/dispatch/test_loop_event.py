"""What an agent's loop makes of each kind of error."""

from __future__ import annotations

import pytest

from callyard.dispatch.loop_event import LOOP_EVENTS, LoopEvent, Repeat, Replan, loop_event
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome, fail
from callyard.ids import CallId

PLANS_ANEW = {"schema", "not_found", "conflict", "denied", "internal", "result", "tool_error"}
BY_ATTEMPTS = {
    "timeout",
    "transient",
    "crashed",
    "resource_limit",
    "circuit_open",
    "unavailable",
    "deadline",
    "rate_limited",
}
STOPS = {"cancelled", "shutting_down"}


@pytest.mark.requirement("D25")
def test_the_table_is_total_and_so_is_this_one() -> None:
    assert set(LOOP_EVENTS) == set(ErrorKind)
    assert {kind.value for kind in ErrorKind} == PLANS_ANEW | BY_ATTEMPTS | STOPS | {"budget_exceeded"}


@pytest.mark.requirement("D25")
@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind(kind: ErrorKind, outcome: Outcome) -> None:
    failure = fail(kind, "it failed", outcome=outcome, retry_after_ms=250)
    if kind.value in PLANS_ANEW:
        expected = LoopEvent("on_error", Replan.YES, Repeat.NO)
    elif kind.value in BY_ATTEMPTS:
        repeat = Repeat.YES if outcome is Outcome.NOT_RUN else Repeat.SAME_KEY
        expected = LoopEvent("on_error", Replan.BY_ATTEMPTS, repeat, 250)
    elif kind.value in STOPS:
        expected = LoopEvent("stop", Replan.NO, Repeat.NO)
    else:
        expected = LoopEvent("on_budget_exceeded", Replan.NO, Repeat.NO)
    assert loop_event(failure) == expected
    assert loop_event(DispatchError(CallId("c"), failure)) == expected


@pytest.mark.requirement("D25")
@pytest.mark.parametrize("retryable", [False, True])
@pytest.mark.parametrize("kind", ErrorKind)
def test_after_an_unknown_outcome_never_under_a_new_key(kind: ErrorKind, retryable: bool) -> None:
    failure = fail(kind, "it may have happened", outcome=Outcome.UNKNOWN, retryable=retryable)
    assert loop_event(failure).repeat is not Repeat.YES


@pytest.mark.requirement("D25")
def test_retry_after_that_is_no_duration_is_left_out() -> None:
    assert loop_event(fail(ErrorKind.TRANSIENT, "busy", retry_after_ms="soon")).retry_after_ms is None
    assert loop_event(fail(ErrorKind.TRANSIENT, "busy")).retry_after_ms is None
    assert loop_event(fail(ErrorKind.TRANSIENT, "busy", retry_after_ms=0.5)).retry_after_ms == 1


@pytest.mark.requirement("D25")
def test_replanning_by_attempts() -> None:
    later = loop_event(fail(ErrorKind.TIMEOUT, "late"))
    assert [later.wants_replan(failures) for failures in (1, 2, 3, 4)] == [False, False, True, True]
    assert later.wants_replan(1, failures_max=1)
    assert loop_event(fail(ErrorKind.SCHEMA, "misfit")).wants_replan(1)
    assert not loop_event(fail(ErrorKind.CANCELLED, "stop")).wants_replan(99)
    assert not loop_event(fail(ErrorKind.BUDGET_EXCEEDED, "none left")).wants_replan(99)
