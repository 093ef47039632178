"""One move of a unit inside this host: seal, wait for its turns, dump, load, cut over, replay.

Until the cutover the old owner is the owner: whatever fails, or is cancelled, opens it again, and what was held is its.
Source: job-queue §0, R22, R49, R124.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from inspect import isawaitable
from typing import Any, Protocol

import msgspec

from callyard.clock import Clock
from callyard.host.context import current_turn
from callyard.host.errors import HostError, HostErrorKind
from callyard.host.moving import Moving
from callyard.host.owners import Condition, OwnerKey, Owners


class Movable(Protocol):
    """One unit, as who moves it sees it."""

    def dump(self) -> Any:
        """The owner's own: its state, or an awaitable of it."""
        ...

    def load(self, state: Any) -> Any:
        """The owner's own, too: what takes over, or an awaitable of it. It may raise: then the move is off."""
        ...

    def cut_over(self, loaded: Any) -> None:
        """Put it in the old one's place: the sealed owners get its handlers. One plain function that does not fail."""
        ...


class MovesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counted since the last reset."""

    done: int
    failed: int
    cutover_ms_max: int
    """From seal to cutover."""


class Moves:
    """Of one host."""

    def __init__(self, owners: Owners, moving: Moving, clock: Clock) -> None:
        self._owners = owners
        self._moving = moving
        self._clock = clock
        self._done = self._failed = self._cutover_ms_max = 0

    async def move(self, keys: Sequence[OwnerKey], unit: Movable) -> None:
        """Move the owners of one unit together. Queued work goes with them; turns that run end first.

        A limit in time is the caller's: cancel it. Raises `HostError`: INVALID_OPERATION in a turn of the unit, which
        would wait for itself, or when a key is not open; NOT_FOUND; UNAVAILABLE when one is removed meanwhile; and
        what `dump` and `load` raise.
        """
        turn = current_turn()
        if turn is not None and turn.owner in keys:
            raise HostError(
                HostErrorKind.INVALID_OPERATION,
                f"a turn of {turn.owner!r} cannot move its own unit: it would wait for itself",
            )
        missing = [key for key in keys if key not in self._owners]
        if missing:
            raise HostError(HostErrorKind.NOT_FOUND, f"there is no owner {missing[0]!r} to move")
        owners = [self._owners.get(key) for key in keys]
        sealed: list[OwnerKey] = []
        began_at_ms = self._clock.now_ms()
        try:
            for key in keys:
                self._moving.seal(key)
                sealed.append(key)
            for key in keys:
                await self._wait_quiet(key)
            state = unit.dump()
            if isawaitable(state):
                state = await state
            loaded = unit.load(state)
            if isawaitable(loaded):
                loaded = await loaded
            if any(self._owners.get(key) is not owner for key, owner in zip(keys, owners, strict=True)):
                raise HostError(HostErrorKind.UNAVAILABLE, f"a part of the unit was removed while it was moved: {keys}")
            unit.cut_over(loaded)
            self._done += 1
            self._cutover_ms_max = max(self._cutover_ms_max, self._clock.now_ms() - began_at_ms)
        except BaseException:
            self._failed += 1
            raise
        finally:
            for key in sealed:
                owner = self._owners.get(key)
                if owner is not None and owner.condition is Condition.SEALED:
                    self._moving.open(key)

    def status(self) -> MovesStatus:
        return MovesStatus(done=self._done, failed=self._failed, cutover_ms_max=self._cutover_ms_max)

    def reset_metrics(self) -> None:
        self._done = self._failed = self._cutover_ms_max = 0

    async def _wait_quiet(self, key: OwnerKey) -> None:
        quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not quiet.done():
                quiet.set_result(None)

        self._owners.when_quiet(key, end)
        await quiet
