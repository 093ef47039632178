"""Runs that belong to a key, and the callers who wait for them. Source: tool-dispatch D17, D43."""

from __future__ import annotations

import asyncio

from callyard.clock import Timers
from callyard.dispatch.call import Alarm, Call
from callyard.dispatch.lines import Party
from callyard.dispatch.stores.port import KeyEnd, KeyScope
from callyard.errors import CallFailure


class Flight:
    """One key's run, from the claim to the end of it. Satisfies `Joint`."""

    __slots__ = ("_joined", "elsewhere", "fingerprint", "holder", "scope", "task")

    def __init__(self, scope: KeyScope, fingerprint: str) -> None:
        self.scope = scope
        self.fingerprint = fingerprint
        self._joined: dict[Call, Seat] = {}
        self.holder: Call | None = None
        """Whose arguments, budget and deadline the run has; None while the key is being claimed."""
        self.elsewhere: asyncio.Future[None] | None = None
        """The wait for another holder of the key: another process, or another dispatcher over the same store."""
        self.task: asyncio.Task[None] | None = None

    @property
    def maker(self) -> Party | None:
        return self.holder

    def __contains__(self, call: Call) -> bool:
        """Whether it waits here."""
        return call in self._joined

    def __len__(self) -> int:
        """How many wait."""
        return len(self._joined)

    @property
    def joiners(self) -> int:
        """How many wait for a run that is not their own."""
        own = self.elsewhere is None if self.holder is None else self.holder in self._joined
        return len(self._joined) - own

    @property
    def is_abandoned(self) -> bool:
        """Nobody waits for it."""
        return not self._joined

    @property
    def is_claiming(self) -> bool:
        """No run is known of yet, here or elsewhere."""
        return self.holder is None and self.elsewhere is None

    def join(self, call: Call, timers: Timers) -> Seat:
        seat = self._joined[call] = Seat(timers)
        return seat

    def begin(self, call: Call) -> None:
        """From now on the run is this caller's."""
        self.holder = call
        call.waits_for = None
        call.on_stop = None
        self.wake_all()

    def wake_all(self) -> None:
        """Those who wait look again: there is a run to wait for now."""
        for seat in self._joined.values():
            seat.alarm.wake()

    def leave(self, call: Call) -> None:
        self._joined.pop(call, None)

    def oldest(self) -> Call | None:
        return next(iter(self._joined), None)

    def answer(self, call: Call, answer: Answer) -> None:
        """One caller's own end; those who left get none."""
        seat = self._joined.pop(call, None)
        if seat is not None:
            seat.answer = answer
            seat.alarm.wake()

    def answer_all(self, answer: Answer) -> None:
        for call in list(self._joined):
            self.answer(call, answer)


class Seat:
    """Where a caller finds its answer."""

    __slots__ = ("alarm", "answer")

    def __init__(self, timers: Timers) -> None:
        self.answer: Answer | None = None
        self.alarm = Alarm(timers)


class Answer:
    """How a caller of a key ends: by the end of a run, or by a refusal of its own."""

    __slots__ = ("end", "refusal", "runner")

    def __init__(self, end: KeyEnd | None, refusal: CallFailure | None = None, runner: Call | None = None) -> None:
        self.end = end
        self.refusal = refusal
        self.runner = runner
        """The call that made the run here; None: the end was found in the store."""
