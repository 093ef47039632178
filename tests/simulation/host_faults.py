"""Faults to plant in a simulated host, each in one place: those that projects like this had, and some per invariant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from callyard.host import owners, wiring
from callyard.host.config import HostConfig
from callyard.host.errors import HostErrorKind
from callyard.host.flow import FlowTargets, _Cell
from callyard.host.gates import Gate, Hold
from callyard.host.jobs import JobQueue, Permit, Transition
from callyard.host.ledger import Lane, LaneLedger, OwnerLimits
from callyard.host.moving import Moving
from callyard.host.outbound import Outbound, Sending
from callyard.host.owners import Callback, Condition, Item, Owner, OwnerKey, Owners, Work
from callyard.host.pump import Pump, _Entry
from callyard.host.requests import RequestTable
from callyard.host.turns import Turn, Turns
from callyard.host.waiters import Waiters
from callyard.host.wiring import Replies
from callyard.transport.port import FlowState, HeadKind, Record

Plant = Callable[[pytest.MonkeyPatch], None]


def part(name: str, kind: type) -> Plant:
    """The wiring builds this kind of a part in place of the right one."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(wiring, name, kind)

    plant.__name__ = f"{name}.{kind.__name__}"
    return plant


# --- recorded ones ---------------------------------------------------------------------------------------------------


class RunsInPlaceWhenFull(Owners):
    """There is no room, so the handler is called at once, in whatever runs."""

    def submit_local(
        self, key: OwnerKey, item: Item, lane: Lane = Lane.APPLICATION, *, replay: bool = False
    ) -> HostErrorKind | None:
        refused = super().submit_local(key, item, lane, replay=replay)
        owner = self.get(key)
        if refused is not HostErrorKind.CAPACITY_EXCEEDED or owner is None or isinstance(item, Callback):
            return refused
        work = Work(owner, item, lane, 0, None, 0)
        work.hold = Hold(owner.gate, 0)
        turns: Any = self.events
        outcome = owner.handler(Turn(turns, work), turns._decode(item))
        if hasattr(outcome, "close"):
            outcome.close()
        return None


class ThrowsAReplyAway(Replies):
    """The one slot that it would be kept in is taken by another turn, and its caller waits until the timeout."""

    def reply(self, record: Record, outcome: Any) -> Awaitable[None] | None:
        return None if self._parts.owners.active > 1 else super().reply(record, outcome)


def a_cancellation_is_told_by_its_text(patch: pytest.MonkeyPatch) -> None:
    """Those of asyncio have none: so it is none, and the send goes on waiting for its room."""
    patch.setattr(Sending, "cancel", lambda self: False)


class LetsAnOldStateWin(FlowTargets):
    """What was wanted when the setter began is what is wanted when it ends."""

    async def _set(self, cell: _Cell, state: FlowState) -> None:
        wanted = cell.wanted
        await super()._set(cell, state)
        cell.wanted = wanted


class NumbersWrap(JobQueue):
    __slots__ = ()

    def _turn_to(self, state: FlowState) -> None:
        super()._turn_to(state)
        self.transition = Transition(self.transition.number % 4, state)
        if self._outbox and isinstance(self._outbox[-1], Transition):
            self._outbox[-1] = self.transition


class HoldsForASessionWithoutAPermit(Moving):
    def _hold_for_session(self, record: Record, permit: Permit) -> HostErrorKind | None:
        return super()._hold_for_session(record, None)  # type: ignore[arg-type]


class RejectsAtSaturation(Pump):
    """No permit, so the record is taken and refused: its sender learns nothing of the load."""

    def _line_up(self, entry: _Entry) -> None:
        while self._jobs.in_use >= self._jobs.limit and self._head_of(entry) is HeadKind.ORDINARY:
            self._refuse(self._transport.take(entry.source), HostErrorKind.CAPACITY_EXCEEDED)
        super()._line_up(entry)


class OwnersWithoutOptions(Owners):
    def __init__(self, limits: OwnerLimits | None = None, **options: Any) -> None:
        super().__init__(OwnerLimits(), **options)


class WaitersWithoutOptions(Waiters):
    def __init__(self, timers: Any, slots: int = 0) -> None:
        super().__init__(timers)


class RequestsWithoutOptions(RequestTable):
    def __init__(self, timers: Any, limit: int = 0) -> None:
        super().__init__(timers)


class OutboundWithoutOptions(Outbound):
    """Every send has the same time, whatever its settings say."""

    def __init__(self, config: HostConfig, *parts: Any) -> None:
        super().__init__(HostConfig(), *parts)


# --- one for each invariant ------------------------------------------------------------------------------------------


def permits_come_back_after_the_handler(patch: pytest.MonkeyPatch) -> None:
    """permits_bounded, permit_once."""
    release = Permit.release
    late: list[Permit] = []

    def begin(self: Turns, turn: Turn) -> Any:
        patch.setattr(Permit, "release", late.append)
        try:
            return begin_right(self, turn)
        finally:
            patch.setattr(Permit, "release", release)
            while late:
                release(late.pop())

    begin_right = Turns._begin
    patch.setattr(Turns, "_begin", begin)


