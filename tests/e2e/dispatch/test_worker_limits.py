"""Time limits and cancellation over real executors: what is answered has stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from callyard.dispatch.allowance import Allowance
from callyard.dispatch.config import DispatcherConfig
from callyard.dispatch.outcomes import DispatchError
from callyard.errors import ErrorKind, Outcome
from callyard.yard import Yard
from tests.e2e.dispatch.yards import ONCE, assert_still, busy, lines, open_yard, wait_for, wait_quiet
from tests.e2e.processes import is_alive

LATE_S = 20.0
"""However loaded the machine: the code would go on for ten minutes."""


def pids(yard: Yard) -> set[int]:
    return {slot.pid for slot in yard.worker.slots() if slot.pid}


@pytest.mark.requirement("D9")
@pytest.mark.requirement("D40")
@pytest.mark.parametrize("tool", ["spin", "nap", "block", "grind"])
async def test_at_the_limit_the_code_runs_no_more(tool: str, tmp_path: Path) -> None:
    """Interrupted where it can be; where it cannot, its process is killed."""
    effects = tmp_path / "effects"
    async with open_yard(dispatching=DispatcherConfig(retry=ONCE)) as yard:
        at = monotonic()
        done = await yard.dispatch(tool, {"path": str(effects)}, timeout_ms=1_500)
        took_s = monotonic() - at
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
        assert done.details["limit"] == "timeout_ms"
        assert done.details["limit_ms"] == 1_500
        assert done.enforced
        assert 1.5 <= took_s < LATE_S
        if tool == "grind":  # at the answer the process is dead, not only given up
            assert not is_alive(int(lines(effects)[0]))
        assert "woke" not in lines(effects)
        await assert_still(effects)
        assert yard.dispatcher.statistics().stragglers_total == 0
        assert (await yard.dispatch("add", {"a": 1, "b": 2})).unwrap() == 3


@pytest.mark.requirement("D9")
@pytest.mark.requirement("D40")
async def test_no_call_list_limit_cuts_a_tool_call() -> None:
    """`call_deadline_ms` is for call lists: a call longer than it ends well."""
    async with open_yard(call_deadline_ms=50) as yard:
        assert (await yard.dispatch("long_nap", {"seconds": 0.3})).unwrap() == 0.3
        spun = await yard.dispatch("slow_python", timeout_ms=60_000)
        assert spun.unwrap() == "done"


@pytest.mark.slow
@pytest.mark.requirement("D40")
@pytest.mark.requirement("X74")
async def test_what_is_silent_within_its_time_is_not_taken_for_wedged(tmp_path: Path) -> None:
    """C code that holds the interpreter for longer than the stall and heartbeat limits, and ends in time."""
    target = tmp_path / "holds.py"
    target.write_text(
        "import ctypes\n"
        "from callyard import function\n"
        "@function\n"
        "def hold_the_gil() -> int: return ctypes.PyDLL(None).usleep(9_000_000)\n"
    )
    limits = {"call_deadline_ms": 0, "scheduler_stall_timeout_ms": 1_000, "heartbeat_timeout_ms": 1_000}
    async with open_yard(target, dispatching=DispatcherConfig(retry=ONCE), **limits) as yard:
        pid = yard.worker.slots()[0].pid
        assert (await yard.dispatch("hold_the_gil", timeout_ms=120_000)).unwrap() == 0
        assert yard.worker.slots()[0].pid == pid


@pytest.mark.requirement("D40")
async def test_the_functions_own_budget_is_sent_else_what_is_left(tmp_path: Path) -> None:
    sent: list[int] = []
    async with open_yard() as yard:
        runner = yard.worker.runner
        opened = yard.worker.open_attempt

        def watch(view: Any, call: Any, context: Any, budget_ms: int, *rest: Any) -> Any:
            sent.append(call.target.budget_ms or budget_ms)
            return opened(view, call, context, budget_ms, *rest)

        yard.worker.open_attempt = watch  # type: ignore[method-assign,assignment]
        assert runner is yard.worker.runner
        assert (await yard.dispatch("with_budget", timeout_ms=5_000)).ok
        assert (await yard.dispatch("add", {"a": 1, "b": 2}, timeout_ms=5_000)).ok
        assert (await yard.dispatch("add", {"a": 1, "b": 2}, timeout_ms=5_000, deadline_ms=3_000)).ok
    assert sent[0] == 60_000
    assert 0 < sent[1] <= 5_000
    assert 0 < sent[2] <= 3_000


@pytest.mark.requirement("D40")
async def test_waiting_for_an_executor_counts_in_timeout_and_not_in_budget(tmp_path: Path) -> None:
    """One seat, held: the one who waits times out without having begun; with time enough its budget is whole."""
    gate, effects = tmp_path / "gate", tmp_path / "effects"
    config = DispatcherConfig(retry=ONCE, slots=8)
    async with open_yard(dispatching=config, executor_max_runnable=1) as yard:
        holder = asyncio.ensure_future(yard.dispatch("hold", {"path": str(effects), "gate": str(gate)}))
        await wait_for(lambda: lines(effects), "the holder runs")
        late = await yard.dispatch("add", {"a": 1, "b": 2}, timeout_ms=300)
        assert isinstance(late, DispatchError)
        assert (late.kind, late.outcome, late.attempts) == (ErrorKind.TIMEOUT, Outcome.NOT_RUN, 0)
        assert late.details["limit"] == "timeout_ms"
        assert late.retryable, "it had not begun: safe for any function"
        queued = await yard.dispatch("add", {"a": 1, "b": 2}, deadline_ms=300)
        assert isinstance(queued, DispatchError)
        assert (queued.kind, queued.outcome, queued.attempts) == (ErrorKind.DEADLINE, Outcome.NOT_RUN, 0)
        spent = await yard.dispatch("add", {"a": 1, "b": 2}, allowance=Allowance(calls=9, wall_ms=300))
        assert isinstance(spent, DispatchError)
        assert (spent.kind, spent.outcome, spent.attempts) == (ErrorKind.BUDGET_EXCEEDED, Outcome.NOT_RUN, 0)
        patient = asyncio.ensure_future(yard.dispatch("within_budget", timeout_ms=600_000))
        await asyncio.sleep(0.5)  # longer than its budget
        gate.touch()
        assert (await patient).unwrap() == "within"
        assert (await holder).ok


@pytest.mark.requirement("D11")
@pytest.mark.requirement("D40")
async def test_running_at_its_deadline_is_a_timeout_and_no_retry_follows(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        done = await yard.dispatch("spin_again", {"path": str(effects)}, deadline_ms=1_500, timeout_ms=60_000)
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (ErrorKind.TIMEOUT, Outcome.UNKNOWN, 1)
        assert done.details["limit"] == "deadline_ms"
        await assert_still(effects)
        past = await yard.dispatch("add", {"a": 1, "b": 2}, deadline_ms=0)
        assert isinstance(past, DispatchError)
        assert (past.kind, past.outcome, past.attempts) == (ErrorKind.DEADLINE, Outcome.NOT_RUN, 0)


@pytest.mark.requirement("D13")
@pytest.mark.requirement("D40")
async def test_the_allowance_s_wall_limit_stops_it_too(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        allowance = Allowance(calls=10, wall_ms=1_500)
        done = await yard.dispatch("spin", {"path": str(effects)}, allowance=allowance)
        assert isinstance(done, DispatchError)
        assert done.kind is ErrorKind.TIMEOUT
        assert done.details["limit"] == "allowance_wall_ms"
        await assert_still(effects)


@pytest.mark.requirement("D41")
@pytest.mark.parametrize("tool", ["spin", "nap", "grind"])
async def test_a_cancelled_caller_stops_its_call(tool: str, tmp_path: Path) -> None:
    """To the caller at once; the code stops within bounds, what it held is free, and its neighbours are unharmed."""
    effects, beside, gate = tmp_path / "effects", tmp_path / "beside", tmp_path / "gate"
    async with open_yard(executors=2) as yard:
        neighbours = [
            asyncio.ensure_future(yard.dispatch("until_again", {"path": str(beside), "gate": str(gate), "value": n}))
            for n in range(4)
        ]
        await wait_for(lambda: len(lines(beside)) >= 4, "the neighbours run")
        caller = asyncio.ensure_future(yard.dispatch(tool, {"path": str(effects)}, owner="me"))
        await wait_for(lambda: lines(effects), "it runs")
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await wait_for(lambda: yard.dispatcher.statistics().running == 4, "its slot is free")
        await assert_still(effects)
        gate.touch()
        ended = await asyncio.gather(*neighbours)
        assert [done.unwrap() for done in ended] == [0, 1, 2, 3], "by their promise they run again if they have to"
        assert "woke" not in lines(effects)


@pytest.mark.requirement("D31")
@pytest.mark.requirement("D41")
async def test_an_owners_turn_ends_with_the_code_of_its_cancelled_call(tmp_path: Path) -> None:
    """The caller is gone at once; the owner's next call begins after the code has stopped, not beside it."""
    effects = tmp_path / "effects"
    async with open_yard(dispatching=DispatcherConfig(retry=ONCE), executors=2) as yard:
        caller = asyncio.ensure_future(yard.dispatch("unwinds", {"path": str(effects)}, owner="me"))
        await wait_for(lambda: lines(effects), "it runs")
        following = asyncio.ensure_future(yard.dispatch("marks", {"path": str(effects), "text": "next"}, owner="me"))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not following.done()
        assert (await following).ok
    assert lines(effects)[-1] == "next"
    assert lines(effects).count("next") == 1


