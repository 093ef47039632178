"""What becomes of a call whose connection is gone, and where its end is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callyard import CallError, aelicit
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError, DispatchResult
from callyard.dispatch.stores.memory import MemoryKeyStore
from callyard.dispatch.stores.port import KeyScope, StoreUnavailable
from callyard.dispatch.stores.sqlite import SqliteKeyStore
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.ids import CallId, Tenant
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import FakeRunner, add, add_described, add_work, assert_quiet, hanging, make, now_ms, spin

ID = CallId("0123456789-7")


async def lose(dispatcher: Dispatcher, name: str, **options: Any) -> asyncio.Future[DispatchResult]:
    """A call that was begun, and lost."""
    call = asyncio.ensure_future(dispatcher.dispatch(name, call_id=ID, **options))
    await spin()
    assert dispatcher.disconnect(ID)
    return call


async def found(dispatcher: Dispatcher, name: str, key: str = ID) -> tuple[Any, ...] | None:
    end = await dispatcher.find_end("default", name, key)
    if end is None:
        return None
    return ("ok", end.value) if end.ok else (end.kind.value, end.outcome.value)


@pytest.mark.requirement("D56")
@pytest.mark.parametrize(
    ("promises", "runs_on"),
    [
        ({}, True),
        ({"idempotent": True}, False),
        ({"read_only": True}, False),
        ({"on_disconnect": "stop"}, False),
        ({"on_disconnect": "finish", "idempotent": True}, True),
    ],
)
@pytest.mark.parametrize("where", ["inline", "executor"])
@virtual_time
async def test_a_promise_decides_and_the_functions_own_word_before_it(
    promises: dict[str, Any], runs_on: bool, where: str
) -> None:
    registry, worker = Registry(), FakeRunner()
    work = add_work(registry, "inline", 1_000, **promises)

    async def script(runner: FakeRunner, args: bytes, context: object) -> Any:
        from callyard.functions.ports import CallOutcome

        await asyncio.sleep(1)
        return CallOutcome(b"1", None)

    add_described(registry, worker, "executor", script, **promises)
    async with make(registry, worker=worker) as dispatcher:
        end = await (await lose(dispatcher, where))
        await spin()
        assert now_ms() == (1_000 if runs_on else 0)
        assert end.ok is runs_on
        assert await found(dispatcher, where) == (("ok", 1) if runs_on else None)
        assert work.cancelled == (where == "inline" and not runs_on)
        assert not dispatcher.disconnect(ID)
        assert_quiet(dispatcher)


@pytest.mark.requirement("D56")
@virtual_time
async def test_a_call_that_has_not_begun_stops_whatever_its_function_says() -> None:
    registry = Registry()
    work = add_work(registry, "work", 1_000, on_disconnect="finish")
    async with make(registry, slots=1) as dispatcher:
        first = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        failed = await (await lose(dispatcher, "work"))
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.CANCELLED, Outcome.NOT_RUN, 0)
        assert now_ms() == 0
        await first
        assert work.begun == 1
        assert_quiet(dispatcher)


@pytest.mark.requirement("D56")
@virtual_time
async def test_what_runs_on_ends_at_its_own_limit_and_says_and_asks_nothing_more() -> None:
    registry, told, refusals = Registry(), [], []

    async def tool(arguments: dict[str, Any]) -> None:
        from callyard import log, progress

        for _ in range(2):
            try:
                await aelicit("Sure?")
            except CallError as error:
                refusals.append((now_ms(), error.failure.kind.value))
        progress(1)
        log("told to nobody")
        await asyncio.sleep(100)

    add(registry, "tool", tool, timeout_ms=2_000)

    async def on_ask(kind: str, params: object) -> dict[str, Any]:
        await asyncio.sleep(1_000)
        return {"action": "accept"}

    async with make(registry) as dispatcher:
        listener: Callable[..., None] = lambda *record: told.append(record)  # noqa: E731
        call = await lose(dispatcher, "tool", on_ask=on_ask, on_progress=listener, on_log=listener)
        failed = await call
        assert isinstance(failed, DispatchError)
        assert failed.details["limit"] == "timeout_ms"
        assert now_ms() == 2_000
        assert refusals == [(0, "unavailable"), (0, "unavailable")]
        assert told == []
        assert await found(dispatcher, "tool") == ("timeout", "unknown")
        (record,) = await dispatcher._keyed.store.unknown()
        assert record.scope == KeyScope(Tenant("default"), "tool", ID)
        assert await dispatcher.resolve("default", "tool", ID, result="it was paid")
        assert await found(dispatcher, "tool") == ("ok", "it was paid")


@pytest.mark.requirement("D56")
@virtual_time
async def test_an_explicit_cancel_stops_what_runs_on() -> None:
    registry = Registry()
    work = add_work(registry, "work", 10_000)
    async with make(registry) as dispatcher:
        call = await lose(dispatcher, "work")
        await asyncio.sleep(1)
        assert dispatcher.cancel(ID)
        assert not (await call).ok
        assert (now_ms(), work.cancelled) == (1_000, 1)
        assert await found(dispatcher, "work") == ("cancelled", "unknown")


@pytest.mark.requirement("D56")
@virtual_time
async def test_its_end_is_kept_for_its_own_time_and_the_stop_waits_for_it() -> None:
    registry = Registry()
    add_work(registry, "work", 1_000)
    store = MemoryKeyStore(now_ms=now_ms)
    async with make(registry, store=store, lost_ttl_ms=5_000) as dispatcher:
        await lose(dispatcher, "work")
    assert now_ms() == 1_000
    scope = KeyScope(Tenant("default"), "work", ID)
    assert await store.find(scope) is not None
    await asyncio.sleep(5)
    assert await store.find(scope) is None


@pytest.mark.requirement("D56", "D21")
async def test_one_that_dies_with_its_process_is_found_as_unknown(tmp_path: Path) -> None:
    registry = Registry()
    blocked = asyncio.Event()

    async def tool(arguments: dict[str, Any]) -> None:
        await blocked.wait()

    add(registry, "tool", tool)
    path = tmp_path / "keys.db"
    store = SqliteKeyStore(path)
    dispatcher = Dispatcher(registry, store=store, cancel_grace_ms=10)
    call = asyncio.ensure_future(dispatcher.dispatch("tool", call_id=ID))
    await spin()
    dispatcher.disconnect(ID)
    async with asyncio.timeout(30):
        while dispatcher._calls[ID].lost is None or not await _is_in_flight(store):
            await asyncio.sleep(0.01)
    await store.close()  # as far as the file can tell, the process is gone
    again = SqliteKeyStore(path)
    await again.open()
    (record,) = await again.unknown()
    assert (record.scope.tool, record.scope.key, record.end.call_id) == ("tool", ID, ID)
    await again.close()
    blocked.set()
    await call
    await dispatcher.close()


async def _is_in_flight(store: SqliteKeyStore) -> bool:
    if store._commits is None:
        return False
    count = store._commits.submit(lambda connection: connection.execute("SELECT count(*) FROM keys").fetchone()[0])
    return await count == 1


@pytest.mark.requirement("D56")
@virtual_time
async def test_a_store_out_of_reach_takes_no_ends_and_stops_no_runs(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryKeyStore):
        async def claim(self, *args: Any, **options: Any) -> Any:
            raise StoreUnavailable("gone")

    registry = Registry()
    work = add_work(registry, "work", 1_000)
    async with make(registry, store=Broken()) as dispatcher:
        assert (await (await lose(dispatcher, "work"))).ok
        assert work.ended == 1
        assert "will not be kept" in caplog.text
        assert_quiet(dispatcher)


@pytest.mark.requirement("D56")
@virtual_time
async def test_a_store_that_hangs_holds_no_stop_up() -> None:
    class Hanging(MemoryKeyStore):
        async def claim(self, *args: Any, **options: Any) -> Any:
            await asyncio.sleep(1_000_000)

    registry = Registry()
    add_work(registry, "work", 1_000)
    async with make(registry, store=Hanging(), drain_deadline_ms=2_000) as dispatcher:
        call = await lose(dispatcher, "work")
    assert now_ms() <= 4_000
    assert (await call).ok


@pytest.mark.requirement("D17", "D56")
@pytest.mark.parametrize(
    ("promises", "runs_on"),
    [
        ({}, True),
        ({"idempotent": True}, False),
        ({"on_disconnect": "stop"}, False),
        ({"on_abandon": "finish", "idempotent": True}, True),
        ({"on_abandon": "cancel"}, False),
        ({"on_abandon": "finish", "on_disconnect": "stop"}, True),
    ],
)
@virtual_time
async def test_a_keyed_run_that_nobody_waits_for_follows_its_own_rule(promises: dict[str, Any], runs_on: bool) -> None:
    registry = Registry()
    work = add_work(registry, "work", 1_000, **promises)
    async with make(registry) as dispatcher:
        end = await (await lose(dispatcher, "work", key="k"))
        assert end.ok is runs_on
        assert now_ms() == (1_000 if runs_on else 0)
        await spin()
        assert (work.ended, work.cancelled) == ((1, 0) if runs_on else (0, 1))
        assert await found(dispatcher, "work", ID) is None
        if runs_on:
            assert await found(dispatcher, "work", "k") == ("ok", 1)
        assert_quiet(dispatcher)


@pytest.mark.requirement("D17", "D56")
@pytest.mark.parametrize("who", ["holder", "joiner"])
@virtual_time
async def test_a_run_that_others_wait_for_goes_on(who: str) -> None:
    registry = Registry()
    work = add_work(registry, "work", 1_000, idempotent=True)
    async with make(registry) as dispatcher:
        others = []
        if who == "joiner":
            others.append(asyncio.ensure_future(dispatcher.dispatch("work", key="k")))
            await spin()
        lost = asyncio.ensure_future(dispatcher.dispatch("work", key="k", call_id=ID))
        await spin()
        if who == "holder":
            others.append(asyncio.ensure_future(dispatcher.dispatch("work", key="k")))
            await spin()
        assert dispatcher.disconnect(ID)
        failed = await lost
        assert isinstance(failed, DispatchError)
        assert (failed.kind, now_ms()) == (ErrorKind.CANCELLED, 0)
        assert (await others[0]).unwrap() == 1
        assert work.begun == 1
        assert_quiet(dispatcher)


@pytest.mark.requirement("D43", "D56")
@virtual_time
async def test_a_keyed_call_that_has_not_begun_hands_its_claim_on() -> None:
    registry = Registry()
    work = add_work(registry, "work", 1_000)
    async with make(registry, slots=1) as dispatcher:
        blocker = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        call = asyncio.ensure_future(dispatcher.dispatch("work", key="k", call_id=ID))
        await spin()
        joined = asyncio.ensure_future(dispatcher.dispatch("work", key="k"))
        await spin()
        assert dispatcher.disconnect(ID)
        failed = await call
        assert isinstance(failed, DispatchError)
        assert failed.outcome is Outcome.NOT_RUN
        done = await joined
        assert (done.ok, done.deduplicated) == (True, False)
        await blocker
        assert work.begun == 2
        assert_quiet(dispatcher)


@pytest.mark.requirement("D56")
@virtual_time
async def test_a_call_elsewhere_that_hangs_is_stopped_at_its_limit() -> None:
    registry, worker = Registry(), FakeRunner()
    add_described(registry, worker, "tool", hanging, timeout_ms=700)
    async with make(registry, worker=worker) as dispatcher:
        failed = await (await lose(dispatcher, "tool"))
        assert (failed.ok, now_ms()) == (False, 700)
        assert await found(dispatcher, "tool") == ("timeout", "unknown")
        assert_quiet(dispatcher)
