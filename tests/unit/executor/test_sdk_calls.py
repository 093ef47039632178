"""`call` and its kin outside an executor: a functions file works in a test, a script, a notebook."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

import callyard
from callyard import CallError, ErrorKind, ToolError, TransientError, UsageError, function
from callyard.errors import fail
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
    with pytest.raises(TransientError):
        call_many(moody, range(3))
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
            "crashed",
        ]
        with pytest.raises(CallError, match="ValueError: odd"):
            answers[3].unwrap()


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
