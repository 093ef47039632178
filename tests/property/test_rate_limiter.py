"""No key uses more than its burst and its rate allow, whatever comes, waits and goes away."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callyard.policy.rate import Rate, RateLimiter

STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 3, 10, 40, 200]),  # how long after the step before
        st.sampled_from("aab"),
        st.sampled_from([0, 0, 5, 50, 1_000]),  # how long it would wait
        st.booleans(),  # give the place back, a while later
        st.integers(0, 60),
    ),
    max_size=60,
)


@pytest.mark.requirement("D58")
@given(count=st.integers(1, 7), per_ms=st.sampled_from([1, 2, 7, 10, 33, 100]), steps=STEPS)
@settings(deadline=None, max_examples=400)
def test_never_more_than_burst_and_rate(count: int, per_ms: int, steps: list[tuple[int, str, int, bool, int]]) -> None:
    limiter = RateLimiter(Rate(count, per_ms))
    used: dict[str, list[int]] = {"a": [], "b": []}
    leaving: list[tuple[int, str, int]] = []
    now_ms = 0
    for pause_ms, key, wait_ms_max, goes, after_ms in steps:
        now_ms += pause_ms
        for leaves_at_ms, gone, at_ms in sorted(leaving):
            if leaves_at_ms <= now_ms:
                leaving.remove((leaves_at_ms, gone, at_ms))
                limiter.give_back(gone, at_ms, leaves_at_ms)
                if at_ms > leaves_at_ms:
                    used[gone].remove(at_ms)
        expected = limiter.peek(key, now_ms)
        wait_ms = limiter.ask(key, now_ms, wait_ms_max)
        assert wait_ms == expected
        if wait_ms <= wait_ms_max:
            used[key].append(now_ms + wait_ms)
            if goes:
                leaving.append((now_ms + after_ms, key, now_ms + wait_ms))
    for instants in used.values():
        instants.sort()
        for first in range(len(instants)):
            for last in range(first, len(instants)):
                assert (last - first + 1 - count) * per_ms <= count * (instants[last] - instants[first])


@pytest.mark.requirement("D58")
@given(count=st.integers(1, 20), per_ms=st.integers(1, 500), idle_ms=st.integers(0, 2_000), calls=st.integers(1, 60))
@settings(deadline=None)
def test_never_less_than_that_either(count: int, per_ms: int, idle_ms: int, calls: int) -> None:
    """A caller who waits as told gets the whole burst, then the whole rate, at the earliest instant."""
    limiter = RateLimiter(Rate(count, per_ms))
    waits = [limiter.ask("a", idle_ms, 1 << 40) for _ in range(calls)]
    assert waits == [max(0, -(-(number - count + 1) * per_ms // count)) for number in range(calls)]
