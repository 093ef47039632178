"""What a handler of this process reads of its call, and what it tells. Source: D7, D14, D42, D44."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

import callyard
from callyard import sdk
from callyard.dispatch.dispatcher import Dispatcher
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from tests.unit.dispatch.keyed_bench import Bench, after, bad, cancel, good, pause, raising

BOUND_S = 30
Told = list[tuple[float, float | None, str]]


def ask(info: sdk.CallInfo) -> dict[str, Any]:
    return {
        "call_id": info.call_id,
        "attempt": info.attempt,
        "key": info.idempotency_key,
        "tenant": info.tenant,
        "owner": info.owner,
        "tags": dict(info.tags),
        "left": info.deadline_remaining_ms,
    }


OPTIONS: dict[str, Any] = {
    "key": "order-7",
    "tenant": "shop",
    "owner": "session-1",
    "tags": {"step": "3"},
    "call_id": "c-7",
}


@pytest.mark.requirement("D42", "D44")
@virtual_time
async def test_an_inline_handler_reads_its_call() -> None:
    registry = Registry()

    @registry.tool
    async def look() -> Any:
        await asyncio.sleep(0.1)
        return ask(callyard.context())

    async with Dispatcher(registry, clock=VirtualTimers()) as dispatcher:
        seen = good(await dispatcher.dispatch("look", {}, deadline_ms=5_000, **OPTIONS)).value
        assert seen == {
            "call_id": "c-7",
            "attempt": 1,
            "key": "order-7",
            "tenant": "shop",
            "owner": "session-1",
            "tags": {"step": "3"},
            "left": 4_900,
        }
        plain = good(await dispatcher.dispatch("look", {})).value
        assert plain.pop("call_id")
        assert plain == {"attempt": 1, "key": "", "tenant": "default", "owner": "", "tags": {}, "left": None}
    assert callyard.context() == sdk.CallInfo(), "outside a handler there is no call"


@pytest.mark.requirement("D42")
async def test_a_handler_in_a_thread_reads_its_call_and_tells() -> None:
    registry = Registry()

    @registry.tool
    def look() -> Any:
        assert threading.current_thread() is not threading.main_thread()
        callyard.progress(1, 2, "half")
        callyard.progress(2, 2)
        return ask(callyard.context())

    told: Told = []
    heard_in: set[int] = set()

    def hear(done: float, total: float | None, message: str) -> None:
        heard_in.add(threading.get_ident())
        told.append((done, total, message))

    async with asyncio.timeout(BOUND_S), Dispatcher(registry) as dispatcher:
        result = await dispatcher.dispatch("look", {}, deadline_ms=600_000, on_progress=hear, **OPTIONS)
        seen = good(result).value
        assert told == [(1, 2, "half"), (2, 2, "")], "all of it, before the answer"
        assert heard_in == {threading.get_ident()}, "in the loop's thread"
        assert 0 < seen.pop("left") <= 600_000
        assert seen == {
            "call_id": "c-7",
            "attempt": 1,
            "key": "order-7",
            "tenant": "shop",
            "owner": "session-1",
            "tags": {"step": "3"},
        }


@pytest.mark.requirement("D42")
async def test_in_a_thread_that_an_inline_handler_starts() -> None:
    registry = Registry()

    def work() -> str:
        callyard.progress(1)
        return callyard.context().idempotency_key

    @registry.tool
    async def look() -> str:
        return await asyncio.to_thread(work)

    told: Told = []
    async with asyncio.timeout(BOUND_S), Dispatcher(registry) as dispatcher:
        result = await dispatcher.dispatch("look", {}, key="k", on_progress=lambda *one: told.append(one))
        assert (good(result).value, told) == ("k", [(1, None, "")])


@pytest.mark.requirement("D14", "D42", "D44")
@virtual_time
async def test_a_nested_call_reads_its_own() -> None:
    async with Bench() as bench:
        seen: list[dict[str, Any]] = []

        async def inner() -> None:
            seen.append(ask(callyard.context()))

        async def outer() -> None:
            await bench.call("search", key="inner", tenant="other")
            seen.append(ask(callyard.context()))

        bench.acts += [outer, inner]
        good(await bench.call(key="outer", tenant="shop", deadline_ms=5_000, tags={"step": "1"}))
        first, second = seen
        assert (first["key"], first["tenant"], first["left"], first["tags"]) == ("inner", "shop", 5_000, {})
        assert (second["key"], second["tenant"], second["tags"]) == ("outer", "shop", {"step": "1"})


@pytest.mark.requirement("D42")
@virtual_time
async def test_code_of_an_earlier_attempt_reads_that_attempt() -> None:
    """It swallowed its cancellation, and goes on beside the next one."""
    async with Bench() as bench:
        seen: list[tuple[str, int]] = []

        async def lingers() -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await asyncio.sleep(0.6)
            seen.append(("late", callyard.context().attempt))
            callyard.progress(99)

        async def second() -> str:
            await asyncio.sleep(0.5)
            seen.append(("now", callyard.context().attempt))
            callyard.progress(1)
            return "done"

        told: Told = []
        bench.acts += [lingers, second]
        result = await bench.call("search", timeout_ms=1_000, on_progress=lambda *one: told.append(one))
        assert (good(result).value, good(result).attempts) == ("done", 2)
        await pause(5_000)
        assert seen == [("late", 1), ("now", 2)]
        assert told == [(1, None, "")], "what was answered tells nothing more"


@pytest.mark.requirement("D7")
@virtual_time
async def test_progress_is_told_only_while_the_call_runs() -> None:
    async with Bench() as bench:
        told: Told = []
        left_behind: list[asyncio.Task[None]] = []

        async def behind() -> None:
            callyard.progress(1)
            await asyncio.sleep(1)
            callyard.progress(2)

        async def leaves() -> None:
            left_behind.append(asyncio.ensure_future(behind()))
            await asyncio.sleep(0.1)

        bench.acts.append(leaves)
        good(await bench.call(key=None, on_progress=lambda *one: told.append(one)))
        await left_behind[0]
        assert told == [(1, None, "")]
        callyard.progress(5)  # outside a call it does nothing


@pytest.mark.requirement("D7", "D17")
@virtual_time
async def test_a_caller_that_has_gone_is_told_nothing_more() -> None:
    async with Bench() as bench:
        told: Told = []

        async def steps() -> str:
            for step in range(10):
                callyard.progress(step, 10)
                await asyncio.sleep(0.1)
            return "done"

        bench.acts.append(steps)
        first = bench.start(on_progress=lambda *one: told.append(one))
        await pause(250)
        await cancel(first)
        assert good(await bench.call()).value == "done"
        assert [done for done, _, _ in told] == [0, 1, 2]


@pytest.mark.requirement("D7")
def test_a_listener_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    @virtual_time
    async def check() -> None:
        async with Bench() as bench:

            async def tells() -> str:
                callyard.progress(1)
                return "done"

            def fails(*_: object) -> None:
                raise ZeroDivisionError

            bench.acts.append(tells)
            assert good(await bench.call(on_progress=fails)).value == "done"

    check()
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.requirement("D42")
@virtual_time
async def test_a_call_outside_and_a_task_that_is_left_behind() -> None:
    """What a handler leaves behind still reads the call it came from; its dispatches are nobody's nested ones."""
    async with Bench() as bench:
        found: list[Any] = []

        async def behind() -> None:
            await asyncio.sleep(1)
            found.append(callyard.context().idempotency_key)
            found.append(await bench.call("search", key="other"))

        async def leaves() -> None:
            found.append(asyncio.ensure_future(behind()))

        bench.acts.append(leaves)
        good(await bench.call(deadline_ms=500))
        await found[0]
        assert found[1] == "k"
        good(found[2])
        assert next(event for event in bench.events if event.tool == "search").parent_id == ""


@pytest.mark.requirement("D30")
@virtual_time
async def test_contextvars_reach_a_keyed_handler_and_do_not_come_back() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    async with Bench() as bench:

        async def look() -> str:
            seen = name.get()
            name.set("changed")
            return seen

        bench.acts.append(look)
        name.set("mine")
        assert good(await bench.call()).value == "mine"
        assert name.get() == "mine"


@pytest.mark.requirement("D17")
@virtual_time
async def test_errors_that_nobody_waits_for_make_no_noise() -> None:
    """The bench looks for "exception was never retrieved" when it ends."""
    async with Bench() as bench:
        for tool in ("charge", "search"):
            bench.acts += [raising(ValueError("x"), 100), raising(SystemExit(1), 100), after(100, object())]
            for key in ("a", "b", "c"):
                first = bench.start(tool, key=key)
                await pause(10)
                await cancel(first)
                await pause(200)
            bench.acts.clear()
        bad(await bench.call(key="a"), ErrorKind.INTERNAL, Outcome.RAN)
