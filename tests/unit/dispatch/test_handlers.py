"""Where a handler runs, and how it is stopped: inline, in a thread, and the code that will not stop."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from callyard.clock import Timer
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import VirtualTimers, virtual_time
from tests.unit.dispatch.kit import add, add_work, assert_quiet, make, now_ms, spin

WAIT_S = 20
"""A bound for what a thread does; nothing waits for it in a green run."""


async def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.005)


class Stubborn:
    """Swallows its cancellation until it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.swallowed = 0
        self.ended = 0

    async def __call__(self, arguments: dict[str, Any]) -> str:
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.swallowed += 1
        self.ended += 1
        return "at last"


@pytest.mark.requirement("D9")
@virtual_time
async def test_at_its_limit_an_inline_handler_is_cancelled_and_runs_no_more() -> None:
    registry = Registry()
    work = add_work(registry, "work", 10_000)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("work", timeout_ms=500)
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, now_ms()) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 500)
        assert failed.enforced
        assert (work.cancelled, work.inside, work.ended) == (1, 0, 0)
        assert_quiet(dispatcher)


@pytest.mark.requirement("D9")
@virtual_time
async def test_one_that_swallows_its_cancellation_is_answered_within_the_grace_and_shown_until_it_ends() -> None:
    registry, stubborn = Registry(), Stubborn()
    add(registry, "stubborn", stubborn)
    async with make(registry, cancel_grace_ms=250) as dispatcher:
        failed = await dispatcher.dispatch("stubborn", timeout_ms=500)
        assert isinstance(failed, DispatchError)
        assert failed.kind is ErrorKind.TIMEOUT
        assert now_ms() == 750
        (straggler,) = dispatcher.statistics().stragglers
        assert (straggler.call_id, straggler.tool, straggler.isolation) == (failed.call_id, "stubborn", "inline")
        assert_quiet(dispatcher, stragglers=1)
        gc.collect()  # nobody else holds its task: it must not be destroyed
        await spin()
        assert stubborn.ended == 0
        stubborn.release.set()
        await spin()
        assert stubborn.ended == 1
        assert_quiet(dispatcher)
        assert dispatcher.statistics().stragglers_total == 1


@pytest.mark.requirement("D9")
@virtual_time
async def test_a_straggler_that_only_its_own_frame_knows_is_not_destroyed() -> None:
    registry, ended, over = Registry(), [], []

    class Canary:
        def __del__(self) -> None:
            ended.append("gone")

    async def handler(arguments: dict[str, Any]) -> None:
        canary = Canary()
        while not over:
            try:
                await asyncio.get_running_loop().create_future()  # nobody else holds it
            except asyncio.CancelledError:
                assert canary

    add(registry, "tool", handler)
    dispatcher = make(registry)
    await dispatcher.dispatch("tool", timeout_ms=10)
    gc.collect()
    assert ended == []
    assert len(dispatcher.statistics().stragglers) == 1
    over.append(True)  # the loop cancels it once more when it closes


@pytest.mark.requirement("D9")
@pytest.mark.parametrize("how", ["returns", "raises"])
@virtual_time
async def test_what_a_handler_makes_of_its_cancellation_is_no_result(how: str) -> None:
    """`except CancelledError: log(...)` falls through to None, which is no success; nor is its exception a fault."""
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            if how == "raises":
                raise RuntimeError("connection closed") from None

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", timeout_ms=500)
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
        call = asyncio.ensure_future(dispatcher.dispatch("tool", call_id="c"))
        await spin()
        assert dispatcher.cancel("c")  # type: ignore[arg-type]
        failed = await call
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome) == (ErrorKind.CANCELLED, Outcome.UNKNOWN)


