"""Who waits for local capacity before its operation starts: one line a place, so many places a family.

A place is an owner of this host (or what else has bounds of its own here). Its line is in order of arrival; whoever
gives room back calls `admit` in the same step, so nobody who comes later is first. A waiter tries its own admission,
which is one plain function that checks and takes, or changes nothing. It ends once: admitted, or by its deadline,
cancellation, detach or shutdown, whichever is first; past its deadline it is never admitted, however late its timer.
It holds neither gate nor permit, nothing of a turn. Source: job-queue §8, R81, R83, R85-R89, R118.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from enum import StrEnum
from functools import partial
from typing import Literal

import msgspec

from callyard.clock import Timer, Timers
from callyard.host.config import OUTBOUND_WAITER_SLOTS, SendFamily
from callyard.host.context import infrastructure_context
from callyard.host.errors import HostError, HostErrorKind

TryAdmit = Callable[[], bool]
"""Admit and start, and True; or change nothing, and False: there is no room yet."""


class WaiterState(StrEnum):
    WAITING = "waiting"
    ADMITTED = "admitted"
    ENDED = "ended"


class FamilyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One family at one instant. All but `waiting` are counted since the last reset."""

    waiting: int
    waits: int
    """Sends that had to wait and found a place."""
    refused: int
    """Sends that found none: DeadlineExceeded at once."""
    admitted: int
    timed_out: int
    cancelled: int
    ended: int
    """By detach or shutdown."""
    wait_ms: int
    """How long those waited that ended, however they did."""


class _Counts:
    """Of one family."""

    __slots__ = ("admitted", "cancelled", "ended", "refused", "timed_out", "wait_ms", "waiting", "waits")

    def __init__(self, waiting: int = 0) -> None:
        self.waiting = waiting
        self.waits = self.refused = self.admitted = self.timed_out = self.cancelled = self.ended = self.wait_ms = 0


class Waiter:
    """One send that waits."""

    __slots__ = (
        "_began_at_ms",
        "_ended",
        "_timer",
        "_try_admit",
        "_waiters",
        "deadline_at_ms",
        "family",
        "key",
        "state",
    )

    def __init__(
        self,
        waiters: Waiters,
        key: Hashable,
        family: SendFamily,
        began_at_ms: int,
        deadline_at_ms: int,
        try_admit: TryAdmit,
        ended: Callable[[HostError], None],
    ) -> None:
        self.key = key
        self.family = family
        self.deadline_at_ms = deadline_at_ms
        self.state = WaiterState.WAITING
        self._waiters = waiters
        self._began_at_ms = began_at_ms
        self._try_admit = try_admit
        self._ended = ended
        self._timer: Timer | None = None

    def cancel(self) -> bool:
        """End the wait without telling anybody; False: it had ended, or been admitted, before."""
        return self._waiters._finish(self, "cancelled")

    def __repr__(self) -> str:
        return f"<Waiter for {self.key!r}, {self.family} {self.state}>"


class _Line:
    """The waiters of one place, oldest first."""

    __slots__ = ("is_admitting", "look_again", "waiters")

    def __init__(self) -> None:
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.is_admitting = False
        self.look_again = False


