"""Restart throttling of a slot."""

from __future__ import annotations

import pytest

from callyard.policy.restart import PROGRESS_MS, RestartPolicy, RestartThrottle

POLICY = RestartPolicy()


@pytest.mark.requirement("X45")
def test_defaults() -> None:
    assert (POLICY.restart_delay_ms, POLICY.max_restarts, POLICY.restart_window_ms, POLICY.backoff_ms) == (
        1_000,
        10,
        60_000,
        30_000,
    )


@pytest.mark.requirement("X45", "X72")
def test_a_loss_after_progress_restarts_at_once_and_never_counts() -> None:
    """A SIGKILL every 300 ms, thirty wedge kills in a minute: the slot stays in use."""
    throttle = RestartThrottle(POLICY)
    assert {throttle.record_exit(at_ms, made_progress=True) for at_ms in range(0, 60_000, 300)} == {(0, False)}
    assert throttle.record_exit(65_000, made_progress=False) == (1_000, False)


@pytest.mark.requirement("X72")
def test_a_kill_before_the_first_call_does_not_count_where_others_came_to_calls() -> None:
    """Killed from outside every 300 ms, two in three before they have finished a call."""
    throttle = RestartThrottle(POLICY)
    answers = [throttle.record_exit(300 * number, made_progress=number % 3 == 0) for number in range(200)]
    assert set(answers) == {(0, False)}


@pytest.mark.requirement("X45")
def test_a_slot_that_made_progress_once_is_throttled_when_it_does_no_more() -> None:
    throttle = RestartThrottle(POLICY)
    throttle.record_exit(0, made_progress=True)
    assert throttle.record_exit(PROGRESS_MS, made_progress=False) == (0, False)
    assert throttle.record_exit(PROGRESS_MS + 1, made_progress=False) == (1_000, False)


@pytest.mark.requirement("X45")
def test_more_than_max_restarts_in_the_window_is_backoff() -> None:
    throttle = RestartThrottle(POLICY)
    answers = [throttle.record_exit(1_000 * number, made_progress=False) for number in range(11)]
    assert answers == [(1_000, False)] * 10 + [(30_000, True)]


@pytest.mark.requirement("X45")
def test_the_window_slides() -> None:
    throttle = RestartThrottle(POLICY)
    answers = [throttle.record_exit(6_001 * number, made_progress=False) for number in range(100)]
    assert set(answers) == {(1_000, False)}  # ten in any minute, never eleven


@pytest.mark.requirement("X45")
def test_exactly_at_the_edge_of_the_window() -> None:
    throttle = RestartThrottle(RestartPolicy(max_restarts=1, restart_window_ms=100))
    assert throttle.record_exit(0, made_progress=False) == (1_000, False)
    assert throttle.record_exit(100, made_progress=False) == (1_000, False)  # the first is a whole window old
    assert throttle.record_exit(199, made_progress=False) == (30_000, True)


@pytest.mark.requirement("X45")
def test_after_backoff_the_count_starts_anew() -> None:
    throttle = RestartThrottle(RestartPolicy(max_restarts=2))
    answers = [throttle.record_exit(number, made_progress=False)[1] for number in range(9)]
    assert answers == [False, False, True] * 3


def test_ranges() -> None:
    with pytest.raises(ValueError, match="backoff_ms must be at least 0, got -1"):
        RestartPolicy(backoff_ms=-1)
