"""Order per owner: one at a time, in order of arrival, others beside them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.dispatch.outcomes import DispatchResult
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import add, add_work, assert_quiet, make, now_ms, spin


@pytest.mark.requirement("D31")
@virtual_time
async def test_calls_of_one_owner_run_one_at_a_time_in_order_of_arrival() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=100)
    async with make(registry) as dispatcher:
        await asyncio.gather(*(dispatcher.dispatch("work", {"mark": n}, owner="o") for n in range(5)))
        assert work.order == [0, 1, 2, 3, 4]
        assert work.peak == 1
        assert now_ms() == 500
        assert_quiet(dispatcher)


@pytest.mark.requirement("D31")
@virtual_time
async def test_other_owners_and_calls_without_one_run_beside_them() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=100)
    async with make(registry) as dispatcher:
        calls = [dispatcher.dispatch("work", owner=owner) for owner in ("a", "b", "c", None, None)]
        await asyncio.gather(*calls)
        assert work.peak == 5
        assert now_ms() == 100


@pytest.mark.requirement("D31")
@virtual_time
async def test_the_order_is_over_all_tools_of_the_owner() -> None:
    registry = Registry()
    order: list[str] = []
    for name, wait in (("slow", 1.0), ("fast", 0.0)):

        async def handler(arguments: dict[str, Any], name: str = name, wait: float = wait) -> None:
            await asyncio.sleep(wait)
            order.append(name)

        add(registry, name, handler)
    async with make(registry) as dispatcher:
        await asyncio.gather(*(dispatcher.dispatch(name, owner="o") for name in ("slow", "fast", "slow", "fast")))
        assert order == ["slow", "fast", "slow", "fast"]


@pytest.mark.requirement("D31", "D41")
@virtual_time
async def test_one_that_gives_up_in_the_line_leaves_the_order_of_the_others() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=100)
    async with make(registry) as dispatcher:
        calls = [asyncio.ensure_future(dispatcher.dispatch("work", {"mark": n}, owner="o")) for n in range(4)]
        await spin()
        calls[1].cancel()
        calls[2].cancel()
        await asyncio.wait(calls)
        assert work.order == [0, 3]
        assert_quiet(dispatcher)


@pytest.mark.requirement("D31", "D12")
@virtual_time
async def test_a_turn_is_held_through_the_retries() -> None:
    from callyard.errors import TransientError

    registry, order = Registry(), []

    async def flaky(arguments: dict[str, Any]) -> None:
        order.append(arguments["n"])
        if order.count(arguments["n"]) < 3:
            raise TransientError

    add(registry, "flaky", flaky)
    async with make(registry) as dispatcher:
        await asyncio.gather(*(dispatcher.dispatch("flaky", {"n": n}, owner="o") for n in range(2)))
        assert order == [0, 0, 0, 1, 1, 1]


@pytest.mark.requirement("D45")
@virtual_time
async def test_owner_as_tool_fans_out_three_calls_for_a_in_order_without_a_deadlock() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=100)
    ends: list[DispatchResult] = []

    async def parent(arguments: dict[str, Any]) -> None:
        calls = (dispatcher.dispatch("work", {"mark": n}, owner="A") for n in range(3))
        ends.extend(await asyncio.gather(*calls))

    add(registry, "parent", parent)
    async with make(registry) as dispatcher:
        parents = [asyncio.ensure_future(dispatcher.dispatch("parent", owner="A")) for _ in range(2)]
        await spin()
        outside = asyncio.ensure_future(dispatcher.dispatch("work", {"mark": "outside"}, owner="A"))
        await asyncio.gather(*parents, outside)
        assert all(end.ok for end in ends)
        assert work.order == [0, 1, 2, 0, 1, 2, "outside"]
        assert work.peak == 1
        assert now_ms() == 700
        assert_quiet(dispatcher)


@pytest.mark.requirement("D45")
@virtual_time
async def test_a_grandchild_for_the_same_owner_runs_inside_the_turn_of_its_nearest_ancestor() -> None:
    registry, order = Registry(), []

    async def node(arguments: dict[str, Any]) -> None:
        order.append(arguments["name"])
        for below in arguments.get("below", ()):
            assert (await dispatcher.dispatch("node", below, owner="A")).ok

    add(registry, "node", node)
    async with make(registry) as dispatcher:
        tree = {"name": 1, "below": [{"name": 2, "below": [{"name": 3}]}, {"name": 4}]}
        ends = await asyncio.gather(
            dispatcher.dispatch("node", tree, owner="A"), dispatcher.dispatch("node", {"name": 5}, owner="A")
        )
        assert all(end.ok for end in ends)
        assert order == [1, 2, 3, 4, 5]
        assert now_ms() == 0
        assert_quiet(dispatcher)


@pytest.mark.requirement("D45")
@virtual_time
async def test_an_owners_line_is_dropped_when_it_is_empty() -> None:
    registry = Registry()
    add_work(registry, wait_ms=1)
    async with make(registry, slots=10_000, queued_max=5_000) as dispatcher:
        calls = [dispatcher.dispatch("work", owner=f"o{n}") for n in range(1_000)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await spin(2)
        assert dispatcher.statistics().owners == 1_000
        await asyncio.gather(*tasks)
        assert dispatcher.statistics().owners == 0


@pytest.mark.requirement("D8", "D45")
@virtual_time
async def test_a_line_is_dropped_whatever_ended_the_call() -> None:
    from callyard.dispatch.allowance import Allowance

    registry = Registry()
    add_work(registry, wait_ms=1_000)
    async with make(registry, slots=1) as dispatcher:
        first = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        await dispatcher.dispatch("work", owner="a", allowance=Allowance(0))
        await dispatcher.dispatch("work", owner="b", deadline_ms=10)
        await dispatcher.dispatch("work", owner="c", deadline_ms=0)
        cancelled = asyncio.ensure_future(dispatcher.dispatch("work", owner="d"))
        await spin()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert dispatcher.statistics().owners == 0
        await first
