"""Questions of running calls to their clients: whose they are, and which clocks stand meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from callyard import CallError, UsageError, aelicit, alist_roots, context, elicit
from callyard.dispatch.allowance import Allowance
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind
from callyard.functions.ports import AskRefused, CallContext, CallOutcome
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import FakeRunner, add, add_described, add_work, assert_quiet, make, now_ms, spin

YES = {"action": "accept", "content": {}}


def after(wait_ms: int, answer: Mapping[str, Any] = YES) -> Any:
    async def on_ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(wait_ms / 1_000)
        return answer

    return on_ask


def add_asker(registry: Registry, worker: FakeRunner, *, wait_ms: int = 60, **promises: Any) -> None:
    """`inline` and `executor`: a while of work, a question, a while of work."""

    async def inline(arguments: dict[str, Any]) -> str:
        await asyncio.sleep(wait_ms / 1_000)
        answer = await aelicit("Sure?")
        await asyncio.sleep(wait_ms / 1_000)
        return answer.action

    async def script(runner: FakeRunner, args: bytes, context: CallContext) -> CallOutcome:
        assert runner.on_ask is not None
        await asyncio.sleep(wait_ms / 1_000)
        answer = await runner.on_ask("elicit", {"message": "Sure?"})
        await asyncio.sleep(wait_ms / 1_000)
        return CallOutcome(b'"%b"' % answer["action"].encode(), None)

    add(registry, "inline", inline, **promises)
    add_described(registry, worker, "executor", script, **promises)


WHERE = pytest.mark.parametrize("where", ["inline", "executor"])


@pytest.mark.requirement("D9", "D40")
@WHERE
@virtual_time
async def test_no_clock_runs_while_a_question_is_open(where: str) -> None:
    registry, worker = Registry(), FakeRunner()
    add_asker(registry, worker, timeout_ms=200)
    async with make(registry, worker=worker) as dispatcher:
        allowance = Allowance(wall_ms=250)
        done = await dispatcher.dispatch(where, deadline_ms=220, allowance=allowance, on_ask=after(100_000))
        assert done.unwrap() == "accept"
        assert now_ms() == 100_120
        assert allowance.spent(now_ms()) is None
        assert allowance.ends_at_ms == 100_250
        assert_quiet(dispatcher)


@pytest.mark.requirement("D9", "D40")
@WHERE
@pytest.mark.parametrize(
    ("timeout_ms", "deadline_ms", "wall_ms", "wins"),
    [
        (100, 300, 300, "timeout_ms"),
        (300, 100, 300, "deadline_ms"),
        (300, 300, 100, "allowance_wall_ms"),
    ],
)
@virtual_time
async def test_after_the_answer_each_clock_goes_on_with_what_it_had(
    where: str, timeout_ms: int, deadline_ms: int, wall_ms: int, wins: str
) -> None:
    registry, worker = Registry(), FakeRunner()
    add_asker(registry, worker, timeout_ms=timeout_ms)
    async with make(registry, worker=worker) as dispatcher:
        allowance = Allowance(wall_ms=wall_ms)
        failed = await dispatcher.dispatch(where, deadline_ms=deadline_ms, allowance=allowance, on_ask=after(5_000))
        assert isinstance(failed, DispatchError)
        assert (failed.kind, failed.details["limit"], failed.details["limit_ms"]) == (ErrorKind.TIMEOUT, wins, 100)
        assert now_ms() == 5_100
        assert_quiet(dispatcher)


@pytest.mark.requirement("D40")
@WHERE
@virtual_time
async def test_several_questions_at_once_hold_the_clocks_once(where: str) -> None:
    registry, worker = Registry(), FakeRunner()
    waits = iter([1_000, 3_000, 2_000])

    async def on_ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(next(waits) / 1_000)
        return {"roots": []}

    async def inline(arguments: dict[str, Any]) -> int:
        await asyncio.gather(*(alist_roots() for _ in range(3)))
        await asyncio.sleep(10)
        return 1

    async def script(runner: FakeRunner, args: bytes, context: CallContext) -> CallOutcome:
        assert runner.on_ask is not None
        await asyncio.gather(*(runner.on_ask("list_roots", {}) for _ in range(3)))
        await asyncio.sleep(10)
        raise AssertionError("its time was over")

    add(registry, "inline", inline, timeout_ms=500)
    add_described(registry, worker, "executor", script, timeout_ms=500)
    async with make(registry, worker=worker) as dispatcher:
        failed = await dispatcher.dispatch(where, on_ask=on_ask)
        assert failed.error is not None
        assert failed.error.kind is ErrorKind.TIMEOUT
        assert now_ms() == 3_500


@pytest.mark.requirement("D40")
@virtual_time
async def test_the_clocks_of_the_calls_above_stand_too() -> None:
    registry, worker = Registry(), FakeRunner()
    add_asker(registry, worker, timeout_ms=1_000)
    dispatchers: list[Dispatcher] = []

    async def outer(arguments: dict[str, Any]) -> Any:
        return (await dispatchers[0].dispatch(arguments["tool"])).unwrap()

    add(registry, "outer", outer, timeout_ms=200)
    async with make(registry, worker=worker) as dispatcher:
        dispatchers.append(dispatcher)
        for tool in ("inline", "executor"):
            done = await dispatcher.dispatch("outer", {"tool": tool}, deadline_ms=300, on_ask=after(9_000))
            assert done.unwrap() == "accept"
        assert_quiet(dispatcher)


@pytest.mark.requirement("D40")
@virtual_time
async def test_a_retry_after_a_question_has_the_deadline_that_is_left() -> None:
    registry, tries = Registry(), []

    async def tool(arguments: dict[str, Any]) -> None:
        tries.append((now_ms(), context().deadline_remaining_ms))
        await aelicit("Sure?")
        await asyncio.sleep(100)

    add(registry, "tool", tool, timeout_ms=3_000, idempotent=True)
    async with make(registry) as dispatcher:
        failed = await dispatcher.dispatch("tool", deadline_ms=5_000, on_ask=after(10_000))
        assert failed.error is not None
        assert failed.error.details["limit"] == "deadline_ms"
        assert failed.error.details["limit_ms"] == 5_000
        assert tries[0] == (0, 5_000)
        assert tries[1][1] == 5_000 - (tries[1][0] - 10_000)
        assert now_ms() == 25_000


@pytest.mark.requirement("D40")
@WHERE
@virtual_time
async def test_a_question_that_nobody_answers_is_refused_after_its_own_time(where: str) -> None:
    registry, worker = Registry(), FakeRunner()
    add_asker(registry, worker, timeout_ms=200)
    async with make(registry, worker=worker, ask_timeout_ms=7_000) as dispatcher:
        call = asyncio.ensure_future(dispatcher.dispatch(where, on_ask=after(1_000_000)))
        if where == "executor":
            with pytest.raises(AskRefused) as refused:
                await call
            assert refused.value.kind is ErrorKind.DEADLINE
        else:
            failed = await call
            assert failed.error is not None
            assert "elicit was not answered within 7000 ms" in failed.error.message
        assert now_ms() == 7_060


@pytest.mark.requirement("D41")
@virtual_time
async def test_cancelling_a_call_withdraws_its_question() -> None:
    registry, worker = Registry(), FakeRunner()
    add_asker(registry, worker)
    withdrawn = []

    async def on_ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            await asyncio.sleep(10_000)
        except asyncio.CancelledError:
            withdrawn.append(now_ms())
            raise
        return YES

    async with make(registry, worker=worker) as dispatcher:
        call = asyncio.ensure_future(dispatcher.dispatch("inline", call_id="c", on_ask=on_ask))
        await asyncio.sleep(1)
        dispatcher.cancel("c")  # type: ignore[arg-type]
        failed = await call
        await spin()
        assert failed.error is not None
        assert failed.error.kind is ErrorKind.CANCELLED
        assert withdrawn == [1_000]
        assert_quiet(dispatcher)


@pytest.mark.requirement("D40")
@virtual_time
async def test_what_an_attempt_left_behind_asks_holds_no_clock_of_the_next() -> None:
    registry, left = Registry(), []

    async def tool(arguments: dict[str, Any]) -> None:
        left.append(asyncio.ensure_future(aelicit("Sure?")))
        await asyncio.sleep(0.01)
        raise CallError(fail_transient())

    def fail_transient() -> Any:
        from callyard.errors import fail

        return fail(ErrorKind.TRANSIENT, "later")

    add(registry, "tool", tool, timeout_ms=400)
    async with make(registry) as dispatcher:
        await dispatcher.dispatch("tool", on_ask=after(1_000_000))
        await spin()
        assert left
        for task in left:
            error = task.exception()
            assert isinstance(error, CallError)
            assert error.failure.kind is ErrorKind.CANCELLED
        assert now_ms() < 10_000
        assert_quiet(dispatcher)


@virtual_time
async def test_refusals_and_faults_are_the_functions_to_see() -> None:
    registry = Registry()

    async def tool(arguments: dict[str, Any]) -> list[str]:
        with pytest.raises(CallError) as caught:
            await aelicit("Sure?")
        return [caught.value.failure.kind.value, caught.value.failure.message]

    add(registry, "tool", tool)

    async def refuse(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AskRefused(ErrorKind.DENIED, "no capability")

    async def fault(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        raise OSError("secret")

    async with make(registry) as dispatcher:
        assert (await dispatcher.dispatch("tool", on_ask=refuse)).unwrap() == ["denied", "no capability"]
        kind, message = (await dispatcher.dispatch("tool", on_ask=fault)).unwrap()
        assert kind == "internal"
        assert "secret" not in message
        kind, message = (await dispatcher.dispatch("tool")).unwrap()
        assert kind == "denied"
        assert "nobody to ask" in message


async def test_a_plain_function_asks_from_its_thread_and_an_async_one_must_await() -> None:
    registry = Registry()

    def plain(arguments: dict[str, Any]) -> str:
        return elicit("Sure?", name="sure").action

    async def hasty(arguments: dict[str, Any]) -> str:
        with pytest.raises(UsageError, match="await aelicit"):
            elicit("Sure?")
        return "told"

    asked = []

    async def on_ask(kind: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append((kind, params["message"], params.get("name")))
        return YES

    add(registry, "plain", plain)
    add(registry, "hasty", hasty)
    async with Dispatcher(registry) as dispatcher:
        assert (await dispatcher.dispatch("plain", on_ask=on_ask)).unwrap() == "accept"
        assert (await dispatcher.dispatch("hasty", on_ask=on_ask)).unwrap() == "told"
    assert asked == [("elicit", "Sure?", "sure")]


@virtual_time
async def test_a_nested_call_asks_the_same_client() -> None:
    registry, worker = Registry(), FakeRunner()
    dispatchers: list[Dispatcher] = []
    work = add_work(registry, "work", 5)

    async def inner(arguments: dict[str, Any]) -> list[Any]:
        answer = await aelicit("Sure?")
        seen = context()
        return [answer.action, dict(seen.claims), dict(seen.headers), dict(seen.meta)]

    async def outer(arguments: dict[str, Any]) -> Any:
        return (await dispatchers[0].dispatch("inner")).unwrap()

    add(registry, "inner", inner)
    add(registry, "outer", outer)
    async with make(registry, worker=worker) as dispatcher:
        dispatchers.append(dispatcher)
        about: dict[str, Any] = {"claims": {"sub": "a"}, "headers": {"x-y": "z"}, "meta": {"deep": [1, {"n": None}]}}
        done = await dispatcher.dispatch("outer", on_ask=after(5), **about)
        assert done.unwrap() == ["accept", *about.values()]
        assert (await dispatcher.dispatch("work")).ok
        assert work.ended == 1
