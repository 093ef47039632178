"""What is told of calls: which events, in what order, with what in them; and that nothing of it is left to chance."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import pytest

from callyard.dispatch.events import ENDS, DispatchEvent
from callyard.dispatch.fan_out import ToolCall
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome, TransientError
from callyard.functions.registry import Registry
from callyard.testing.virtual_time import run_virtual, virtual_time
from tests.unit.dispatch.kit import add, add_work, assert_quiet, hear, make, spin, told


@pytest.mark.requirement("D29")
@virtual_time
async def test_a_success_is_told_with_its_times() -> None:
    registry = Registry()
    add_work(registry, wait_ms=700)
    dispatcher = make(registry)
    events = hear(dispatcher)
    await asyncio.sleep(1)
    done = await dispatcher.dispatch("work", {"mark": 1}, owner="o", tenant="t")
    start, attempt, success = events
    common = {"tool": "work", "call_id": done.call_id, "tenant": "t", "owner": "o", "parent_id": ""}
    for event in events:
        assert {name: getattr(event, name) for name in common} == common
    assert (start.name, start.at_ms, start.attempt, start.arguments) == ("dispatch.start", 1_000, 0, b'{"mark":1}')
    assert (attempt.name, attempt.at_ms, attempt.attempt, attempt.arguments) == ("dispatch.attempt", 1_000, 1, b"")
    assert (success.name, success.at_ms, success.attempt, success.duration_ms) == ("dispatch.success", 1_700, 1, 700)
    assert (success.kind, success.outcome, success.message, success.deduplicated) == (None, None, "", False)


@pytest.mark.requirement("D29", "D22")
@virtual_time
async def test_a_failure_is_told_with_kind_outcome_and_message() -> None:
    registry = Registry()

    async def fails(arguments: dict[str, Any]) -> None:
        raise ValueError("it broke")

    add(registry, "fails", fails)
    dispatcher = make(registry)
    events = hear(dispatcher)
    await dispatcher.dispatch("fails")
    end = events[-1]
    assert (end.name, end.kind, end.outcome, end.message, end.attempt) == (
        "dispatch.error",
        ErrorKind.INTERNAL,
        Outcome.RAN,
        "ValueError: it broke",
        1,
    )


@pytest.mark.requirement("D29")
@virtual_time
async def test_refusals_are_told_as_start_and_error() -> None:
    registry = Registry()
    registry.add_tool("strict", lambda arguments: None, input_schema={"type": "object", "required": ["n"]})
    dispatcher = make(registry, policy=lambda tenant, tool, arguments: False)
    events = hear(dispatcher)
    for name, args in (("nope", {}), ("strict", {}), ("strict", {"n": 1})):
        await dispatcher.dispatch(name, args, owner="o")
    await dispatcher.close()
    await dispatcher.dispatch("strict", {"n": 1})
    assert told(events) == ["dispatch.start", "dispatch.error"] * 4
    kinds = [event.kind for event in events if event.name == "dispatch.error"]
    assert kinds == [ErrorKind.NOT_FOUND, ErrorKind.SCHEMA, ErrorKind.DENIED, ErrorKind.SHUTTING_DOWN]
    assert all(event.attempt == 0 for event in events)


@pytest.mark.requirement("D29", "D43")
@virtual_time
async def test_a_joined_call_and_a_stored_answer_are_told_as_deduplicated() -> None:
    registry = Registry()
    add_work(registry)
    dispatcher = make(registry)
    events = hear(dispatcher)
    ends = await asyncio.gather(*(dispatcher.dispatch("work", key="k", call_id=f"c{n}") for n in range(2)))
    ends.append(await dispatcher.dispatch("work", key="k", call_id="c2"))
    assert {end.call_id for end in ends} == {"c0"}
    by_call = {call_id: [event.name for event in events if event.call_id == call_id] for call_id in ("c0", "c1", "c2")}
    assert by_call == {
        "c0": ["dispatch.start", "dispatch.attempt", "dispatch.success"],
        "c1": ["dispatch.start", "dispatch.deduplicated"],
        "c2": ["dispatch.start", "dispatch.deduplicated"],
    }
    assert all(event.deduplicated == (event.name == "dispatch.deduplicated") for event in events)


@pytest.mark.requirement("D29")
@virtual_time
async def test_a_failing_subscriber_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    add_work(registry)
    results = []
    for fails in (False, True):
        dispatcher = make(registry)
        seen: list[DispatchEvent] = []

        def angry(event: DispatchEvent, fails: bool = fails) -> None:
            if fails:
                raise SystemExit(1)

        dispatcher.subscribe(angry)
        dispatcher.subscribe(seen.append)  # after it: it hears all the same
        with caplog.at_level(logging.CRITICAL, "callyard.dispatch"):
            end = await dispatcher.dispatch("work", key="k")
        results.append((end.ok, told(seen)))
        assert dispatcher.statistics().subscriber_failures == (3 if fails else 0)
        assert_quiet(dispatcher)
    assert results[0] == results[1]


@pytest.mark.requirement("D29")
@virtual_time
async def test_a_subscriber_may_cancel_and_dispatch_and_leave() -> None:
    registry = Registry()
    work = add_work(registry)
    dispatcher = make(registry)
    started: list[asyncio.Task[Any]] = []

    def on_event(event: DispatchEvent) -> None:
        if event.name == "dispatch.attempt":
            leave()
            dispatcher.cancel(event.call_id)
            started.append(asyncio.ensure_future(dispatcher.dispatch("work")))

    leave = dispatcher.subscribe(on_event)
    end = await dispatcher.dispatch("work")
    assert isinstance(end, DispatchError)
    assert end.kind is ErrorKind.CANCELLED
    assert (await started[0]).ok
    assert work.ended == 1
    assert_quiet(dispatcher)


@pytest.mark.requirement("D29", "D47")
@virtual_time
async def test_a_handlers_calls_name_their_parent() -> None:
    registry = Registry()
    add_work(registry)

    async def parent(arguments: dict[str, Any]) -> None:
        await dispatcher.dispatch("work")
        await dispatcher.dispatch("nope")

    add(registry, "parent", parent)
    dispatcher = make(registry)
    events = hear(dispatcher)
    end = await dispatcher.dispatch("parent")
    assert [(event.tool, event.parent_id) for event in events if event.name == "dispatch.start"] == [
        ("parent", ""),
        ("work", end.call_id),
        ("nope", end.call_id),
    ]


def _run(seed: int) -> list[DispatchEvent]:
    """A crowd of calls with retries, keys, owners, cancellations and limits."""
    rng = Random(seed)

    async def main() -> list[DispatchEvent]:
        registry = Registry()

        async def tool(arguments: dict[str, Any]) -> int:
            await asyncio.sleep(rng.random())
            if rng.random() < 0.5:
                raise TransientError("busy")
            return 1

        add(registry, "tool", tool, max_concurrency=3)
        dispatcher = make(registry, rng=Random(seed), slots=4)
        events = hear(dispatcher)
        calls = [
            ToolCall(
                "tool",
                idempotency_key=f"k{n % 7}" if n % 3 else None,
                owner=f"o{n % 4}" if n % 2 else None,
                deadline_ms=rng.randrange(3_000),
            )
            for n in range(60)
        ]
        gathering = asyncio.ensure_future(dispatcher.gather_bounded(calls, limit=9))
        await asyncio.sleep(2.5)
        gathering.cancel()
        await asyncio.wait([gathering])
        await dispatcher.close()
        return events

    return run_virtual(main())


@pytest.mark.requirement("D51")
def test_one_seed_gives_one_list_of_events() -> None:
    first, again, other = _run(1), _run(1), _run(2)
    assert first == again
    assert len(first) > 90
    assert first != other


@pytest.mark.requirement("D51", "D29")
@pytest.mark.parametrize("seed", range(3))
def test_each_call_has_one_start_and_one_end_and_time_never_runs_back(seed: int) -> None:
    events = _run(seed)
    assert [event.at_ms for event in events] == sorted(event.at_ms for event in events)
    by_call: dict[str, list[str]] = {}
    for event in events:
        if event.call_id:
            by_call.setdefault(event.call_id, []).append(event.name)
    for names in by_call.values():
        assert names[0] == "dispatch.start"
        assert names[-1] in ENDS
        assert sum(name in ENDS for name in names) == names.count("dispatch.start") == 1


@pytest.mark.requirement("D51")
@virtual_time
async def test_nothing_is_built_when_nobody_listens() -> None:
    registry = Registry()
    add_work(registry)
    dispatcher = make(registry)
    leave = dispatcher.subscribe(lambda event: None)
    leave()
    assert not dispatcher._teller.hub.wanted
    assert (await dispatcher.dispatch("work")).ok
    await spin()
