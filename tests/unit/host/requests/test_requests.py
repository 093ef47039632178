"""The table of requests: places, and who owns an outcome."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from callyard.host.errors import HostError, HostErrorKind
from callyard.host.requests import Request, RequestTable
from tests.unit.host.manual_timers import ManualTimers


class Caller:
    """Keeps what it was told; `is_gone`: cancelled, and not yet out of the table."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.is_gone = False

    def deliver(self, outcome: Any) -> bool:
        if not self.is_gone:
            self.told.append(outcome)
        return not self.is_gone

    @property
    def kinds(self) -> list[Any]:
        return [outcome.kind if isinstance(outcome, HostError) else outcome for outcome in self.told]


def ask(table: RequestTable, timers: ManualTimers, timeout_ms: int = 5_000) -> tuple[Request, Caller]:
    caller = Caller()
    return table.reserve("cart", timers.now_ms() + timeout_ms, caller.deliver), caller


@pytest.mark.requirement("R119")
def test_places_are_bounded_and_are_kept_until_the_caller_was_told() -> None:
    timers = ManualTimers()
    table = RequestTable(timers, limit=2)
    first, _ = ask(table, timers)
    second, _ = ask(table, timers)
    with pytest.raises(HostError) as refused:
        ask(table, timers)
    assert refused.value.kind is HostErrorKind.CAPACITY_EXCEEDED
    table.settle(first.operation_id, "reply")
    with pytest.raises(HostError):
        ask(table, timers)  # its callback was not delivered yet
    table.check_invariants()
    first.release()
    third, _ = ask(table, timers)
    assert (len(table), table.status().refused) == (2, 2)
    for request in (second, third, third):
        request.release()
    assert (len(table), timers.armed, table.status().withdrawn) == (0, 0, 2)


@pytest.mark.requirement("R119")
def test_the_default_limit_is_4096() -> None:
    timers = ManualTimers()
    table = RequestTable(timers)
    for _ in range(4_096):
        ask(table, timers)
    with pytest.raises(HostError, match="4096 requests"):
        ask(table, timers)


@pytest.mark.requirement("R103")
def test_a_reply_after_the_deadline_is_no_second_terminal() -> None:
    timers = ManualTimers()
    table = RequestTable(timers)
    request, caller = ask(table, timers)
    timers.advance(4_999)
    assert caller.told == []
    timers.advance(1)
    assert caller.kinds == [HostErrorKind.DEADLINE_EXCEEDED]
    request.release()
    assert not table.settle(request.operation_id, "late reply")
    status = table.status()
    assert (caller.kinds, status.late, status.timeouts) == ([HostErrorKind.DEADLINE_EXCEEDED], 1, 1)
    assert (len(table), timers.armed) == (0, 0)


def by_reply(table: RequestTable, timers: ManualTimers, request: Request, caller: Caller) -> None:
    table.settle(request.operation_id, "reply")


def by_error_reply(table: RequestTable, timers: ManualTimers, request: Request, caller: Caller) -> None:
    table.settle(request.operation_id, HostError(HostErrorKind.NOT_FOUND, "nobody there"))


def by_deadline(table: RequestTable, timers: ManualTimers, request: Request, caller: Caller) -> None:
    timers.advance(5_000)


def by_cancel(table: RequestTable, timers: ManualTimers, request: Request, caller: Caller) -> None:
    request.release()


def by_detach(table: RequestTable, timers: ManualTimers, request: Request, caller: Caller) -> None:
    table.end_target("cart", HostError(HostErrorKind.UNAVAILABLE, "gone"))


def by_shutdown(table: RequestTable, timers: ManualTimers, request: Request, caller: Caller) -> None:
    table.close()


ENDS: dict[Callable[..., None], Any] = {
    by_reply: "reply",
    by_error_reply: HostErrorKind.NOT_FOUND,
    by_deadline: HostErrorKind.DEADLINE_EXCEEDED,
    by_cancel: None,
    by_detach: HostErrorKind.UNAVAILABLE,
    by_shutdown: HostErrorKind.SHUTTING_DOWN,
}


@pytest.mark.requirement("R81", "R119")
@pytest.mark.parametrize("ends", list(permutations(ENDS, 2)), ids=lambda ends: "-".join(end.__name__ for end in ends))
def test_whoever_removes_the_entry_owns_the_outcome(ends: tuple[Callable[..., None], ...]) -> None:
    timers = ManualTimers()
    table = RequestTable(timers)
    request, caller = ask(table, timers)
    for end in ends:
        end(table, timers, request, caller)
        table.check_invariants()
    first = ENDS[ends[0]]
    assert caller.kinds == ([] if first is None else [first])
    request.release()
    assert (len(table), timers.armed) == (0, 0)


def test_an_outcome_for_a_caller_that_was_cancelled_in_the_same_step_is_late() -> None:
    timers = ManualTimers()
    table = RequestTable(timers)
    request, caller = ask(table, timers)
    caller.is_gone = True
    assert table.settle(request.operation_id, "reply")
    assert (caller.told, table.status().late) == ([], 1)
    request.release()
    assert len(table) == 0


def test_only_requests_to_a_detached_target_end() -> None:
    timers = ManualTimers()
    table = RequestTable(timers)
    _, caller = ask(table, timers)
    other = Caller()
    table.reserve("other", 5_000, other.deliver)
    assert table.end_target("cart", HostError(HostErrorKind.UNAVAILABLE, "gone")) == 1
    assert (caller.kinds, other.kinds) == ([HostErrorKind.UNAVAILABLE], [])


def test_a_timer_that_fires_early_is_armed_again() -> None:
    """Loops have no timers of many days, and send timeouts go to 2³¹ - 1 ms."""
    timers = ManualTimers()
    table = RequestTable(timers)
    request, caller = ask(table, timers, 2**31 - 1)
    table._look_at_deadline(request)
    assert caller.told == []
    timers.advance(2**31 - 1)
    assert caller.kinds == [HostErrorKind.DEADLINE_EXCEEDED]


def test_ids_are_not_zero_and_never_given_twice() -> None:
    timers = ManualTimers()
    table = RequestTable(timers, limit=1)
    seen = set()
    for _ in range(10):
        request, _ = ask(table, timers)
        seen.add(request.operation_id)
        request.release()
    assert len(seen) == 10
    assert 0 not in seen


def test_durations_and_reset() -> None:
    timers = ManualTimers()
    table = RequestTable(timers)
    for wait_ms in (30, 10):
        request, _ = ask(table, timers)
        timers.advance(wait_ms)
        table.settle(request.operation_id, "reply")
    status = table.status()
    assert (status.settled, status.duration_ms, status.duration_ms_max, status.undelivered) == (2, 40, 30, 2)
    table.reset_metrics()
    status = table.status()
    assert (status.settled, status.duration_ms, status.duration_ms_max, status.undelivered) == (0, 0, 0, 2)
