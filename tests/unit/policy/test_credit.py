"""The credit window, and the batches that wait for earlier ones."""

from __future__ import annotations

import pytest

from callyard.policy.credit import ITEM_BYTES, CreditWindow, ReorderBuffer


@pytest.mark.requirement("X20")
def test_a_window_is_open_until_its_credits_are_out() -> None:
    window = CreditWindow(2)
    window.take()
    assert window.is_open
    window.take()
    assert not window.is_open
    with pytest.raises(ValueError, match="no credit left: 2 of 2 outstanding"):
        window.take()
    window.give_back()
    assert window.is_open


def test_a_credit_comes_back_once() -> None:
    window = CreditWindow(1)
    with pytest.raises(ValueError, match="nobody holds"):
        window.give_back()
    with pytest.raises(ValueError, match="at least one credit, got 0"):
        CreditWindow(0)


def drain(buffer: ReorderBuffer[str]) -> list[tuple[int, list[str], bool]]:
    out = []
    while (ready := buffer.pop_ready()) is not None:
        index, items, owes = ready
        out.append((index, list(items), owes))
    return out


@pytest.mark.requirement("X76")
def test_batches_leave_in_order() -> None:
    buffer: ReorderBuffer[str] = ReorderBuffer(1_000_000)
    assert buffer.settle(2, ["c"], 1) is True  # parked: its credit comes back now
    assert buffer.settle(1, ["b"], 1) is True
    assert drain(buffer) == []
    assert buffer.settle(0, ["a"], 1) is False  # next in line: when the sink has taken it
    assert drain(buffer) == [(0, ["a"], True), (1, ["b"], False), (2, ["c"], False)]
    assert (len(buffer), buffer.parked_bytes) == (0, 0)


@pytest.mark.requirement("X76")
def test_above_the_bound_the_credit_stays_out() -> None:
    buffer: ReorderBuffer[str] = ReorderBuffer(100 + ITEM_BYTES)
    assert buffer.settle(1, ["b"], 100) is True
    assert buffer.settle(2, [], 1) is False
    assert buffer.settle(3, [], 0) is True
    buffer.settle(0, ["a"], 5)
    assert drain(buffer) == [(0, ["a"], True), (1, ["b"], False), (2, [], True), (3, [], False)]


@pytest.mark.requirement("X76")
def test_failures_weigh_something() -> None:
    """A park of failures has no output bytes at all, and must fill up all the same."""
    buffer: ReorderBuffer[str] = ReorderBuffer(64 * 1024)
    parked = sum(buffer.settle(index, ["failed"] * 64, 0) for index in range(1, 1_000))
    assert parked == 64 * 1024 // (64 * ITEM_BYTES)


@pytest.mark.requirement("X76")
def test_unordered_nothing_is_parked() -> None:
    buffer: ReorderBuffer[str] = ReorderBuffer(1_000, ordered=False)
    assert [buffer.settle(index, [], 1) for index in (5, 3, 4)] == [False] * 3
    assert [index for index, _, _ in drain(buffer)] == [5, 3, 4]


@pytest.mark.requirement("X76")
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("shuffle", [1, 7, 16], ids=lambda span: f"settling within {span}")
def test_a_consumer_that_stops_at_most_the_window_is_held(ordered: bool, shuffle: int) -> None:
    """However early batches settle: once the sink takes nothing, no more are built than there are credits."""
    window = CreditWindow(16)
    buffer: ReorderBuffer[int] = ReorderBuffer(1 << 40, ordered=ordered)
    produced = settled = taken = 0
    pending: list[int] = []

    def produce() -> None:
        nonlocal produced
        while window.is_open:
            window.take()
            pending.append(produced)
            produced += 1

    def settle_one() -> None:
        nonlocal settled
        at = min(shuffle, len(pending)) - 1  # the youngest of so many: always out of order when it can be
        index = pending.pop(at if settled % shuffle else 0)
        settled += 1
        if buffer.settle(index, [index], 100):
            window.give_back()

    for _ in range(200):  # the sink keeps up
        produce()
        settle_one()
        while (ready := buffer.pop_ready()) is not None:
            taken += 1
            if ready[2]:
                window.give_back()
    parked = len(buffer)
    while True:  # the sink stops
        produce()
        if not pending:
            break
        settle_one()
    assert len(buffer) <= parked + 16 + shuffle
    assert window.outstanding <= 16
    assert produced - taken == len(buffer)


@pytest.mark.requirement("X76")
def test_in_order_a_stopped_consumer_holds_exactly_the_window() -> None:
    window = CreditWindow(256)
    buffer: ReorderBuffer[int] = ReorderBuffer(64 << 20)
    produced = 0
    while window.is_open:
        window.take()
        if buffer.settle(produced, [produced], 10):
            window.give_back()
        produced += 1
    assert len(buffer) == produced == 256


@pytest.mark.requirement("X76")
def test_a_slow_batch_does_not_stop_production_while_the_sink_keeps_up() -> None:
    """What the park is for: one batch of a thousand takes long, the others go on beside it."""
    window = CreditWindow(4)
    buffer: ReorderBuffer[int] = ReorderBuffer(64 << 20)
    window.take()  # batch 0, which does not settle
    for index in range(1, 1_000):
        window.take()
        if buffer.settle(index, [index], 10):
            window.give_back()
    assert (len(buffer), window.outstanding) == (999, 1)
    buffer.settle(0, [0], 10)
    assert [index for index, _, _ in drain_numbers(buffer)] == list(range(1_000))


def drain_numbers(buffer: ReorderBuffer[int]) -> list[tuple[int, object, bool]]:
    out = []
    while (ready := buffer.pop_ready()) is not None:
        out.append(ready)
    return out


def test_a_batch_settles_once() -> None:
    buffer: ReorderBuffer[str] = ReorderBuffer(1_000)
    buffer.settle(0, [], 0)
    with pytest.raises(ValueError, match="batch 0 settled twice"):
        buffer.settle(0, [], 0)
    buffer.pop_ready()
    with pytest.raises(ValueError, match="batch 0 settled twice"):
        buffer.settle(0, [], 0)


@pytest.mark.requirement("X20", "X76")
def test_a_window_is_shut_by_weight_too_but_never_to_a_batch_that_would_be_alone() -> None:
    window = CreditWindow(10, bytes_max=100)
    window.take(500)  # whatever it weighs: there is no other
    assert not window.is_open
    window.weigh(500, 60)
    assert window.is_open
    window.take(50)
    assert not window.is_open
    window.give_back(60)
    assert (window.is_open, window.outstanding, window.held_bytes) == (True, 1, 50)
    window.give_back(50)
    assert (window.outstanding, window.held_bytes) == (0, 0)
