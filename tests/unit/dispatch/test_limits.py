"""What bounds the calls beside deadlines: slots, seats, the queue, rates, tenants' shares."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.errors import ErrorKind, Outcome, TransientError, UsageError
from callyard.functions.registry import Registry
from callyard.policy.retry import RetryPolicy
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import Work, add, add_work, assert_quiet, make, now_ms, spin


def kinds(results: list[DispatchResult]) -> list[str]:
    return [result.kind.value if isinstance(result, DispatchError) else "ok" for result in results]


@pytest.mark.requirement("D27")
@virtual_time
async def test_slots_in_all_and_seats_per_tool_in_order_of_arrival() -> None:
    registry = Registry()
    narrow = add_work(registry, "narrow", 100, max_concurrency=2)
    wide = add_work(registry, "wide", 100)
    dispatcher = make(registry, slots=5)
    running: list[int] = []
    dispatcher.subscribe(lambda event: running.append(dispatcher.statistics().running))
    calls = [dispatcher.dispatch(name, {"mark": n}) for n in range(10) for name in ("narrow", "wide")]
    assert all(end.ok for end in await asyncio.gather(*calls))
    assert narrow.peak == 2
    assert narrow.order == list(range(10))
    assert wide.order == list(range(10))
    assert max(running) == 5
    assert_quiet(dispatcher)


@pytest.mark.requirement("D27")
@virtual_time
async def test_one_that_waits_for_a_seat_takes_no_slot_from_the_others() -> None:
    registry = Registry()
    narrow = add_work(registry, "narrow", 1_000, max_concurrency=1)
    wide = add_work(registry, "wide", 100)
    dispatcher = make(registry, slots=2)
    waiting = [asyncio.ensure_future(dispatcher.dispatch("narrow")) for _ in range(5)]
    await spin()
    assert (await dispatcher.dispatch("wide")).ok
    assert now_ms() == 100
    await asyncio.gather(*waiting)
    assert narrow.peak == 1
    assert wide.ended == 1


@pytest.mark.requirement("D27")
@virtual_time
async def test_the_queue_has_a_bound_and_one_answer_when_it_is_full() -> None:
    registry = Registry()
    work = add_work(registry)
    dispatcher = make(registry, slots=1, queued_max=3)
    calls = [asyncio.ensure_future(dispatcher.dispatch("work", {"mark": n})) for n in range(6)]
    await spin()
    assert dispatcher.statistics().queued == 3
    ends = await asyncio.gather(*calls)
    assert kinds(ends) == ["ok"] * 4 + ["unavailable"] * 2
    refused = ends[-1]
    assert isinstance(refused, DispatchError)
    assert (refused.outcome, refused.retryable) == (Outcome.NOT_RUN, True)
    assert refused.details["retry_after_ms"] > 0
    assert work.order == [0, 1, 2, 3]
    assert_quiet(dispatcher)


@pytest.mark.requirement("D27")
@virtual_time
async def test_a_bound_of_none_in_the_queue_lets_run_what_need_not_wait() -> None:
    registry = Registry()
    add_work(registry)
    dispatcher = make(registry, slots=2, queued_max=0)
    ends = await asyncio.gather(*(dispatcher.dispatch("work") for _ in range(3)))
    assert kinds(ends) == ["ok", "ok", "unavailable"]


def rated(rate: str, **settings: Any) -> tuple[Any, Work]:
    registry = Registry()
    work = add_work(registry, wait_ms=0, rate=rate)
    return make(registry, **settings), work


@pytest.mark.requirement("D58")
@virtual_time
async def test_over_its_rate_a_call_without_a_deadline_ends_rate_limited_at_once() -> None:
    dispatcher, work = rated("2/s")
    ends = [await dispatcher.dispatch("work") for _ in range(3)]
    assert kinds(ends) == ["ok", "ok", "rate_limited"]
    assert now_ms() == 0
    refused = ends[-1]
    assert isinstance(refused, DispatchError)
    assert (refused.outcome, refused.attempts, refused.retryable) == (Outcome.NOT_RUN, 0, True)
    assert refused.details["retry_after_ms"] == 500
    await asyncio.sleep(0.5)
    assert (await dispatcher.dispatch("work")).ok
    assert work.begun == 3
    assert_quiet(dispatcher)


@pytest.mark.requirement("D58")
@virtual_time
async def test_with_a_deadline_it_waits_up_to_it() -> None:
    dispatcher, work = rated("1/s")
    ends = await asyncio.gather(*(dispatcher.dispatch("work", {"mark": n}, deadline_ms=2_500) for n in range(4)))
    assert kinds(ends) == ["ok", "ok", "ok", "rate_limited"]
    assert now_ms() == 2_000
    assert work.order == [0, 1, 2]
    refused = ends[-1]
    assert isinstance(refused, DispatchError)
    assert refused.details["retry_after_ms"] == 3_000
    assert_quiet(dispatcher)


@pytest.mark.requirement("D58", "D57")
@virtual_time
async def test_no_place_is_taken_that_comes_too_late_for_an_attempt() -> None:
    dispatcher, work = rated("1/s", attempt_min_ms=600)
    ends = await asyncio.gather(*(dispatcher.dispatch("work", deadline_ms=1_500) for _ in range(2)))
    assert kinds(ends) == ["ok", "rate_limited"]
    assert now_ms() == 0
    assert work.begun == 1


@pytest.mark.requirement("D58", "D57")
@virtual_time
async def test_it_waits_no_longer_than_queue_wait_ms_max() -> None:
    dispatcher, _ = rated("1/s", queue_wait_ms_max=1_500)
    ends = await asyncio.gather(*(dispatcher.dispatch("work", deadline_ms=60_000) for _ in range(3)))
    assert kinds(ends) == ["ok", "ok", "rate_limited"]
    assert now_ms() == 1_000


@pytest.mark.requirement("D58", "D44")
@virtual_time
async def test_each_tenant_has_the_rate_of_its_own() -> None:
    dispatcher, _ = rated("1/s")
    ends = [await dispatcher.dispatch("work", tenant=tenant) for tenant in ("a", "b", "a")]
    assert kinds(ends) == ["ok", "ok", "rate_limited"]


@pytest.mark.requirement("D58", "D12")
@virtual_time
async def test_retries_take_no_place_in_the_rate() -> None:
    registry, runs = Registry(), []

    async def flaky(arguments: dict[str, Any]) -> None:
        runs.append(now_ms())
        raise TransientError

    add(registry, "flaky", flaky, rate="1/s", retry=RetryPolicy(jitter=0))
    dispatcher = make(registry)
    await dispatcher.dispatch("flaky")
    assert runs == [0, 100, 500]


@pytest.mark.requirement("D58", "D41")
@virtual_time
async def test_the_place_of_one_that_was_cancelled_is_the_next_ones() -> None:
    dispatcher, _ = rated("1/s")
    await dispatcher.dispatch("work")
    waiting = asyncio.ensure_future(dispatcher.dispatch("work", deadline_ms=60_000))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (await dispatcher.dispatch("work", deadline_ms=60_000)).ok
    assert now_ms() == 1_000


@pytest.mark.requirement("D58")
@virtual_time
async def test_those_that_wait_for_their_rate_are_bounded_as_all_that_wait() -> None:
    dispatcher, _ = rated("1/s", queued_max=2)
    ends = await asyncio.gather(*(dispatcher.dispatch("work", deadline_ms=60_000) for _ in range(5)))
    assert sorted(kinds(ends)) == ["ok"] * 3 + ["unavailable"] * 2
    assert_quiet(dispatcher)


@pytest.mark.requirement("D58")
@virtual_time
async def test_a_tool_put_in_place_of_another_has_its_own_rate() -> None:
    dispatcher, _ = rated("1/h")
    await dispatcher.dispatch("work")
    assert kinds([await dispatcher.dispatch("work")]) == ["rate_limited"]
    add_work(dispatcher.registry, wait_ms=0, rate="100/s", override=True)
    assert kinds([await dispatcher.dispatch("work") for _ in range(5)]) == ["ok"] * 5


@pytest.mark.requirement("D58")
@virtual_time
async def test_a_tenants_running_calls_are_bounded_and_other_tenants_go_on() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=100)
    dispatcher = make(registry, tenant_running=2)
    many = [asyncio.ensure_future(dispatcher.dispatch("work", tenant="a")) for _ in range(6)]
    await spin()
    assert work.inside == 2
    assert (await dispatcher.dispatch("work", tenant="b")).ok
    assert now_ms() == 100
    assert kinds(await asyncio.gather(*many)) == ["ok"] * 6
    assert now_ms() == 300
    assert_quiet(dispatcher)
    assert dispatcher._admission._tenants is not None
    assert len(dispatcher._admission._tenants) == 0


@pytest.mark.requirement("D58")
@virtual_time
async def test_a_tenants_queued_calls_are_bounded() -> None:
    registry = Registry()
    add_work(registry, wait_ms=100)
    dispatcher = make(registry, slots=1, tenant_queued=2)
    many = [asyncio.ensure_future(dispatcher.dispatch("work", tenant="a")) for _ in range(5)]
    await spin()
    other = asyncio.ensure_future(dispatcher.dispatch("work", tenant="b"))
    ends = await asyncio.gather(*many, other)
    assert kinds(ends) == ["ok", "ok", "ok", "unavailable", "unavailable", "ok"]
    assert_quiet(dispatcher)


@pytest.mark.requirement("D58")
@virtual_time
async def test_the_bytes_of_a_tenants_queued_arguments_are_bounded() -> None:
    registry = Registry()
    add_work(registry, wait_ms=100)
    dispatcher = make(registry, slots=1, tenant_bytes=1_000)
    first = asyncio.ensure_future(dispatcher.dispatch("work", {"mark": "x" * 5_000}))  # it runs: it does not wait
    await spin()
    sizes = (600, 600, 300)
    ends = await asyncio.gather(*(dispatcher.dispatch("work", {"mark": "x" * size}) for size in sizes), first)
    assert kinds(ends) == ["ok", "unavailable", "ok", "ok"]
    assert_quiet(dispatcher)


@pytest.mark.requirement("D58", "D14")
@virtual_time
async def test_a_nested_call_counts_in_no_tenants_share_twice() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=100)

    async def parent(arguments: dict[str, Any]) -> Any:
        return (await dispatcher.dispatch("work")).unwrap()

    add(registry, "parent", parent)
    dispatcher = make(registry, tenant_running=1)
    ends = await asyncio.gather(*(dispatcher.dispatch("parent", tenant="a") for _ in range(3)))
    assert kinds(ends) == ["ok"] * 3
    assert work.peak == 1
    assert now_ms() == 300
    assert_quiet(dispatcher)


@pytest.mark.requirement("D27")
@virtual_time
async def test_a_tool_put_in_place_of_another_has_its_own_seats() -> None:
    registry = Registry()
    work = add_work(registry, wait_ms=1_000, max_concurrency=1)
    dispatcher = make(registry)
    first = [asyncio.ensure_future(dispatcher.dispatch("work")) for _ in range(3)]
    await spin()
    assert work.inside == 1
    wider = add_work(registry, wait_ms=1_000, max_concurrency=3, override=True)
    await asyncio.gather(dispatcher.dispatch("work"), *first)
    assert work.ended + wider.ended == 4
    assert now_ms() == 2_000
    assert_quiet(dispatcher)


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 0},
        {"slots": True},
        {"timeout_ms": 0},
        {"queued_max": -1},
        {"cancel_grace_ms": -1},
        {"tenant_running": 0},
        {"drain_deadline_ms": None},
        {"unknown": 1},
        {"ttl_ms": 1.5},
    ],
    ids=repr,
)
def test_a_setting_out_of_range_says_so_when_it_is_built(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(Registry(), **settings)


def test_a_config_and_a_setting_by_name_go_together() -> None:
    dispatcher = make(Registry(), config=DispatcherConfig(slots=3), timeout_ms=7)
    assert (dispatcher.config.slots, dispatcher.config.timeout_ms) == (3, 7)


@pytest.mark.requirement("D23")
def test_rate_limited_may_be_repeated_by_the_caller() -> None:
    from callyard.errors import KIND_RULES, Retried

    assert KIND_RULES[ErrorKind.RATE_LIMITED].retried is Retried.BY_CALLER


@pytest.mark.requirement("D9")
async def test_code_that_cannot_be_stopped_takes_no_more_threads_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("callyard.dispatch.handlers.STRAGGLERS_MAX", 2)
    registry, go_on = Registry(), threading.Event()

    @registry.tool(timeout_ms=20)
    def stuck() -> None:
        go_on.wait(60)

    async with Dispatcher(registry, cancel_grace_ms=0, breaker=None) as dispatcher:
        for _ in range(2):
            assert (await dispatcher.dispatch("stuck")).error.kind is ErrorKind.TIMEOUT  # type: ignore[union-attr]
        refused = await dispatcher.dispatch("stuck")
        assert isinstance(refused, DispatchError)
        assert (refused.kind, refused.attempts, refused.retryable) == (ErrorKind.UNAVAILABLE, 0, True)
        go_on.set()
        while dispatcher.statistics().stragglers:
            await asyncio.sleep(0.001)
