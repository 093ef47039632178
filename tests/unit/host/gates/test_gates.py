"""One holder, the others in order, numbers that are never used twice."""

from __future__ import annotations

from itertools import count

import pytest

from callyard.host import context
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.gates import Gate, Hold


def test_who_waits_longest_is_next() -> None:
    gate = Gate(count(1))
    granted: list[tuple[str, int]] = []
    holds: list[Hold] = []

    def wait(name: str) -> None:
        def take(hold: Hold) -> None:
            granted.append((name, hold.number))
            holds.append(hold)

        waiters[name] = gate.wait(take)

    waiters: dict[str, object] = {}
    first = gate.try_enter()
    assert first is not None
    assert gate.try_enter() is None
    for name in "abc":
        wait(name)
    waiters["b"].cancel()  # type: ignore[attr-defined]
    gate.leave(first)
    assert granted == [("a", 2)]
    assert not first.is_current
    wait("d")
    gate.leave(holds[-1])
    gate.leave(holds[-1])
    assert granted == [("a", 2), ("c", 3), ("d", 4)]
    assert gate.try_enter() is None
    gate.leave(holds[-1])
    assert gate.holder is None


def test_a_late_continuation_is_found_out() -> None:
    numbers = count(1)
    gate, other = Gate(numbers), Gate(numbers)
    old = gate.try_enter()
    assert old is not None
    new = gate.renew(old)
    assert (old.is_current, new.is_current) == (False, True)
    for act in (gate.leave, gate.renew, other.leave):
        with pytest.raises(HostError, match="turn 1 is over") as caught:
            act(old)
        assert caught.value.kind is HostErrorKind.INVALID_OPERATION
    assert gate.holder is new
    third = other.try_enter()
    assert third is not None
    assert [old.number, new.number, third.number] == [1, 2, 3]


@pytest.mark.requirement("R59")
def test_no_gate_is_entered_inside_a_receive_callback() -> None:
    gate = Gate(count(1))
    with context.receive_callback(), pytest.raises(HostError, match="receive callback") as caught:
        gate.try_enter()
    assert caught.value.kind is HostErrorKind.INVALID_OPERATION
    assert gate.holder is None
    assert gate.try_enter() is not None
