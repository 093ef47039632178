"""The dispatcher's keyed calls over a SQLite file, on a real loop. Source: D16-D19, D21, D42, D43."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import callyard
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchResult
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.policy.retry import RetryPolicy

BOUND_S = 20


class Till:
    """Runs wait at a gate, and are counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gate = asyncio.Event()
        self.began = asyncio.Event()
        self.runs: list[tuple[str, int]] = []
        self.registry = Registry()
        retry = RetryPolicy(base_ms=0)

        async def act(cents: int = 5) -> dict[str, int]:
            info = callyard.context()
            self.runs.append((info.idempotency_key, info.attempt))
            self.began.set()
            await self.gate.wait()
            return {"paid": cents}

        self.registry.add_function(act, name="charge", timeout_ms=600_000)
        self.registry.add_function(act, name="search", idempotent=True, timeout_ms=600_000, retry=retry)
        self.open()

    def open(self, **settings: Any) -> Dispatcher:
        self.dispatcher = Dispatcher(self.registry, store=SqliteKeyStore(self.path, lock_wait_ms=20_000), **settings)
        return self.dispatcher

    def start(self, tool: str = "charge", **options: Any) -> asyncio.Task[DispatchResult]:
        return asyncio.ensure_future(self.dispatcher.dispatch(tool, {"cents": 5}, **{"key": "k", **options}))


@pytest.fixture
async def till(tmp_path: Path) -> AsyncIterator[Till]:
    till = Till(tmp_path / "keys.db")
    opener = asyncio.get_running_loop().call_later(BOUND_S, till.gate.set)  # what hangs fails
    yield till
    opener.cancel()
    till.gate.set()
    await till.dispatcher.close()
    statistics = till.dispatcher.statistics()
    assert (statistics.calls, statistics.running, statistics.queued, statistics.flights) == (0, 0, 0, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.requirement("D16", "D17", "D21", "D43")
async def test_joined_and_kept_across_a_restart(till: Till) -> None:
    callers = [till.start() for _ in range(4)]
    other_tenant = till.start(tenant="b")
    await until(lambda: len(till.runs) == 2)
    conflict = await till.dispatcher.dispatch("charge", {"cents": 6}, key="k")
    assert not conflict.ok
    assert conflict.kind is ErrorKind.CONFLICT
    till.gate.set()
    results = await asyncio.gather(*callers)
    assert [result.value for result in results] == [{"paid": 5}] * 4
    assert [result.deduplicated for result in results] == [False, True, True, True]
    assert not (await other_tenant).deduplicated
    await till.dispatcher.close()
    async with till.open():
        again = await till.start()
        assert (again.value, again.deduplicated, again.call_id) == ({"paid": 5}, True, results[0].call_id)
    assert len(till.runs) == 2


@pytest.mark.requirement("D17", "D21")
async def test_a_charge_goes_on_without_its_caller(till: Till) -> None:
    first = till.start()
    await till.began.wait()
    first.cancel()
    await asyncio.wait((first,))
    joined = till.start()
    await asyncio.sleep(0)
    till.gate.set()
    result = await joined
    assert (result.value, len(till.runs)) == ({"paid": 5}, 1)


@pytest.mark.requirement("D18", "D19", "D21")
async def test_unknown_until_it_is_resolved(till: Till) -> None:
    ended = await till.start(timeout_ms=20)
    await till.dispatcher.close()
    async with till.open():
        again = await till.start()
        for result in (ended, again):
            assert not result.ok
            assert (result.kind, result.outcome, result.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
        assert await till.dispatcher.resolve("default", "charge", "k", retry=True)
        till.gate.set()
        assert not (await till.start()).deduplicated
    assert till.runs == [("k", 1), ("k", 1)]


@pytest.mark.requirement("D21", "D42")
async def test_one_key_over_all_attempts(till: Till) -> None:
    callers = [till.start("search", timeout_ms=1_000)] + [till.start("search") for _ in range(3)]
    await until(lambda: len(till.runs) == 2)
    till.gate.set()
    results = await asyncio.gather(*callers)
    assert len({result.call_id for result in results}) == 1
    assert [result.deduplicated for result in results] == [False, True, True, True]
    assert all(result.ok for result in results)
    assert till.runs[:2] == [("k", 1), ("k", 2)]


@pytest.mark.requirement("D21", "D43")
async def test_the_claim_is_handed_on(till: Till) -> None:
    """While the only slot is taken: the holder ends at its deadline, who joined it runs, who comes back joins."""
    await till.dispatcher.close()
    till.open(slots=1)
    busy = till.start(key="busy")
    await till.began.wait()
    holder, heir = till.start(deadline_ms=20), till.start()
    ended = await holder
    assert not ended.ok
    assert (ended.kind, ended.attempts) == (ErrorKind.DEADLINE, 0)
    till.gate.set()
    assert not (await heir).deduplicated
    assert (await till.start()).deduplicated
    await busy
    assert till.runs == [("busy", 1), ("k", 1)]


@pytest.mark.requirement("D21", "D43")
async def test_who_comes_back_while_the_claim_goes_back(till: Till) -> None:
    await till.dispatcher.close()
    till.open(slots=1)
    busy = till.start(key="busy")
    await till.began.wait()
    for _ in range(20):
        ended = await till.start(deadline_ms=5)
        assert not ended.ok
        assert (ended.kind, ended.outcome) == (ErrorKind.DEADLINE, Outcome.NOT_RUN), ended
    till.gate.set()
    assert (await till.start()).ok
    await busy


@pytest.mark.requirement("D20", "D21")
async def test_a_hundred_keys_at_once(till: Till) -> None:
    till.gate.set()
    tasks = [till.start(key=f"k-{index % 50}") for index in range(100)]
    results = await asyncio.gather(*tasks)
    assert all(result.ok for result in results)
    assert len(till.runs) == 50
    assert sum(result.deduplicated for result in results) == 50
