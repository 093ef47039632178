"""Whose run it is, and what becomes of it when those who wait for it go. Source: D17, D41, D43, D56."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.errors import ErrorKind, Outcome
from callyard.policy.breaker import BreakerPolicy, BreakerState
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.keyed_bench import RUN_MS, Bench, after, bad, cancel, good, pause, raising, tidying


@pytest.mark.requirement("D17")
@pytest.mark.parametrize("tool", ["charge", "search"])
def test_the_run_goes_on_when_its_first_caller_is_cancelled(tool: str) -> None:
    @virtual_time
    async def check() -> None:
        async with Bench() as bench:
            first = bench.start(tool)
            others = [bench.start(tool) for _ in range(3)]
            await pause(100)
            await cancel(first)
            assert bench.timers.now_ms() == 100, "its own wait ends at once"
            results = [good(result) for result in await asyncio.gather(*others)]
            assert all(result.deduplicated and result.value == {"n": 0} for result in results)
            assert (len(bench.runs), bench.ended) == (1, ["ok"])

    check()


@pytest.mark.requirement("D17", "D41")
@pytest.mark.parametrize(
    ("promises", "goes_on"),
    [
        ({}, True),
        ({"on_abandon": "cancel"}, False),
        ({"idempotent": True}, False),
        ({"idempotent": True, "on_abandon": "finish"}, True),
        ({"pure": True}, False),
    ],
)
def test_a_run_that_nobody_waits_for(promises: dict[str, Any], goes_on: bool) -> None:
    @virtual_time
    async def check() -> None:
        async with Bench() as bench:
            bench.add("tool", **promises)
            first, second = bench.start("tool"), bench.start("tool")
            await pause(100)
            await cancel(second)
            await pause(100)
            assert bench.ended == [], "somebody waits"
            await cancel(first)
            assert bench.timers.now_ms() == 200
            await pause(0)
            assert bench.ended == ([] if goes_on else ["cancelled"])
            await pause(RUN_MS)
            assert bench.ended == (["ok"] if goes_on else ["cancelled"])
            again = await bench.call("tool")
            if goes_on:
                assert (good(again).deduplicated, good(again).call_id) == (True, bench.runs[0].call_id)
            elif promises.get("idempotent") or promises.get("pure"):
                assert not good(again).deduplicated
            else:
                bad(again, ErrorKind.CANCELLED, Outcome.UNKNOWN)

    check()


@pytest.mark.requirement("D17")
@virtual_time
async def test_a_run_whose_callers_have_gone_is_joined_by_who_comes() -> None:
    async with Bench() as bench:
        first = bench.start()
        await pause(100)
        await cancel(first)
        joined = good(await bench.call())
        assert (joined.deduplicated, joined.value) == (True, {"n": 0})
        assert bench.timers.now_ms() == RUN_MS


@pytest.mark.requirement("D17")
@virtual_time
async def test_the_last_joiner_going_ends_the_run_of_a_caller_who_went_before() -> None:
    async with Bench() as bench:
        first, second = bench.start("search"), bench.start("search")
        await pause(100)
        await cancel(first)
        await pause(100)
        await cancel(second)
        await pause(0)
        assert bench.ended == ["cancelled"]


@pytest.mark.requirement("D17")
@virtual_time
async def test_who_comes_while_an_abandoned_run_stops_gets_a_run_and_not_its_end() -> None:
    """The code swallows its cancellation for a while: the key is still held, and free again after it."""
    async with Bench() as bench:
        bench.acts.append(tidying(100))
        first = bench.start("search")
        await pause(10)
        await cancel(first)
        await pause(10)
        again = good(await bench.call("search"))
        assert (again.value, again.deduplicated, again.attempts) == ({"n": 0}, False, 1)
        assert bench.ended == ["cancelled", "ok"]


@pytest.mark.requirement("D17", "D19")
@virtual_time
async def test_who_comes_while_an_abandoned_charge_stops_gets_its_unknown_end() -> None:
    async with Bench() as bench:
        bench.add("wipe", on_abandon="cancel")
        bench.acts.append(tidying(100))
        first = bench.start("wipe")
        await pause(10)
        await cancel(first)
        bad(await bench.call("wipe"), ErrorKind.CANCELLED, Outcome.UNKNOWN)
        assert len(bench.runs) == 1


@pytest.mark.requirement("D14", "D17")
@virtual_time
async def test_a_run_that_goes_on_alone_is_still_its_callers_call() -> None:
    """Its nested calls are nested, though its caller has gone: they take no slot, and its tenant is theirs."""
    async with Bench(slots=1) as bench:

        async def nests() -> Any:
            await asyncio.sleep(0.1)
            return good(await bench.call("search", key=None)).call_id

        bench.acts.append(nests)
        first = bench.start(tenant="a")
        await pause(10)
        await cancel(first)
        await pause(2_000)
        assert bench.ended == ["ok", "ok"]
        assert [event.tenant for event in bench.events if event.tool == "search"] == ["a"] * 3
        nested = next(event for event in bench.events if event.tool == "search")
        assert nested.parent_id == bench.runs[0].call_id


@pytest.mark.requirement("D41", "D56")
@virtual_time
async def test_an_explicit_cancel_stops_a_run_that_is_the_callers_alone() -> None:
    async with Bench() as bench:
        first = bench.start(call_id="c-1")
        await pause(100)
        assert bench.dispatcher.cancel("c-1")  # type: ignore[arg-type]
        ended = bad(await first, ErrorKind.CANCELLED, Outcome.UNKNOWN)
        assert (ended.attempts, bench.ended) == (1, ["cancelled"])
        again = bad(await bench.call(), ErrorKind.CANCELLED, Outcome.UNKNOWN)
        assert again.deduplicated
        assert not bench.dispatcher.cancel("c-1")  # type: ignore[arg-type]


@pytest.mark.requirement("D17", "D41")
@pytest.mark.parametrize("who", ["c-1", "c-2"])
def test_an_explicit_cancel_leaves_the_run_to_the_others(who: str) -> None:
    @virtual_time
    async def check() -> None:
        async with Bench() as bench:
            callers = {name: bench.start("search", call_id=name) for name in ("c-1", "c-2")}
            await pause(100)
            assert bench.dispatcher.cancel(who)  # type: ignore[arg-type]
            ended = bad(await callers.pop(who), ErrorKind.CANCELLED, Outcome.UNKNOWN)
            assert (ended.attempts, bench.timers.now_ms()) == (0, 100)
            (other,) = callers.values()
            assert good(await other).value == {"n": 0}
            assert bench.ended == ["ok"]

    check()


@pytest.mark.requirement("D41", "D56")
@virtual_time
async def test_an_explicit_cancel_by_the_last_joiner_stops_the_run() -> None:
    async with Bench() as bench:
        first, second = bench.start(), bench.start(call_id="c-2")
        await pause(100)
        await cancel(first)
        assert bench.dispatcher.cancel("c-2")  # type: ignore[arg-type]
        bad(await second, ErrorKind.CANCELLED, Outcome.UNKNOWN)
        await pause(0)
        assert (bench.ended, len(bench.runs)) == (["cancelled"], 1)


@pytest.mark.requirement("D41", "D43")
@virtual_time
async def test_an_explicit_cancel_while_queued_hands_the_claim_on() -> None:
    async with Bench(slots=1) as bench:
        await bench.fill(500)
        first, second = bench.start(call_id="c-1"), bench.start()
        await pause(100)
        assert bench.dispatcher.cancel("c-1")  # type: ignore[arg-type]
        ended = await first
        assert (ended.error.kind, ended.error.attempts) == (ErrorKind.CANCELLED, 0)
        assert bench.timers.now_ms() == 100
        result = good(await second)
        assert (result.deduplicated, result.attempts, len(bench.runs)) == (False, 1, 1)


@pytest.mark.requirement("D43")
@virtual_time
async def test_a_joiner_takes_no_slot_no_allowance_and_no_count() -> None:
    policy = BreakerPolicy(failures=2)
    async with Bench(slots=1, breaker=policy) as bench:
        bench.acts.append(raising(ValueError("x"), 100))
        allowance = Allowance(calls=5)
        callers = [bench.start(allowance=allowance) for _ in range(10)]
        await pause(10)
        statistics = bench.dispatcher.statistics()
        assert (statistics.running, statistics.queued) == (1, 0)
        for result in await asyncio.gather(*callers):
            bad(result, ErrorKind.INTERNAL, Outcome.RAN)
        assert allowance.taken == 1
        assert bench.dispatcher.breaker_state("charge") is BreakerState.CLOSED, "one failure, however many heard of it"
        bad(await bench.call(allowance=Allowance(calls=0)), ErrorKind.INTERNAL, Outcome.RAN)


@pytest.mark.requirement("D43")
@pytest.mark.parametrize(
    ("options", "kind", "limit"),
    [
        ({"deadline_ms": 100}, ErrorKind.DEADLINE, "deadline_ms"),
        ({"timeout_ms": 100}, ErrorKind.TIMEOUT, "timeout_ms"),
        ({"timeout_ms": 100, "deadline_ms": 5_000}, ErrorKind.TIMEOUT, "timeout_ms"),
    ],
)
def test_a_joiner_that_gives_up_first(options: dict[str, Any], kind: ErrorKind, limit: str) -> None:
    @virtual_time
    async def check() -> None:
        async with Bench() as bench:
            first = bench.start()
            await pause(10)
            ended = bad(await bench.call(**options), kind, Outcome.UNKNOWN)
            assert (ended.attempts, ended.details["limit"], bench.timers.now_ms()) == (0, limit, 110)
            assert not ended.deduplicated
            assert good(await first).value == {"n": 0}, "the run goes on"

    check()


@pytest.mark.requirement("D14", "D43")
@virtual_time
async def test_a_joiner_waits_no_longer_than_the_allowance_of_the_call_it_is_nested_in() -> None:
    async with Bench() as bench:
        found: list[Any] = []

        async def nests() -> Any:
            found.append(await bench.call("search", key="shared"))

        bench.acts += [after(10_000), nests]
        running = bench.start("search", key="shared")
        await pause(0)
        await bench.call("charge", key=None, allowance=Allowance(wall_ms=300))
        assert bench.timers.now_ms() <= 300 + 250
        for result in found:
            bad(result, ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        good(await running)


@pytest.mark.requirement("D43")
@virtual_time
async def test_a_joiner_outwaits_the_longest_wait_in_the_queue() -> None:
    """It waits for a run, not for a seat."""
    async with Bench(queue_wait_ms_max=200) as bench:
        first, joined = bench.start(), bench.start()
        assert good(await joined).deduplicated
        good(await first)


@pytest.mark.requirement("D14", "D43")
@virtual_time
async def test_a_nested_call_under_the_key_of_an_ancestor_is_a_conflict() -> None:
    async with Bench() as bench:
        found: list[Any] = []

        async def nests() -> str:
            found.append(await bench.call())
            found.append(await bench.call(key="other"))
            return "done"

        async def deeper() -> str:
            found.append(await bench.call())
            return "deep"

        bench.acts += [nests, deeper]
        assert good(await bench.call()).value == "done"
        bad(found[0], ErrorKind.CONFLICT, Outcome.NOT_RUN)
        bad(found[1], ErrorKind.CONFLICT, Outcome.NOT_RUN)
        assert good(found[2]).value == "deep"
        assert len(bench.runs) == 2


@pytest.mark.requirement("D14", "D43")
@virtual_time
async def test_two_keys_that_wait_for_each_other_are_a_cycle() -> None:
    async with Bench() as bench:
        found: dict[str, Any] = {}

        def nests(other: str) -> Any:
            async def act() -> str:
                await asyncio.sleep(0.1)
                found[other] = await bench.call(key=other)
                return f"waited for {other}"

            return act

        bench.acts += [nests("b"), nests("a")]
        of_a, of_b = bench.start(key="a"), bench.start(key="b")
        await asyncio.gather(of_a, of_b)
        kinds = sorted(result.error.kind if not result.ok else "ok" for result in found.values())
        assert kinds == ["denied", "ok"]
        denied = next(result.error for result in found.values() if not result.ok)
        assert denied.details["reason"] == "cycle"


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("keys", [("ka", "kb"), ("ka", None), (None, "kb")])
def test_seats_that_wait_for_each_other_are_a_cycle_for_keyed_calls_too(keys: tuple[str | None, str | None]) -> None:
    @virtual_time
    async def check() -> None:
        async with Bench() as bench:
            for name in ("a", "b"):
                bench.add(name, max_concurrency=1)
            found: list[Any] = []

            def nests(other: str, key: str | None, ms: int) -> Any:
                async def act() -> None:
                    await asyncio.sleep(ms / 1_000)
                    found.append(await bench.call(other, key=key))

                return act

            bench.acts += [nests("b", keys[0], 100), nests("a", keys[1], 200)]
            await asyncio.gather(bench.start("a", key=None), bench.start("b", key=None))
            kinds = sorted(result.error.kind if not result.ok else "ok" for result in found)
            assert kinds == ["denied", "ok"]

    check()


@pytest.mark.requirement("D17")
@virtual_time
async def test_each_runs_in_the_context_of_who_asked() -> None:
    """Joined and handed on: the run has the contextvars of the caller whose run it is."""
    import contextvars

    asker: contextvars.ContextVar[str] = contextvars.ContextVar("asker")
    async with Bench(slots=1) as bench:
        seen: list[str] = []

        async def look() -> None:
            seen.append(asker.get())

        def start(name: str, **options: Any) -> asyncio.Task[Any]:
            context = contextvars.copy_context()
            context.run(asker.set, name)
            return context.run(lambda: bench.start(**options))

        bench.acts.append(look)
        await bench.fill(500)
        first, second = start("first"), start("second")
        await pause(10)
        await cancel(first)
        good(await second)
        assert seen == ["second"]


@pytest.mark.requirement("D17")
@virtual_time
async def test_callers_that_come_and_go_leave_nothing_behind() -> None:
    async with Bench(slots=1) as bench:
        for index in range(20):
            tool = ("charge", "search")[index % 2]
            tasks = [bench.start(tool, key=f"k-{index}", owner="o" if index % 3 else None) for _ in range(4)]
            await pause(index * 7 % 30)
            for task in tasks[:: 1 + index % 2]:
                task.cancel()
            await pause(index * 11 % 50)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await pause(30 * RUN_MS)
        bench.check_empty()
