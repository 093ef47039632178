"""Which clock ends a call: its timeout, its deadline, its allowance's wall limit, the wait in the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import (
    FakeRunner,
    add,
    add_described,
    add_work,
    assert_quiet,
    ending,
    hanging,
    make,
    now_ms,
    spin,
)


def shown(result: DispatchResult) -> tuple[Any, ...]:
    assert isinstance(result, DispatchError), result
    return result.kind.value, result.outcome.value, result.attempts, result.details.get("limit")


@pytest.mark.requirement("D9", "D40")
@pytest.mark.parametrize("where", ["inline", "executor"])
@pytest.mark.parametrize(
    ("timeout_ms", "deadline_ms", "wall_ms", "wins"),
    [
        (100, 200, 300, "timeout_ms"),
        (300, 100, 200, "deadline_ms"),
        (300, 200, 100, "allowance_wall_ms"),
        (200, 200, 200, "deadline_ms"),
    ],
)
@virtual_time
async def test_the_first_of_three_clocks_ends_an_attempt_and_is_named(
    where: str, timeout_ms: int, deadline_ms: int, wall_ms: int, wins: str
) -> None:
    registry, worker = Registry(), FakeRunner()
    work = add_work(registry, "inline", 10_000, timeout_ms=timeout_ms)
    add_described(registry, worker, "executor", hanging, timeout_ms=timeout_ms)
    async with make(registry, worker=worker) as dispatcher:
        allowance = Allowance(wall_ms=wall_ms)
        failed = await dispatcher.dispatch(where, deadline_ms=deadline_ms, allowance=allowance)
        assert shown(failed) == ("timeout", "unknown", 1, wins)
        assert now_ms() == min(timeout_ms, deadline_ms, wall_ms)
        assert isinstance(failed, DispatchError)
        assert failed.details["limit_ms"] == now_ms()
        assert work.inside == 0
        assert work.cancelled == (where == "inline")
        assert_quiet(dispatcher)


@pytest.mark.requirement("D9")
@virtual_time
async def test_the_timeout_is_the_calls_own_else_the_tools_else_the_dispatchers() -> None:
    registry = Registry()
    add_work(registry, "said", 10_000, timeout_ms=300)
    add_work(registry, "silent", 10_000)
    async with make(registry, timeout_ms=500) as dispatcher:
        for name, options, expected_ms in (
            ("said", {"timeout_ms": 100}, 100),
            ("said", {}, 300),
            ("silent", {}, 500),
            ("said", {"timeout_ms": 900}, 900),
        ):
            before_ms = now_ms()
            failed = await dispatcher.dispatch(name, **options)
            assert shown(failed)[3] == "timeout_ms"
            assert now_ms() - before_ms == expected_ms


@pytest.mark.requirement("D9", "D1")
@virtual_time
async def test_thirty_seconds_by_default() -> None:
    registry = Registry()
    add_work(registry, "work", 100_000)
    async with make(registry) as dispatcher:
        await dispatcher.dispatch("work")
        assert now_ms() == 30_000


@pytest.mark.requirement("D12", "D40")
@virtual_time
async def test_each_attempt_has_the_timeout_anew_and_all_have_one_deadline() -> None:
    registry = Registry()
    work = add_work(registry, "work", 10_000, idempotent=True, timeout_ms=1_000)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("work", deadline_ms=2_000)
        assert shown(failed) == ("timeout", "unknown", 2, "deadline_ms")
        assert now_ms() == 2_000
        assert work.begun == 2


@pytest.mark.requirement("D11")
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("line", ["slot", "seat", "owner"])
@virtual_time
async def test_a_call_that_is_still_queued_at_its_deadline_never_runs(line: str, keyed: bool) -> None:
    registry = Registry()
    promises = {"max_concurrency": 1} if line == "seat" else {}
    work = add_work(registry, "work", 10_000, **promises)
    options: dict[str, Any] = {"owner": "o"} if line == "owner" else {}
    async with make(registry, slots=1 if line == "slot" else 9) as dispatcher:
        first = asyncio.ensure_future(dispatcher.dispatch("work", **options))
        await spin()
        key = {"key": "k"} if keyed else {}
        failed = await dispatcher.dispatch("work", deadline_ms=700, **options, **key)
        assert shown(failed) == ("deadline", "not_run", 0, "deadline_ms")
        assert now_ms() == 700
        assert (await first).ok
        assert work.begun == 1
        assert_quiet(dispatcher)


@pytest.mark.requirement("D11")
@pytest.mark.parametrize("deadline_ms", [0, -5])
@virtual_time
async def test_a_deadline_that_has_passed_already_ends_it_before_it_runs(deadline_ms: int) -> None:
    registry = Registry()
    work = add_work(registry)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("work", deadline_ms=deadline_ms)
        assert shown(failed) == ("deadline", "not_run", 0, "deadline_ms")
        assert work.begun == 0


@pytest.mark.requirement("D11", "D40")
@virtual_time
async def test_the_wait_for_a_slot_counts_in_the_deadline() -> None:
    registry = Registry()
    add_work(registry, "work", 1_000)
    async with make(registry, slots=1) as dispatcher:
        first = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        failed = await dispatcher.dispatch("work", deadline_ms=1_500)
        assert shown(failed) == ("timeout", "unknown", 1, "deadline_ms")
        assert now_ms() == 1_500
        await first


@pytest.mark.requirement("D13", "D40")
@virtual_time
async def test_the_walls_end_while_queued_is_budget_exceeded() -> None:
    registry = Registry()
    work = add_work(registry, "work", 1_000)
    async with make(registry, slots=1) as dispatcher:
        first = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        failed = await dispatcher.dispatch("work", allowance=Allowance(wall_ms=600))
        assert shown(failed) == ("budget_exceeded", "not_run", 0, "wall_ms")
        assert now_ms() == 600
        await first
        assert work.begun == 1
        assert_quiet(dispatcher)


@pytest.mark.requirement("D13")
@virtual_time
async def test_the_wall_runs_from_the_first_dispatch_and_over_all_that_carry_it() -> None:
    registry = Registry()
    add_work(registry, "work", 400)
    allowance = Allowance(wall_ms=1_000)
    async with make(registry) as dispatcher:
        await asyncio.sleep(5)  # making it starts no clock
        ends = [await dispatcher.dispatch("work", allowance=allowance) for _ in range(4)]
        assert [end.ok for end in ends] == [True, True, False, False]
        assert shown(ends[2]) == ("timeout", "unknown", 1, "allowance_wall_ms")
        assert shown(ends[3]) == ("budget_exceeded", "not_run", 0, "wall_ms")


@pytest.mark.requirement("D57")
@virtual_time
async def test_no_attempt_starts_with_less_time_than_attempt_min_ms() -> None:
    registry = Registry()
    work = add_work(registry, "work", 100)
    async with make(registry, attempt_min_ms=1_000) as dispatcher:
        assert shown(await dispatcher.dispatch("work", deadline_ms=1_000)) == ("deadline", "not_run", 0, "deadline_ms")
        assert work.begun == 0
        assert (await dispatcher.dispatch("work", deadline_ms=1_001)).ok


@pytest.mark.requirement("D57")
@virtual_time
async def test_no_retry_starts_with_less_time_than_attempt_min_ms() -> None:
    registry = Registry()
    work = add_work(registry, "work", 10_000, idempotent=True, timeout_ms=200)
    async with make(registry, attempt_min_ms=1_000) as dispatcher:
        failed = await dispatcher.dispatch("work", deadline_ms=1_300)
        assert shown(failed) == ("timeout", "unknown", 1, "timeout_ms")
        assert work.begun == 1
        assert now_ms() == 200


@pytest.mark.requirement("D57")
@virtual_time
async def test_a_call_that_waits_longer_than_queue_wait_ms_max_ends_deadline_with_retry_after() -> None:
    registry = Registry()
    work = add_work(registry, "work", 10_000)
    async with make(registry, slots=1, queue_wait_ms_max=2_000) as dispatcher:
        first = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        failed = await dispatcher.dispatch("work")
        assert shown(failed) == ("deadline", "not_run", 0, "queue_wait_ms_max")
        assert isinstance(failed, DispatchError)
        assert failed.details["retry_after_ms"] > 0
        assert now_ms() == 2_000
        assert (await first).ok
        assert work.begun == 1


@pytest.mark.requirement("D14", "D40")
@virtual_time
async def test_a_nested_call_ends_with_the_remaining_deadline_of_its_parent() -> None:
    registry = Registry()
    work = add_work(registry, "work", 10_000)
    seen: list[DispatchResult] = []

    async def parent(arguments: dict[str, Any]) -> str:
        await asyncio.sleep(0.3)
        seen.append(await dispatcher.dispatch("work", deadline_ms=arguments.get("ms")))
        return "parent"

    add(registry, "parent", parent)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("parent", deadline_ms=1_000)
        assert shown(failed)[0] == "timeout"
        assert now_ms() == 1_000
        assert work.cancelled == 1
        assert work.inside == 0
        done = await dispatcher.dispatch("parent", {"ms": 100}, deadline_ms=1_000)
        assert done.ok
        assert now_ms() == 1_400
        assert shown(seen[-1])[3] == "deadline_ms"
        assert_quiet(dispatcher)


@pytest.mark.requirement("D22", "D40")
@pytest.mark.parametrize("kind", [ErrorKind.DEADLINE, ErrorKind.TIMEOUT])
def test_deadline_says_not_run_and_timeout_unknown(kind: ErrorKind) -> None:
    from callyard.errors import KIND_RULES

    expected = Outcome.NOT_RUN if kind is ErrorKind.DEADLINE else Outcome.UNKNOWN
    assert KIND_RULES[kind].outcome is expected


@pytest.mark.requirement("D14")
@virtual_time
async def test_a_nested_call_knows_how_much_of_its_parents_deadline_is_left() -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "leaf", ending(b"1"))

    async def parent(arguments: dict[str, Any]) -> None:
        await asyncio.sleep(0.3)
        for deadline_ms in (None, 5_000, 100):
            assert (await dispatcher.dispatch("leaf", deadline_ms=deadline_ms)).ok

    add(registry, "parent", parent)
    dispatcher = make(registry, worker=worker)
    assert (await dispatcher.dispatch("parent", deadline_ms=1_000)).ok
    assert [context.deadline_remaining_ms for context in worker.contexts] == [700, 700, 100]