class Waiters:
    """All lines of a host, and at most `slots` waiters of each family in them together."""

    def __init__(self, timers: Timers, slots: int = OUTBOUND_WAITER_SLOTS) -> None:
        self.slots = slots
        self._timers = timers
        self._lines: dict[Hashable, _Line] = {}
        self._counts = {family: _Counts() for family in SendFamily}
        self._closed: HostErrorKind | None = None

    def __len__(self) -> int:
        return sum(counts.waiting for counts in self._counts.values())

    def places(self) -> list[Hashable]:
        """The places where somebody waits, the oldest line first."""
        return list(self._lines)

    def has_line(self, key: Hashable) -> bool:
        """Whether somebody waits there, whom a newcomer must not overtake."""
        return key in self._lines

    def wait(
        self,
        key: Hashable,
        family: SendFamily,
        deadline_at_ms: int,
        try_admit: TryAdmit,
        ended: Callable[[HostError], None],
    ) -> Waiter:
        """Stand at the end of a line. Either `try_admit` is True once, or `ended` is called once, or it is cancelled.

        Raises `HostError`: DEADLINE_EXCEEDED at once when the family's places are taken, and what was closed with.
        """
        if self._closed is not None:
            raise HostError(self._closed, f"the host is closing: no wait for room at {key!r}")
        counts = self._counts[family]
        if counts.waiting >= self.slots:
            counts.refused += 1
            raise HostError(
                HostErrorKind.DEADLINE_EXCEEDED,
                f"{key!r} has no room, and {self.slots} sends of family {family} wait already (outbound_waiter_slots)",
            )
        waiter = Waiter(self, key, family, self._timers.now_ms(), deadline_at_ms, try_admit, ended)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        line.waiters[waiter] = None
        counts.waiting += 1
        counts.waits += 1
        self._arm(waiter)
        return waiter

    def admit(self, key: Hashable) -> None:
        """There may be room at a place: those who wait there are tried in order, until one finds none.

        For whoever gives back, in the step in which it does. Cheap when nobody waits there.
        """
        line = self._lines.get(key)
        if line is None:
            return
        if line.is_admitting:  # out of an admission: the step further out goes on
            line.look_again = True
            return
        line.is_admitting = True
        try:
            while line.waiters:
                line.look_again = False
                if not self._try_head(next(iter(line.waiters))) and not line.look_again:
                    return
        finally:
            line.is_admitting = False
            self._tidy(key, line)

    def end_line(self, key: Hashable, kind: HostErrorKind, message: str) -> int:
        """End all who wait at a place that is detached or gone; how many."""
        line = self._lines.get(key)
        if line is None:
            return 0
        was_admitting, line.is_admitting = line.is_admitting, True  # none of them is admitted in place of another
        ended = [waiter for waiter in list(line.waiters) if self._finish(waiter, "ended")]
        line.is_admitting = was_admitting
        self._tidy(key, line)
        for waiter in ended:
            waiter._ended(HostError(kind, message))
        return len(ended)

    def close(self, kind: HostErrorKind = HostErrorKind.SHUTTING_DOWN) -> None:
        """End all, and refuse who comes. A second time changes nothing."""
        if self._closed is not None:
            return
        self._closed = kind
        for key in list(self._lines):
            self.end_line(key, kind, f"the host was closed while this waited for room at {key!r}")

    def status(self) -> Mapping[SendFamily, FamilyStatus]:
        return {
            family: FamilyStatus(**{name: getattr(counts, name) for name in FamilyStatus.__struct_fields__})
            for family, counts in self._counts.items()
        }

    def reset_metrics(self) -> None:
        self._counts = {family: _Counts(counts.waiting) for family, counts in self._counts.items()}

    def check_invariants(self) -> None:
        """Between steps, by the names of the design page."""
        waiting: Counter[SendFamily] = Counter()
        for key, line in self._lines.items():
            assert line.waiters or line.is_admitting, f"waiters_bounded: empty line {key!r}"
            for waiter in line.waiters:
                assert waiter.state is WaiterState.WAITING or line.is_admitting, f"first_terminal: {waiter} in line"
                assert waiter.key == key, f"first_terminal: {waiter} in the line of {key!r}"
                waiting[waiter.family] += 1
        for family, counts in self._counts.items():
            assert counts.waiting == waiting[family] <= self.slots, f"waiters_bounded: {family} {counts.waiting}"
        assert self._closed is None or not len(self), f"first_terminal: {len(self)} wait after the close"

    def _try_head(self, waiter: Waiter) -> bool:
        """Whether the line goes on to the next: this one is out of it."""
        if self._timers.now_ms() >= waiter.deadline_at_ms:
            self._time_out(waiter)
            return True
        waiter.state = WaiterState.ADMITTED  # claimed: nothing that the admission causes can end it
        if infrastructure_context().run(waiter._try_admit):  # no part of the turn that gives room
            self._counts[waiter.family].admitted += 1
            self._leave(waiter)
            return True
        waiter.state = WaiterState.WAITING
        if self._closed is not None and self._finish(waiter, "ended"):
            waiter._ended(HostError(self._closed, f"the host was closed while this tried {waiter.key!r}"))
            return True
        return False

    def _time_out(self, waiter: Waiter) -> None:
        if self._finish(waiter, "timed_out"):
            waited_ms = waiter.deadline_at_ms - waiter._began_at_ms
            waiter._ended(
                HostError(HostErrorKind.DEADLINE_EXCEEDED, f"{waiter.key!r} had no room within {waited_ms} ms")
            )

    def _finish(self, waiter: Waiter, how: Literal["timed_out", "cancelled", "ended"]) -> bool:
        """End a wait without admission, unless it has ended."""
        if waiter.state is not WaiterState.WAITING:
            return False
        waiter.state = WaiterState.ENDED
        counts = self._counts[waiter.family]
        setattr(counts, how, getattr(counts, how) + 1)
        self._leave(waiter)
        return True

    def _leave(self, waiter: Waiter) -> None:
        line = self._lines[waiter.key]
        was_head = next(iter(line.waiters)) is waiter
        del line.waiters[waiter]
        if waiter._timer is not None:
            waiter._timer.cancel()
            waiter._timer = None
        counts = self._counts[waiter.family]
        counts.waiting -= 1
        counts.wait_ms += self._timers.now_ms() - waiter._began_at_ms
        self._tidy(waiter.key, line)
        if was_head and waiter.state is WaiterState.ENDED and line.waiters and not line.is_admitting:
            self.admit(waiter.key)  # what was too large for the room there is no longer in front

    def _tidy(self, key: Hashable, line: _Line) -> None:
        if not line.waiters and not line.is_admitting:
            self._lines.pop(key, None)

    def _arm(self, waiter: Waiter) -> None:
        waiter._timer = self._timers.call_at(waiter.deadline_at_ms, partial(self._look_at_deadline, waiter))

    def _look_at_deadline(self, waiter: Waiter) -> None:
        if waiter.state is not WaiterState.WAITING:
            return
        if self._timers.now_ms() < waiter.deadline_at_ms:  # no timer of a loop runs for weeks
            self._arm(waiter)
        else:
            self._time_out(waiter)