@pytest.mark.requirement("D12", "D9")
@virtual_time
async def test_an_idempotent_tool_that_wraps_its_cancellation_is_tried_again() -> None:
    registry, runs = Registry(), [0]

    async def handler(arguments: dict[str, Any]) -> int:
        runs[0] += 1
        try:
            await asyncio.sleep(10 if runs[0] == 1 else 0)
        except asyncio.CancelledError as error:
            raise OSError("read was interrupted") from error
        return runs[0]

    add(registry, "tool", handler, idempotent=True, timeout_ms=100)
    async with make(registry) as dispatcher:
        assert (await dispatcher.dispatch("tool")).value == 2


@pytest.mark.requirement("D10")
@pytest.mark.parametrize("error", [TimeoutError(), TimeoutError("theirs"), asyncio.CancelledError()], ids=repr)
@virtual_time
async def test_the_tools_own_timeout_and_its_own_cancellation_are_its_error(error: BaseException) -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        await asyncio.sleep(0.1)
        raise error

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", timeout_ms=500)
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.INTERNAL, Outcome.RAN, 1)
        assert type(error).__name__ in failed.message
        assert now_ms() == 100


@pytest.mark.requirement("D10")
@virtual_time
async def test_a_timeout_inside_the_tool_is_not_ours() -> None:
    registry = Registry()

    async def handler(arguments: dict[str, Any]) -> None:
        async with asyncio.timeout(0.2):
            await asyncio.sleep(10)

    add(registry, "tool", handler, idempotent=True)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", timeout_ms=500)
        assert isinstance(failed, DispatchError)
        assert failed.kind is ErrorKind.INTERNAL
        assert now_ms() == 200


@pytest.mark.requirement("D7", "D24")
@virtual_time
async def test_a_cancelled_callers_stubborn_tool_holds_its_seat_only_for_the_grace() -> None:
    registry, stubborn = Registry(), Stubborn()
    add(registry, "stubborn", stubborn, max_concurrency=1)
    async with make(registry, cancel_grace_ms=250, slots=1) as dispatcher:
        caller = asyncio.ensure_future(dispatcher.dispatch("stubborn"))
        await spin()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert now_ms() == 0
        assert dispatcher.statistics().running == 1
        await asyncio.sleep(0.251)
        assert_quiet(dispatcher, stragglers=1)
        stubborn.release.set()
        await spin()
        assert_quiet(dispatcher)


@pytest.mark.requirement("D9", "D7")
@virtual_time
async def test_a_nested_handler_is_stopped_with_its_parent() -> None:
    registry = Registry()
    work = add_work(registry, "work", 10_000)

    async def parent(arguments: dict[str, Any]) -> Any:
        return (await dispatcher.dispatch("work")).unwrap()

    add(registry, "parent", parent)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("parent", timeout_ms=100)
        assert isinstance(failed, DispatchError)
        assert failed.kind is ErrorKind.TIMEOUT
        await spin()
        assert (work.cancelled, work.inside) == (1, 0)
        assert_quiet(dispatcher)


request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="none")


@pytest.mark.requirement("D30")
@pytest.mark.parametrize("keyed", [False, True])
@virtual_time
async def test_contextvars_reach_inline_handlers_and_what_they_set_stays_theirs(keyed: bool) -> None:
    registry, seen = Registry(), []

    async def handler(arguments: dict[str, Any]) -> str:
        seen.append(request_id.get())
        request_id.set("theirs")
        return request_id.get()

    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        request_id.set("mine")
        options = {"key": "k"} if keyed else {}
        assert (await dispatcher.dispatch("tool", **options)).value == "theirs"
        assert request_id.get() == "mine"
        assert seen == ["mine"]


@pytest.mark.requirement("D30")
@pytest.mark.parametrize("keyed", [False, True])
async def test_contextvars_reach_thread_handlers(keyed: bool) -> None:
    registry = Registry()

    @registry.tool
    def tool() -> str:
        return request_id.get()

    async with Dispatcher(registry) as dispatcher:
        request_id.set("mine")
        options = {"key": "k"} if keyed else {}
        assert (await dispatcher.dispatch("tool", **options)).value == "mine"


