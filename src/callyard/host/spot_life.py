"""The life of spots: made on their first message, put away when idle, moved, gone; and what a message means to one.

A spot with an object is made in a lifecycle turn; what comes meanwhile is held. It is put away by the same seal as a
move: dumped and saved when its turns are over, and forgotten unless something came for it in between. Its next message
makes it again and loads what was saved. Source: job-queue §2.1, R44, R116, R124.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from functools import partial
from inspect import isawaitable
from typing import Any, Final

import msgspec

from callyard.clock import Timers
from callyard.host.context import infrastructure_context
from callyard.host.errors import HostError, HostErrorKind, text_of
from callyard.host.flow import wait_until_done
from callyard.host.ledger import Lane
from callyard.host.messages import JSON, Route, encode, find_route, shown_name
from callyard.host.owners import Callback, Condition
from callyard.host.spots import Factory, Kind, Kinds, Spot, States, is_pattern, matcher, shown_factory
from callyard.host.states import Admission, Asking
from callyard.host.turns import ABANDON_MS, Turn
from callyard.host.wiring import HostParts
from callyard.transport.port import Record

_log: Final = logging.getLogger("callyard.host")

SAVE_MS: Final = 5_000
"""The least that the close gives the saving of spots, also when it has no time left."""
SAVES_AT_ONCE: Final = 16
"""So one that hangs is in nobody's way."""
NAMES_MAX: Final = 10
"""Spots, or patterns, that a line names; of more it gives the number."""

TurnOf = Callable[[Spot, Turn], Any]
"""What a handler is given as its turn."""


