"""The one way a gate makes a call: what a caller may do, its permits, its one answer, its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from callyard.dispatch.events import DispatchEvent
from callyard.dispatch.outcomes import DispatchResult
from callyard.errors import CallError, ErrorKind, Outcome, UsageError
from callyard.functions.registry import Registry
from callyard.host.jobs import Permit
from callyard.ids import CallId, Tenant
from callyard.serve.gateway import Caller, Gateway, ToolRequest
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from tests.unit.dispatch.kit import Work, add_work, assert_quiet, make, now_ms, spin

ANYBODY = Caller()


@asynccontextmanager
async def opened(registry: Registry, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway that must be at rest when the test is over."""
    for_dispatcher = {name: settings.pop(name) for name in ("slots", "tenant_running") if name in settings}
    async with make(registry, **for_dispatcher) as dispatcher:
        gateway = Gateway(dispatcher, clock=VirtualTimers(), **settings)
        yield gateway
        assert await gateway.wait_idle(120_000)
        await spin()
        assert_at_rest(gateway)
        assert_quiet(dispatcher)


def assert_at_rest(gateway: Gateway) -> None:
    seen = gateway.statistics()
    assert (seen.permits, seen.waiting, seen.calls, seen.adrift, seen.lanes) == (0, 0, 0, 0, 0), seen
    gateway.jobs.check_invariants()
    for share in gateway._shares.values():
        assert share.waiting == 0
        assert share.running is None or share.running.in_use == share.running.waiters == 0


async def call(gateway: Gateway, tool: str = "work", connection: object = "c", **fields: Any) -> DispatchResult:
    permit = await gateway.admit(connection)
    try:
        return await gateway.call(ToolRequest(**{"tool": tool, "caller": ANYBODY, **fields}), permit)
    finally:
        permit.release()


def kinds(results: list[DispatchResult]) -> list[ErrorKind | None]:
    return [None if result.ok else result.kind for result in results]


def registry_of(*names: str, wait_ms: int = 1_000, **promises: Any) -> tuple[Registry, Work]:
    registry = Registry()
    works = [add_work(registry, name, wait_ms, **promises) for name in names or ("work",)]
    return registry, works[0]


# --- who sees what ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D47")
@virtual_time
async def test_a_tool_that_a_caller_may_not_see_is_not_found_and_not_suggested() -> None:
    registry, _ = registry_of("read_one", "read_two", "write_one")
    async with opened(registry) as gateway:
        reader = Caller(tools=("read_*",))
        assert [spec.name for spec in gateway.functions(reader)] == ["read_one", "read_two"]
        for name in ("write_one", "write_on", "never"):
            result = await call(gateway, name, caller=reader)
            assert not result.ok
            assert (result.kind, result.outcome, result.attempts) == (ErrorKind.NOT_FOUND, Outcome.NOT_RUN, 0)
            assert "write_one" not in result.message.replace(f"no function '{name}'", "")
        near = await call(gateway, "read_onne", caller=reader)
        assert not near.ok
        assert "'read_one'" in near.message
        assert (await call(gateway, "read_one", caller=reader)).ok
        assert (await call(gateway, "write_one")).ok


@pytest.mark.requirement("D44")
@virtual_time
async def test_owner_and_key_belong_to_the_callers_tenant() -> None:
    registry, work = registry_of()
    async with opened(registry) as gateway:
        callers = [Caller(tenant=Tenant(name), token=name) for name in ("a", "b")]
        results = await asyncio.gather(
            *(call(gateway, caller=caller, connection=caller.token, owner="o", key="k") for caller in callers)
        )
        assert [result.ok for result in results] == [True, True]
        assert work.begun == 2  # neither answers for the other
        assert now_ms() == 1_000  # neither waits for the other


@virtual_time
async def test_an_owner_from_the_config_holds_where_the_request_names_none() -> None:
    registry, work = registry_of()
    async with opened(registry) as gateway:
        caller = Caller(token="t", owner="o")
        await asyncio.gather(*(call(gateway, connection=n, caller=caller) for n in range(3)))
        assert work.peak == 1


@virtual_time
async def test_what_a_client_says_wrong_is_an_answer() -> None:
    registry, work = registry_of()
    async with opened(registry) as gateway:
        wrong: list[dict[str, Any]] = [
            {"owner": "a\nb"},
            {"owner": "o" * 257},
            {"key": "k" * 1_000},
            {"deadline_ms": 0},
            {"deadline_ms": "soon"},
            {"timeout_ms": -1},
            {"trace": {"traceparent": 7}},
        ]
        for fields in wrong:
            result = await call(gateway, **fields)
            assert not result.ok
            assert (result.kind, result.outcome) == (ErrorKind.SCHEMA, Outcome.NOT_RUN), (fields, result)
        assert work.begun == 0


