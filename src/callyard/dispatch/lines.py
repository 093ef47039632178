"""Lines: so many may be inside, the others wait in the order in which they came. Slots, seats and turns are lines.

Pure: who waits is told by a callback. A line that an ancestor of the asker is inside of is shared with it; a wait that
could never end does not begin. Source: tool-dispatch D14, D27, D31, D45.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from callyard.policy import waits


class Joint(Protocol):
    """A run that several share: they wait for the one who makes it."""

    @property
    def maker(self) -> Party | None: ...


class Party:
    """Who enters lines: a call. Most have no nested calls and no owner: what those need is made when it is needed."""

    waits_for: Line | Joint | None = None
    nested: Mapping[Party, None] = {}
    """The calls it made that have not ended."""
    turn_of: Hashable = None
    """Whose turn it holds, or shares."""
    inner_turn: Line | None = None
    """The line of its nested calls for the same owner."""

    def __init__(self, parent: Party | None) -> None:
        self.parent = parent
        """The call that made it."""
        self.inside: list[Line] = []

    def add_nested(self, party: Party) -> None:
        if not self.nested:
            self.nested = {}
        self.nested[party] = None  # type: ignore[index]

    def drop_nested(self, party: Party) -> None:
        self.nested.pop(party, None)  # type: ignore[attr-defined]

    def wake(self) -> None:
        """Look again: it may be inside now."""
        raise NotImplementedError

    def ancestors(self) -> Iterator[Party]:
        above = self.parent
        while above is not None:
            yield above
            above = above.parent


class Line:
    """At most `capacity` inside."""

    __slots__ = ("capacity", "holders", "waiters")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.holders: dict[Party, None] = {}
        self.waiters: OrderedDict[Party, None] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        return not self.holders and not self.waiters

    def try_enter(self, party: Party) -> bool:
        """Nobody overtakes those who wait."""
        if self.waiters or len(self.holders) >= self.capacity:
            return False
        self.holders[party] = None
        party.inside.append(self)
        return True

    def wait(self, party: Party) -> None:
        """Stand at the end; `wake` comes once it is inside."""
        self.waiters[party] = None
        party.waits_for = self

    def stop_waiting(self, party: Party) -> None:
        self.waiters.pop(party, None)
        party.waits_for = None

    def leave(self, party: Party) -> None:
        """Out, and in with the next. One that is not inside is a KeyError: it would leave twice."""
        del self.holders[party]
        party.inside.remove(self)
        if self.waiters:
            self.admit_waiting()

    def admit_waiting(self) -> None:
        """After `capacity` grew, too."""
        while self.waiters and len(self.holders) < self.capacity:
            party, _ = self.waiters.popitem(last=False)
            party.waits_for = None
            self.holders[party] = None
            party.inside.append(self)
            party.wake()


def is_inside_above(party: Party, line: Line) -> bool:
    """Whether an ancestor is inside, so that the party shares its place."""
    return any(line in above.inside for above in party.ancestors())


def groups_of(party: Party) -> waits.Groups[Party]:
    """What a party waits for now; a call waits for the calls it made."""
    target = party.waits_for
    if target is None:
        return [(nested,) for nested in party.nested]
    if isinstance(target, Line):
        return (tuple(target.holders),)
    maker = target.maker
    return () if maker is None else ((maker,),)


def can_wait(party: Party, target: Line | Joint) -> bool:
    """Whether that wait would come to an end: no holder waits, in the end, for the party itself."""
    if isinstance(target, Line):
        return waits.can_end(party, tuple(target.holders), groups_of)
    maker = target.maker
    return maker is None or waits.can_end(party, (maker,), groups_of)


K = TypeVar("K", bound=Hashable)


class Lines(Generic[K]):
    """Lines by key, each there while somebody is in it or waits."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lines: dict[K, Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, key: K) -> Line:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self._capacity)
        return line

    def tidy(self, key: K) -> None:
        """Forget the line of `key` when it is empty."""
        line = self._lines.get(key)
        if line is not None and line.is_empty:
            del self._lines[key]


def find_turn(party: Party, key: Hashable, lines: Lines[Hashable]) -> Line:
    """Where a call for this owner stands in line: in the turn of the nearest ancestor that is one of the owner's, in
    order among that turn's calls; else among all calls of the owner."""
    for above in party.ancestors():
        if above.turn_of == key:
            if above.inner_turn is None:
                above.inner_turn = Line(1)
            return above.inner_turn
    return lines.get(key)
