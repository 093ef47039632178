"""`max_concurrency`: so many calls of a function at once, over all tasks and executors.

A *seat* is held by a call that is bound, roots and subcalls alike; a call below one of the same function shares its
ancestor's. A call that finds none is set aside in the function's *line*, so that it holds nobody back. When a seat is
free the next in line is *called*: it goes back to the head of its queue, and the seat is kept for it against other root
calls. It is never kept against a subcall: the called one may need a place that the subcall's ancestors hold.
Source: call-execution X81, tool-dispatch D14.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from callyard.ids import CallId, Digest, FunctionId
from callyard.scheduler.calls import Call
from callyard.scheduler.queues import TaskQueues
from callyard.scheduler.tasks import Task

_LineKey = tuple[FunctionId, Digest]


@dataclass(eq=False, slots=True)
class Seat:
    owner: Call
    line: Line
    users: int = 0
    """Reservations that stand on it: its owner's, those that share it, those of old attempts that still drain."""


@dataclass(eq=False, slots=True)
class Line:
    """One function's seats, and the calls that wait for one."""

    key: _LineKey
    limit: int
    roots: TaskQueues
    taken: dict[Seat, None] = field(default_factory=dict)
    """In the order in which they were taken; of one call two, when an old attempt of it still drains."""
    called_roots: dict[CallId, Call] = field(default_factory=dict)
    """Seats are kept for these against other roots."""
    called_subcalls: dict[CallId, Call] = field(default_factory=dict)
    subcalls: OrderedDict[CallId, Call] = field(default_factory=OrderedDict)

    @property
    def waiting(self) -> int:
        return len(self.roots) + len(self.subcalls)

    @property
    def holders(self) -> list[Call]:
        """Those whose end frees a seat: they have one, or are about to. Called ones are not, once subcalls have taken
        what was kept for them."""
        owners = [seat.owner for seat in self.taken]
        if len(owners) >= self.limit:
            return owners
        return [*owners, *self.called_roots.values(), *self.called_subcalls.values()]

    @property
    def drains(self) -> bool:
        """One of its seats is left to an attempt that was given up: that seat will be free, whatever its owner waits
        for now."""
        return any(seat.owner.ties is not None and seat.owner.ties.seat is not seat for seat in self.taken)

    def called(self, call: Call) -> dict[CallId, Call]:
        return self.called_roots if call.parent is None else self.called_subcalls


def may_go(task: Task) -> bool:
    return task.stop_reason is None


def ancestors(call: Call) -> Iterator[Call]:
    """Its parent first, its root last."""
    above = call.parent
    while above is not None:
        yield above
        above = above.parent


class Seats:
    def __init__(self) -> None:
        self.lines: dict[_LineKey, Line] = {}
        self.draining: dict[tuple[CallId, int], Seat] = {}
        """Of attempts that the scheduler gave up and whose code may still run, by call and attempt."""

    def line_of(self, call: Call) -> Line:
        target = call.target
        key = (target.function_id, target.digest)
        line = self.lines.get(key)
        if line is None:
            assert target.max_concurrency is not None
            line = self.lines[key] = Line(key, target.max_concurrency, TaskQueues())
        return line

    def shared(self, call: Call) -> Seat | None:
        """The seat of the same function that an ancestor holds."""
        key = (call.target.function_id, call.target.digest)
        for above in ancestors(call):
            if above.ties is not None and above.ties.seat is not None and above.ties.seat.line.key == key:
                return above.ties.seat
        return None

    def has_room(self, call: Call) -> bool:
        """Whether the call may be bound now, on a seat of its own or an ancestor's."""
        ties = call.ties
        assert ties is not None
        if call.parent is not None and self.shared(call) is not None:
            return True
        line = self.lines.get((call.target.function_id, call.target.digest))
        if line is None:
            return True
        kept = 0
        if call.parent is None and ties.called is None:
            kept = len(line.called_roots) + len(line.called_subcalls)
        return len(line.taken) + kept < line.limit

    def wait(self, call: Call) -> None:
        """Set the call aside; one that had been called keeps its place."""
        ties = call.ties
        assert ties is not None
        first = ties.called is not None
        line = self.line_of(call)
        if first:
            del line.called(call)[call.call_id]
            ties.called = None
        ties.line = line
        if call.parent is None:
            line.roots.add(call, first=first)
        else:
            line.subcalls[call.call_id] = call
            if first:
                line.subcalls.move_to_end(call.call_id, last=False)

    def take(self, call: Call) -> None:
        """The call is bound."""
        ties = call.ties
        assert ties is not None
        seat = None if call.parent is None else self.shared(call)
        if seat is None:
            line = self.line_of(call)
            seat = Seat(call, line)
            line.taken[seat] = None
        seat.users += 1
        ties.seat = seat
        if ties.called is not None:
            del ties.called.called(call)[call.call_id]
            ties.called = None

    def leave(self, call: Call) -> list[Call]:
        """The call's reservation is released. Returns the calls that are called for the seat."""
        assert call.ties is not None
        seat, call.ties.seat = call.ties.seat, None
        return [] if seat is None else self._stand_up(seat)

    def drain(self, call: Call) -> None:
        """The call's attempt is given up while its code may still run: its seat stays with that attempt."""
        assert call.ties is not None
        seat, call.ties.seat = call.ties.seat, None
        if seat is not None:
            self.draining[call.call_id, call.attempt_seq] = seat

    def drained(self, call_id: CallId, attempt_seq: int) -> list[Call]:
        seat = self.draining.pop((call_id, attempt_seq), None)
        return [] if seat is None else self._stand_up(seat)

    def forget(self, call: Call) -> list[Call]:
        """The call ended without a seat, or needs none any more. Returns the calls that are called in its place."""
        ties = call.ties
        assert ties is not None
        if ties.line is not None:
            line, ties.line = ties.line, None
            if call.parent is None:
                line.roots.remove(call)
            else:
                del line.subcalls[call.call_id]
            self._close(line)
            return []
        if ties.called is not None:
            line, ties.called = ties.called, None
            del line.called(call)[call.call_id]
            return self._call_up(line)
        return []

    def _stand_up(self, seat: Seat) -> list[Call]:
        seat.users -= 1
        if seat.users:
            return []
        del seat.line.taken[seat]
        return self._call_up(seat.line)

    def _call_up(self, line: Line) -> list[Call]:
        """Those next in line for the seats that are free: subcalls first, as if nothing were kept for roots."""
        following: list[Call] = []
        while line.subcalls and len(line.taken) + len(line.called_subcalls) < line.limit:
            following.append(self._call(line, line.subcalls.popitem(last=False)[1]))
        while len(line.taken) + len(line.called_roots) + len(line.called_subcalls) < line.limit:
            call = line.roots.pop(may_go)
            if call is None:
                break
            following.append(self._call(line, call))
        self._close(line)
        return following

    @staticmethod
    def _call(line: Line, call: Call) -> Call:
        assert call.ties is not None
        call.ties.line, call.ties.called = None, line
        line.called(call)[call.call_id] = call
        return call

    def _close(self, line: Line) -> None:
        if not (line.taken or line.called_roots or line.called_subcalls or line.waiting):
            del self.lines[line.key]
