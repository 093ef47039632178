"""What a call tells of its progress, in words, and which call's is shown."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.cli.live import Amount, Live
from callyard.cli.screen import Screen
from callyard.wire.messages import CallEventKind
from callyard.worker.results import CallEvent, RunningCall


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"done": 340, "total": 1000, "message": "reading"}, "340 of 1,000 (34%), reading"),
        ({"done": 3.0}, "3"),
        ({"done": 0.25, "total": 0.5}, "0.25 of 0.50 (50%)"),
        ({"done": 7, "total": 5}, "7 of 5 (100%)"),
        ({"done": 0, "total": 0}, "0 of 0"),
        ({"done": 1, "message": "two\nlines\x1b[2K"}, "1, two lines\\x1b[2K"),
        ({"done": 1, "total": 10**400}, "1"),
    ],
)
def test_an_amount(value: Any, text: str) -> None:
    assert str(Amount.of(value)) == text


@pytest.mark.parametrize(
    "value", [None, [], {}, {"done": "1"}, {"done": True}, {"done": -1}, {"done": 1, "message": 3}]
)
def test_what_an_executor_may_send_and_is_none(value: Any) -> None:
    assert Amount.of(value) is None


def told(index: int, done: int) -> CallEvent:
    return CallEvent(index, CallEventKind.PROGRESS, value={"done": done})


def running(*indexes: int) -> list[RunningCall]:
    return [RunningCall(index, "f", "exec-1") for index in indexes]


@pytest.mark.requirement("X59")
def test_the_longest_of_those_that_tell_is_shown_and_those_that_ended_are_forgotten() -> None:
    live = Live(Screen(), "info", prefixed=True, keeps_amounts=True)
    assert live.describe_longest(running(0)) == ""
    for index in (5, 3, 8):
        live.on_event(told(index, index))
    live.on_event(told(3, 4))
    assert live.describe_longest(running(0, 3, 5)) == "call 3: 4"
    assert set(live.amounts) == {3, 5}
    assert live.describe_longest(running(0, 5)) == "call 5: 5"
    assert live.describe_longest(running(0)) == ""
    assert live.amounts == {}


def test_without_a_terminal_no_amount_is_kept() -> None:
    live = Live(Screen(), "info", prefixed=True, keeps_amounts=False)
    live.on_event(told(0, 1))
    assert live.amounts == {}
