"""What runs where: descriptions without imports, subcalls inside executors, tools of this process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.dispatcher import Dispatcher
from callyard.dispatch.exporters.audit import AuditExporter
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome, UsageError
from callyard.worker.loading import Registry
from callyard.worker.worker import Worker
from tests.e2e.cli.shell import run
from tests.e2e.dispatch.yards import ONCE, TOOLS, hear, lines, open_yard, quiet
from tests.e2e.processes import children_of


@pytest.mark.requirement("D6")
@pytest.mark.requirement("D50")
async def test_described_called_and_never_imported_here(tmp_path: Path) -> None:
    marker = tmp_path / "imported_by"
    target = tmp_path / "suspect_tools.py"
    target.write_text(
        f"import os\nwith open({str(marker)!r}, 'a') as file: file.write(f'{{os.getpid()}}\\n')\n{TOOLS.read_text()}"
    )
    registry = await Registry.aload(target, on_output=quiet)
    described_by = lines(marker)
    assert len(described_by) == 1
    assert registry.validate("add", {"a": 1}), "checked by what was described"
    async with open_yard(registry) as yard:
        assert (await yard.dispatch("add", {"a": 1, "b": 2})).unwrap() == 3
    assert str(os.getpid()) not in lines(marker)
    assert "suspect_tools" not in sys.modules


@pytest.mark.requirement("D50")
async def test_described_only_and_no_worker_is_refused_with_both_ways_out() -> None:
    registry = await Registry.aload(TOOLS, on_output=quiet)
    with pytest.raises(UsageError) as refused:
        Dispatcher(registry)
    assert "Dispatcher(registry, worker=worker)" in str(refused.value)
    assert "Registry.from_module" in str(refused.value)
    async with Worker(registry, executors=1, on_output=quiet) as worker, Dispatcher(registry, worker=worker) as own:
        assert (await own.dispatch("add", {"a": 1, "b": 2})).unwrap() == 3


@pytest.mark.requirement("D50")
async def test_a_described_function_is_never_inline() -> None:
    async with open_yard() as yard:
        executors = {slot.pid for slot in yard.worker.slots()}
        for tool in ("wants_to_be_inline", "wants_to_be_inline_too"):
            assert yard.registry.get(tool).isolation == "executor"
            assert (await yard.dispatch(tool)).unwrap() in executors


@pytest.mark.requirement("D50")
def test_list_says_that_isolation_is_ignored() -> None:
    listed = run("list", TOOLS).out
    line = next(line for line in listed.splitlines() if line.startswith("wants_to_be_inline("))
    assert "isolation=inline (ignored: it runs in an executor)" in line


@pytest.mark.requirement("D48")
@pytest.mark.requirement("D50")
async def test_a_tool_of_this_process_is_beyond_an_executors_reach() -> None:
    """Both kinds in one registry: the dispatcher finds each where it runs; the executor is told why it cannot."""
    registry = await Registry.aload(TOOLS, on_output=quiet)

    @registry.tool
    async def at_home() -> int:
        return os.getpid()

    async with open_yard(registry) as yard:
        assert (await yard.dispatch("at_home")).unwrap() == os.getpid()
        assert (await yard.dispatch("pid")).unwrap() != os.getpid()
        done = await yard.dispatch("calls", {"name": "at_home"})
        assert isinstance(done, DispatchError)
        assert done.kind is ErrorKind.INTERNAL
        cause = done.details["cause"]
        assert cause["kind"] == "not_found"
        assert cause["details"]["reason"] == "not_in_executor"
        assert "at_home" in cause["message"]
        unknown = await yard.dispatch("calls", {"name": "nobody"})
        assert isinstance(unknown, DispatchError)
        assert unknown.details["cause"]["kind"] == "not_found"
        assert "reason" not in unknown.details["cause"]["details"]
        with pytest.raises(UsageError):
            await yard.call("at_home")


@pytest.mark.requirement("D14")
@pytest.mark.requirement("D48")
async def test_an_inline_tool_calls_into_an_executor_through_the_dispatcher() -> None:
    registry = await Registry.aload(TOOLS, on_output=quiet)
    dispatchers: list[Dispatcher] = []

    @registry.tool
    async def plan() -> Any:
        return (await dispatchers[0].dispatch("seen")).unwrap()["tenant"]

    async with open_yard(registry) as yard:
        dispatchers.append(yard.dispatcher)
        events = hear(yard.dispatcher)
        done = await yard.dispatch("plan", tenant="acme")
        assert done.unwrap() == "acme"
    inner = [event for event in events if event.tool == "seen"]
    assert {event.parent_id for event in inner} == {done.call_id}


@pytest.mark.requirement("D29")
@pytest.mark.requirement("D48")
async def test_subcalls_are_told_of_as_children_of_their_call() -> None:
    async with open_yard() as yard:
        events = hear(yard.dispatcher)
        done = await yard.dispatch("tree", tenant="acme", owner="me")
        assert done.unwrap() == [3, 5, "tool_error: below zero"]
        assert done.attempts == 1
    told = [(event.name, event.tool) for event in events]
    assert told.count(("dispatch.start", "tree")) == told.count(("dispatch.success", "tree")) == 1
    starts = {event.call_id: event for event in events if event.name == "dispatch.start"}
    ends = {event.call_id: event for event in events if event.name in ("dispatch.success", "dispatch.error")}
    assert starts.keys() == ends.keys()
    assert len(starts) == 6
    assert {(event.tenant, event.owner) for event in events} == {("acme", "me")}
    below = [event for event in starts.values() if event.parent_id == done.call_id]
    assert [event.tool for event in below] == ["branch", "leaf", "leaf"]
    assert [event.tool for event in starts.values() if event.parent_id == below[0].call_id] == ["leaf", "leaf"]
    assert below[1].arguments == b'{"n":5}'
    failed = [event for event in ends.values() if event.name == "dispatch.error"]
    assert [(event.call_id, event.kind, event.message) for event in failed] == [
        (below[2].call_id, ErrorKind.TOOL_ERROR, "below zero")
    ]


@pytest.mark.requirement("D29")
@pytest.mark.requirement("D48")
async def test_subcalls_are_in_the_audit_file(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    async with open_yard() as yard:
        audit = AuditExporter(file)
        yard.dispatcher.subscribe(audit)
        done = await yard.dispatch("tree")
        assert await asyncio.to_thread(audit.close)
    records = [json.loads(line) for line in lines(file)]
    assert len(records) == 6
    below = [record for record in records if "parent" in record]
    assert [record["tool"] for record in below].count("leaf") == 4
    assert sum(record["parent"] == done.call_id for record in below) == 3


@pytest.mark.requirement("D48")
async def test_each_subcall_told_of_has_an_end(tmp_path: Path) -> None:
    """Refused, cut off by the timeout of its call, or lost with its process."""
    async with open_yard(max_subcall_depth=2) as yard:
        events = hear(yard.dispatcher)
        assert not (await yard.dispatch("too_deep")).ok
        assert not (await yard.dispatch("calls", {"name": "nobody"})).ok
        late = await yard.dispatch("calls", {"name": "overruns_not"}, timeout_ms=500)
        assert isinstance(late, DispatchError)
        assert (late.kind, late.outcome) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN)
        assert late.details["limit"] == "timeout_ms", "whoever of the two saw it first"
        assert not (await yard.dispatch("calls", {"name": "dies"})).ok
    starts = [event.call_id for event in events if event.name == "dispatch.start"]
    ends = [event.call_id for event in events if event.name in ("dispatch.success", "dispatch.error")]
    assert len(set(starts)) == len(starts)
    assert sorted(starts) == sorted(ends)
    kinds = {event.tool: event.kind for event in events if event.parent_id and event.name == "dispatch.error"}
    assert kinds["nobody"] is ErrorKind.NOT_FOUND
    assert kinds["overruns_not"] in (ErrorKind.CANCELLED, ErrorKind.TIMEOUT), "with its call, or by its own clock"
    assert kinds["dies"] in (ErrorKind.CRASHED, ErrorKind.CANCELLED)


@pytest.mark.requirement("D48")
async def test_a_subcall_has_no_key_no_retry_and_no_breaker(tmp_path: Path) -> None:
    from callyard.dispatch.allowance import Allowance

    async with open_yard() as yard:
        allowance = Allowance(calls=1)
        above = await yard.dispatch("calls", {"name": "seen"}, key="k", owner="me", tags={"a": "b"})
        below = above.unwrap()
        assert below["call_id"] != above.call_id, "a subcall is a call of its own"
        assert (below["key"], below["owner"], below["tags"], below["attempt"]) == ("", "me", {"a": "b"}, 1)
        for n in range(7):  # more failures below than open a breaker
            done = await yard.dispatch("tree", key=f"k-{n}")
            assert done.ok
        assert (await yard.dispatch("leaf", {"n": 1})).unwrap() == 1
        counted = await yard.dispatch("tree", allowance=allowance)
        assert counted.ok, "six calls, one of which is a tool call"
        spent = await yard.dispatch("leaf", {"n": 1}, allowance=allowance)
        assert isinstance(spent, DispatchError)
        assert spent.kind is ErrorKind.BUDGET_EXCEEDED


@pytest.mark.requirement("D6")
def test_loading_without_a_loop_leaves_no_process_behind() -> None:
    registry = Registry.load(TOOLS, on_output=quiet)
    assert "add" in registry.names()
    assert children_of(os.getpid()) == []


@pytest.mark.requirement("D40")
@pytest.mark.parametrize("tool", ["overruns_not", "calls"])
async def test_the_executor_may_be_the_first_to_see_that_the_time_is_over(tool: str) -> None:
    """Its clock and the dispatcher's say the same: here the dispatcher's cancellation never comes."""
    args = {"name": "overruns_not"} if tool == "calls" else {}
    async with open_yard(dispatching=DispatcherConfig(retry=ONCE)) as yard:
        yard.worker.runner.cancel = lambda *_: True  # type: ignore[method-assign]
        done = await yard.dispatch(tool, args, timeout_ms=1_000)
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
        assert (done.details["limit"], done.details["limit_ms"]) == ("timeout_ms", 1_000)