@virtual_time
async def test_events_tell_of_what_the_gateway_refuses() -> None:
    registry, _ = registry_of()
    async with opened(registry) as gateway:
        heard: list[DispatchEvent] = []
        end = gateway.subscribe(heard.append)
        await call(gateway, caller=Caller(tenant=Tenant("t"), tools=("other",)))
        await call(gateway)
        end()
        end()
        await call(gateway)
        assert [(event.name, event.kind, event.tenant) for event in heard if event.name != "dispatch.attempt"] == [
            ("dispatch.error", ErrorKind.NOT_FOUND, "t"),
            ("dispatch.start", None, "default"),
            ("dispatch.success", None, "default"),
        ]
        assert gateway.statistics().refused_total == 1


# --- permits ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R16", "R125")
@virtual_time
async def test_a_flood_by_one_connection_leaves_the_others_their_turn() -> None:
    registry, _ = registry_of()
    async with opened(registry, jobs_max=1) as gateway:
        held = await gateway.admit("first")
        order: list[str] = []

        async def wait(connection: str) -> None:
            permit = await gateway.admit(connection)
            order.append(connection)
            permit.release()

        flood = [asyncio.ensure_future(wait("flood")) for _ in range(100)]
        await spin(3)
        other = asyncio.ensure_future(wait("other"))
        await spin(3)
        assert gateway.statistics().waiting == 2  # one place a connection
        held.release()
        await asyncio.gather(other, *flood)
        assert order.index("other") == 1
        assert len(order) == 101


@pytest.mark.requirement("R125")
@virtual_time
async def test_one_session_among_a_thousand_connections_is_served_within_their_round() -> None:
    registry, _ = registry_of()
    async with opened(registry, jobs_max=1) as gateway:
        held = await gateway.admit("first")
        order: list[object] = []

        async def keep_asking(connection: object, times: int) -> None:
            for _ in range(times):
                permit = await gateway.admit(connection)
                order.append(connection)
                permit.release()

        asking = [asyncio.ensure_future(keep_asking(n, 2)) for n in range(1_000)]
        await spin(3)
        asking.append(asyncio.ensure_future(keep_asking("session", 1)))
        await spin(3)
        held.release()
        await asyncio.gather(*asking)
        assert order.index("session") + 1 <= 1_001


@virtual_time
async def test_whoever_is_cancelled_in_line_leaves_no_permit_and_no_place() -> None:
    registry, _ = registry_of()
    async with opened(registry, jobs_max=1) as gateway:
        held = await gateway.admit("first")
        for count in (1, 3):  # alone in its connection's place, and with others behind it
            waiting = [asyncio.ensure_future(gateway.admit("c")) for _ in range(count)]
            await spin(3)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert gateway.statistics().waiting == 0
            assert gateway.jobs.waiters == 0
        waiting = [asyncio.ensure_future(gateway.admit("c")) for _ in range(3)]
        await spin(3)
        waiting[0].cancel()
        await spin(3)
        held.release()
        (await waiting[1]).release()
        (await waiting[2]).release()


@virtual_time
async def test_a_permit_that_was_granted_and_not_taken_goes_back() -> None:
    registry, _ = registry_of()
    async with opened(registry, jobs_max=1) as gateway:
        held = await gateway.admit("first")
        waiting = asyncio.ensure_future(gateway.admit("c"))
        await spin(3)
        held.release()  # granted now, and the one who waits has not run
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()


@pytest.mark.requirement("R109")
@virtual_time
async def test_a_call_that_ends_before_an_attempt_gives_its_permit_back_once() -> None:
    registry, work = registry_of()
    async with opened(registry, jobs_max=2) as gateway:
        refused = [
            {"tool": "never"},
            {"args": b"[1]"},
            {"deadline_ms": 0},
            {"caller": Caller(tools=("read_*",))},
        ]
        for fields in refused:
            permit = await gateway.admit("c")
            assert not (await gateway.call(ToolRequest(**{"tool": "work", "caller": ANYBODY, **fields}), permit)).ok
            assert gateway.jobs.in_use == 0, fields
            permit.release()
            assert gateway.jobs.in_use == 0
        assert work.begun == 0


