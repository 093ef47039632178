"""How long the line at an executor may be."""

from __future__ import annotations

import pytest

from callyard.policy.lookahead import AVERAGED_CALLS, FIRST_AHEAD, Lookahead

pytestmark = pytest.mark.requirement("X91")


def test_unknown_calls_get_a_first_line() -> None:
    assert Lookahead(5).limit == 1 + FIRST_AHEAD
    assert Lookahead(0).limit > 1_000_000, "no limit"


@pytest.mark.parametrize(
    ("run_us", "ahead"), [(10, 500), (1_000, 5), (2_500, 2), (5_000, 1), (2_000_000, 1), (0, 5_000)]
)
def test_the_line_holds_what_runs_in_5_ms_and_one_call_at_the_least(run_us: int, ahead: int) -> None:
    line = Lookahead(5)
    for _ in range(4 * AVERAGED_CALLS):
        line.end(run_us)
    assert line.limit == 1 + ahead


def test_the_time_is_an_average() -> None:
    """One long call among many short ones counts by its share."""
    line = Lookahead(5)
    for _ in range(64):
        line.end(100)
    line.end(160_000)
    assert line.limit == 1 + 1
    for _ in range(20 * AVERAGED_CALLS):
        line.end(100)
    assert line.limit in (50, 51)


def test_a_call_that_holds_up_the_line_counts_as_long_as_it_does() -> None:
    line = Lookahead(5)
    line.move(1_000)
    for _ in range(AVERAGED_CALLS):
        line.end(100)
    line.look(1_002)
    assert line.limit == 1 + 2
    line.look(1_050)
    assert line.limit == 1 + 1
    line.move(1_060)
    assert line.limit == 1 + 50, "it moved on: the average holds again"


def test_a_line_is_held_up_after_ahead_ms() -> None:
    line = Lookahead(5)
    line.move(1_000)
    assert not line.is_held_up(1_004)
    assert line.is_held_up(1_005)
    assert not Lookahead(0).is_held_up(1_000_000)


def test_calls_that_wait_make_the_line_longer() -> None:
    """They have begun, and nothing runs: after a few looks the line is as long as may be."""
    line = Lookahead(5, limit=2)
    limits = []
    for _ in range(4):
        line.find_waiting()
        limits.append(line.limit)
    assert limits == [8, 32, 128, 512]


def test_without_a_time_there_is_no_limit() -> None:
    line = Lookahead(0)
    line.end(10_000_000)
    assert line.limit > 1_000_000