@pytest.mark.requirement("D9", "D50")
async def test_a_plain_function_runs_in_a_thread_is_marked_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()

    @registry.tool
    def where() -> str:
        return threading.current_thread().name

    async with Dispatcher(registry) as dispatcher:
        with caplog.at_level(logging.WARNING, "callyard.dispatch"):
            for _ in range(3):
                done = await dispatcher.dispatch("where")
                assert done.ok
                assert done.value != threading.current_thread().name
                assert not done.enforced
        assert len([record for record in caplog.records if "where runs in a thread" in record.getMessage()]) == 1


@pytest.mark.requirement("D9")
async def test_a_thread_that_does_not_stop_is_answered_at_the_limit_and_shown_until_it_ends() -> None:
    registry = Registry()
    release, ended = threading.Event(), threading.Event()

    @registry.tool
    def stuck() -> None:
        release.wait(WAIT_S)
        ended.set()

    async with Dispatcher(registry) as dispatcher:
        failed = await dispatcher.dispatch("stuck", timeout_ms=50)
        try:
            assert isinstance(failed, DispatchError)
            assert (failed.kind, failed.outcome, failed.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
            assert failed.enforced is False
            assert failed.details["enforced"] is False
            assert not ended.is_set()
            (straggler,) = dispatcher.statistics().stragglers
            assert (straggler.call_id, straggler.isolation) == (failed.call_id, "thread")
        finally:
            release.set()
        await until(lambda: not dispatcher.statistics().stragglers)
        assert ended.is_set()
        assert_quiet(dispatcher)


@pytest.mark.requirement("D9")
async def test_a_cancelled_callers_thread_is_a_straggler_too() -> None:
    registry = Registry()
    release, begun = threading.Event(), threading.Event()

    @registry.tool(max_concurrency=1)
    def stuck() -> None:
        begun.set()
        release.wait(WAIT_S)

    async with Dispatcher(registry, cancel_grace_ms=20) as dispatcher:
        caller = asyncio.ensure_future(dispatcher.dispatch("stuck"))
        try:
            await until(begun.is_set)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            await until(lambda: dispatcher.statistics().running == 0)
            assert_quiet(dispatcher, stragglers=1)
        finally:
            release.set()
        await until(lambda: not dispatcher.statistics().stragglers)


@pytest.mark.requirement("D9", "D24")
async def test_threads_contain_what_is_raised_in_them() -> None:
    registry = Registry()

    @registry.tool
    def exits() -> None:
        raise SystemExit(3)

    async with Dispatcher(registry) as dispatcher:
        failed = await dispatcher.dispatch("exits")
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.details["exit_code"]) == (ErrorKind.INTERNAL, 3)


@pytest.mark.requirement("D9")
async def test_a_plain_function_that_returns_a_coroutine_is_awaited() -> None:
    registry = Registry()

    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    def in_thread(arguments: dict[str, Any]) -> Any:
        return later(1)

    add(registry, "in_thread", in_thread)
    add(registry, "inline", in_thread, isolation="inline")
    async with Dispatcher(registry) as dispatcher:
        for name in ("in_thread", "inline"):
            done = await dispatcher.dispatch(name)
            assert done.ok
            assert (done.value, done.attempts) == (2, 1)


@virtual_time
@pytest.mark.requirement("D9")
async def test_the_coroutine_of_a_plain_function_is_stopped_at_the_limit() -> None:
    registry = Registry()
    add(registry, "tool", lambda arguments: asyncio.sleep(100), isolation="inline")
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", timeout_ms=300)
        assert isinstance(failed, DispatchError)
        assert failed.kind is ErrorKind.TIMEOUT
        assert now_ms() == 300