class SpotLife:
    """Satisfies `SpotTable`. `parts` is set once there are any."""

    parts: HostParts

    def __init__(self, timers: Timers, states: States | None, spots_max: int, turn_of: TurnOf) -> None:
        self.kinds = Kinds()
        self.spots: dict[str, Spot] = {}
        self.on_gone: Callable[[str], None] = lambda spot: None
        """Told of spots that are gone for good."""
        self._timers = timers
        self._store = states
        self._kept: dict[str, bytes] = {}
        """Without a store: the states of spots that were put away, and are not here. They count as spots."""
        self._spots_max = spots_max
        self.turn_of = turn_of
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def now_ms(self) -> int:
        """In a turn that begins now."""
        return self.parts.turns.now_ms

    def is_here(self, spot_id: str) -> bool:
        """Whether a message for it is this host's own."""
        return spot_id in self.spots or self.kinds.of_spot(spot_id) is not None

    def add(self, spot_id: str, kind: Kind, state: Any = None, condition: Condition = Condition.OPEN) -> Spot:
        spot = Spot(spot_id, kind, self)
        self.parts.owners.add(spot_id, spot.handle, condition=condition)
        spot.state = state
        self.spots[spot_id] = spot
        return spot

    # What the parts ask.

    def prepare(self, spot: str) -> HostErrorKind | None:
        kind = self.kinds.of_spot(spot)
        if kind is None:
            return HostErrorKind.NOT_FOUND
        answer = self.parts.life.admit(Asking.NEW_PAYLOAD)
        if not isinstance(answer, Admission):
            return answer
        if self._is_full and spot not in self._kept:
            return HostErrorKind.CAPACITY_EXCEEDED
        if kind.factory is None:
            self._watch_idle(self.add(spot, kind))
            return None
        made = self.add(spot, kind, condition=Condition.CREATING)
        made.kept = self._kept.pop(spot, None)
        make = Callback(partial(self._make, made, kind.factory), on_end=partial(self._made, made))
        refused = self.parts.owners.submit_local(spot, make, Lane.LIFECYCLE)
        assert refused is None, f"the first work of {spot!r} was refused: {refused}"
        return None

    def why_not(self, spot: str) -> str:
        patterns = self.kinds.patterns()
        of_patterns = (
            f"none of {_shown(patterns)} matches it" if patterns else "no `spots` or `on` made any pattern known"
        )
        return f"there is no spot {spot!r}: none was given by `host.spot`, and {of_patterns}"

    def matching(self, pattern: str) -> Sequence[str]:
        if not is_pattern(pattern):
            return ()
        if "*" not in pattern:
            return (pattern,) if pattern in self.spots or pattern in self.kinds.exact_ids() else ()
        is_meant = matcher(pattern)
        here = [spot for spot in self.spots if is_meant(spot)]
        unmade = [spot for spot in self.kinds.exact_ids() if spot not in self.spots and is_meant(spot)]
        return here + unmade

    def decode(self, record: Record) -> tuple[Route, Any]:
        spot = self.spots.get(record.target)
        if record.content_type == JSON and spot is not None:
            route = spot.kind.routes.get(record.message_type)
            if route is not None:
                return route, route.decode(record.payload)
            return self.read(spot, record.message_type, record.payload)
        if spot is None:
            raise HostError(HostErrorKind.NOT_FOUND, f"{record.target!r} is gone")
        raise HostError(HostErrorKind.PROTOCOL_ERROR, f"content type {record.content_type!r} is not known")

    def read(self, spot: Spot, message_type: str, payload: bytes) -> tuple[Route, Any]:
        """Raises `HostError(NOT_CONFIGURED)` without a handler, and `msgspec.DecodeError`."""
        route = find_route(spot.kind.routes, message_type)
        if route is None:
            raise HostError(
                HostErrorKind.NOT_CONFIGURED,
                f"{spot.id!r} has no handler for {shown_name(message_type)}, it has for "
                f"{_shown([shown_name(name) for name in spot.kind.routes]) or 'nothing'}",
            )
        return route, route.decode(payload)

    def gone(self, spot: str) -> None:
        gone = self.spots.pop(spot, None)
        if gone is not None and not gone.is_going:
            self.on_gone(spot)

    def give_places(self) -> None:
        if len(self.spots) + len(self._kept) != self._spots_max - 1:  # nobody can have waited for a place
            return
        for key in self.parts.waiters.places():
            if self._is_full:
                return
            if key not in self.spots:
                self.parts.waiters.admit(key)

    def remove(self, spot_id: str) -> bool:
        """Forget a spot, and what was kept of it. False: it is neither here nor put away in memory."""
        self.kinds.drop(spot_id)
        was_kept = self._kept.pop(spot_id, None) is not None
        if was_kept:
            self.give_places()
        return self.parts.owners.remove(spot_id) or was_kept

    @property
    def kept(self) -> int:
        """Spots that were put away in memory."""
        return len(self._kept)

    @property
    def _is_full(self) -> bool:
        return len(self.spots) + len(self._kept) >= self._spots_max

    # Made.

    async def _make(self, spot: Spot, factory: Factory, turn: Turn) -> Any:
        part = f"its factory {shown_factory(factory)}"
        try:
            made = await _settle(factory(spot.id))
            if hasattr(made, "load"):
                part = "its store's `load`"
                saved = spot.kept if self._store is None else await self._store.load(spot.id)
                if saved is not None:
                    part = f"`load` of its {type(made).__name__}"
                    await _load(made, saved)
        except Exception as error:
            _log.error("%r could not be made: %s failed", spot.id, part, exc_info=error)
            kind = error.kind if isinstance(error, HostError) else HostErrorKind.INTERNAL_FAILURE
            what = f"{type(error).__name__}: {text_of(error)}"
            raise HostError(kind, f"{spot.id!r} could not be made: {part} failed: {what}") from error
        return made

    def _made(self, spot: Spot, outcome: Any) -> None:
        kept, spot.kept = spot.kept, None
        if self.spots.get(spot.id) is not spot:  # it was removed meanwhile, and may be here anew
            return
        if isinstance(outcome, HostError):
            if kept is not None:
                self._kept[spot.id] = kept
            self.parts.owners.remove(spot.id, outcome)
            return
        spot.state = outcome
        self._watch_idle(spot)
        self.parts.moving.open(spot.id)

    # Put away.

    def _watch_idle(self, spot: Spot) -> None:
        if spot.kind.idle_ms is None:
            return
        spot.used_at_ms = self._timers.now_ms()
        self._look_at(spot, spot.used_at_ms + spot.kind.idle_ms)

    def _look_at(self, spot: Spot, at_ms: int) -> None:
        infrastructure_context().run(self._timers.call_at, at_ms, partial(self._look_whether_idle, spot))

    def _look_whether_idle(self, spot: Spot) -> None:
        idle_ms = spot.kind.idle_ms
        if idle_ms is None or self.spots.get(spot.id) is not spot or not self.parts.life.is_accepting_work:
            return
        now_ms = self._timers.now_ms()
        owner = self.parts.owners.get(spot.id)
        assert owner is not None, f"{spot.id!r} has no owner"
        if now_ms < spot.used_at_ms + idle_ms:
            self._look_at(spot, spot.used_at_ms + idle_ms)
        elif not owner.ledger.is_empty or owner.condition is not Condition.OPEN:
            self._look_at(spot, now_ms + idle_ms)
        elif hasattr(spot.state, "dump"):
            self._keep(self._put_away(spot), infrastructure_context())
        else:
            self._forget(spot)

    def _keep(self, work: Any, context: Context) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _put_away(self, spot: Spot) -> None:
        try:
            await self.parts.moves.move([spot.id], _PutAway(self, spot))
        except Exception:  # noqa: BLE001 - of the spot's own dump, or its store: it stays
            _log.warning("%r could not be put away", spot.id, exc_info=True)
        if self.spots.get(spot.id) is spot:
            self._watch_idle(spot)

    def _forget(self, spot: Spot) -> None:
        spot.is_going = True
        self.parts.owners.remove(spot.id)

    async def move(self, spot_id: str, make: Factory | None) -> None:
        spot = self.spots.get(spot_id)
        if spot is None:
            raise HostError(
                HostErrorKind.NOT_FOUND, f"there is no spot {spot_id!r} here to move: its first message makes it"
            )
        factory = spot.kind.factory if make is None else make
        if factory is None or not hasattr(spot.state, "dump"):
            has = (
                "no factory for what takes over" if factory is None else f"a {type(spot.state).__name__} without `dump`"
            )
            raise HostError(HostErrorKind.INVALID_OPERATION, f"{spot_id!r} cannot be moved: it has {has}")
        if isinstance(factory, type) and not hasattr(factory, "load"):
            raise _not_loadable(spot_id, factory.__name__)
        await self._keep(self.parts.moves.move([spot_id], _Move(spot, factory)), copy_context())

    # The end.

    async def save_all(self, deadline_at_ms: int) -> None:
        """What has a `dump` is saved, where a store was given; after the last turn, and for `SAVE_MS` at least.

        But for spots whose handler was left behind, which may still change them. What was not saved is logged.
        """
        if self._store is None:
            return
        deadline_at_ms = max(deadline_at_ms, self._timers.now_ms() + SAVE_MS)
        left_behind = self.parts.turns.left_behind
        wanted = [spot for spot in self.spots.values() if hasattr(spot.state, "dump")]
        unsaved = {spot.id: None for spot in wanted}
        coming = iter([spot for spot in wanted if spot.id not in left_behind])
        loop = asyncio.get_running_loop()
        work = [
            loop.create_task(self._save_each(coming, unsaved, self._store), context=infrastructure_context())
            for _ in range(min(SAVES_AT_ONCE, len(wanted)))
        ]
        if not await wait_until_done(work, self._timers, deadline_at_ms):
            for task in work:
                task.cancel()
        if unsaved:
            _log.error(
                "at the close %d of %d spots were not saved: %s. Their handlers did not end, or their `dump` or the "
                "store failed or did not end in time.",
                len(unsaved),
                len(wanted),
                _shown(list(unsaved)),
            )

    async def _save_each(self, coming: Iterator[Spot], unsaved: dict[str, None], store: States) -> None:
        for spot in coming:
            try:
                await store.save(spot.id, encode(await _settle(spot.state.dump())))
            except Exception:  # noqa: BLE001 - of the spot's own dump, or its store
                _log.warning("%r could not be saved", spot.id, exc_info=True)
            else:
                del unsaved[spot.id]

    async def save(self, spot_id: str, state: Any) -> bytes:
        """In the store, if there is one. Returns what is kept."""
        kept = encode(state)
        if self._store is not None:
            await self._store.save(spot_id, kept)
        return kept

    def put_away(self, spot: Spot, kept: bytes) -> None:
        """It is saved, and nothing came for it meanwhile."""
        if self._store is None:
            self._kept[spot.id] = kept  # first: its place does not become free
        self._forget(spot)

    async def stop(self, deadline_at_ms: int) -> None:
        """Let moves come to their ends, then cancel them."""
        if not await wait_until_done(self._tasks, self._timers, deadline_at_ms):
            for task in list(self._tasks):
                task.cancel()
            await wait_until_done(self._tasks, self._timers, self._timers.now_ms() + ABANDON_MS)


