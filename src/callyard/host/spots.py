"""Spots: what a message is for. Which there are, which are made on their first message, and what handles it there.

A kind is what the spots of one pattern have in common: their handlers, what makes their object, after how long without
a message it is put away. In a pattern `*` stands for any text, all else for itself; a spot belongs to the kind with
its very name, else to the one whose pattern says most. Source: job-queue §1, §2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from callyard.host.messages import Route, Routes, shown_name

SPOT_BYTES_MAX: Final = 255
"""Of a spot's id, as UTF-8."""

STATELESS_IDLE_MS: Final = 10_000
"""After so long without a message, spots of a pattern that have no object are forgotten: nothing of them is lost."""

Factory = Callable[[str], Any]
"""Makes the object of a spot, or an awaitable of it, of the spot's id."""


class States(Protocol):
    """Where the states of spots are put away: what their `dump` gives, as JSON."""

    async def load(self, spot: str) -> bytes | None: ...

    async def save(self, spot: str, state: bytes) -> None: ...


class Kind:
    __slots__ = ("factory", "idle_ms", "is_mine", "pattern", "routes")

    def __init__(
        self, pattern: str, routes: Routes | None = None, factory: Factory | None = None, idle_ms: int | None = None
    ) -> None:
        self.pattern = pattern
        self.is_mine = matcher(pattern)
        """Of a spot's id."""
        self.routes: Routes = routes if routes is not None else {}
        """Never changed in place: spots of one class share it."""
        self.factory = factory
        """None: its spots have no object."""
        self.idle_ms = STATELESS_IDLE_MS if idle_ms is None and "*" in pattern else idle_ms

    def add(self, routes: Routes) -> None:
        """Raises ValueError for a type that is handled already."""
        twice = self.routes.keys() & routes.keys()
        if twice:
            raise ValueError(f"{self.pattern!r} has a handler for {shown_name(sorted(twice)[0])} already")
        self.routes = {**self.routes, **routes}


class ForTurns(Protocol):
    """What a spot asks of its host when a turn of it begins."""

    @property
    def now_ms(self) -> int: ...

    def turn_of(self, spot: Spot, turn: Any) -> Any:
        """What a handler is given as its turn."""
        ...


class Spot:
    """One that is there, or is being made."""

    __slots__ = ("_host", "id", "is_going", "kept", "kind", "state", "used_at_ms")

    def __init__(self, spot_id: str, kind: Kind, host: ForTurns) -> None:
        self.id = spot_id
        self.kind = kind
        self.state: Any = None
        """Its object."""
        self.used_at_ms = 0
        """When its last turn began; kept where the kind has an `idle_ms`."""
        self.is_going = False
        """It is being put away."""
        self.kept: bytes | None = None
        """What was kept of it in memory, while its object is made."""
        self._host = host

    def handle(self, turn: Any, message: tuple[Route, Any]) -> Any:
        """The handler that its owner runs: of a message that was read, and the route that it was read for."""
        (_, function, takes_state, takes_turn), value = message
        if self.kind.idle_ms is not None:
            self.used_at_ms = self._host.now_ms
        if not takes_turn:
            return function(self.state, value) if takes_state else function(value)
        given = self._host.turn_of(self, turn)
        return function(self.state, given, value) if takes_state else function(given, value)


class Kinds:
    """All kinds of a host."""

    def __init__(self) -> None:
        self._exact: dict[str, Kind] = {}
        self._patterns: list[Kind] = []
        """Those that say most come first."""

    def of_pattern(self, pattern: str) -> Kind:
        """The kind of this very pattern, new or not."""
        kind = self.get(pattern)
        if kind is None:
            kind = Kind(pattern)
            self.put(kind)
        return kind

    def get(self, pattern: str) -> Kind | None:
        found = self._exact.get(pattern)
        return found or next((kind for kind in self._patterns if kind.pattern == pattern), None)

    def put(self, kind: Kind) -> None:
        if "*" in kind.pattern:
            self._patterns.append(kind)
            self._patterns.sort(key=lambda each: -len(each.pattern.replace("*", "")))
        else:
            self._exact[kind.pattern] = kind

    def drop(self, spot_id: str) -> None:
        self._exact.pop(spot_id, None)

    def of_spot(self, spot_id: str) -> Kind | None:
        """What a spot would be, if it were made now."""
        kind = self._exact.get(spot_id)
        if kind is not None or not is_spot_id(spot_id):
            return kind
        return next((kind for kind in self._patterns if kind.is_mine(spot_id)), None)

    def patterns(self) -> list[str]:
        """Of which messages make spots."""
        return [kind.pattern for kind in self._patterns]

    def exact_ids(self) -> Iterable[str]:
        """Spots that a publish reaches although they were not made yet."""
        return self._exact.keys()


def is_pattern(text: object) -> bool:
    """Also a spot's id is one, of itself."""
    if not isinstance(text, str) or not 0 < len(text) <= SPOT_BYTES_MAX:
        return False
    try:
        return len(text.encode()) <= SPOT_BYTES_MAX
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def is_spot_id(text: object) -> bool:
    return is_pattern(text) and "*" not in str(text)


def check_spot_id(text: object) -> None:
    """Raises ValueError."""
    if not is_spot_id(text):
        raise ValueError(f"a spot's id is text of 1 to {SPOT_BYTES_MAX} bytes of UTF-8 without '*', got {text!r}")


def check_pattern(text: object) -> None:
    """Raises ValueError."""
    if not is_pattern(text):
        hint = ": say it first, as in `@host.spots('cart/*')`" if callable(text) else ""
        raise ValueError(f"a pattern is text of 1 to {SPOT_BYTES_MAX} bytes of UTF-8, got {text!r}{hint}")


def check_factory(what: str, factory: object) -> None:
    """Raises ValueError."""
    if not callable(factory):
        raise ValueError(f"{what} takes a class, or a function of a spot's id, got {factory!r}")


def shown_factory(factory: Factory) -> str:
    return getattr(factory, "__qualname__", repr(factory))


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a spot's id is one of the pattern's: looked at once, then asked for each spot.

    An answer takes the time of the product of both at most, whatever a peer made of the pattern.
    """
    head, star, rest = pattern.partition("*")
    if not star:
        return pattern.__eq__
    *middle, tail = rest.split("*")
    middle = [part for part in middle if part]

    def matches(spot_id: str) -> bool:
        at, end = len(head), len(spot_id) - len(tail)
        if end < at or not spot_id.startswith(head) or not spot_id.endswith(tail):
            return False
        for part in middle:
            found = spot_id.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True

    return matches