@pytest.mark.requirement("D9")
@virtual_time
async def test_a_plain_function_inline_is_marked_not_enforced() -> None:
    registry = Registry()

    @registry.tool(isolation="inline")
    def quick() -> int:
        return 1

    @registry.tool
    async def waits() -> int:
        return 1

    async with make(registry) as dispatcher:
        quick_done, waits_done = await dispatcher.dispatch("quick"), await dispatcher.dispatch("waits")
        assert quick_done.ok
        assert not quick_done.enforced
        assert waits_done.ok
        assert waits_done.enforced


async def test_asyncio_run_inside_a_tool() -> None:
    """Inline it is the tool's error; in a thread it works."""
    registry = Registry()

    async def inner() -> int:
        return 5

    def runs(arguments: dict[str, Any]) -> int:
        work = inner()
        try:
            return asyncio.run(work)
        finally:
            work.close()

    add(registry, "in_thread", runs)
    add(registry, "inline", runs, isolation="inline")
    async with Dispatcher(registry) as dispatcher:
        assert (await dispatcher.dispatch("in_thread")).value == 5
        failed = await dispatcher.dispatch("inline")
        assert isinstance(failed, DispatchError)
        assert failed.kind is ErrorKind.INTERNAL
        assert "event loop" in failed.message


@pytest.mark.requirement("D9")
@virtual_time
async def test_a_task_that_a_handler_leaves_behind_is_not_nested_but_keeps_its_tenant() -> None:
    registry, seen = Registry(), []
    events: list[Any] = []

    async def leaf(arguments: dict[str, Any]) -> None:
        return None

    async def handler(arguments: dict[str, Any]) -> None:
        async def later() -> None:
            await asyncio.sleep(1)
            seen.append(await dispatcher.dispatch("leaf"))

        tasks.append(asyncio.ensure_future(later()))

    tasks: list[asyncio.Task[None]] = []
    add(registry, "leaf", leaf)
    add(registry, "tool", handler)
    async with make(registry) as dispatcher:
        dispatcher.subscribe(events.append)
        await dispatcher.dispatch("tool", tenant="acme", deadline_ms=500)
        await asyncio.gather(*tasks)
        assert seen[0].ok  # the deadline of the call that left it is not its own
        assert {event.tenant for event in events if event.tool == "leaf"} == {"acme"}
        assert {event.parent_id for event in events if event.tool == "leaf"} == {""}


class CountedTimers(VirtualTimers):
    armed = 0

    def call_at(self, at_ms: int, callback: Callable[[], None]) -> Timer:
        self.armed += 1
        return super().call_at(at_ms, callback)


@pytest.mark.requirement("D32")
@virtual_time
async def test_code_that_ends_in_its_first_step_arms_no_timer_and_costs_one_turn_of_the_loop_at_most() -> None:
    async def at_once(arguments: dict[str, Any]) -> int:
        return 1

    registry = Registry()
    add(registry, "at_once", at_once)
    add_work(registry, "work", 10)
    timers, turns = CountedTimers(), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with make(registry, clock=timers) as dispatcher:
        counting = asyncio.ensure_future(count_turns())
        before = timers.armed
        for _ in range(10):
            assert (await dispatcher.dispatch("at_once")).ok
        assert (timers.armed - before, turns <= 10) == (0, True), turns
        counting.cancel()
        assert (await dispatcher.dispatch("work")).ok
        assert timers.armed > before


@pytest.mark.requirement("D9")
@virtual_time
async def test_a_handler_has_a_task_of_its_own_from_its_first_step_on() -> None:
    tasks: list[Any] = []

    async def bounded(arguments: dict[str, Any]) -> str:
        tasks.append(asyncio.current_task())
        try:
            async with asyncio.timeout(0.05):
                await asyncio.sleep(10)
        except TimeoutError:
            return "in time"
        return "never"

    registry = Registry()
    add(registry, "bounded", bounded)
    async with make(registry) as dispatcher:
        assert (await dispatcher.dispatch("bounded")).value == "in time"
    mine = asyncio.current_task()
    assert mine is not None
    assert (tasks[0] is not mine, mine.cancelling()) == (True, 0)
