"""How long a failed tool call waits before its next attempt."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from callyard.policy.retry import WAIT_MS_MAX, RetryPolicy, read_retry_after_ms


class Fixed(Random):
    """Always gives one number."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.requirement("D12")
def test_by_default_three_attempts_after_a_tenth_and_four_tenths_of_a_second() -> None:
    policy = RetryPolicy()
    assert (policy.max_attempts, policy.base_ms, policy.factor, policy.jitter) == (3, 100, 4, 0.5)
    assert [policy.delay_ms(attempt, Fixed(0.0)) for attempt in (1, 2)] == [100, 400]
    assert [policy.delay_ms(attempt, Fixed(1.0)) for attempt in (1, 2)] == [150, 600]


@pytest.mark.requirement("D12", "D51")
def test_jitter_spreads_over_the_whole_range_and_repeats_by_seed() -> None:
    rng, again = Random(7), Random(7)
    delays = [RetryPolicy().delay_ms(2, rng) for _ in range(500)]
    assert all(delay is not None and 400 <= delay <= 600 for delay in delays)
    assert len(set(delays)) > 100
    assert delays == [RetryPolicy().delay_ms(2, again) for _ in range(500)]


@pytest.mark.requirement("D12")
def test_what_the_tool_asks_for_is_the_least_wait_and_jitter_comes_on_top() -> None:
    policy = RetryPolicy()
    assert policy.delay_ms(1, Fixed(0.0), 5_000) == 5_000
    assert policy.delay_ms(1, Fixed(1.0), 5_000) == 5_050
    assert policy.delay_ms(2, Fixed(0.0), 10) == 400  # less than the policy's own wait
    assert policy.delay_ms(1, Fixed(0.0), -5) == 100
    assert policy.delay_ms(1, Fixed(0.0), WAIT_MS_MAX) == WAIT_MS_MAX


@pytest.mark.requirement("D12")
def test_a_wish_beyond_the_bound_is_no_wait_at_all() -> None:
    """Coming back earlier than asked would break the wish; waiting for an hour would hold a slot for it."""
    assert RetryPolicy().delay_ms(1, Fixed(0.0), WAIT_MS_MAX + 1) is None


def test_own_waits_are_bounded() -> None:
    policy = RetryPolicy(max_attempts=100, factor=100)
    assert policy.delay_ms(99, Fixed(1.0)) == WAIT_MS_MAX * 3 // 2


def test_attempts_count_from_one() -> None:
    with pytest.raises(ValueError, match="attempts count from 1, got 0"):
        RetryPolicy().delay_ms(0, Random(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 100, got 0"),
        ({"max_attempts": True}, "max_attempts must be a whole number from 1 to 100, got True"),
        ({"base_ms": -1}, "base_ms must be a whole number from 0 to 300000, got -1"),
        ({"base_ms": "100"}, "base_ms must be a whole number from 0 to 300000, got '100'"),
        ({"factor": 0.5}, "factor must be a number from 1 to 100, got 0.5"),
        ({"factor": float("inf")}, "factor must be a number from 1 to 100, got inf"),
        ({"jitter": float("nan")}, "jitter must be a number from 0 to 1, got nan"),
    ],
)
def test_ranges(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        RetryPolicy(**settings)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("given", "read"),
    [
        *[(0, 0), (1_500, 1_500), (0.2, 1), (1_500.5, 1_501)],
        *[(value, None) for value in (-1, float("nan"), float("inf"), 10**400, None, "5", True, [5])],
    ],
)
def test_reading_what_a_tool_gave_as_retry_after(given: object, read: int | None) -> None:
    assert read_retry_after_ms(given) == read