@pytest.mark.requirement("R126")
@virtual_time
async def test_a_stuck_owner_holds_a_quarter_of_the_permits_at_most() -> None:
    registry, work = registry_of(wait_ms=5_000)
    async with opened(registry, jobs_max=16) as gateway:
        assert gateway.owner_max == 4
        flood = [asyncio.ensure_future(call(gateway, connection=n, owner="stuck")) for n in range(40)]
        await spin()
        assert gateway.statistics().calls == 4
        assert (await call(gateway, owner="other")).ok
        results = await asyncio.gather(*flood)
        assert kinds(results).count(ErrorKind.UNAVAILABLE) == 36
        assert all(result.retryable or result.details["retry_after_ms"] > 0 for result in results if not result.ok)
        assert work.begun == 5


@pytest.mark.requirement("R126")
@pytest.mark.parametrize(("jobs_max", "expected"), [(256, 64), (8_192, 1_024), (4, 1), (1, 1)])
@virtual_time
async def test_the_owners_cap_follows_the_permits(jobs_max: int, expected: int) -> None:
    registry, _ = registry_of()
    async with opened(registry, jobs_max=jobs_max) as gateway:
        assert gateway.owner_max == expected


# --- times --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D57")
@virtual_time
async def test_a_call_without_a_deadline_has_the_gates_own_from_its_receipt() -> None:
    registry, _ = registry_of(wait_ms=600_000, timeout_ms=600_000)
    async with opened(registry) as gateway:
        received_at_ms = gateway.now_ms()
        await asyncio.sleep(5)  # its body came slowly
        result = await call(gateway, received_at_ms=received_at_ms)
        assert not result.ok
        assert (result.kind, result.details["limit"]) == (ErrorKind.TIMEOUT, "deadline_ms")
        assert now_ms() == 55_000
        shorter = await call(gateway, deadline_ms=2_000)
        assert not shorter.ok
        assert now_ms() == 57_000


@pytest.mark.requirement("D58")
@virtual_time
async def test_a_token_over_its_rate_waits_and_beyond_its_patience_is_refused() -> None:
    registry, work = registry_of(wait_ms=1)
    async with opened(registry, queue_wait_ms_max=3_000) as gateway:
        caller = Caller(token="t", rate="1/s")
        results = await asyncio.gather(*(call(gateway, connection=n, caller=caller) for n in range(6)))
        assert kinds(results) == [None] * 4 + [ErrorKind.RATE_LIMITED] * 2
        assert work.begun == 4
        assert now_ms() >= 3_000
        assert (await call(gateway, caller=Caller(token="other", rate="1/s"))).ok


@pytest.mark.requirement("D58")
@virtual_time
async def test_a_tokens_running_calls_are_bounded_and_the_next_one_waits_its_turn() -> None:
    registry, work = registry_of()
    async with opened(registry, queue_wait_ms_max=2_500) as gateway:
        caller = Caller(token="t", running_max=2)
        results = await asyncio.gather(*(call(gateway, connection=n, caller=caller) for n in range(8)))
        assert work.peak == 2
        assert kinds(results) == [None] * 6 + [ErrorKind.DEADLINE] * 2
        late = results[-1]
        assert not late.ok
        assert (late.details["limit"], late.attempts, late.outcome) == ("queue_wait_ms_max", 0, Outcome.NOT_RUN)


# --- cancellation -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D41", "D56")
@virtual_time
async def test_an_explicit_cancel_stops_any_call_of_the_tenants_own() -> None:
    registry, work = registry_of()
    async with opened(registry) as gateway:
        mine = Caller(tenant=Tenant("a"), token="a")
        call_id = gateway.next_id()
        calling = asyncio.ensure_future(call(gateway, caller=mine, call_id=call_id))
        await spin()
        assert not gateway.cancel(Caller(tenant=Tenant("b")), call_id)
        assert not gateway.cancel(Caller(tenant=Tenant("a"), tools=("other",)), call_id)
        assert not gateway.cancel(mine, CallId("nobody's"))
        assert gateway.cancel(mine, call_id)
        result = await calling
        assert not result.ok
        assert result.kind is ErrorKind.CANCELLED
        assert work.cancelled == 1
        assert not gateway.cancel(mine, call_id)


