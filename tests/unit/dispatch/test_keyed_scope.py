"""What a key belongs to, and that nobody sees what is another's. Source: D15, D16, D20, D42."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.keyed_bench import RUN_MS, Bench, after, bad, good, pause, raising, small_store


@pytest.mark.requirement("D15")
@virtual_time
async def test_no_key_is_ever_invented() -> None:
    async with Bench() as bench:
        for _ in range(2):
            assert not good(await bench.call(key=None)).deduplicated
        together = await asyncio.gather(*(bench.call(key=None) for _ in range(3)))
        assert [run.key for run in bench.runs] == [""] * 5
        assert len({good(result).call_id for result in together}) == 3
        assert len(bench.store) == 0


@pytest.mark.requirement("D16")
@virtual_time
async def test_two_tenants_have_two_runs_and_see_nothing_of_each_other() -> None:
    async with Bench() as bench:
        bench.acts += [after(10, "a's"), after(20, "b's")]
        of_a, of_b = bench.start(tenant="a"), bench.start(tenant="b")
        assert (good(await of_a).value, good(await of_b).value) == ("a's", "b's")
        assert len(bench.runs) == 2
        again = good(await bench.call(tenant="a"))
        assert (again.value, again.deduplicated) == ("a's", True)


@pytest.mark.requirement("D16")
@virtual_time
async def test_a_key_never_leaks_to_another_tool() -> None:
    async with Bench() as bench:
        results = await asyncio.gather(bench.call("charge"), bench.call("search"))
        assert [run.tool for run in bench.runs] == ["charge", "search"]
        assert not any(good(result).deduplicated for result in results)


@pytest.mark.requirement("D16")
@virtual_time
async def test_other_arguments_are_a_conflict_and_run_nothing() -> None:
    """While it runs, and once it is kept; whatever becomes of the run."""
    async with Bench() as bench:
        first = bench.start(n=1)
        await pause(1)
        bad(await bench.call(n=2), ErrorKind.CONFLICT, Outcome.NOT_RUN)
        assert good(await first).value == {"n": 1}
        conflict = bad(await bench.call(n=2), ErrorKind.CONFLICT, Outcome.NOT_RUN)
        assert (conflict.attempts, conflict.retryable, conflict.deduplicated) == (0, False, False)
        assert [run.n for run in bench.runs] == [1]


@pytest.mark.requirement("D16")
@virtual_time
async def test_equal_arguments_are_equal_however_they_are_written() -> None:
    async with Bench() as bench:
        first = await bench.dispatcher.dispatch("charge", b'{ "n" : 5 }', key="k")
        again = await bench.dispatcher.dispatch("charge", {"n": 5}, key="k")
        assert good(again).call_id == good(first).call_id
        assert len(bench.runs) == 1


@pytest.mark.requirement("D8", "D16")
@virtual_time
async def test_a_call_that_misfits_claims_no_key() -> None:
    async with Bench() as bench:
        bad(await bench.dispatcher.dispatch("charge", {"n": "x"}, key="k"), ErrorKind.SCHEMA, Outcome.NOT_RUN)
        assert good(await bench.call(n=3)).value == {"n": 3}


@pytest.mark.requirement("D20")
@virtual_time
async def test_a_value_that_a_caller_changes_is_nobody_elses() -> None:
    async with Bench() as bench:
        shared: list[int] = [1]
        bench.acts.append(after(10, shared))
        first, joined = bench.start(), bench.start()
        value = good(await first).value
        value.append(2)
        shared.append(3)
        assert good(await joined).value == [1]
        stored = good(await bench.call())
        stored.value.append(4)
        assert stored.value == good(await bench.call()).value == [1]


@pytest.mark.requirement("D20")
@virtual_time
async def test_the_details_of_an_error_are_nobody_elses() -> None:
    async with Bench() as bench:
        bench.acts.append(raising(ExceptionGroup("two", [ValueError("a"), ValueError("b")]), 10))
        first, joined = bench.start(), bench.start()
        details: Any = bad(await first, ErrorKind.INTERNAL, Outcome.RAN).details
        named = list(details["exceptions"])
        details["exceptions"].clear()
        assert bad(await joined, ErrorKind.INTERNAL, Outcome.RAN).details["exceptions"] == named
        assert bad(await bench.call(), ErrorKind.INTERNAL, Outcome.RAN).details["exceptions"] == named


@pytest.mark.requirement("D20")
@virtual_time
async def test_with_no_room_left_a_new_key_is_unavailable_and_runs_nothing() -> None:
    async with Bench(small_store()) as bench:
        running = bench.start(key="a")
        good(await bench.call(key="b"))
        full = bad(await bench.call(key="c"), ErrorKind.UNAVAILABLE, Outcome.NOT_RUN)
        assert full.retryable
        assert full.details["retry_after_ms"] > 0
        good(await running)
        assert sorted(run.key for run in bench.runs) == ["a", "b"]
        assert good(await bench.call(key="b")).deduplicated
        good(await bench.call(key=None))  # without a key nothing is refused


@pytest.mark.requirement("D20")
@virtual_time
async def test_ends_of_idempotent_tools_make_room() -> None:
    async with Bench(small_store()) as bench:
        for key in ("a", "b", "c"):
            good(await bench.call("search", key=key))
        assert good(await bench.call("search", key="c")).deduplicated
        assert not good(await bench.call("search", key="a")).deduplicated


@pytest.mark.requirement("D18", "D20")
@virtual_time
async def test_keys_are_not_kept_for_ever() -> None:
    """Ten thousand keys a minute, for ten minutes: a minute's worth is held, and of flights nothing."""
    async with Bench(ttl_ms=1_000) as bench:
        for index in range(300):
            bench.acts.append(after(0, index))
            good(await bench.call(key=f"k-{index}"))
            await asyncio.sleep(0.1)
            assert len(bench.store) <= 12
        assert bench.dispatcher.statistics().flights == 0


