"""The stop, with runs of keys under way. Source: D46."""

from __future__ import annotations

import asyncio

import pytest

from callyard.errors import ErrorKind, Outcome
from callyard.testing.virtual_time import VirtualTimers, run_virtual, virtual_time
from tests.unit.dispatch.keyed_bench import RUN_MS, Bench, after, bad, cancel, good, pause, stubborn


@pytest.mark.requirement("D46")
@virtual_time
async def test_runs_under_way_end_and_new_calls_are_refused() -> None:
    async with Bench() as bench:
        first, joined = bench.start(), bench.start()
        await pause(100)
        closing = asyncio.ensure_future(bench.dispatcher.close())
        await pause(0)
        bad(await bench.call(), ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN)
        bad(await bench.call(key="other"), ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN)
        assert good(await first).value == good(await joined).value == {"n": 0}
        await closing
        assert bench.timers.now_ms() == RUN_MS


@pytest.mark.requirement("D46")
@virtual_time
async def test_the_stop_waits_for_a_run_that_nobody_waits_for() -> None:
    async with Bench() as bench:
        first = bench.start()
        await pause(100)
        await cancel(first)
        await bench.dispatcher.close()
        assert (bench.ended, bench.timers.now_ms()) == (["ok"], RUN_MS)


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("alone", [False, True])
def test_at_the_deadline_what_runs_is_stopped_and_its_end_kept(alone: bool) -> None:
    @virtual_time
    async def check() -> None:
        async with Bench(drain_deadline_ms=500) as bench:
            bench.acts.append(after(60_000))
            first, joined = bench.start(), bench.start()
            await pause(0)
            if alone:
                await cancel(first)
                await cancel(joined)
            await bench.dispatcher.close()
            assert bench.ended == ["cancelled"]
            assert bench.timers.now_ms() <= 500 + 250
            if not alone:
                ended = bad(await first, ErrorKind.CANCELLED, Outcome.UNKNOWN)
                assert ended.attempts == 1
                other = (await joined).error
                assert other.outcome is Outcome.UNKNOWN
                assert other.kind in (ErrorKind.CANCELLED, ErrorKind.SHUTTING_DOWN)
            (record,) = await bench.store.unknown()
            assert record.scope.key == "k"

    check()


@pytest.mark.requirement("D46")
@virtual_time
async def test_at_the_deadline_what_waits_never_runs() -> None:
    async with Bench(slots=1, drain_deadline_ms=500) as bench:
        bench.acts.append(after(60_000))
        running = bench.start(key="a")
        await pause(0)
        queued, joined = bench.start(key="b"), bench.start(key="b")
        await bench.dispatcher.close()
        bad(await running, ErrorKind.CANCELLED, Outcome.UNKNOWN)
        ended = bad(await queued, ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN)
        assert ended.attempts == 0
        assert (await joined).error.kind is ErrorKind.SHUTTING_DOWN
        assert [run.key for run in bench.runs] == ["a"]


@pytest.mark.requirement("D46")
@virtual_time
async def test_no_retry_starts_while_it_stops() -> None:
    async with Bench() as bench:
        bench.acts.append(after(60_000))
        first = bench.start("search", timeout_ms=200)
        await pause(100)
        closing = asyncio.ensure_future(bench.dispatcher.close())
        ended = bad(await first, ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        assert (ended.attempts, len(bench.runs)) == (1, 1)
        await closing


@pytest.mark.requirement("D46")
def test_a_handler_that_never_ends_holds_nothing_up() -> None:
    async def check() -> None:
        bench = Bench(drain_deadline_ms=500)
        await bench.__aenter__()
        bench.acts.append(stubborn(3_600_000))
        first = bench.start()
        await pause(0)
        await bench.dispatcher.close()
        assert VirtualTimers().now_ms() <= 500 + 2_000
        bad(await first, ErrorKind.CANCELLED, Outcome.UNKNOWN)
        assert bench.dispatcher.statistics().flights == 0
        assert len(bench.dispatcher.statistics().stragglers) == 1

    run_virtual(check())


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("step", ["claim", "settle", "close"])
def test_a_store_that_never_answers_holds_nothing_up(step: str) -> None:
    async def check() -> None:
        bench = Bench(drain_deadline_ms=1_500)
        await bench.__aenter__()

        async def hang(*args: object, **options: object) -> None:
            await asyncio.Event().wait()

        setattr(bench.store, step, hang)
        asyncio.get_running_loop().call_later(3_600, int)  # else the loop sees a deadlock
        first, joined = bench.start(), bench.start()
        await pause(10)
        await bench.dispatcher.close()
        assert VirtualTimers().now_ms() <= 1_500 + 2_000
        for task in (first, joined):
            result = await task
            if step == "claim":
                bad(result, ErrorKind.SHUTTING_DOWN, result.outcome)
            elif task is first or step == "close":
                good(result)
            else:  # it was asked to go while the end was being kept
                bad(result, ErrorKind.SHUTTING_DOWN, Outcome.UNKNOWN)
        assert bench.dispatcher.statistics().flights == 0

    run_virtual(check())


@pytest.mark.requirement("D46")
@virtual_time
async def test_a_settle_that_hangs_takes_no_answer_away() -> None:
    bench = Bench(drain_deadline_ms=1_500)
    await bench.__aenter__()

    async def hang(*_: object) -> bool:
        await asyncio.Event().wait()
        return True

    bench.store.settle = hang
    first = bench.start()
    await pause(10)
    await bench.dispatcher.close()
    assert good(await first).value == {"n": 0}
    assert bench.dispatcher.statistics().lost_claims == 1