@pytest.mark.requirement("D41")
async def test_cancel_by_id_answers_when_it_has_stopped(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        for n, tool in enumerate(("spin", "grind")):
            path = tmp_path / tool
            running = asyncio.ensure_future(yard.dispatch(tool, {"path": str(path)}, call_id=f"mine-{n}"))
            await wait_for(lambda path=path: lines(path), "it runs")  # type: ignore[misc]
            assert yard.dispatcher.cancel(f"mine-{n}")  # type: ignore[arg-type]
            done = await running
            assert isinstance(done, DispatchError)
            assert (done.kind, done.outcome, done.attempts) == (ErrorKind.CANCELLED, Outcome.UNKNOWN, 1)
            assert not busy(yard.worker)
            await assert_still(path, 0.2)
        assert not yard.dispatcher.cancel("mine-0")  # type: ignore[arg-type]
    assert lines(effects) == []


@pytest.mark.requirement("D41")
async def test_a_name_is_free_when_its_caller_is_gone(tmp_path: Path) -> None:
    """Another call of the same id begins while the code of the first is being stopped: each is its own."""
    first, second = tmp_path / "first", tmp_path / "second"
    async with open_yard(dispatching=DispatcherConfig(retry=ONCE), executors=2) as yard:
        gone = asyncio.ensure_future(yard.dispatch("unwinds", {"path": str(first)}, call_id="mine"))
        await wait_for(lambda: lines(first), "it runs")
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        again = asyncio.ensure_future(yard.dispatch("nap", {"path": str(second)}, call_id="mine"))
        await wait_for(lambda: lines(second), "the second runs")
        await wait_for(lambda: yard.worker.statistics().calls == 1, "the first has ended")
        assert yard.dispatcher.cancel("mine")  # type: ignore[arg-type]
        done = await again
        assert isinstance(done, DispatchError)
        assert done.kind is ErrorKind.CANCELLED


@pytest.mark.requirement("D41")
@pytest.mark.requirement("D23")
async def test_cancelled_while_it_waits_for_an_executor_it_never_runs(tmp_path: Path) -> None:
    gate, effects, other = tmp_path / "gate", tmp_path / "effects", tmp_path / "other"
    async with open_yard(dispatching=DispatcherConfig(retry=ONCE, slots=8), executor_max_runnable=1) as yard:
        holder = asyncio.ensure_future(yard.dispatch("hold", {"path": str(effects), "gate": str(gate)}))
        await wait_for(lambda: lines(effects), "the holder runs")
        waiting = asyncio.ensure_future(yard.dispatch("marks", {"path": str(other), "text": "ran"}, call_id="w"))
        await wait_for(lambda: yard.worker.statistics().calls == 2, "it waits in the worker")
        assert yard.dispatcher.cancel("w")  # type: ignore[arg-type]
        done = await waiting
        assert isinstance(done, DispatchError)
        assert (done.kind, done.outcome, done.attempts) == (ErrorKind.CANCELLED, Outcome.NOT_RUN, 0)
        gate.touch()
        assert (await holder).ok
    assert lines(other) == []


@pytest.mark.requirement("D41")
@pytest.mark.requirement("D46")
@pytest.mark.parametrize("tool", ["spin", "nap", "grind"])
async def test_closing_stops_what_runs(tool: str, tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_yard() as yard:
        running = asyncio.ensure_future(yard.dispatch(tool, {"path": str(effects)}))
        await wait_for(lambda: lines(effects), "it runs")
        await yard.dispatcher.close(drain_deadline_ms=100)
        assert running.done() or await asyncio.wait({running}, timeout=LATE_S)
        done = await running
        assert isinstance(done, DispatchError)
        assert done.kind in (ErrorKind.SHUTTING_DOWN, ErrorKind.CANCELLED)
        assert done.outcome is Outcome.UNKNOWN
        assert done.attempts == 1
        await wait_quiet(yard.dispatcher)
        await assert_still(effects)
        refused = await yard.dispatch("add", {"a": 1, "b": 2})
        assert isinstance(refused, DispatchError)
        assert (refused.kind, refused.outcome) == (ErrorKind.SHUTTING_DOWN, Outcome.NOT_RUN)
