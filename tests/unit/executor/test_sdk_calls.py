"""`call` and its kin outside an executor: a functions file works in a test, a script, a notebook."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys

import pytest

import callyard
from callyard import CallError, ErrorKind, ToolError, TransientError, UsageError, function
from callyard.errors import CallFailure, Outcome, fail
from callyard.functions.handed_on import hand_on
from callyard.sdk import Answer, acall, acall_many, call, call_many, log, progress, runtime


@dataclasses.dataclass
class Flight:
    origin: str
    delay: int = 0


@function(pure=True)
def double(x: int) -> int:
    return 2 * x


async def a_double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


def origin_of(flight: Flight) -> str:
    return flight.origin


def add(a: int, b: int = 10) -> int:
    return a + b


def moody(x: int) -> int:
    if x == 1:
        raise TransientError("later")
    if x == 2:
        raise ToolError("never")
    if x == 3:
        raise ValueError("odd")
    if x == 4:
        raise CallError(fail(ErrorKind.CRASHED, "gone"))
    if x == 5:
        sys.exit(7)
    if x == 6:
        raise MemoryError
    return x


def test_nothing_runs_here() -> None:
    assert runtime() is None


def test_call_runs_the_plain_function() -> None:
    assert call(double, 4) == 8
    assert call(add, 1, b=2) == 3
    assert call(a_double, 4) == 8


async def test_acall_awaits() -> None:
    assert await acall(double, 4) == 8
    assert await acall(a_double, x=4) == 8
    assert await acall_many(a_double, [1, 2]) == [2, 4]


async def test_the_blocking_form_of_an_async_def_is_refused_in_a_loop() -> None:
    with pytest.raises(UsageError, match=r"await acall\(a_double, …\) instead"):
        call(a_double, 4)


@pytest.mark.parametrize("use", [lambda: call("double", {"x": 1}), lambda: call_many("double", [1])])
def test_a_name_means_nothing_here(use: object) -> None:
    assert callable(use)
    with pytest.raises(UsageError, match="give the function"):
        use()


@pytest.mark.requirement("X30")
def test_rows_are_read_as_in_an_executor() -> None:
    assert call_many(add, [1, [2], (3, 4), {"a": 5, "b": 6}]) == [11, 12, 7, 11]
    assert call_many(origin_of, [{"origin": "JFK"}, Flight("LAX"), [Flight("EWR")]]) == ["JFK", "LAX", "EWR"]
    assert call_many(a_double, range(3)) == [0, 2, 4]
    assert call_many(double, []) == []


@pytest.mark.requirement("X30")
async def test_failures_of_rows() -> None:
    seen: list[int] = []

    def noted(x: int) -> int:
        seen.append(x)
        return moody(x)

    with pytest.raises(CallError, match="transient: later") as caught:
        call_many(noted, range(5))
    assert isinstance(caught.value.__cause__, TransientError)
    assert seen == [0, 1, 2, 3, 4], "all end, as in an executor"
    for answers in (
        call_many(moody, range(5), return_errors=True),
        await acall_many(moody, range(5), return_errors=True),
    ):
        assert [answer.index for answer in answers] == [0, 1, 2, 3, 4]
        assert [answer.ok for answer in answers] == [True, False, False, False, False]
        assert answers[0].value == answers[0].unwrap() == 0
        assert [answer.error and answer.error.kind for answer in answers] == [
            None,
            "transient",
            "tool_error",
            "internal",
            "internal",
        ]
        with pytest.raises(CallError, match="ValueError: odd"):
            answers[3].unwrap()


@pytest.mark.requirement("X28", "X30")
@pytest.mark.parametrize(
    ("x", "cause", "kind", "message", "outcome", "attempts"),
    [
        (1, TransientError, ErrorKind.TRANSIENT, "later", Outcome.NOT_RUN, 0),
        (2, ToolError, ErrorKind.TOOL_ERROR, "never", Outcome.RAN, 1),
        (3, ValueError, ErrorKind.INTERNAL, "ValueError: odd", Outcome.RAN, 1),
        (4, CallError, ErrorKind.INTERNAL, "crashed: gone", Outcome.RAN, 1),
        (5, SystemExit, ErrorKind.INTERNAL, "SystemExit: 7", Outcome.RAN, 1),
        (6, MemoryError, ErrorKind.RESOURCE_LIMIT, "MemoryError", Outcome.UNKNOWN, 1),
    ],
)
async def test_what_a_function_raises_is_a_call_error_here_as_well(
    x: int, cause: type[BaseException], kind: ErrorKind, message: str, outcome: Outcome, attempts: int
) -> None:
    with pytest.raises(CallError) as caught:
        call(moody, x)
    with pytest.raises(CallError) as awaited:
        await acall(moody, x)
    [answer] = call_many(moody, [x], return_errors=True)
    with pytest.raises(CallError) as unwrapped:
        answer.unwrap()
    for error in (caught.value, awaited.value, unwrapped.value):
        failure = error.failure
        assert (failure.kind, failure.message, failure.outcome, failure.attempts) == (kind, message, outcome, attempts)
        assert failure.details["function"] == "moody"
        assert type(error.__cause__) is cause


async def test_what_is_wrong_with_the_call_itself_is_no_failure_of_the_function() -> None:
    with pytest.raises(TypeError, match=r"^add\(\) missing a required argument: 'a'"):
        call(add)
    with pytest.raises(TypeError, match=r"^double\(\) got an unexpected keyword argument 'y'"):
        await acall(double, x=1, y=1)  # type: ignore[call-arg]
    misfit, fits = call_many(add, [{"c": 1}, 1], return_errors=True)
    assert (misfit.error and misfit.error.kind, fits.value) == (ErrorKind.SCHEMA, 11)
    no_flight, _ = call_many(origin_of, [{"delay": "x"}, {"origin": "JFK"}], return_errors=True)
    assert no_flight.error is not None
    assert no_flight.error.kind is ErrorKind.SCHEMA


def interrupted() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        call(interrupted)


def price() -> int:
    raise ValueError("no fuel")


def leg() -> int:
    return call(price)


@function(idempotent=True)
def plan() -> int:
    return call(leg)


@pytest.mark.requirement("X28")
def test_a_failure_that_is_handed_on_says_its_reason_first_and_the_path() -> None:
    with pytest.raises(CallError) as caught:
        call(plan)
    failure = caught.value.failure
    assert failure.message == "ValueError: no fuel (in plan → leg → price)"
    assert failure.details == {
        "function": "plan",
        "path": ["plan", "leg", "price"],
        "cause": {"kind": "internal", "message": "ValueError: no fuel", "details": {"function": "price"}},
    }


@pytest.mark.requirement("D38")
@pytest.mark.parametrize(
    ("failure", "idempotent", "kind", "message"),
    [
        (fail(ErrorKind.TOOL_ERROR, "no such row", function="b"), False, ErrorKind.TOOL_ERROR, "no such row"),
        (fail(ErrorKind.TIMEOUT, "too long", function="b"), False, ErrorKind.INTERNAL, "timeout: too long (in a → b)"),
        (
            fail(ErrorKind.TIMEOUT, "too long", retryable=True, function="b", limit="budget_ms"),
            True,
            ErrorKind.TIMEOUT,
            "too long (in a → b)",
        ),
        (
            fail(ErrorKind.UNAVAILABLE, "no answer", retryable=True, provider="http"),
            True,
            ErrorKind.TRANSIENT,
            "unavailable: no answer",
        ),
        (fail(ErrorKind.CRASHED, "gone", function="b"), True, ErrorKind.INTERNAL, "crashed: gone (in a → b)"),
        (fail(ErrorKind.DENIED, "nobody to ask", provider="client"), False, ErrorKind.DENIED, "nobody to ask"),
        (fail(ErrorKind.DENIED, "not allowed", provider="http"), False, ErrorKind.INTERNAL, "denied: not allowed"),
    ],
)
def test_the_kind_of_a_failure_that_is_handed_on(
    failure: CallFailure, idempotent: bool, kind: ErrorKind, message: str
) -> None:
    handed = hand_on(failure, "a", idempotent=idempotent)
    assert (handed.kind, handed.message) == (kind, message)
    assert handed.details["cause"]["kind"] == failure.kind
    assert handed.details.get("limit") == (failure.details.get("limit") if kind is failure.kind else None)


def test_a_question_that_nobody_answered_is_no_fault_of_any_function() -> None:
    handed = hand_on(fail(ErrorKind.DENIED, "nobody to ask", provider="client"), "inner", idempotent=False)
    above = hand_on(handed, "outer", idempotent=True)
    for failure in (handed, above):
        assert (failure.kind, failure.outcome) == (ErrorKind.DENIED, Outcome.RAN)


def test_an_answer_shows_what_it_is() -> None:
    assert repr(Answer(0, 5, None)) == "Answer(index=0, ok=True, value=5)"
    assert repr(Answer(1, None, fail(ErrorKind.CRASHED, "gone"))) == "Answer(index=1, ok=False, error=crashed: gone)"


@pytest.mark.requirement("X59")
def test_log_goes_to_logging_and_progress_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="callyard.functions"):
        log("100 %s")
        log("with fields", "error", row=7)
        progress(1, 2, "half")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "100 %s"),
        ("ERROR", "with fields row=7"),
    ]
    with pytest.raises(ValueError, match="level must be one of"):
        log("x", "loud")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="done must be a number from 0"):
        progress(-1)


def test_all_of_it_is_exported() -> None:
    for name in ("Answer", "acall", "acall_many", "call", "call_many", "log", "progress"):
        assert name in callyard.__all__
        assert getattr(callyard, name) is getattr(callyard.sdk, name)
