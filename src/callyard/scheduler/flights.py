"""Equal calls of one task that share one run: a leader that runs, and those that wait for its end.

A flight begins when a call with a key is bound. What happens when its leader ends is decided here; the scheduler ends
or queues the calls. A subcall never waits for a root call that holds no reservation: that one may need the very place
that the subcall's own ancestors hold. It takes the lead instead, and the root becomes a call like any other, which
joins when its turn comes. Source: call-execution X16, X67.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from callyard.errors import KIND_RULES, CallFailure, ErrorKind, Retried
from callyard.ids import CallId
from callyard.scheduler.cache import ResultCache
from callyard.scheduler.calls import Call

PASSED_ON: Final = frozenset(
    {kind for kind, rule in KIND_RULES.items() if rule.retried is not Retried.NEVER}
    | {ErrorKind.CANCELLED, ErrorKind.DEADLINE}
)
"""What may end one run of a call without being the call's own (crashed, timeout, …): another of its equals tries."""


class Flight:
    """One key's calls that are not DONE: who leads, and who waits, oldest first."""

    def __init__(self, key: bytes, leader: Call) -> None:
        self.key = key
        self.leader = leader
        self.failed = 0
        """Leaders that ran and failed; one that was told to stop has not."""
        self.roots: OrderedDict[CallId, Call] = OrderedDict()
        self.subcalls: OrderedDict[CallId, Call] = OrderedDict()

    def __len__(self) -> int:
        return len(self.roots) + len(self.subcalls)

    def _group(self, call: Call) -> OrderedDict[CallId, Call]:
        return self.roots if call.parent is None else self.subcalls

    def join(self, call: Call) -> None:
        ties = call.ties
        assert ties is not None
        ties.flight = self
        self._group(call)[call.call_id] = call

    def leave(self, call: Call) -> None:
        """A waiter ended, or leads now; the others stay."""
        del self._group(call)[call.call_id]

    def pop_waiters(self) -> list[Call]:
        waiters = [*self.roots.values(), *self.subcalls.values()]
        self.roots.clear()
        self.subcalls.clear()
        for call in waiters:
            assert call.ties is not None
            call.ties.flight = None
        return waiters


class Sharing:
    """One task's results and flights."""

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self.cache = ResultCache(entries_max, bytes_max)
        self.flights: dict[bytes, Flight] = {}

    def lead(self, call: Call) -> None:
        """A keyed call is bound. Another leads already: it runs by itself (X67)."""
        ties = call.ties
        assert ties is not None
        assert ties.key is not None, f"{call.call_id} is bound before its key was looked up"
        if ties.key not in self.flights:
            ties.flight = self.flights[ties.key] = Flight(ties.key, call)

    def take_over(self, flight: Flight, call: Call) -> None:
        """`call` leads in place of a leader that holds no reservation."""
        assert flight.leader.ties is not None
        assert call.ties is not None
        flight.leader.ties.flight = None
        flight.leader = call
        call.ties.flight = flight

    def step_back(self, call: Call) -> Call | None:
        """A call is READY again. Returns the subcall that leads in its place, if one waits for it."""
        ties = call.ties
        assert ties is not None
        flight = ties.flight
        if flight is None or call.parent is not None or flight.leader is not call or not flight.subcalls:
            return None
        _, following = flight.subcalls.popitem(last=False)
        self.take_over(flight, following)
        return following

    def succeed(self, call: Call, output: bytes) -> list[Call]:
        """A keyed call's output is known. Returns the waiters that it ends."""
        ties = call.ties
        assert ties is not None
        if ties.key is not None and not ties.disturbed:
            self.cache.put(ties.key, output)
        return self._disband(call)

    def fail(self, call: Call, failure: CallFailure, leaders_max: int) -> tuple[list[Call], Call | None]:
        """A keyed call failed for good. Returns the waiters that share it, and the one that leads now."""
        ties = call.ties
        assert ties is not None
        flight = ties.flight
        if flight is None:
            return [], None
        if flight.leader is not call:
            flight.leave(call)
            ties.flight = None
            return [], None
        own = failure.kind not in PASSED_ON and not ties.disturbed
        flight.failed += call.attempt_count > 0 and call.stopping is None
        if own or flight.failed >= leaders_max or not len(flight):
            return self._disband(call), None
        group = flight.subcalls or flight.roots  # a subcall holds its parent's place: it goes first
        _, following = group.popitem(last=False)
        ties.flight = None
        flight.leader = following
        return [], following

    def _disband(self, call: Call) -> list[Call]:
        ties = call.ties
        assert ties is not None
        flight, ties.flight = ties.flight, None
        if flight is None:
            return []
        if flight.leader is not call:
            flight.leave(call)
            return []
        del self.flights[flight.key]
        return flight.pop_waiters()
