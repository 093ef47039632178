"""The one table of kinds, row by row, and what is built on it."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from callyard.errors import (
    KIND_RULES,
    CallError,
    CallFailure,
    ErrorKind,
    Outcome,
    Retried,
    TransientError,
    fail,
    may_retry,
)

# kind, outcome, who may run it again, JSON-RPC code, HTTP status: the table of D23.
TABLE = [
    ("not_found", "not_run", "never", -32601, 404),
    ("schema", "not_run", "never", -32602, 422),
    ("conflict", "not_run", "never", -32602, 409),
    ("denied", "not_run", "never", -32603, 403),
    ("budget_exceeded", "not_run", "never", -32603, 429),
    ("circuit_open", "not_run", "never", -32603, 503),
    ("deadline", "not_run", "never", -32603, 504),
    ("shutting_down", "not_run", "never", -32603, 503),
    ("unavailable", "not_run", "by_caller", -32603, 503),
    ("rate_limited", "not_run", "by_caller", -32603, 429),
    ("timeout", "unknown", "if_idempotent", -32603, 504),
    ("crashed", "unknown", "if_idempotent", -32603, 502),
    ("resource_limit", "unknown", "never", -32603, 507),
    ("transient", "not_run", "always", -32603, 503),
    ("tool_error", "ran", "never", -32603, 400),
    ("internal", "ran", "never", -32603, 500),
    ("result", "ran", "never", -32603, 500),
    ("cancelled", "unknown", "never", -32603, 499),
]


@pytest.mark.requirement("D23")
@pytest.mark.parametrize(("kind", "outcome", "retried", "jsonrpc_code", "http_status"), TABLE)
def test_row(kind: str, outcome: str, retried: str, jsonrpc_code: int, http_status: int) -> None:
    rule = KIND_RULES[ErrorKind(kind)]
    assert rule.outcome == Outcome(outcome)
    assert rule.retried == Retried(retried)
    assert rule.jsonrpc_code == jsonrpc_code
    assert rule.http_status == http_status


@pytest.mark.requirement("D23")
def test_table_is_total_over_the_kinds() -> None:
    assert list(KIND_RULES) == list(ErrorKind) == [row[0] for row in TABLE]


def test_every_kind_has_plain_words_of_its_own() -> None:
    summaries = [rule.summary for rule in KIND_RULES.values()]
    assert all(summaries)
    assert len(set(summaries)) == len(summaries)


RETRIED_IF_IDEMPOTENT = {ErrorKind.TIMEOUT, ErrorKind.CRASHED}


@pytest.mark.requirement("X12", "D12")
@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_may_retry(kind: ErrorKind, idempotent: bool, begun: bool) -> None:
    expected = kind is ErrorKind.TRANSIENT or (kind in RETRIED_IF_IDEMPOTENT and (idempotent or not begun))
    assert may_retry(kind, idempotent=idempotent, begun=begun) is expected


@pytest.mark.requirement("D12")
def test_a_call_counts_as_begun_unless_told_otherwise() -> None:
    assert not may_retry(ErrorKind.TIMEOUT, idempotent=False)


@pytest.mark.requirement("D23")
@pytest.mark.parametrize("kind", ErrorKind)
def test_failure_takes_its_outcome_from_the_table(kind: ErrorKind) -> None:
    assert fail(kind, "why").outcome == KIND_RULES[kind].outcome


@pytest.mark.requirement("D23")
def test_a_timeout_that_had_not_begun_is_not_run() -> None:
    failure = fail(ErrorKind.TIMEOUT, "late", outcome=Outcome.NOT_RUN, limit="timeout_ms")
    assert failure.outcome is Outcome.NOT_RUN
    assert failure.details == {"limit": "timeout_ms"}


def test_failure_is_json_in_both_directions() -> None:
    failure = fail(ErrorKind.SCHEMA, "no", attempts=2, pointer="/origin", stack="s", local_variables={"a": "1"})
    assert msgspec.json.decode(msgspec.json.encode(failure), type=CallFailure) == failure


def test_call_error_keeps_its_failure_through_pickling() -> None:
    error = CallError(fail(ErrorKind.CRASHED, "exec-3 ended with signal 9", attempts=2))
    assert str(error) == "crashed: exec-3 ended with signal 9"
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes, made on this line
    assert copy.failure == error.failure
    assert (copy.kind, copy.outcome, copy.attempts) == (ErrorKind.CRASHED, Outcome.UNKNOWN, 2)


def test_transient_error_carries_its_wait() -> None:
    assert TransientError("busy", retry_after_ms=250).retry_after_ms == 250
    assert TransientError().retry_after_ms is None
