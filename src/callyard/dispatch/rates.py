"""Rates: kept in the key store where several processes share it, else in this process. Source: tool-dispatch D58."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

import msgspec

from callyard.clock import Timers
from callyard.dispatch.call import Alarm
from callyard.dispatch.stores.port import SharedPlace, SharedRates, StoreUnavailable
from callyard.ids import Tenant
from callyard.policy.rate import Rate, RateLimiter

_log: Final = logging.getLogger("callyard.dispatch")


class Place(msgspec.Struct, frozen=True):
    """What whoever asks a rate gets."""

    wait_ms: int
    """So long to wait, and then to go on without asking again; where none was taken, when there would be one."""
    give_back: Callable[[], None] | None
    """Of one that will not be used, before its time has come. None: none was taken."""


NO_PLACE: Final = Place(0, None)


class Rates:
    """The rates of all tools, and of whatever else has one."""

    def __init__(self, clock: Timers, shared: SharedRates | None, open_store: Callable[[], Awaitable[None]]) -> None:
        self._clock = clock
        self.shared = shared
        """None: each process counts for itself."""
        self._open_store = open_store
        self._limiters: dict[tuple[str, str], tuple[str, RateLimiter]] = {}
        """By what has the rate: the rate as it is written, and who keeps it."""
        self._is_cut_off = False
        self._returning: set[asyncio.Future[Any]] = set()

    async def take(
        self,
        kind: str,
        name: str,
        tenant: Tenant,
        text: str,
        wait_ms_max: int,
        alarm: Alarm,
        is_over: Callable[[], bool],
        until_ms: int,
    ) -> Place:
        """A place for one call of a `tool` or a `token` of that name. It is not waited for here. Until the store has
        answered, `alarm` may be woken for `is_over()` to be asked again, as it is at `until_ms`: then none is taken."""
        known = self._limiters.get((kind, name))
        if known is None or known[0] != text:  # another has the name now
            known = self._limiters[kind, name] = (text, RateLimiter(Rate.parse(text)))
        limiter = known[1]
        if self.shared is not None:
            asking = self._ask(self.shared, f"{kind}:{name}", tenant, limiter.rate, wait_ms_max)
            place = await self._take_shared(self.shared, asking, alarm, is_over, until_ms)
            if place is not None:
                return place
        now_ms = self._clock.now_ms()
        wait_ms = limiter.ask(tenant, now_ms, wait_ms_max)
        if wait_ms > wait_ms_max:
            return Place(wait_ms, None)
        at_ms = now_ms + wait_ms
        return Place(wait_ms, lambda: limiter.give_back(tenant, at_ms, self._clock.now_ms()))

    async def _take_shared(
        self,
        shared: SharedRates,
        asking: Coroutine[None, None, SharedPlace],
        alarm: Alarm,
        is_over: Callable[[], bool],
        until_ms: int,
    ) -> Place | None:
        """None: the store is out of reach, and this process counts for itself meanwhile."""
        taking = asyncio.ensure_future(asking)
        taking.add_done_callback(alarm.wake)
        try:
            while not taking.done():
                if is_over():
                    return NO_PLACE
                await alarm.pause(until_ms)
        finally:
            if not taking.done():
                self._keep(taking)
                taking.add_done_callback(partial(self._drop, shared))
        try:
            place = taking.result()
        except StoreUnavailable as error:
            if not self._is_cut_off:
                _log.warning("rates are kept in this process alone while their store is out of reach: %s", error)
            self._is_cut_off = True
            return None
        self._is_cut_off = False
        if not place.is_taken:
            return Place(place.wait_ms, None)
        return Place(place.wait_ms, lambda: self._give_back(shared, place))

    async def _ask(self, shared: SharedRates, name: str, tenant: Tenant, rate: Rate, wait_ms_max: int) -> SharedPlace:
        await self._open_store()
        return await shared.take_place(name, tenant, rate, wait_ms_max)

    def _drop(self, shared: SharedRates, taking: asyncio.Future[SharedPlace]) -> None:
        """Nobody waits for it any more."""
        if not taking.cancelled() and taking.exception() is None and taking.result().is_taken:
            self._give_back(shared, taking.result())

    def _give_back(self, shared: SharedRates, place: SharedPlace) -> None:
        self._keep(asyncio.ensure_future(self._return(shared, place)))

    async def _return(self, shared: SharedRates, place: SharedPlace) -> None:
        try:
            await shared.give_place_back(place)
        except StoreUnavailable as error:
            _log.debug("a place of a rate was not given back: %s", error)

    def _keep(self, future: asyncio.Future[Any]) -> None:
        """The loop keeps only weak references."""
        self._returning.add(future)
        future.add_done_callback(self._returning.discard)
