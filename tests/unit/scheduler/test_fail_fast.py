"""The first final failure ends the task, when it says so."""

from __future__ import annotations

import pytest

from callyard.errors import ErrorKind, Outcome, fail
from callyard.scheduler import NewCall, StopReason
from callyard.scheduler import commands as c
from callyard.scheduler import events as e

from .harness import IDEMPOTENT, PLAIN, Harness, converged, dispatches, kinds, resumes


@pytest.mark.requirement("X14", "X77")
def test_the_first_final_failure_stops_dispatching_and_the_rest_is_cancelled() -> None:
    h = Harness(executors=1, contexts=2)
    one, two = dispatches(h.begin(*[PLAIN] * 5, on_failure="fail_fast", streaming=False))
    commands = h.fail(one)
    assert kinds(commands) == [c.UnbindCall, c.StopCallProduction]
    done = converged(h.complete(two, b"2") + h.stop_production())
    assert (done.success, done.stop_reason, done.outputs) == (False, StopReason.FAIL_FAST, [b"2"])
    ends = [(result.failure.kind, result.failure.outcome, result.attempts) for result in done.results if not result.ok]
    assert ends == [(ErrorKind.INTERNAL, Outcome.RAN, 1), *[(ErrorKind.CANCELLED, Outcome.NOT_RUN, 0)] * 3]


@pytest.mark.requirement("X14")
def test_continue_runs_every_call() -> None:
    h = Harness(executors=1)
    sent = dispatches(h.begin(*[PLAIN] * 5, streaming=False))
    for one in sent:
        h.fail(one)
    done = converged(h.stop_production())
    assert [result.attempts for result in done.results] == [1] * 5
    assert done.stop_reason is None


@pytest.mark.requirement("X14", "X12")
def test_a_failure_that_is_tried_again_is_not_final() -> None:
    h = Harness(executors=1)
    one, two = dispatches(h.begin(IDEMPOTENT, IDEMPOTENT, on_failure="fail_fast", streaming=False))
    h.fail(one, ErrorKind.TIMEOUT)
    h.now_ms += 1_000
    (again,) = dispatches(h.post(e.RetryDue(one.call_id)))
    h.complete(again)
    h.complete(two)
    assert converged(h.stop_production()).success


@pytest.mark.requirement("X14")
def test_a_failed_subcall_is_its_parents_business() -> None:
    h = Harness(executors=1)
    parent, _ = dispatches(h.begin(PLAIN, PLAIN, on_failure="fail_fast"))
    (resume,) = resumes(h.fail(h.call(parent, PLAIN, b"1")))
    h.resume(resume)
    assert h.scheduler.has_capacity_for("t")


@pytest.mark.requirement("X14", "X84")
def test_a_bad_line_is_a_failure_too() -> None:
    h = Harness(executors=1)
    h.open(on_failure="fail_fast", streaming=False)
    h.commit([NewCall(0, PLAIN, b"[]"), NewCall(1, None, b"", failure=fail(ErrorKind.SCHEMA, "line 2"))])
    done = converged(h.turn() + h.stop_production())
    assert [result.failure.kind for result in done.results] == [ErrorKind.CANCELLED, ErrorKind.SCHEMA]
    assert not h.commit(1) if "t" in h.scheduler._tasks else True