class _PutAway:
    """A unit that moves out: `callyard.host.moves.Movable`."""

    def __init__(self, life: SpotLife, spot: Spot) -> None:
        self._life = life
        self._spot = spot

    def dump(self) -> Any:
        return self._spot.state.dump()

    def load(self, state: Any) -> Any:
        return self._life.save(self._spot.id, state)

    def cut_over(self, loaded: Any) -> None:
        if not self._life.parts.moving.held(self._spot.id):
            self._life.put_away(self._spot, loaded)


class _Move:
    """A unit whose object is made anew."""

    def __init__(self, spot: Spot, factory: Factory) -> None:
        self._spot = spot
        self._factory = factory

    def dump(self) -> Any:
        return self._spot.state.dump()

    async def load(self, state: Any) -> Any:
        made = await _settle(self._factory(self._spot.id))
        if not hasattr(made, "load"):
            raise _not_loadable(self._spot.id, type(made).__name__)
        await _load(made, encode(state))
        return made

    def cut_over(self, loaded: Any) -> None:
        self._spot.state = loaded


def _not_loadable(spot: str, made: str) -> HostError:
    return HostError(
        HostErrorKind.INVALID_OPERATION,
        f"{spot!r} cannot be moved to a {made}: it has no `load(state)` for what the old one's `dump` gives",
    )


def _shown(names: Sequence[str]) -> str:
    """So many as a line has room for."""
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


async def _load(made: Any, saved: bytes) -> None:
    await _settle(made.load(msgspec.json.decode(saved)))


async def _settle(value: Any) -> Any:
    return await value if isawaitable(value) else value
