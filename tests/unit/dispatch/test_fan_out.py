"""`gather_bounded`: many calls, so many at once."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from callyard.dispatch.fan_out import ToolCall
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome, ToolError, TransientError, UsageError
from callyard.functions.registry import Registry
from callyard.policy.retry import RetryPolicy
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import add, add_work, assert_quiet, hear, make, now_ms, spin


@pytest.mark.requirement("D27")
@virtual_time
async def test_results_come_in_the_order_of_the_calls_and_the_peak_is_never_above_the_limit() -> None:
    registry, rng = Registry(), Random(1)
    inside, peak = [0], [0]

    async def handler(arguments: dict[str, Any]) -> int:
        inside[0] += 1
        peak[0] = max(peak[0], inside[0])
        await asyncio.sleep(rng.random())
        inside[0] -= 1
        number: int = arguments["n"]
        return number

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        for limit in (1, 3, 8, 500):
            peak[0] = 0
            calls = (ToolCall("tool", {"n": n}) for n in range(100))
            results = await dispatcher.gather_bounded(calls, limit=limit)
            assert [result.value for result in results] == list(range(100))
            assert peak[0] == min(limit, 100)
        assert await dispatcher.gather_bounded([]) == []
        assert_quiet(dispatcher)


@pytest.mark.requirement("D27")
@virtual_time
async def test_eight_at_once_by_default() -> None:
    registry = Registry()
    work = add_work(registry)
    async with make(registry) as dispatcher:
        await dispatcher.gather_bounded([ToolCall("work")] * 20)
        assert work.peak == 8
        assert now_ms() == 3_000


@pytest.mark.requirement("D27")
@virtual_time
async def test_one_failure_leaves_the_others_alone() -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> str:
        await asyncio.sleep(0.1)
        if arguments.get("fail"):
            raise ToolError("no")
        return "yes"

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        calls = [ToolCall("tool"), ToolCall("tool", {"fail": True}), ToolCall("nope"), ToolCall("tool")]
        results = await dispatcher.gather_bounded(calls, limit=4)
        assert [result.ok for result in results] == [True, False, False, True]
        assert [result.kind.value for result in results if isinstance(result, DispatchError)] == [
            "tool_error",
            "not_found",
        ]


@pytest.mark.requirement("D27")
@virtual_time
async def test_fail_fast_stops_the_rest_and_leaves_nothing_running() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=10_000)

    async def fails(arguments: dict[str, Any]) -> None:
        await asyncio.sleep(0.5)
        raise ToolError("no")

    add(registry, "fails", fails)
    async with make(registry) as dispatcher:
        calls = [ToolCall("work"), ToolCall("fails"), ToolCall("work"), *[ToolCall("work")] * 5]
        results = await dispatcher.gather_bounded(calls, limit=3, fail_fast=True)
        assert now_ms() == 500
        kinds = [result.kind for result in results if isinstance(result, DispatchError)]
        assert kinds == [ErrorKind.CANCELLED, ErrorKind.TOOL_ERROR, *[ErrorKind.CANCELLED] * 6]
        outcomes = [result.outcome for result in results if isinstance(result, DispatchError)]
        assert outcomes == [Outcome.UNKNOWN, Outcome.RAN, Outcome.UNKNOWN, *[Outcome.NOT_RUN] * 5]
        assert (work.begun, work.cancelled, work.inside) == (2, 2, 0)
        assert_quiet(dispatcher)
        await asyncio.sleep(60)
        assert work.begun == 2  # nothing goes on unseen


@pytest.mark.requirement("D27")
@virtual_time
async def test_fail_fast_ends_calls_that_queue_and_that_wait_for_a_retry() -> None:
    registry = Registry()
    work = add_work(registry, "work", wait_ms=10_000, max_concurrency=1)
    attempts = []

    async def flaky(arguments: dict[str, Any]) -> None:
        attempts.append(now_ms())
        raise TransientError("busy", retry_after_ms=60_000)

    async def fails(arguments: dict[str, Any]) -> None:
        await asyncio.sleep(0.5)
        raise ToolError("no")

    add(registry, "flaky", flaky)
    add(registry, "fails", fails)
    async with make(registry) as dispatcher:
        calls = [ToolCall("work"), ToolCall("work"), ToolCall("flaky"), ToolCall("fails")]
        results = await dispatcher.gather_bounded(calls, fail_fast=True)
        kinds = [result.kind.value for result in results if isinstance(result, DispatchError)]
        assert kinds == ["cancelled", "cancelled", "cancelled", "tool_error"]
        assert now_ms() == 500
        assert work.begun == 1
        assert len(attempts) == 1
        assert_quiet(dispatcher)


@pytest.mark.requirement("D27")
@virtual_time
async def test_without_a_failure_fail_fast_changes_nothing() -> None:
    registry = Registry()
    add_work(registry)
    async with make(registry) as dispatcher:
        results = await dispatcher.gather_bounded([ToolCall("work")] * 3, fail_fast=True)
        assert all(result.ok for result in results)


@pytest.mark.requirement("D27", "D41")
@pytest.mark.parametrize("fail_fast", [False, True])
@virtual_time
async def test_cancelling_it_ends_all(fail_fast: bool) -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=10_000)
    async with make(registry) as dispatcher:
        calls = [ToolCall("work", owner="o" if n % 2 else None) for n in range(10)]
        gathering = asyncio.ensure_future(dispatcher.gather_bounded(calls, limit=4, fail_fast=fail_fast))
        await asyncio.sleep(0.1)
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering
        await spin()
        assert work.begun == work.cancelled == 3
        assert work.inside == 0
        assert_quiet(dispatcher)
        await asyncio.sleep(60)
        assert work.begun == 3


@pytest.mark.requirement("D27")
@virtual_time
async def test_a_seat_is_held_through_the_waits_between_attempts() -> None:
    registry, runs = Registry(), []

    async def flaky(arguments: dict[str, Any]) -> None:
        runs.append((arguments["n"], now_ms()))
        raise TransientError

    add(registry, "flaky", flaky, retry=RetryPolicy(jitter=0))
    async with make(registry) as dispatcher:
        await dispatcher.gather_bounded([ToolCall("flaky", {"n": n}) for n in range(2)], limit=1)
        assert runs == [(0, 0), (0, 100), (0, 500), (1, 500), (1, 600), (1, 1_000)]


@pytest.mark.requirement("D27", "D17")
@virtual_time
async def test_calls_of_one_key_in_one_fan_out_share_a_run() -> None:
    registry = Registry()
    work = add_work(registry)
    async with make(registry) as dispatcher:
        results = await dispatcher.gather_bounded([ToolCall("work", idempotency_key="k")] * 5)
        assert [result.value for result in results] == [1] * 5
        assert work.begun == 1


@pytest.mark.requirement("D27")
@pytest.mark.parametrize("limit", [0, -1, True, 1.5, None])
@virtual_time
async def test_a_limit_that_means_nothing(limit: Any) -> None:
    async with make(Registry()) as dispatcher:
        with pytest.raises(UsageError, match="limit"):
            await dispatcher.gather_bounded([], limit=limit)


@pytest.mark.requirement("D27")
@pytest.mark.parametrize(
    "bad",
    [ToolCall("work", timeout_ms=-1), ToolCall("work", owner=""), ToolCall("work", call_id="twice"), "work"],
    ids=repr,
)
@virtual_time
async def test_a_call_with_an_option_out_of_range_is_refused_before_any_begins(bad: Any) -> None:
    registry = Registry()
    work = add_work(registry)
    async with make(registry) as dispatcher:
        with pytest.raises(UsageError):
            await dispatcher.gather_bounded([ToolCall("work", call_id="twice"), bad, ToolCall("work")], limit=1)
        assert work.begun == 0
        assert_quiet(dispatcher)


@pytest.mark.requirement("D27", "D14")
@virtual_time
async def test_a_handler_may_fan_out() -> None:
    registry = Registry()
    work = add_work(registry)

    async def parent(arguments: dict[str, Any]) -> int:
        results = await dispatcher.gather_bounded([ToolCall("work")] * 6, limit=2)
        return sum(result.ok for result in results)

    add(registry, "parent", parent)
    async with make(registry, slots=1) as dispatcher:
        events = hear(dispatcher)
        assert (await dispatcher.dispatch("parent")).value == 6
        assert work.peak == 2
        assert len({event.parent_id for event in events}) == 2


@pytest.mark.requirement("D27")
@virtual_time
async def test_slots_bound_what_runs_whatever_the_fan_outs_say() -> None:
    registry = Registry()
    work = add_work(registry)
    async with make(registry, slots=3) as dispatcher:
        await asyncio.gather(*(dispatcher.gather_bounded([ToolCall("work")] * 4, limit=4) for _ in range(3)))
        assert work.peak == 3
        assert work.ended == 12


@pytest.mark.requirement("D27", "D39")
@virtual_time
async def test_with_a_worker_its_capacity_bounds_the_slots() -> None:
    from tests.unit.dispatch.kit import FakeRunner

    registry, worker = Registry(), FakeRunner()
    work = add_work(registry)
    async with make(registry, worker=worker) as dispatcher:
        await dispatcher.gather_bounded([ToolCall("work")] * 20, limit=20)
        assert work.peak == FakeRunner.capacity
    assert make(Registry()).config.slots == 1_024
