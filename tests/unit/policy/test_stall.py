"""When an executor is stalled, and how long it may be silent."""

from __future__ import annotations

import pytest

from callyard.policy.stall import compute_limits, derive_stall_timeout_ms, is_stalled


@pytest.mark.requirement("X38", "X73")
@pytest.mark.parametrize(
    ("call_deadline_ms", "explicit_ms", "expected_ms"),
    [
        (5_000, None, 10_000),
        (5_000, 20_000, 20_000),
        (5_000, 6_001, 6_001),
        (5_000, 6_000, 10_000),
        (5_000, 1, 10_000),
        (5_000, 0, 10_000),
        (0, None, 5_000),
        (0, 1_000, 5_000),
        (0, 1_001, 1_001),
    ],
)
def test_stall_timeout_is_derived_and_low_values_are_raised(
    call_deadline_ms: int, explicit_ms: int | None, expected_ms: int
) -> None:
    assert derive_stall_timeout_ms(call_deadline_ms, explicit_ms) == expected_ms


@pytest.mark.requirement("X73")
def test_the_heartbeat_timeout_is_coupled_to_the_stall() -> None:
    limits = compute_limits(10_000, 10_000, 0, unlimited=False)
    assert (limits.stall_ms, limits.heartbeat_ms, limits.heartbeat_needs_idle_cpu) == (10_000, 15_000, False)
    assert compute_limits(10_000, 60_000, 0, unlimited=False).heartbeat_ms == 60_000


@pytest.mark.requirement("X74")
def test_a_60_s_call_with_a_budget_of_90_s_lives() -> None:
    limits = compute_limits(10_000, 10_000, 90_000, unlimited=False)
    assert (limits.stall_ms, limits.heartbeat_ms) == (95_000, 100_000)
    assert not is_stalled(limits.stall_ms, True, 0, 60_000)
    assert is_stalled(limits.stall_ms, True, 0, 95_001)


@pytest.mark.requirement("X74")
def test_an_unlimited_budget_turns_the_stall_check_off() -> None:
    limits = compute_limits(10_000, 10_000, 0, unlimited=True)
    assert limits.stall_ms is None
    assert limits.heartbeat_needs_idle_cpu
    assert not is_stalled(limits.stall_ms, True, 0, 10**9)


@pytest.mark.requirement("X74")
def test_a_small_budget_does_not_shorten_the_setting() -> None:
    assert compute_limits(10_000, 10_000, 100, unlimited=False).stall_ms == 10_000


@pytest.mark.requirement("X38")
def test_stalled_only_while_something_runs_and_only_past_the_limit() -> None:
    assert is_stalled(500, True, 1_000, 1_501)
    assert not is_stalled(500, True, 1_000, 1_500)
    assert not is_stalled(500, False, 1_000, 9_000)
