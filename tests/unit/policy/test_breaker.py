"""One tool's circuit breaker."""

from __future__ import annotations

from typing import Any

import pytest

from callyard.errors import ErrorKind, Outcome, fail
from callyard.policy.breaker import (
    PROBE_RETRY_AFTER_MS,
    Allowed,
    Breaker,
    BreakerPolicy,
    BreakerState,
    Refused,
    is_failure,
)

OPEN, HALF_OPEN, CLOSED = BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED


def allowed(breaker: Breaker, now_ms: int, held: Allowed | None = None) -> Allowed:
    answer = breaker.ask(now_ms, held)
    assert isinstance(answer, Allowed)
    return answer


def opened(at_ms: int = 0, **settings: Any) -> Breaker:
    breaker = Breaker(BreakerPolicy(**settings))
    states = [breaker.failed(allowed(breaker, at_ms), at_ms) for _ in range(BreakerPolicy(**settings).failures)]
    assert states[-1] is OPEN
    return breaker


@pytest.mark.requirement("D28")
def test_five_failed_calls_within_thirty_seconds_open_it_for_ten() -> None:
    breaker = Breaker(BreakerPolicy())
    states = [breaker.failed(allowed(breaker, at_ms), at_ms) for at_ms in (0, 7_000, 14_000, 21_000, 29_999)]
    assert states == [None] * 4 + [OPEN]
    assert breaker.peek(29_999) == breaker.ask(29_999) == Refused(10_000)
    assert breaker.ask(39_998) == Refused(1)
    assert breaker.peek(39_999) is None


@pytest.mark.requirement("D28")
def test_the_window_slides_and_its_edge_is_outside() -> None:
    breaker = Breaker(BreakerPolicy())
    assert [breaker.failed(allowed(breaker, at), at) for at in (0, 1, 2, 3, 30_000)] == [None] * 5
    assert breaker.failed(allowed(breaker, 30_000), 30_000) is OPEN  # 1, 2, 3, 30 000, 30 000


@pytest.mark.requirement("D28")
def test_successes_between_failures_do_not_hide_them() -> None:
    breaker = Breaker(BreakerPolicy())
    for at_ms in range(4):
        breaker.failed(allowed(breaker, at_ms), at_ms)
        assert breaker.succeeded(allowed(breaker, at_ms)) is None
    assert breaker.failed(allowed(breaker, 4), 4) is OPEN


@pytest.mark.requirement("D28")
def test_of_ten_callers_after_the_cool_down_one_is_the_probe() -> None:
    breaker = opened()
    assert breaker.peek(10_000) is None  # all ten pass before they queue
    answers = [breaker.ask(10_000) for _ in range(10)]
    assert answers[0] == Allowed(2, probe=True, entered=HALF_OPEN)
    assert answers[1:] == [Refused(PROBE_RETRY_AFTER_MS)] * 9
    assert breaker.peek(10_000) == Refused(PROBE_RETRY_AFTER_MS)


@pytest.mark.requirement("D28")
def test_a_probe_keeps_its_place_through_its_retries_and_tells_once() -> None:
    breaker = opened()
    probe = allowed(breaker, 10_000)
    again = allowed(breaker, 11_000, probe)
    assert again.probe
    assert again.entered is None
    assert breaker.succeeded(again) is CLOSED


@pytest.mark.requirement("D28")
def test_success_of_the_probe_closes_and_forgets() -> None:
    breaker = opened()
    assert breaker.succeeded(allowed(breaker, 10_000)) is CLOSED
    assert [breaker.failed(allowed(breaker, 10_001), 10_001) for _ in range(5)] == [None] * 4 + [OPEN]
    assert breaker.ask(10_001) == Refused(10_000)  # the cool-down is the first one again


@pytest.mark.requirement("D28")
def test_each_failed_probe_doubles_the_cool_down_up_to_the_maximum() -> None:
    breaker = opened()
    now_ms, waits = 0, []
    for _ in range(7):
        answer = breaker.ask(now_ms)
        assert isinstance(answer, Refused)
        waits.append(answer.retry_after_ms)
        now_ms += answer.retry_after_ms
        assert breaker.failed(allowed(breaker, now_ms), now_ms) is OPEN
    assert waits == [10_000, 20_000, 40_000, 80_000, 160_000, 300_000, 300_000]


