"""What is kept of a run, for how long, and what is done about an unknown outcome. Source: D18, D19, D55."""

from __future__ import annotations

import asyncio

import pytest

from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome, ToolError, TransientError, UsageError
from callyard.policy.retry import RetryPolicy
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.keyed_bench import Act, Bench, after, bad, good, pause, raising, small_store, stubborn

ONCE = RetryPolicy(max_attempts=1)
LIMIT_MS = 100

# act, kind of the end, its outcome (None: it succeeded), kept for a tool that is not idempotent, for one that is
ENDS: dict[str, tuple[Act, ErrorKind | None, Outcome | None, bool, bool]] = {
    "success": (after(10, "done"), None, None, True, True),
    "its own error": (raising(ToolError("no such account")), ErrorKind.TOOL_ERROR, Outcome.RAN, True, False),
    "raised": (raising(ValueError("x")), ErrorKind.INTERNAL, Outcome.RAN, True, False),
    "its own timeout": (raising(TimeoutError()), ErrorKind.INTERNAL, Outcome.RAN, True, False),
    "exit": (raising(SystemExit(3)), ErrorKind.INTERNAL, Outcome.RAN, True, False),
    "result": (after(10, float("nan")), ErrorKind.RESULT, Outcome.RAN, True, False),
    "timeout": (after(10_000), ErrorKind.TIMEOUT, Outcome.UNKNOWN, True, False),
    "straggler": (stubborn(1_000), ErrorKind.TIMEOUT, Outcome.UNKNOWN, True, False),
    "memory": (raising(MemoryError()), ErrorKind.RESOURCE_LIMIT, Outcome.UNKNOWN, True, False),
    "transient": (raising(TransientError("busy")), ErrorKind.TRANSIENT, Outcome.NOT_RUN, False, False),
}


@pytest.mark.requirement("D18", "D19")
@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_what_is_kept(name: str, idempotent: bool) -> None:
    """An end is kept unless running again is safe."""
    act, kind, outcome, kept_otherwise, kept_if_idempotent = ENDS[name]
    kept = kept_if_idempotent if idempotent else kept_otherwise

    @virtual_time
    async def check() -> None:
        async with Bench(retry=ONCE) as bench:
            tool = "search" if idempotent else "charge"
            bench.acts.append(act)
            first = await bench.call(tool, timeout_ms=LIMIT_MS)
            if isinstance(first, DispatchError):
                assert (first.kind, first.outcome, first.attempts) == (kind, outcome, 1)
            else:
                assert kind is None
            again = await bench.call(tool)
            assert again.deduplicated is kept
            assert len(bench.runs) == (1 if kept else 2)
            if kept and isinstance(first, DispatchError):
                assert isinstance(again, DispatchError)
                assert (again.kind, again.outcome, again.attempts) == (kind, outcome, 1)
                assert (again.call_id, again.retryable) == (first.call_id, first.retryable)
            elif not kept:
                assert good(again).value == {"n": 0}
            await pause(5_000)

    check()


@pytest.mark.requirement("D18")
@virtual_time
async def test_an_end_is_kept_for_its_time_from_the_end_of_the_run() -> None:
    async with Bench(ttl_ms=60_000) as bench:
        bench.acts.append(after(20_000, "slow"))
        good(await bench.call())
        await pause(59_900)
        assert good(await bench.call()).deduplicated
        await pause(101)
        assert not good(await bench.call()).deduplicated


@pytest.mark.requirement("D19", "D55")
@virtual_time
async def test_a_timed_out_charge_never_runs_again_by_itself() -> None:
    """Long after the usual time: until somebody resolves it, or its own time is over."""
    async with Bench(unknown_ttl_ms=3_600_000) as bench:
        bench.acts.append(after(10_000))
        bad(await bench.call(timeout_ms=LIMIT_MS), ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        for _ in range(5):
            await pause(600_000)
            again = bad(await bench.call(), ErrorKind.TIMEOUT, Outcome.UNKNOWN)
            assert (again.deduplicated, again.retryable) == (True, False)
        assert len(bench.runs) == 1
        await pause(600_001)
        assert not good(await bench.call()).deduplicated


@pytest.mark.requirement("D19")
@virtual_time
async def test_resolved_by_a_result() -> None:
    async with Bench() as bench:
        bench.acts.append(after(10_000))
        bad(await bench.call(timeout_ms=LIMIT_MS), ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        assert await bench.dispatcher.resolve("default", "charge", "k", {"paid": 5})
        again = good(await bench.call())
        assert (again.value, again.deduplicated) == ({"paid": 5}, True)
        assert len(bench.runs) == 1
        assert not await bench.dispatcher.resolve("default", "charge", "k", {"paid": 6}), "it is known by now"
        await pause(60_001)
        assert not good(await bench.call()).deduplicated, "kept as long as any other end"


@pytest.mark.requirement("D19")
@virtual_time
async def test_resolved_by_leave_to_run_again() -> None:
    async with Bench() as bench:
        bench.acts.append(after(10_000))
        bad(await bench.call(timeout_ms=LIMIT_MS), ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        assert await bench.dispatcher.resolve("default", "charge", "k", retry=True)
        assert not good(await bench.call()).deduplicated
        assert len(bench.runs) == 2


@pytest.mark.requirement("D19")
@virtual_time
async def test_what_is_not_unknown_is_not_resolved() -> None:
    async with Bench() as bench:
        bench.acts += [after(10, "mine"), raising(ValueError("x"))]
        running = bench.start()
        await pause(0)
        assert not await bench.dispatcher.resolve("default", "charge", "k", "theirs"), "in flight"
        assert good(await running).value == "mine"
        bad(await bench.call(key="ran"), ErrorKind.INTERNAL, Outcome.RAN)
        for tenant, tool, key in (
            ("default", "charge", "k"),
            ("default", "charge", "ran"),
            ("default", "charge", "none"),
            ("b", "charge", "k"),
            ("default", "search", "k"),
        ):
            assert not await bench.dispatcher.resolve(tenant, tool, key, "theirs")
        assert good(await bench.call()).value == "mine"
        with pytest.raises(UsageError):
            await bench.dispatcher.resolve("default", "charge", "k", float("nan"))


@pytest.mark.requirement("D18")
@virtual_time
async def test_a_holder_cancelled_while_it_ran_is_kept_as_unknown() -> None:
    async with Bench() as bench:
        bench.add("wipe", on_abandon="cancel")
        task = bench.start("wipe")
        await pause(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pause(10)
        assert bench.ended == ["cancelled"]
        bad(await bench.call("wipe"), ErrorKind.CANCELLED, Outcome.UNKNOWN)
        assert len(bench.runs) == 1


@pytest.mark.requirement("D20", "D55")
@virtual_time
async def test_unknown_ends_are_never_pushed_out() -> None:
    async with Bench(small_store()) as bench:
        bench.acts.append(after(10_000))
        bad(await bench.call(timeout_ms=LIMIT_MS), ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        for index in range(5):
            good(await bench.call("search", key=f"s-{index}"))
        bad(await bench.call(), ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        assert [run.tool for run in bench.runs] == ["charge"] + ["search"] * 5


@pytest.mark.requirement("D12", "D19")
@virtual_time
async def test_a_charge_that_ran_out_of_time_is_not_retried_inside_either() -> None:
    async with Bench() as bench:
        bench.acts.append(after(10_000))
        ended = bad(await bench.call(timeout_ms=LIMIT_MS), ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        assert (ended.attempts, ended.retryable) == (1, False)
        assert "retry" not in bench.names()