@pytest.mark.requirement("D42")
@virtual_time
async def test_one_key_covers_all_attempts() -> None:
    """Timeout, retry, success: three joiners get one result, the handler saw attempts 1 and 2, and one key."""
    async with Bench() as bench:
        bench.acts += [after(10_000), after(50, "paid")]
        callers = [bench.start("search", timeout_ms=200)]
        callers += [bench.start("search") for _ in range(3)]
        results = [good(result) for result in await asyncio.gather(*callers)]
        assert [(run.attempt, run.key) for run in bench.runs] == [(1, "k"), (2, "k")]
        assert len({run.call_id for run in bench.runs}) == 1
        assert {(result.value, result.attempts, result.call_id) for result in results} == {
            ("paid", 2, bench.runs[0].call_id)
        }
        assert [result.deduplicated for result in results] == [False, True, True, True]
        assert bench.ended == ["cancelled", "ok"]


@pytest.mark.requirement("D42", "D17")
@virtual_time
async def test_who_comes_between_two_attempts_joins() -> None:
    async with Bench() as bench:
        bench.acts += [after(10_000), after(50, "paid")]
        first = bench.start("search", timeout_ms=100)
        await pause(101)
        assert bench.names()[-1] == "retry"
        joined = good(await bench.call("search"))
        assert (joined.value, joined.attempts, joined.deduplicated) == ("paid", 2, True)
        good(await first)


@pytest.mark.requirement("D8", "D17")
@virtual_time
async def test_the_key_is_claimed_before_the_queue() -> None:
    """With all slots taken, equal calls are one call that waits, not two runs that come later."""
    async with Bench(slots=1) as bench:
        held = await bench.fill(500)
        callers = [bench.start() for _ in range(5)]
        await pause(100)
        assert bench.dispatcher.statistics().queued == 1
        results = [good(result) for result in await asyncio.gather(*callers)]
        assert len(bench.runs) == 1
        assert len({result.call_id for result in results}) == 1
        assert bench.timers.now_ms() == 500 + RUN_MS
        await asyncio.gather(*held)


@pytest.mark.requirement("D43")
@virtual_time
async def test_a_joined_answer_says_so() -> None:
    async with Bench() as bench:
        first, joined = bench.start(), bench.start()
        mine, theirs = good(await first), good(await joined)
        stored = good(await bench.call())
        assert not mine.deduplicated
        assert (theirs.deduplicated, theirs.call_id, theirs.attempts) == (True, mine.call_id, 1)
        assert (stored.deduplicated, stored.call_id, stored.attempts) == (True, mine.call_id, 1)
        assert bench.names() == ["start", "start", "attempt", "success", "deduplicated", "start", "deduplicated"]