@pytest.mark.requirement("D28")
def test_a_probe_without_a_verdict_is_given_back() -> None:
    breaker = opened()
    probe = allowed(breaker, 10_000)
    breaker.give_back(probe)
    assert breaker.state is HALF_OPEN
    assert breaker.peek(10_000) is None
    second = allowed(breaker, 10_000)
    assert second.probe
    assert second.entered is None  # it was half open already
    assert breaker.succeeded(probe) is None  # the first one has had its end
    breaker.give_back(probe)
    assert isinstance(breaker.ask(10_000), Refused)
    assert breaker.failed(second, 10_000) is OPEN


@pytest.mark.requirement("D28")
def test_late_verdicts_of_calls_from_before_it_opened_change_nothing() -> None:
    breaker = Breaker(BreakerPolicy())
    early = allowed(breaker, 0)
    for _ in range(5):
        breaker.failed(allowed(breaker, 0), 0)
    assert breaker.succeeded(early) is None
    assert breaker.failed(early, 9_000) is None
    assert breaker.ask(9_000) == Refused(1_000)  # not closed, not extended
    probe = allowed(breaker, 10_000)
    assert breaker.succeeded(early) is None
    assert breaker.failed(early, 10_000) is None
    breaker.give_back(early)
    assert isinstance(breaker.ask(10_000), Refused)  # the probe is still out
    assert breaker.succeeded(probe) is CLOSED
    assert [breaker.failed(early, 10_000) for _ in range(9)] == [None] * 9


@pytest.mark.requirement("D28")
def test_a_retry_of_a_call_from_before_may_be_the_probe() -> None:
    breaker = Breaker(BreakerPolicy())
    early = allowed(breaker, 0)
    for _ in range(5):
        breaker.failed(allowed(breaker, 0), 0)
    assert breaker.ask(5_000, early) == Refused(5_000)  # opened between its attempts
    assert allowed(breaker, 10_000, early).probe


@pytest.mark.requirement("D28")
def test_one_at_rest_remembers_nothing() -> None:
    breaker = Breaker(BreakerPolicy())
    assert breaker.is_at_rest(0)
    breaker.failed(allowed(breaker, 0), 0)
    assert not breaker.is_at_rest(29_999)
    assert breaker.is_at_rest(30_000)
    assert not opened().is_at_rest(1_000_000), "the next call is its probe"


def test_memory_is_bounded_while_failures_are_sparse() -> None:
    breaker = Breaker(BreakerPolicy(failures=3, window_ms=10))
    for at_ms in range(0, 100_000, 100):
        assert breaker.failed(allowed(breaker, at_ms), at_ms) is None
    assert len(breaker._failed_at_ms) == 3


COUNTED = {"timeout", "crashed", "internal", "resource_limit", "transient"}


@pytest.mark.requirement("D28")
@pytest.mark.parametrize("kind", ErrorKind)
def test_which_ends_count(kind: ErrorKind) -> None:
    assert is_failure(fail(kind, "it failed")) is (kind.value in COUNTED)
    assert is_failure(fail(kind, "it never began", outcome=Outcome.NOT_RUN)) is (kind is ErrorKind.TRANSIENT)


@pytest.mark.requirement("D28")
def test_options_and_their_ranges() -> None:
    policy = BreakerPolicy()
    assert (policy.failures, policy.window_ms, policy.open_ms, policy.factor, policy.open_ms_max) == (
        *(5, 30_000, 10_000),
        *(2, 300_000),
    )
    with pytest.raises(ValueError, match="failures must be a whole number from 1 to 1000, got 0"):
        BreakerPolicy(failures=0)
    with pytest.raises(ValueError, match="open_ms_max must be a whole number from 10000 to 86400000, got 5"):
        BreakerPolicy(open_ms_max=5)
    with pytest.raises(ValueError, match=r"factor must be a number from 1 to 100, got 0\.5"):
        BreakerPolicy(factor=0.5)
