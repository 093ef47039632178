"""The pool with real processes: crashes, code that does not end, leaks, starts that fail, late binding, tenants."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import chaos

from callyard.errors import CallError, ErrorKind, Outcome, UsageError
from callyard.worker.worker import Worker
from tests.e2e.processes import WAIT_S, kill

FUNCTIONS = """
import ctypes
import os
import re
import time

from callyard import function, sleep

here = []
"Calls that have begun in this process and not ended."
leaked = []


@function(idempotent=True)
def pid(number: int = 0) -> int:
    return os.getpid()


@function
def segfault() -> None:
    ctypes.string_at(0)


@function
def backtrack() -> bool:
    return bool(re.match("(a+)+$", "a" * 40 + "b"))


@function
def leak(mebibytes: int) -> int:
    leaked.append(bytes(range(256)) * (4096 * mebibytes))
    return os.getpid()


@function
def until(begun: str, go_on: str) -> int:
    "Waits, and lets others run."
    open(begun, "x").close()
    while not os.path.exists(go_on):
        sleep(0.01)
    return os.getpid()


@function(idempotent=True)
def hold(path: str) -> str:
    "Holds its executor until the file is there; the name nothing is there at once."
    while path and not os.path.exists(path):
        time.sleep(0.005)
    return path


@function
def meet(count: int) -> int:
    "Ends once so many have begun in this process."
    here.append(None)
    while len(here) < count:
        sleep(0.01)
    return os.getpid()


@function(idempotent=True, exclusive=True)
def alone(number: int) -> int:
    return beside_of()


@function(idempotent=True)
def beside(number: int) -> int:
    return beside_of()


def beside_of() -> int:
    "How many others have begun here."
    here.append(None)
    try:
        sleep(0.002)
        return len(here) - 1
    finally:
        here.pop()


seen = set()


@function(idempotent=True)
def whose(tenant: str) -> list:
    seen.add(tenant)
    sleep(0.001)
    return sorted(seen)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def start(path: Path, **settings: Any) -> Worker:
    return Worker(path, **{"executors": 1, "on_output": lambda *_: None, **settings})


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


# --- calls that take their process down, or do not end -----------------------------------------------------------


@pytest.mark.requirement("X45", "X57")
async def test_a_segfault_costs_its_call_and_the_slot_is_filled(path: Path) -> None:
    async with start(path) as worker:
        before = await worker.call("pid")
        with pytest.raises(CallError, match="SIGSEGV") as caught:
            await worker.call("segfault")
        assert (caught.value.kind, caught.value.outcome) == (ErrorKind.CRASHED, Outcome.UNKNOWN)
        assert await worker.call("pid") != before


@pytest.mark.requirement("X38", "X53")
async def test_a_catastrophic_regex_ends_with_its_budget(path: Path) -> None:
    """It is interrupted where it stands: no wedge, and its neighbour goes on."""
    async with start(path) as worker:
        begun, go_on = path.with_name("begun"), path.with_name("go on")
        neighbour = asyncio.ensure_future(worker.call("until", [str(begun), str(go_on)]))
        await wait_for(begun.exists)
        with pytest.raises(CallError) as caught:
            await worker.call("backtrack", budget_ms=200)
        assert (caught.value.kind, caught.value.failure.details["limit"]) == (ErrorKind.TIMEOUT, "budget_ms")
        go_on.touch()
        assert await neighbour > 0


# --- recycling ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X47")
async def test_an_executor_that_has_ended_enough_calls_is_replaced(path: Path) -> None:
    async with start(path, recycle_after_calls=10) as worker:
        pids = [await worker.call("pid") for _ in range(50)]
        assert len(set(pids)) >= 3
        assert worker.restarts()["default"] >= 2


@pytest.mark.requirement("X47")
async def test_an_executor_that_leaks_is_replaced_and_ends_what_it_has_begun(path: Path) -> None:
    """Not a call is lost: one that waits there ends beside its successor."""
    mebi = 1 << 20
    async with start(path, recycle_above_rss=300 * mebi) as worker:
        begun, go_on = path.with_name("begun"), path.with_name("go on")
        waiting = asyncio.ensure_future(worker.call("until", [str(begun), str(go_on)]))
        await wait_for(begun.exists)
        first = await worker.call("leak", [400])
        async with asyncio.timeout(WAIT_S):
            while await worker.call("pid") == first:
                await asyncio.sleep(0.02)
        assert not waiting.done()
        go_on.touch()
        assert await waiting == first
        assert await worker.call("leak", [1]) != first


@pytest.mark.requirement("X8", "X47")
async def test_an_executor_above_its_memory_is_replaced_once_it_has_no_call(path: Path) -> None:
    """Else code that leaks would leave all later calls waiting: nothing makes an idle process smaller."""
    async with start(path, executor_memory_high_watermark=300 << 20) as worker:
        first = await worker.call("leak", [400])
        async with asyncio.timeout(WAIT_S):
            while await worker.call("pid") == first:
                await asyncio.sleep(0.02)


@pytest.mark.requirement("X47")
async def test_recycling_is_off_by_default(path: Path) -> None:
    async with start(path) as worker:
        assert len({await worker.call("pid") for _ in range(300)}) == 1


# --- starts that fail --------------------------------------------------------------------------------------------

BROKEN_START = """
import os, sys
sys.stderr.write("license server: connection refused\\n")
sys.stderr.flush()
os._exit(3)
"""


@pytest.mark.requirement("X45", "X71")
async def test_a_start_that_crashes_in_a_loop_backs_off_and_shows_its_last_lines(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BROKEN_START)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with pytest.raises(UsageError, match=r"(?s)do not start: .*exit.* 3.*license server: connection refused"):
        async with start(path, max_restarts=2, restart_delay_ms=1, start_timeout_ms=60_000):
            pass


