"""Rates, and the limiter that keeps them."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.policy.rate import Rate, RateLimiter


@pytest.mark.requirement("D58")
@pytest.mark.parametrize(
    ("text", "count", "per_ms", "shown"),
    [
        ("10/s", 10, 1_000, "10/s"),
        ("100/m", 100, 60_000, "100/m"),
        ("5/10s", 5, 10_000, "5/10s"),
        ("1000/h", 1_000, 3_600_000, "1000/h"),
        (" 3 / 2min ", 3, 120_000, "3/2m"),
        ("1/24h", 1, 86_400_000, "1/24h"),
        ("7/250ms", 7, 250, "7/250ms"),
    ],
)
def test_rates_as_people_write_them(text: str, count: int, per_ms: int, shown: str) -> None:
    rate = Rate.parse(text)
    assert (rate.count, rate.per_ms, str(rate)) == (count, per_ms, shown)
    assert Rate.parse(str(rate)) == rate


@pytest.mark.requirement("D58")
@pytest.mark.parametrize(
    "text", ["", "10", "10/", "/s", "10/d", "-1/s", "1.5/s", "10 per s", "10/s/s", "\uff11/s", 10, None]
)
def test_what_is_no_rate_is_refused_with_an_example(text: Any) -> None:
    with pytest.raises(ValueError, match=r'expected a rate such as "10/s", "100/m", "1000/h" or "5/10s", got '):
        Rate.parse(text)


@pytest.mark.parametrize("text", ["0/s", "10/0s", "2000000/s", "1/25h"])
def test_out_of_range(text: str) -> None:
    with pytest.raises(ValueError, match=f"the rate {text!r} is out of range: (count|per_ms) must be a whole number"):
        Rate.parse(text)


@pytest.mark.requirement("D58")
def test_a_burst_then_one_at_a_time() -> None:
    limiter = RateLimiter(Rate(10, 1_000))
    assert [limiter.ask("a", 0) for _ in range(11)] == [0] * 10 + [100]
    assert limiter.ask("a", 99) == 1
    assert limiter.ask("a", 100) == 0
    assert limiter.ask("a", 100) == 100


@pytest.mark.requirement("D58")
def test_keys_do_not_share() -> None:
    limiter = RateLimiter(Rate(1, 1_000))
    assert [limiter.ask(key, 0) for key in ("a", "b", ("a", "b"))] == [0, 0, 0]
    assert limiter.ask("a", 0) == 1_000


@pytest.mark.requirement("D58")
def test_a_refusal_and_a_look_take_nothing() -> None:
    limiter = RateLimiter(Rate(1, 1_000))
    assert limiter.peek("a", 0) == 0
    assert limiter.ask("a", 0) == 0
    assert {limiter.ask("a", 0, wait_ms_max=999) for _ in range(100)} == {1_000}
    assert {limiter.peek("a", 0) for _ in range(100)} == {1_000}
    assert limiter.ask("a", 1_000) == 0


@pytest.mark.requirement("D58")
def test_those_who_wait_get_places_in_the_order_of_asking() -> None:
    limiter = RateLimiter(Rate(2, 1_000))
    assert [limiter.ask("a", 0, wait_ms_max=2_000) for _ in range(7)] == [0, 0, 500, 1_000, 1_500, 2_000, 2_500]
    assert limiter.peek("a", 0) == 2_500  # the seventh would not wait that long, and holds no place


@pytest.mark.requirement("D58")
def test_a_place_to_come_that_is_given_back_goes_to_the_next() -> None:
    limiter = RateLimiter(Rate(1, 1_000))
    assert [limiter.ask("a", 0, 9_000) for _ in range(4)] == [0, 1_000, 2_000, 3_000]
    limiter.give_back("a", 1_000, 0)
    assert limiter.ask("a", 500, 9_000) == 500
    assert limiter.ask("a", 500, 9_000) == 3_500


@pytest.mark.requirement("D58")
def test_when_all_who_waited_have_gone_nothing_is_left_of_them() -> None:
    limiter = RateLimiter(Rate(1, 1_000))
    for order in ([1_000, 2_000, 3_000], [3_000, 2_000, 1_000], [2_000, 3_000, 1_000]):
        limiter = RateLimiter(Rate(1, 1_000))
        assert [limiter.ask("a", 0, 9_000) for _ in range(4)] == [0, 1_000, 2_000, 3_000]
        for at_ms in order:
            limiter.give_back("a", at_ms, 10)
        assert limiter.ask("a", 10, 9_000) == 990


def test_a_place_whose_time_has_come_is_spent() -> None:
    limiter = RateLimiter(Rate(1, 1_000))
    assert limiter.ask("a", 0) == 0
    limiter.give_back("a", 0, 0)
    limiter.give_back("nobody", 5_000, 0)
    assert limiter.peek("a", 0) == 1_000
    assert len(limiter) == 1


@pytest.mark.requirement("D58")
def test_nothing_drifts() -> None:
    """Three in 100 ms: a place each 33 1/3 ms, for ten million ms."""
    limiter = RateLimiter(Rate(3, 100))
    now_ms, taken = 0, 0
    while taken < 10_000:
        wait_ms = limiter.ask("a", now_ms)
        taken += wait_ms == 0
        now_ms += wait_ms
    assert now_ms == 333_234  # (10 000 - 3) places after the burst, 33 1/3 ms each, rounded up once


def test_idle_keys_are_forgotten() -> None:
    limiter = RateLimiter(Rate(1, 1_000))
    for number in range(100_000):
        assert limiter.ask(number, number * 10) == 0
    assert len(limiter) <= 2 * 101


def test_when_too_many_keys_are_busy_a_further_one_waits_for_the_first_to_be_idle() -> None:
    limiter = RateLimiter(Rate(1, 1_000), keys_max=3)
    assert [limiter.ask(key, at_ms) for at_ms, key in enumerate("abc")] == [0, 0, 0]
    assert limiter.ask("d", 10) == 990
    assert limiter.ask("d", 999) == 1
    assert limiter.ask("a", 999) == 1
    assert limiter.ask("d", 1_000) == 0
    assert limiter.ask("e", 1_000, 10_000) == 10_001  # b is idle at 1 001: not taken all the same, ask again
    assert len(limiter) == 3
