"""What callers get from a store that is out of reach, slow, loses a claim, or has one of another process.
Source: D20, D21, D43."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import Claimed, KeyEnd, KeyScope, StoreUnavailable
from callyard.errors import ErrorKind, Outcome
from callyard.ids import CallId, Tenant
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from tests.unit.dispatch.keyed_bench import RUN_MS, Bench, after, bad, cancel, good, pause, raising

SCOPE = KeyScope(Tenant("default"), "charge", "k")


class Moody(MemoryKeyStore):
    """A store that fails, or takes its time, as it is told."""

    def __init__(self) -> None:
        super().__init__(now_ms=VirtualTimers().now_ms)
        self.failing: set[str] = set()
        self.slow_ms: dict[str, int] = {}
        self.asked: list[str] = []

    async def _step(self, name: str) -> None:
        self.asked.append(name)
        await asyncio.sleep(self.slow_ms.get(name, 0) / 1_000)
        if name in self.failing:
            raise StoreUnavailable("connection refused")

    async def open(self) -> None:
        await self._step("open")

    async def claim(self, *args: Any, **options: Any) -> Any:
        await self._step("claim")
        return await super().claim(*args, **options)

    async def settle(self, *args: Any) -> bool:
        await self._step("settle")
        return await super().settle(*args)

    async def wait(self, *args: Any) -> None:
        await self._step("wait")
        await super().wait(*args)


async def claim_elsewhere(store: Moody, bench: Bench, *, idempotent: bool = False) -> Claimed:
    """Another process has the key of a `charge` with n 0."""
    from callyard.dispatch.keys import fingerprint

    claimed = await MemoryKeyStore.claim(
        store, SCOPE, fingerprint(b'{"n":0}'), CallId("theirs"), idempotent=idempotent, unknown_ttl_ms=60_000
    )
    assert isinstance(claimed, Claimed)
    return claimed


@pytest.mark.requirement("D21")
@virtual_time
async def test_a_store_out_of_reach_runs_nothing() -> None:
    store = Moody()
    async with Bench(store) as bench:
        store.failing.add("claim")
        first, joined = bench.start(), bench.start()
        for task in (first, joined):
            ended = bad(await task, ErrorKind.UNAVAILABLE, Outcome.NOT_RUN)
            assert ended.retryable
            assert "connection refused" in ended.message
        assert bench.runs == []
        good(await bench.call(key=None))
        store.failing.clear()
        good(await bench.call())


@pytest.mark.requirement("D21")
@virtual_time
async def test_a_store_that_could_not_be_opened_is_opened_by_the_next_who_asks() -> None:
    store = Moody()
    bench = Bench(store)
    store.failing.add("open")
    bad(await bench.call(), ErrorKind.UNAVAILABLE, Outcome.NOT_RUN)
    bad(await bench.call(), ErrorKind.UNAVAILABLE, Outcome.NOT_RUN)
    store.failing.clear()
    good(await bench.call())
    good(await bench.call())
    assert store.asked.count("open") == 3
    await bench.dispatcher.close()
    bench.check_empty()


@pytest.mark.requirement("D11", "D21")
@virtual_time
async def test_a_slow_store_is_within_the_deadline() -> None:
    store = Moody()
    async with Bench(store) as bench:
        store.slow_ms["claim"] = 500
        ended = bad(await bench.call(deadline_ms=100), ErrorKind.DEADLINE, Outcome.NOT_RUN)
        assert (ended.attempts, bench.timers.now_ms(), bench.runs) == (0, 100, [])
        await pause(1_000)
        assert bench.runs == [], "nobody waits for it any more"
        assert len(store) == 0, "its claim went back"


@pytest.mark.requirement("D9", "D40")
@virtual_time
async def test_a_slow_store_takes_nothing_of_an_attempts_time() -> None:
    store = Moody()
    async with Bench(store) as bench:
        store.slow_ms["claim"] = 500
        bench.acts.append(after(90, "done"))
        first, joined = bench.start(timeout_ms=100), bench.start(timeout_ms=100)
        assert good(await first).value == "done"
        bad(await joined, ErrorKind.TIMEOUT, Outcome.UNKNOWN)  # it has waited for longer than it wanted to


@pytest.mark.requirement("D17", "D43")
@virtual_time
async def test_the_first_caller_goes_while_the_key_is_being_claimed() -> None:
    store = Moody()
    async with Bench(store) as bench:
        store.slow_ms["claim"] = 500
        first, second = bench.start(), bench.start()
        await pause(100)
        await cancel(first)
        assert bench.timers.now_ms() == 100
        result = good(await second)
        assert (result.deduplicated, len(bench.runs)) == (False, 1)


@pytest.mark.requirement("D17")
@virtual_time
async def test_who_comes_while_an_abandoned_claim_goes_back_gets_a_run() -> None:
    store = Moody()
    async with Bench(store) as bench:
        store.slow_ms |= {"claim": 500, "settle": 100}
        first = bench.start()
        await pause(100)
        await cancel(first)
        await pause(450)
        assert store.asked == ["open", "claim", "settle"]
        assert good(await bench.call()).attempts == 1
        assert len(bench.runs) == 1


@pytest.mark.requirement("D18", "D21")
@virtual_time
async def test_an_end_that_is_not_kept_is_given_and_counted() -> None:
    store = Moody()
    async with Bench(store) as bench:
        store.failing.add("settle")
        first, joined = bench.start(), bench.start()
        assert good(await first).value == good(await joined).value == {"n": 0}
        assert bench.dispatcher.statistics().lost_claims == 1
        store.failing.clear()
        waiting = bench.start(deadline_ms=2_000)
        bad(await waiting, ErrorKind.DEADLINE, Outcome.UNKNOWN)  # the claim stands until the store has settled it
        assert len(bench.runs) == 1


@pytest.mark.requirement("D21")
def test_a_claim_that_was_lost_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    @virtual_time
    async def check() -> None:
        store = Moody()
        async with Bench(store) as bench:
            first = bench.start()
            await pause(100)
            fence = store._records[SCOPE].fence
            assert await MemoryKeyStore.settle(store, SCOPE, fence, KeyEnd(CallId("x"), 1, b"1"), 60_000)
            assert good(await first).value == {"n": 0}
            assert bench.dispatcher.statistics().lost_claims == 1
            assert good(await bench.call()).value == 1, "what was written stays"

    with caplog.at_level(logging.WARNING, "callyard.dispatch"):
        check()
    assert "was lost while it ran" in caplog.text


@pytest.mark.requirement("D21", "D43")
@virtual_time
async def test_a_run_of_another_process_is_waited_for() -> None:
    store = Moody()
    async with Bench(store) as bench:
        claimed = await claim_elsewhere(store, bench)
        callers = [bench.start() for _ in range(3)]
        impatient = bench.start(deadline_ms=100)
        bad(await impatient, ErrorKind.DEADLINE, Outcome.UNKNOWN)
        await pause(400)
        assert await MemoryKeyStore.settle(store, SCOPE, claimed.fence, KeyEnd(CallId("theirs"), 2, b'"ok"'), 60_000)
        for task in callers:
            result = good(await task)
            assert (result.value, result.call_id, result.attempts) == ("ok", "theirs", 2)
            assert result.deduplicated
        assert bench.runs == []


@pytest.mark.requirement("D21", "D43")
@virtual_time
async def test_a_key_that_another_process_gives_back_is_run_here() -> None:
    store = Moody()
    async with Bench(store) as bench:
        claimed = await claim_elsewhere(store, bench)
        first = bench.start()
        await pause(100)
        assert await MemoryKeyStore.settle(store, SCOPE, claimed.fence, None, 60_000)
        result = good(await first)
        assert (result.deduplicated, len(bench.runs)) == (False, 1)


@pytest.mark.requirement("D17")
@virtual_time
async def test_nobody_waits_for_another_process_for_nobody() -> None:
    """The wait ends with the last who wanted it; who comes then begins anew."""
    store = Moody()
    async with Bench(store) as bench:
        claimed = await claim_elsewhere(store, bench)
        first, second = bench.start(), bench.start()
        await pause(100)
        await cancel(first)
        assert bench.dispatcher.statistics().flights == 1
        await cancel(second)
        third = bench.start()
        await pause(100)
        assert store.asked.count("wait") == 2
        assert await MemoryKeyStore.settle(store, SCOPE, claimed.fence, None, 60_000)
        assert not good(await third).deduplicated
        last = bench.start()
        await cancel(last)
        await pause(0)
        assert bench.dispatcher.statistics().flights == 0


@pytest.mark.requirement("D21")
@virtual_time
async def test_a_store_that_fails_while_another_process_has_the_key() -> None:
    store = Moody()
    async with Bench(store) as bench:
        await claim_elsewhere(store, bench)
        store.slow_ms["wait"] = 200
        store.failing.add("wait")
        bad(await bench.call(), ErrorKind.UNAVAILABLE, Outcome.UNKNOWN)
        assert bench.runs == []


@pytest.mark.requirement("D16", "D21")
@virtual_time
async def test_arguments_that_another_process_has_under_the_key() -> None:
    store = Moody()
    async with Bench(store) as bench:
        await claim_elsewhere(store, bench)
        conflict = bad(await bench.call(n=5), ErrorKind.CONFLICT, Outcome.NOT_RUN)
        assert "theirs" in conflict.message
        assert bench.runs == []


@pytest.mark.requirement("D21")
@virtual_time
async def test_two_dispatchers_over_one_store_make_one_run() -> None:
    store = Moody()
    async with Bench(store) as one, Bench(store) as other:
        other.runs, other.acts = one.runs, one.acts
        one.acts.append(after(500, "once"))
        results = await asyncio.gather(one.call(), other.call(), one.call(), other.call())
        assert {good(result).value for result in results} == {"once"}
        assert len({good(result).call_id for result in results}) == 1
        assert len(one.runs) == 1


@pytest.mark.requirement("D21", "D43")
@virtual_time
async def test_an_idempotent_failure_in_one_dispatcher_is_run_again_by_the_other() -> None:
    store = Moody()
    async with Bench(store) as one, Bench(store) as other:
        one.acts.append(raising(ValueError("x"), 300))
        first, second = one.start("search"), other.start("search")
        bad(await first, ErrorKind.INTERNAL, Outcome.RAN)
        assert good(await second).value == {"n": 0}


@pytest.mark.requirement("D24")
def test_a_store_that_breaks_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    @virtual_time
    async def check() -> None:
        store = Moody()
        async with Bench(store) as bench:

            async def broken(*_: Any, **__: Any) -> Any:
                raise ZeroDivisionError

            store.claim = broken  # type: ignore[method-assign]
            for task in (bench.start(), bench.start()):
                bad(await task, ErrorKind.INTERNAL, Outcome.UNKNOWN)
            assert bench.runs == []

    check()
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.requirement("D24")
def test_a_fault_of_our_own_leaves_no_key_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    """What it did is not known, so it is kept as that."""

    @virtual_time
    async def check() -> None:
        async with Bench() as bench:
            keyed = bench.dispatcher._keyed
            run = keyed._run

            async def broken(call: Any) -> Any:
                await run(call)
                raise ZeroDivisionError

            keyed._run = broken
            for task in (bench.start(), bench.start()):
                bad(await task, ErrorKind.INTERNAL, Outcome.UNKNOWN)
            keyed._run = run
            again = bad(await bench.call(deadline_ms=5_000), ErrorKind.INTERNAL, Outcome.UNKNOWN)
            assert (again.deduplicated, len(bench.runs)) == (True, 1)

    check()
    assert "failed inside the dispatcher" in caplog.text


@pytest.mark.requirement("D20")
@virtual_time
async def test_a_store_that_is_given_is_the_one_that_is_used() -> None:
    """An empty one is false to Python."""
    store = MemoryKeyStore(now_ms=VirtualTimers().now_ms)
    async with Bench(store) as bench:
        good(await bench.call(tenant="a"))
        assert len(store) == 1
        async with Dispatcher(bench.registry, clock=VirtualTimers(), store=store) as other:
            assert good(await other.dispatch("charge", {"n": 0}, key="k", tenant="a")).deduplicated
        assert bench.timers.now_ms() == RUN_MS