@pytest.mark.requirement("D41")
@pytest.mark.parametrize("limits", [{"rate": "1/h"}, {"running_max": 1}])
@virtual_time
async def test_a_call_that_waits_for_its_tokens_share_can_be_cancelled(limits: dict[str, Any]) -> None:
    registry, work = registry_of(wait_ms=50)
    async with opened(registry, queue_wait_ms_max=7_200_000, deadline_ms=7_200_000) as gateway:
        caller = Caller(token="t", **limits)
        first = asyncio.ensure_future(call(gateway, caller=caller, connection=1))
        await spin()
        call_id = gateway.next_id()
        waiting = asyncio.ensure_future(call(gateway, caller=caller, connection=2, call_id=call_id))
        await spin()
        assert gateway.cancel(caller, call_id)
        result = await waiting
        assert not result.ok
        assert (result.kind, result.outcome) == (ErrorKind.CANCELLED, Outcome.NOT_RUN)
        await first
        assert work.begun == 1


@pytest.mark.requirement("D56")
@virtual_time
async def test_a_lost_connection_stops_what_is_promised_and_lets_the_other_run_on() -> None:
    registry = Registry()
    safe, unsafe = add_work(registry, "safe", idempotent=True), add_work(registry, "unsafe")
    async with opened(registry) as gateway:
        told: list[float] = []
        ids = [gateway.next_id() for _ in range(2)]
        for name, call_id in zip(("safe", "unsafe"), ids, strict=True):
            calling = asyncio.ensure_future(
                call(gateway, name, call_id=call_id, on_progress=lambda *told_: told.append(told_[0]))
            )
            await spin()
            calling.cancel()
            await asyncio.wait({calling})
            assert calling.cancelled()
        await spin()
        assert (safe.cancelled, safe.inside, unsafe.cancelled, unsafe.inside) == (1, 0, 0, 1)
        assert gateway.statistics().adrift == 1
        assert gateway.statistics().lost_total == 2
        assert await gateway.wait_idle(60_000)
        assert unsafe.ended == 1
        assert told == []
        assert await gateway.find_end(Caller(), ids[0]) is None
        kept = await gateway.find_end(Caller(), ids[1])
        assert kept is not None
        assert (kept.call_id, kept.value) == (ids[1], 1)
        assert await gateway.find_end(Caller(tenant=Tenant("other")), ids[1]) is None
        assert await gateway.find_end(Caller(tools=("safe",)), ids[1]) is None


@pytest.mark.requirement("D56")
@virtual_time
async def test_the_end_of_a_lost_call_is_looked_for_once_however_many_tools_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("callyard.serve.gateway.LOST_MAX", 2)
    registry, _ = registry_of(*(f"work{number}" for number in range(50)))
    async with opened(registry) as gateway:
        asked: list[str] = []
        find = gateway.dispatcher.find_end

        async def counted(tenant: str, tool: str, key: str) -> DispatchResult | None:
            asked.append(tool)
            return await find(tenant, tool, key)

        monkeypatch.setattr(gateway.dispatcher, "find_end", counted)
        ids = [gateway.next_id() for _ in range(3)]
        for number, call_id in enumerate(ids):
            if number == 2:
                assert [await ended(gateway, one) for one in ids] == [True, True, False]
                assert asked == ["work30", "work31"], "of a call that was never lost nothing is asked"
            calling = asyncio.ensure_future(call(gateway, f"work{30 + number}", call_id=call_id))
            await spin()
            calling.cancel()
            await asyncio.wait({calling})
            assert await gateway.wait_idle(60_000)
        asked.clear()
        assert await ended(gateway, ids[2])
        assert asked == ["work32"]
        assert await ended(gateway, ids[0]), "it is no longer among the newest: each tool is asked"
        assert len(asked) == 51
        assert not await ended(gateway, CallId("0123456789-7")), "of an earlier process"


async def ended(gateway: Gateway, call_id: CallId) -> bool:
    return await gateway.find_end(ANYBODY, call_id) is not None


@pytest.mark.requirement("D47")
@virtual_time
async def test_only_tools_are_suggested_to_who_calls_a_tool() -> None:
    registry, _ = registry_of("greeting")

    @registry.prompt
    def greet() -> str:
        return "hello"

    async with opened(registry) as gateway:
        for caller in (ANYBODY, Caller(tools=("g*",))):
            failed = await call(gateway, "gree", caller=caller)
            assert failed.error is not None
            assert "did you mean 'greeting'?" in failed.error.message


@pytest.mark.requirement("D44", "D56")
@virtual_time
async def test_no_callers_key_is_read_by_way_of_a_calls_id() -> None:
    registry, _ = registry_of()
    async with opened(registry) as gateway:
        for key in ("order-7", "0123456789-7"):
            assert (await call(gateway, key=key)).ok
            assert await gateway.find_end(Caller(), key) is None


