"""A holder that ends without having begun keeps its error, and the oldest who waits makes the run. Source: D43."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.errors import ErrorKind, Outcome
from callyard.policy.breaker import BreakerPolicy, BreakerState
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.keyed_bench import RUN_MS, Bench, after, bad, cancel, good, pause, raising

N = Outcome.NOT_RUN


@pytest.mark.requirement("D43")
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"allowance": lambda: Allowance(calls=0)}, ErrorKind.BUDGET_EXCEEDED),
        ({"deadline_ms": lambda: 100}, ErrorKind.DEADLINE),
        ({"deadline_ms": lambda: 0}, ErrorKind.DEADLINE),
    ],
)
def test_the_oldest_joiner_takes_the_claim(options: dict[str, Callable[[], Any]], kind: ErrorKind) -> None:
    """With its own budget and deadline; the younger ones get its result."""

    @virtual_time
    async def check() -> None:
        async with Bench(slots=1) as bench:
            await bench.fill(500)
            allowance = Allowance(calls=1)
            holder = bench.start(**{name: make() for name, make in options.items()})
            heir = bench.start(allowance=allowance, deadline_ms=5_000)
            third = bench.start()
            ended = bad(await holder, kind, N)
            assert (ended.attempts, ended.deduplicated) == (0, False)
            assert bench.timers.now_ms() <= 100
            result = good(await heir)
            assert (result.value, result.deduplicated, allowance.taken) == ({"n": 0}, False, 1)
            assert good(await third).call_id == result.call_id == bench.runs[0].call_id
            assert (len(bench.runs), bench.timers.now_ms()) == (1, 500 + RUN_MS)

    check()


@pytest.mark.requirement("D43")
@virtual_time
async def test_the_holder_cancelled_while_queued() -> None:
    async with Bench(slots=1) as bench:
        await bench.fill(500)
        holder, heir = bench.start(), bench.start()
        await pause(100)
        await cancel(holder)
        result = good(await heir)
        assert (result.deduplicated, len(bench.runs), bench.timers.now_ms()) == (False, 1, 500 + RUN_MS)


@pytest.mark.requirement("D43")
@virtual_time
async def test_each_heir_in_turn_until_one_can_run() -> None:
    async with Bench(slots=1) as bench:
        await bench.fill(500)
        callers = [bench.start(deadline_ms=ms) for ms in (50, 100, 150, 10_000, 10_000)]
        results = await asyncio.gather(*callers)
        assert [result.ok for result in results] == [False, False, False, True, True]
        holder = results[0].error
        assert (holder.kind, holder.outcome) == (ErrorKind.DEADLINE, N)
        assert all(result.error.kind is ErrorKind.DEADLINE for result in results[:3])
        assert all(result.error.attempts == 0 for result in results[:3])
        assert len(bench.runs) == 1


@pytest.mark.requirement("D43")
@virtual_time
async def test_with_no_heir_the_key_is_free() -> None:
    async with Bench(slots=1) as bench:
        await bench.fill(500)
        bad(await bench.call(deadline_ms=100), ErrorKind.DEADLINE, N)
        assert len(bench.store) == 0
        assert good(await bench.call(n=2)).value == {"n": 2}, "for other arguments, too"


@pytest.mark.requirement("D28", "D43")
@virtual_time
async def test_a_circuit_that_opens_while_the_holder_queues() -> None:
    """Each caller is told that it is open; none gets another's error, and a call that finds it closed runs."""
    policy = BreakerPolicy(failures=1, open_ms=1_000)
    async with Bench(slots=1, breaker=policy) as bench:
        bench.acts.append(raising(ValueError("x"), 200))
        failing = bench.start(key=None)
        await pause(0)
        holder, heir = bench.start(), bench.start()
        await failing
        assert bench.dispatcher.breaker_state("charge") is BreakerState.OPEN
        for task in (holder, heir):
            refused = bad(await task, ErrorKind.CIRCUIT_OPEN, N)
            assert not refused.deduplicated
            assert refused.details["retry_after_ms"] > 0
        assert len(bench.runs) == 1
        await pause(1_001)
        good(await bench.call())


@pytest.mark.requirement("D12", "D43")
@virtual_time
async def test_an_end_after_it_had_begun_is_everybodys() -> None:
    """Not handed on: it ran, and running again is for the caller to ask."""
    async with Bench() as bench:
        bench.acts += [raising(ValueError("x"), 10), after(10, "again")]
        first, joined = bench.start("search"), bench.start("search")
        for task in (first, joined):
            bad(await task, ErrorKind.INTERNAL, Outcome.RAN)
        assert len(bench.runs) == 1
        assert good(await bench.call("search")).value == "again"


@pytest.mark.requirement("D43")
@virtual_time
async def test_the_heir_has_its_own_timeout_and_owner() -> None:
    async with Bench(slots=1) as bench:
        await bench.fill(500)
        holder = bench.start(deadline_ms=100, timeout_ms=50, owner="a")
        heir = bench.start(timeout_ms=5_000, owner="b")
        bad(await holder, ErrorKind.DEADLINE, N)
        good(await heir)
        told = [event for event in bench.events if event.name == "dispatch.attempt" and event.tool == "charge"]
        assert [event.owner for event in told] == ["b"]


@pytest.mark.requirement("D43")
@virtual_time
async def test_an_heir_whose_owner_waits_for_the_holder() -> None:
    """The holder's owner line is its own while it queues, and goes to the heir when it gives up."""
    async with Bench(slots=1) as bench:
        await bench.fill(500)
        holder, heir = bench.start(deadline_ms=100, owner="a"), bench.start(owner="a")
        bad(await holder, ErrorKind.DEADLINE, N)
        good(await heir)


@pytest.mark.requirement("D43")
@virtual_time
async def test_who_comes_back_at_once_gets_a_run() -> None:
    """The claim of a holder that did not begin is given back: whoever asks meanwhile is not told of it."""
    async with Bench(slots=1) as bench:
        store = bench.store
        settle = store.settle

        async def slow_settle(*args: Any) -> bool:
            await asyncio.sleep(0.05)
            return bool(await settle(*args))

        store.settle = slow_settle
        await bench.fill(500)
        bad(await bench.call(deadline_ms=100), ErrorKind.DEADLINE, N)
        assert bench.dispatcher.statistics().flights == 1, "the claim is on its way back"
        assert good(await bench.call()).value == {"n": 0}
        assert len(bench.runs) == 1