@pytest.mark.requirement("X45", "X71")
async def test_calls_of_a_pool_whose_starts_crash_end_with_the_last_lines(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_restarts": 2, "restart_delay_ms": 1, "no_executor_timeout_ms": 2_000, "spare_executors": 0}
    async with start(path, **settings) as worker:
        assert await worker.call("pid")
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(BROKEN_START)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        for slot in worker.slots():
            kill(slot.pid, signal.SIGKILL)
        await wait_for(lambda: all(slot.state == "BACKOFF" for slot in worker.slots()))
        with pytest.raises(CallError, match="license server: connection refused") as caught:
            await worker.call("pid")
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert caught.value.outcome is Outcome.NOT_RUN


@pytest.mark.requirement("X45", "X71")
async def test_calls_end_though_processes_start_and_die_of_the_code(path: Path, tmp_path: Path) -> None:
    """A process is there each time, and an executor never."""
    broken = tmp_path / "broken"
    crash = f"if os.path.exists({str(broken)!r}):\n    os.write(2, b'no license\\n')\n    os.abort()\n"
    path.write_text(path.read_text() + crash)
    settings = {"max_restarts": 1, "restart_delay_ms": 1, "backoff_ms": 1_200, "no_executor_timeout_ms": 2_000}
    async with start(path, spare_executors=0, **settings) as worker:
        killed = await worker.call("pid")
        broken.touch()
        kill(killed, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(CallError, match=r"SIGABRT\n *no license") as caught:
                await worker.call("pid")
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        broken.unlink()
        await wait_for(lambda: worker.slots()[0].is_attached)
        assert await worker.call("pid") != killed


# --- late binding ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X91", "X93")
async def test_nothing_waits_behind_a_long_call_while_another_executor_is_idle(path: Path) -> None:
    """All others end while two of three executors are held: what stood in their lines was taken back."""
    go_on = path.with_name("go on")
    async with start(path, executors=3, batch_rows=1) as worker:
        rows: list[list[str]] = [[""]] * 200
        rows[3] = rows[10] = [str(go_on)]
        ended = 0
        async with asyncio.timeout(WAIT_S):
            async for result in worker.map("hold", rows, ordered=False):
                assert result.ok
                assert result.attempts == 1
                ended += 1
                if ended == 198:
                    go_on.touch()
        assert ended == 200


@pytest.mark.requirement("X91", "X52")
@pytest.mark.parametrize("known", ["", "after calls that hold their executor"])
async def test_calls_that_wait_go_128_wide_to_one_executor(path: Path, known: str) -> None:
    async with start(path) as worker:
        if known:
            for _ in range(3):
                await worker.call("hold", [str(path)])
        async with asyncio.timeout(WAIT_S):
            pids = {result.value async for result in worker.map("meet", [[128]] * 128)}
        assert len(pids) == 1


# --- exclusive calls, tenants ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.requirement("X90")
async def test_exclusive_calls_are_alone_under_load_and_kills(path: Path) -> None:
    async with start(path, executors=2, executors_max=3, max_restarts=1_000, restart_delay_ms=1) as worker:

        async def run(name: str, calls: int) -> list[int]:
            return [one.value async for one in worker.map(name, range(calls), max_attempts=100)]

        lists = asyncio.gather(run("alone", 150), run("beside", 6_000))
        for _ in range(8):
            await asyncio.sleep(0.25)
            if lists.done():
                break
            pids = [slot.pid for slot in worker.slots() if slot.pid]
            if pids:
                kill(pids[0], signal.SIGKILL)
        async with asyncio.timeout(4 * WAIT_S):
            alone, beside = await lists
    assert alone == [0] * 150
    assert len(beside) == 6_000
    assert max(beside) > 0, "the others do share their process"


@pytest.mark.slow
@pytest.mark.requirement("X92")
async def test_tenants_under_load_share_no_sandboxed_executor(path: Path) -> None:
    async with start(path, executors=2, sandbox="auto", executor_max_inflight=4) as worker:

        async def run(tenant: str) -> set[str]:
            found = [one.value async for one in worker.map("whose", [[tenant]] * 300, tenant=tenant)]
            return {name for names in found for name in names}

        tenants = ["a", "b", "c"]
        async with asyncio.timeout(8 * WAIT_S):
            assert await asyncio.gather(*map(run, tenants)) == [{tenant} for tenant in tenants]


# --- fairness ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X17")
async def test_a_tenant_with_few_calls_is_not_behind_one_with_many(path: Path) -> None:
    async with start(path, instance_fairness=True, executor_max_inflight=4) as worker:
        many = worker.map("beside", range(100_000), tenant="many")
        first = await anext(many)
        assert first.ok
        flooding = asyncio.create_task(drain(many))
        async with asyncio.timeout(WAIT_S):
            few = [result.value async for result in worker.map("beside", range(10), tenant="few")]
        assert len(few) == 10
        assert not flooding.done()
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


async def drain(results: Any) -> None:
    async for _ in results:
        pass


# --- all at once -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.requirement("X45", "X62", "X63", "X72")
async def test_chaos(tmp_path: Path) -> None:
    """SIGKILL every 300 ms, SIGSTOP every second: `python -m bench.chaos` says how it is with 300,000 calls."""
    seconds, wrong, counts = await chaos.run_list(tmp_path, 30_000, 1.0, backoff_ms=500)
    assert wrong == []
    assert counts["calls"] == 30_000
    assert counts["kills"] >= 1
    assert seconds > 0
    assert os.listdir(tmp_path)
