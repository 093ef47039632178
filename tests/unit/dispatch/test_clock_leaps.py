"""A wall clock that is set while calls run: no key is forgotten for it, and no time of a call changes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.stores.records import wall_ms
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry

DAY_NS = 86_400_000_000_000
real_ns = time.time_ns


def leap(monkeypatch: pytest.MonkeyPatch, by_ns: int) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + by_ns)
    monkeypatch.setattr(time, "time", lambda: (real_ns() + by_ns) / 1e9)


def test_stores_date_by_the_wall_clock_as_it_was_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(wall_ms() - real_ns() // 1_000_000) < 60_000
    before = wall_ms()
    leap(monkeypatch, DAY_NS)
    assert 0 <= wall_ms() - before < 60_000


@pytest.mark.requirement("D19", "D20", "D55")
@pytest.mark.parametrize("by_ns", [400 * DAY_NS, -400 * DAY_NS])
@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_a_set_clock_makes_no_key_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, by_ns: int
) -> None:
    ran: list[str] = []
    registry = Registry()

    @registry.tool(timeout_ms=50)
    async def charge(order: str) -> str:
        ran.append(order)
        if order == "lost":
            leap(monkeypatch, by_ns)
            await asyncio.sleep(60)
        return order

    async with Dispatcher(registry, store="memory" if store == "memory" else tmp_path / "keys.db") as dispatcher:
        assert (await dispatcher.dispatch("charge", {"order": "a"}, key="a")).ok
        lost = await dispatcher.dispatch("charge", {"order": "lost"}, key="lost")
        assert lost.error is not None
        assert (lost.error.kind, lost.error.outcome) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        again = await dispatcher.dispatch("charge", {"order": "a"}, key="a")
        assert (again.ok, again.deduplicated) == (True, True)
        still = await dispatcher.dispatch("charge", {"order": "lost"}, key="lost")
        assert still.error is not None
        assert (still.error.outcome, still.error.deduplicated) == (Outcome.UNKNOWN, True)
        assert ran == ["a", "lost"]


@pytest.mark.requirement("D58")
async def test_rates_and_breakers_do_not_look_at_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()

    @registry.tool(rate="1/h")
    async def once() -> int:
        return 1

    async with Dispatcher(registry) as dispatcher:
        assert (await dispatcher.dispatch("once")).ok
        leap(monkeypatch, DAY_NS)
        over = await dispatcher.dispatch("once")
        assert over.error is not None
        assert over.error.kind is ErrorKind.RATE_LIMITED