def a_dropped_record_keeps_its_permit(patch: pytest.MonkeyPatch) -> None:
    free = Owners._free

    def forget(self: Owners, work: Work) -> None:
        work.permit = None
        free(self, work)

    patch.setattr(Owners, "_free", forget)


def a_refused_item_has_a_number(patch: pytest.MonkeyPatch) -> None:
    """all_or_nothing: the sequence goes on though the item does not come in."""
    append = Owners._append

    def count(self: Owners, key: OwnerKey, *about: Any) -> Any:
        answer = append(self, key, *about)
        owner = self.get(key)
        if answer is HostErrorKind.CAPACITY_EXCEEDED and owner is not None:
            owner.accepted_sequence += 1
        return answer

    patch.setattr(Owners, "_append", count)


def count_and_bytes_are_reserved_apart(patch: pytest.MonkeyPatch) -> None:
    """all_or_nothing."""

    def half(self: LaneLedger, charge: int) -> bool:
        if self.items >= self.items_max:
            return False
        self.items += 1
        if self.bytes + charge > self.bytes_max:
            return False
        self.bytes += charge
        return True

    patch.setattr(LaneLedger, "try_reserve", half)


def a_claim_is_a_second_charge(patch: pytest.MonkeyPatch) -> None:
    """one_charge."""
    claim = LaneLedger.claim

    def twice(self: LaneLedger, charge: int) -> None:
        claim(self, charge)
        self.items += 1
        self.bytes += charge

    patch.setattr(LaneLedger, "claim", twice)


def a_charge_ends_at_the_claim(patch: pytest.MonkeyPatch) -> None:
    """one_charge: a running handler costs nothing."""
    claim, give_back = LaneLedger.claim, LaneLedger.give_back

    def early(self: LaneLedger, charge: int) -> None:
        claim(self, charge)
        give_back(self, charge, claimed=True)

    def late(self: LaneLedger, charge: int, *, claimed: bool) -> None:
        if not claimed:
            give_back(self, charge, claimed=claimed)

    patch.setattr(LaneLedger, "claim", early)
    patch.setattr(LaneLedger, "give_back", late)


def two_are_inside_a_gate(patch: pytest.MonkeyPatch) -> None:
    """one_turn."""

    def enter(self: Gate) -> Hold:
        self.holder = Hold(self, next(self._numbers))
        return self.holder

    patch.setattr(Gate, "try_enter", enter)


def who_yields_comes_in_again_unasked(patch: pytest.MonkeyPatch) -> None:
    """one_turn: a new turn without waiting for the gate."""

    def reenter(self: Owners, work: Work, granted: Any) -> bool:
        gate = work.owner.gate
        gate.holder = work.hold = Hold(gate, next(gate._numbers))
        return True

    patch.setattr(Owners, "reenter", reenter)


def the_debt_between_lanes_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """lane_debt: at each hand-over."""
    put_down = Owners._put_down

    def forget(self: Owners, owner: Owner) -> None:
        owner.lifecycle_run = 0
        put_down(self, owner)

    patch.setattr(Owners, "_put_down", forget)


def application_work_goes_first(patch: pytest.MonkeyPatch) -> None:
    """lane_debt."""
    next_lane = Owner.next_lane

    def reverse(self: Owner) -> Lane:
        lane = next_lane(self)
        return Lane.APPLICATION if self.application.head is not None and self.condition == "open" else lane

    patch.setattr(Owner, "next_lane", reverse)


def a_wake_is_lost(patch: pytest.MonkeyPatch) -> None:
    """ready_once: every third, and nobody looks again."""
    on_ready = Turns.on_ready
    woken: list[Turns] = []

    def lose(self: Turns) -> None:
        woken.append(self)
        if len(woken) % 3:
            on_ready(self)

    patch.setattr(Turns, "on_ready", lose)


def an_owner_with_work_is_not_ready_again(patch: pytest.MonkeyPatch) -> None:
    """ready_once."""
    patch.setattr(Owners, "_make_ready", lambda self, owner: None)


def a_permit_may_be_waited_for_under_a_gate(patch: pytest.MonkeyPatch) -> None:
    """no_wait_under_gate."""
    patch.setattr(wiring, "forbid_under_gate", lambda what: None)


def a_turn_may_wait_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Owners, "would_wait_for", lambda self, work, key: False)


def room_is_told_to_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "on_room", lambda self, key: None)


def an_owner_takes_no_notice_of_its_seal(patch: pytest.MonkeyPatch) -> None:
    """hold_in_order: what comes for a sealed owner is queued, before what was held."""
    patch.setattr(owners, "_HELD", owners._HELD - {Condition.SEALED})


def a_handler_that_raises_keeps_its_gate(patch: pytest.MonkeyPatch) -> None:
    end = Turns._end
    explained: list[Turn] = []
    explain = Turns._explain

    def note(self: Turns, turn: Turn, error: Exception) -> Any:
        explained.append(turn)
        return explain(self, turn, error)

    def skip(self: Turns, turn: Turn) -> None:
        if turn not in explained:
            end(self, turn)

    patch.setattr(Turns, "_explain", note)
    patch.setattr(Turns, "_end", skip)
