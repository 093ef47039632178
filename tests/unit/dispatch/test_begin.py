"""When a call has begun, for who holds a permit for it; and how many wait for one key's run."""

from __future__ import annotations

import asyncio

import pytest

from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import virtual_time
from tests.unit.dispatch.kit import (
    FakeRunner,
    add,
    add_described,
    add_work,
    assert_quiet,
    ending,
    make,
    now_ms,
    spin,
)


@pytest.mark.requirement("R108")
@pytest.mark.parametrize("where", ["inline", "thread", "executor"])
@virtual_time
async def test_it_is_told_directly_before_the_first_attempt_and_once(where: str) -> None:
    registry, worker, seen = Registry(), FakeRunner(), []

    async def inline(arguments: dict[str, object]) -> int:
        seen.append("runs")
        if seen.count("runs") < 3:
            raise TimeoutError
        return 1

    def thread(arguments: dict[str, object]) -> int:
        seen.append("runs")
        return 1

    async def script(runner: FakeRunner, args: bytes, context: object) -> object:
        seen.append("runs")
        return await ending(b"1")(runner, args, context)  # type: ignore[arg-type]

    add(registry, "inline", inline)
    add(registry, "thread", thread)
    add_described(registry, worker, "executor", script)  # type: ignore[arg-type]
    async with make(registry, worker=worker) as dispatcher:
        await dispatcher.dispatch(where, on_begin=lambda: seen.append("begin"))
        assert seen[:2] == ["begin", "runs"]
        assert seen.count("begin") == 1
        assert_quiet(dispatcher)


@pytest.mark.requirement("R108")
@virtual_time
async def test_a_retry_does_not_begin_again() -> None:
    registry, worker, begun = Registry(), FakeRunner(), []
    add_work(registry, "work", 10_000, idempotent=True, timeout_ms=100)
    async with make(registry, worker=worker) as dispatcher:
        failed = await dispatcher.dispatch("work", on_begin=lambda: begun.append(now_ms()))
        assert failed.attempts == 3
        assert begun == [0]


@pytest.mark.requirement("R108", "R109")
@pytest.mark.parametrize("kind", ["schema", "deadline", "cancelled", "kept"])
@virtual_time
async def test_what_ends_before_an_attempt_never_begins(kind: str) -> None:
    registry, begun = Registry(), []
    add_work(registry, "work", 1_000)
    registry.add_tool("strict", lambda a: 1, input_schema={"type": "object", "required": ["n"]})
    async with make(registry, slots=1) as dispatcher:
        await dispatcher.dispatch("work", key="k")
        blocker = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()

        def begin() -> None:
            begun.append(kind)

        if kind == "schema":
            await dispatcher.dispatch("strict", on_begin=begin)
        elif kind == "deadline":
            await dispatcher.dispatch("work", deadline_ms=500, on_begin=begin)
        elif kind == "kept":
            assert (await dispatcher.dispatch("work", key="k", on_begin=begin)).deduplicated
        else:
            waiting = asyncio.ensure_future(dispatcher.dispatch("work", call_id="c", on_begin=begin))
            await spin()
            assert dispatcher.cancel("c")  # type: ignore[arg-type]
            await waiting
        assert begun == []
        await blocker
        assert_quiet(dispatcher)


@pytest.mark.requirement("R108")
@virtual_time
async def test_queued_calls_have_not_begun() -> None:
    registry, begun = Registry(), []
    add_work(registry, "work", 1_000)
    async with make(registry, slots=1) as dispatcher:
        calls = [
            asyncio.ensure_future(dispatcher.dispatch("work", on_begin=lambda: begun.append(now_ms())))
            for _ in range(3)
        ]
        await spin()
        assert begun == [0]
        await asyncio.gather(*calls)
        assert begun == [0, 1_000, 2_000]


@pytest.mark.requirement("R109")
@virtual_time
async def test_who_joins_a_run_begins_there_and_a_promoted_one_not_again() -> None:
    registry, begun = Registry(), []
    work = add_work(registry, "work", 1_000)
    async with make(registry, slots=1) as dispatcher:
        blocker = asyncio.ensure_future(dispatcher.dispatch("work"))
        await spin()
        first = asyncio.ensure_future(
            dispatcher.dispatch("work", key="k", call_id="first", on_begin=lambda: begun.append("first"))
        )
        await spin()
        joined = [
            asyncio.ensure_future(dispatcher.dispatch("work", key="k", on_begin=lambda n=n: begun.append(n)))
            for n in range(2)
        ]
        await spin()
        assert begun == [0, 1]  # the first one's run is queued
        assert dispatcher.cancel("first")  # type: ignore[arg-type]
        assert isinstance(await first, DispatchError)
        ends = await asyncio.gather(*joined)
        assert [end.deduplicated for end in ends] == [False, True]
        assert begun == [0, 1]
        await blocker
        assert work.ended == 2
        assert_quiet(dispatcher)


@pytest.mark.requirement("R109")
@virtual_time
async def test_so_many_wait_for_one_keys_run_and_no_more() -> None:
    registry = Registry()
    work = add_work(registry, "work", 1_000)
    async with make(registry, key_joiners_max=3) as dispatcher:
        calls = [asyncio.ensure_future(dispatcher.dispatch("work", key="k")) for _ in range(4)]
        await spin()
        refused = await dispatcher.dispatch("work", key="k")
        assert isinstance(refused, DispatchError)
        assert (refused.kind, refused.retryable) == (ErrorKind.UNAVAILABLE, True)
        assert refused.details["retry_after_ms"] > 0
        assert now_ms() == 0
        other = asyncio.ensure_future(dispatcher.dispatch("work", key="other"))
        assert [end.ok for end in await asyncio.gather(*calls)] == [True] * 4
        assert (await other).ok
        assert work.begun == 2
        assert_quiet(dispatcher)


@pytest.mark.requirement("R108")
@virtual_time
async def test_what_the_listener_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    add_work(registry, "work", 10)

    def begin() -> None:
        raise OSError

    async with make(registry) as dispatcher:
        assert (await dispatcher.dispatch("work", on_begin=begin)).ok
        assert "on_begin" in caplog.text
