"""One ledger per owner: two columns under one cap, two lanes that never lend."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from callyard.host.ledger import Column, Lane, OwnerLedger, OwnerLimits

MIB = 1_024 * 1_024


@pytest.mark.requirement("R117")
@pytest.mark.parametrize(
    ("lane", "items_max", "bytes_max"), [(Lane.APPLICATION, 1_024, 64 * MIB), (Lane.LIFECYCLE, 128, 4 * MIB)]
)
def test_lanes_are_filled_apart(lane: Lane, items_max: int, bytes_max: int) -> None:
    ledger = OwnerLedger(OwnerLimits())
    other = Lane.LIFECYCLE if lane is Lane.APPLICATION else Lane.APPLICATION
    assert ledger.charge(0) == 256
    for _ in range(items_max):
        assert ledger.lanes[lane].try_reserve(256)
    assert not ledger.lanes[lane].try_reserve(256)
    assert ledger.lanes[other].try_reserve(256)
    ledger.check_invariants()
    full = OwnerLedger(OwnerLimits())
    assert not full.lanes[lane].try_reserve(full.charge(bytes_max - 255))
    assert full.lanes[lane].try_reserve(full.charge(bytes_max - 256))
    assert not full.lanes[lane].try_reserve(256)
    assert full.lanes[other].try_reserve(256)
    full.check_invariants()


@pytest.mark.requirement("R45")
@pytest.mark.parametrize(("items", "bytes_"), [(2, 100), (1, 2_000)])
def test_count_and_bytes_are_reserved_together_or_not_at_all(items: int, bytes_: int) -> None:
    ledger = OwnerLedger(OwnerLimits(application_items_max=2, application_bytes_max=2_000, fixed_work_bytes=0))
    for _ in range(items):
        assert ledger.application.try_reserve(bytes_)
    before = (ledger.application.items, ledger.application.bytes)
    assert not ledger.application.try_reserve(100)  # bytes would fit where the count is full, and the other way round
    assert (ledger.application.items, ledger.application.bytes) == before


@pytest.mark.requirement("R95")
def test_at_no_instant_of_a_claim_does_the_sum_differ() -> None:
    """Looked at after each line of the claim, as anybody could who reads the two columns."""
    ledger = OwnerLedger(OwnerLimits())
    entry = ledger.application
    assert entry.try_reserve(1_000)
    assert entry.try_reserve(300)
    sums: list[tuple[int, int]] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        sums.append((entry.mailbox.items + entry.execution.items, entry.mailbox.bytes + entry.execution.bytes))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        entry.claim(1_000)
    finally:
        sys.settrace(before)
    assert len(sums) >= 4
    assert set(sums) == {(2, 1_300)}
    assert (entry.mailbox, entry.execution) == (Column(1, 300), Column(1, 1_000))


@pytest.mark.requirement("R96", "R98")
def test_claims_at_the_cap_all_succeed_and_move_nothing_but_the_column() -> None:
    """Cap of ten charges: ten are accepted, not five; all ten are claimed at the cap."""
    ledger = OwnerLedger(OwnerLimits(application_items_max=10, application_bytes_max=10 * 356))
    accepted = 0
    while ledger.application.try_reserve(ledger.charge(100)):
        accepted += 1
    assert accepted == 10
    for claimed in range(1, 11):
        ledger.application.claim(356)
        assert ledger.application.execution == Column(claimed, claimed * 356)
        assert (ledger.application.items, ledger.application.bytes) == (10, 3_560)
        assert not ledger.application.try_reserve(256)
        ledger.check_invariants()
    for _ in range(10):
        ledger.application.give_back(356, claimed=True)
        ledger.check_invariants()
    assert ledger.is_empty


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
def test_limits_are_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match="lifecycle_burst_max: expected a whole number, 1 or more"):
        OwnerLimits(lifecycle_burst_max=wrong)