@pytest.mark.requirement("R108")
@virtual_time
async def test_a_permit_goes_back_when_the_first_attempt_begins() -> None:
    registry, work = registry_of(wait_ms=1_000)
    dispatcher_slots = 1
    async with opened(registry, jobs_max=4, slots=dispatcher_slots) as gateway:
        calls = [asyncio.ensure_future(call(gateway, connection=number)) for number in range(10)]
        await spin()
        seen = gateway.statistics()
        assert (work.inside, seen.permits, seen.waiting) == (1, 4, 5)
        await asyncio.gather(*calls)
        assert gateway.statistics().permits == 0


@pytest.mark.requirement("R109")
@virtual_time
async def test_duplicates_of_a_keyed_call_wait_without_permits() -> None:
    registry, work = registry_of(wait_ms=1_000)
    other = add_work(registry, "other", 10)
    async with opened(registry, jobs_max=2) as gateway:
        calls = [asyncio.ensure_future(call(gateway, key="k", connection=number)) for number in range(50)]
        await spin(200)
        assert gateway.statistics().permits == 0
        assert (await call(gateway, "other", connection="another")).ok
        assert all(result.ok for result in await asyncio.gather(*calls))
        assert (work.begun, other.begun) == (1, 1)


@virtual_time
async def test_nothing_leaks_wherever_the_awaiter_is_cancelled() -> None:
    """After each number of turns of the loop, for every kind of wait on a call's way."""
    registry = Registry()
    add_work(registry, "safe", 20, idempotent=True)
    add_work(registry, "unsafe", 20)
    callers = [ANYBODY, Caller(token="r", rate="1/m"), Caller(token="n", running_max=1)]
    async with opened(registry, jobs_max=2, slots=1) as gateway:
        for name in ("safe", "unsafe"):
            for caller in callers:
                for turns in range(14):
                    fields = {"caller": caller, "owner": "o"}
                    before = asyncio.ensure_future(call(gateway, name, connection=1, **fields))
                    calling = asyncio.ensure_future(call(gateway, name, connection=2, **fields))
                    await spin(turns)
                    calling.cancel()
                    await asyncio.wait({calling})
                    before.cancel()
                    await asyncio.wait({before})
                    assert await gateway.wait_idle(60_000)
                    await spin()
                    assert_at_rest(gateway)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, others


@virtual_time
async def test_a_name_in_use_is_the_gates_mistake() -> None:
    registry, _ = registry_of()
    async with opened(registry) as gateway:
        call_id = gateway.next_id()
        calling = asyncio.ensure_future(call(gateway, call_id=call_id))
        await spin()
        with pytest.raises(UsageError, match="under way"):
            await call(gateway, call_id=call_id)
        assert (await calling).ok


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D46")
@virtual_time
async def test_a_sealed_gateway_tells_all_that_had_not_begun() -> None:
    registry, work = registry_of()
    async with opened(registry, jobs_max=2) as gateway:
        caller = Caller(token="t", running_max=1)
        running = asyncio.ensure_future(call(gateway, connection=1, caller=caller))
        await spin()
        waiting = asyncio.ensure_future(call(gateway, connection=2, caller=caller))
        await spin()
        permits: list[Permit] = []
        in_line = [asyncio.ensure_future(call(gateway, connection=n)) for n in (3, 4)]
        while (permit := gateway.jobs.try_acquire()) is not None:
            permits.append(permit)
        await spin()
        gateway.seal()
        for task in in_line:
            with pytest.raises(CallError) as refused:
                await task
            assert refused.value.kind is ErrorKind.SHUTTING_DOWN
        with pytest.raises(CallError):
            await gateway.admit("late")
        result = await waiting
        assert not result.ok
        assert (result.kind, result.outcome) == (ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN)
        assert (await running).ok
        assert work.begun == 1
        for permit in permits:
            permit.release()


@virtual_time
async def test_who_hears_of_changes_can_stop_and_can_fail() -> None:
    registry, _ = registry_of()
    async with opened(registry) as gateway:
        heard: list[int] = []

        def fail() -> None:
            raise RuntimeError("a listener's own fault")

        gateway.on_changed(fail)
        end = gateway.on_changed(lambda: heard.append(1))
        gateway.tell_changed()
        end()
        end()
        gateway.tell_changed()
        assert heard == [1]
