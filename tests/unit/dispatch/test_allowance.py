"""The caller's budget of tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance


@pytest.mark.requirement("D13")
def test_every_attempt_takes_one_until_none_is_left() -> None:
    allowance = Allowance(calls=2)
    assert [(allowance.take(0), allowance.left) for _ in range(3)] == [(True, 1), (True, 0), (False, 0)]
    assert allowance.spent(0) == "calls"


@pytest.mark.requirement("D13")
def test_none_from_the_start() -> None:
    assert Allowance(calls=0).spent(0) == "calls"
    assert not Allowance(calls=0).take(0)


@pytest.mark.requirement("D13")
def test_looking_takes_nothing() -> None:
    allowance = Allowance(calls=1)
    assert [allowance.spent(0) for _ in range(5)] == [None] * 5
    assert allowance.take(0)


@pytest.mark.requirement("D13")
def test_the_wall_limit_runs_from_the_first_question() -> None:
    allowance = Allowance(calls=9, wall_ms=100)
    assert allowance.ends_at_ms is None
    assert allowance.spent(1_000) is None
    assert allowance.ends_at_ms == 1_100
    assert allowance.take(1_099)
    assert allowance.spent(1_100) == "wall_ms"
    assert not allowance.take(1_100)
    assert allowance.left == 8


@pytest.mark.requirement("D13")
def test_without_limits_it_only_counts() -> None:
    allowance = Allowance()
    assert all(allowance.take(at_ms) for at_ms in range(1_000))
    assert (allowance.left, allowance.taken, allowance.ends_at_ms) == (None, 1_000, None)


@pytest.mark.requirement("D13")
def test_an_attempt_that_did_not_begin_comes_back_once() -> None:
    allowance = Allowance(calls=1)
    assert allowance.take(0)
    allowance.give_back()
    assert allowance.left == 1
    with pytest.raises(AssertionError, match="nobody took"):
        allowance.give_back()


@pytest.mark.parametrize("settings", [{"calls": -1}, {"calls": 1.5}, {"calls": True}, {"wall_ms": 0}, {"wall_ms": "1"}])
def test_ranges(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be a whole number from "):
        Allowance(**settings)


def test_shown() -> None:
    assert repr(Allowance(calls=3, wall_ms=50)) == "Allowance(calls=3, wall_ms=50, taken=0)"
