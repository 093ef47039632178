"""Delays between attempts, and after refusals."""

from __future__ import annotations

from random import Random

import pytest

from callyard.policy.backoff import compute_backoff_ms, compute_refusal_delay_ms


@pytest.mark.requirement("X12")
def test_the_base_doubles_for_each_earlier_attempt() -> None:
    for attempt in range(1, 20):
        base = 10 << (attempt - 1)
        delays = [compute_backoff_ms(attempt, 10, Random(seed)) for seed in range(50)]
        assert min(delays) >= base
        assert max(delays) <= base * 1.05


@pytest.mark.requirement("X12")
def test_jitter_spreads_calls_that_failed_together() -> None:
    rng = Random(1)
    delays = {compute_backoff_ms(1, 10_000, rng) for _ in range(200)}
    assert len(delays) > 100
    assert max(delays) > 10_400


@pytest.mark.requirement("X1", "X12")
def test_the_same_source_gives_the_same_delay() -> None:
    assert [compute_backoff_ms(3, 100, Random(7)) for _ in range(3)] == [compute_backoff_ms(3, 100, Random(7))] * 3


def test_attempts_count_from_one() -> None:
    with pytest.raises(ValueError, match="attempts count from 1, got 0"):
        compute_backoff_ms(0, 10, Random(1))


def test_a_base_of_zero_is_no_wait() -> None:
    assert compute_backoff_ms(5, 0, Random(1)) == 0


def test_no_attempt_number_overflows() -> None:
    assert compute_backoff_ms(1_000, 10, Random(1)) >= compute_backoff_ms(41, 10, Random(1)) / 1.05
    assert isinstance(compute_backoff_ms(10**9, 10, Random(1)), int)
    assert compute_refusal_delay_ms(10**9, 10) == 1_000


@pytest.mark.requirement("X70")
def test_refusals_are_tried_again_at_once_then_doubling_up_to_a_second() -> None:
    delays = [compute_refusal_delay_ms(refusals, 10) for refusals in range(1, 12)]
    assert delays == [0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 1_000]
    assert compute_refusal_delay_ms(5, 10, 50) == 50


@pytest.mark.requirement("X70")
def test_ten_seconds_of_refusals_are_at_most_twenty_tries() -> None:
    at_ms = tries = 0
    while at_ms < 10_000:
        tries += 1
        at_ms += compute_refusal_delay_ms(tries, 10)
    assert tries <= 20
