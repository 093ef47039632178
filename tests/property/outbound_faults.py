"""Faults to plant in waiters, holds and the request table: classes that differ from the right one in one place each."""

from __future__ import annotations

from typing import Any, Final

from callyard.host.errors import HostErrorKind
from callyard.host.jobs import Permit
from callyard.host.moving import Held, Moving, _Hold
from callyard.host.owners import OwnerKey
from callyard.host.requests import Request, RequestTable
from callyard.host.waiters import Waiter, Waiters, WaiterState
from callyard.transport.port import Record


class LosesWakeups(Waiters):
    """Room for several comes at once, and only the first hears of it."""

    def admit(self, key: Any) -> None:
        line = self._lines.get(key)
        if line is not None and line.waiters:
            self._try_head(next(iter(line.waiters)))


class AdmitsThePast(Waiters):
    """The timer is late, room is not: what its caller was told, or will be, is that it timed out."""

    def _try_head(self, waiter: Waiter) -> bool:
        deadline_at_ms, waiter.deadline_at_ms = waiter.deadline_at_ms, 1 << 60
        try:
            return super()._try_head(waiter)
        finally:
            waiter.deadline_at_ms = deadline_at_ms


class ServesTheNewestFirst(Waiters):
    def admit(self, key: Any) -> None:
        line = self._lines.get(key)
        if line is not None and line.waiters:
            line.waiters.move_to_end(next(reversed(line.waiters)), last=False)
        super().admit(key)


class LetsNewcomersIn(Waiters):
    def has_line(self, key: Any) -> bool:
        return False


class KeepsThePlaceOfACancelledWaiter(Waiters):
    def _finish(self, waiter: Waiter, how: Any) -> bool:
        ended = super()._finish(waiter, how)
        if ended and how == "cancelled":
            self._counts[waiter.family].waiting += 1
        return ended


class SubmitsAfterACancel(Waiters):
    """Cancelled, and still in line."""

    def _finish(self, waiter: Waiter, how: Any) -> bool:
        if how != "cancelled":
            return super()._finish(waiter, how)
        return waiter.state is WaiterState.WAITING


class StopsBehindWhatWasTooLarge(Waiters):
    """Who was in front has left, and those behind are not looked at."""

    def _leave(self, waiter: Waiter) -> None:
        line = self._lines[waiter.key]
        was_admitting, line.is_admitting = line.is_admitting, True
        super()._leave(waiter)
        line.is_admitting = was_admitting
        self._tidy(waiter.key, line)


class HoldsWithItsPermit(Moving):
    """A held record keeps the permit that it came with."""

    def _hold_for_session(self, record: Record, permit: Permit) -> HostErrorKind | None:
        held = Held(record, "session", self._timers.now_ms() + 1_000, needs_permit=True)
        self._append(self._hold_of(record.target), held)
        return None


class LetsNewcomersPastTheHold(Moving):
    def _lend(self, hold: _Hold, record: Record, permit: Permit) -> HostErrorKind | None:
        return self._owners.commit(record, permit, replay=True)


class PutsTheBacklogBehind(Moving):
    """What was queued when the unit was sealed goes behind what came since."""

    def seal(self, key: OwnerKey) -> None:
        super().seal(key)
        items = self._holds[key].items
        for held in [held for held in items if held.origin == "backlog"]:
            items.move_to_end(held)


class ForgetsTheRoom(Moving):
    """A replay that met a full owner is never gone on with."""

    def give_room(self, key: OwnerKey) -> None:
        return


class DropsWhatFindsNoRoom(Moving):
    """A full owner at the replay, and the head is gone unseen."""

    def _try_head(self, hold: _Hold, permit: Permit | None) -> bool:
        head = hold.head
        used = super()._try_head(hold, permit)
        if hold.has_no_room:
            self._remove(hold, head)
            hold.has_no_room = False
        return used


class HoldsThePast(Moving):
    """Deadlines of what is held are not looked at."""

    def _arm(self, hold: _Hold, held: Held, deadline_at_ms: int) -> None:
        return

    def _is_past(self, deadline_at_ms: int | None) -> bool:
        return False


class DeliversTwice(RequestTable):
    """A reply that comes late is told, too."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._all: dict[int, Request] = {}

    def reserve(self, *about: Any) -> Request:
        request = super().reserve(*about)
        self._all[request.operation_id] = request
        return request

    def settle(self, operation_id: int, outcome: Any) -> bool:
        return super().settle(operation_id, outcome) or self._all[operation_id]._deliver(outcome)


class CountsOnlyWhatIsInFlight(RequestTable):
    """Outcomes that nobody has taken are not counted."""

    def __len__(self) -> int:
        return len(self._in_flight)


class KeepsThePlaceOfAWithdrawnRequest(RequestTable):
    """A cancelled caller's place comes back with the reply only."""

    def _release(self, request: Request) -> None:
        if request.operation_id not in self._in_flight:
            super()._release(request)


class LosesTheReplyToACancelledDeadline(RequestTable):
    """The timer goes on after the reply, and ends the next one's time."""

    def _disarm(self, request: Request) -> None:
        request._timer = None


WAITERS: Final = [
    LosesWakeups,
    AdmitsThePast,
    ServesTheNewestFirst,
    LetsNewcomersIn,
    KeepsThePlaceOfACancelledWaiter,
    SubmitsAfterACancel,
    StopsBehindWhatWasTooLarge,
]
HOLDS: Final = [
    HoldsWithItsPermit,
    LetsNewcomersPastTheHold,
    PutsTheBacklogBehind,
    ForgetsTheRoom,
    DropsWhatFindsNoRoom,
    HoldsThePast,
]
TABLES: Final = [
    DeliversTwice,
    CountsOnlyWhatIsInFlight,
    KeepsThePlaceOfAWithdrawnRequest,
    LosesTheReplyToACancelledDeadline,
]
