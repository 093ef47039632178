"""The whole way with real executors: results, kills at any moment, clean ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest

import callyard
from callyard import CallError, ErrorKind, Outcome, Result, UsageError, Worker, Yard
from callyard.worker.builders import IterableSource
from callyard.worker.outputs import CallableOutput, MemoryOutput
from tests.e2e.processes import children_of, is_alive, kill, wait_gone, wait_until

TARGET = Path(__file__).parents[1] / "functions_file.py"


def quiet(*_: object) -> None:
    """Drop what executors print."""


async def test_call_and_map() -> None:
    async with Worker(TARGET, executors=2, on_output=quiet) as worker:
        assert await worker.call("double", [4]) == 8
        assert await worker.call("double", {"x": 5}) == 10
        results = [result async for result in worker.map("double", range(1_000))]
    assert [result.value for result in results] == [2 * i for i in range(1_000)]
    assert [result.index for result in results] == list(range(1_000))


@pytest.mark.requirement("X77")
async def test_each_failed_index_carries_its_failure() -> None:
    async with Worker(TARGET, executors=2, on_output=quiet) as worker:
        results = [result async for result in worker.map("boom", range(300))]
    for result in results:
        assert result.ok == (result.index % 3 != 0)
        if result.error is not None:
            assert (result.error.kind, result.error.outcome) == (ErrorKind.INTERNAL, Outcome.RAN)
            assert result.error.message == f"ValueError: {result.index} is divisible by 3"
            with pytest.raises(CallError):
                result.unwrap()


@pytest.mark.requirement("X43")
async def test_the_empty_list_ends_at_once() -> None:
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        assert [result async for result in worker.map("double", [])] == []


KILLS = 15


async def kill_at_random(worker: Worker, rng: Random) -> int:
    """SIGKILL a random executor now and then, seldom enough for a new one to get to work; how many were killed."""
    killed = 0
    while killed < KILLS:
        await asyncio.sleep(rng.uniform(0.05, 0.5))
        pids = [slot.pid for slot in worker.slots() if slot.pid]
        if pids:
            kill(rng.choice(pids), signal.SIGKILL)
            killed += 1
    return killed


@pytest.mark.slow
@pytest.mark.requirement("X45")
@pytest.mark.requirement("X72")
async def test_idempotent_calls_survive_kills_at_any_moment() -> None:
    async with Worker(TARGET, executors=2, max_restarts=1_000, restart_delay_ms=1, on_output=quiet) as worker:
        killer = asyncio.ensure_future(kill_at_random(worker, Random(7)))
        while not killer.done():
            results = [result async for result in worker.map("safe_nap", range(2_000), max_attempts=100)]
            assert [result.value for result in results] == list(range(2_000))
        assert await killer == KILLS


@pytest.mark.slow
@pytest.mark.requirement("X62")
@pytest.mark.requirement("X63")
async def test_unpromised_calls_begin_at_most_once_under_kills(tmp_path: Path) -> None:
    path = tmp_path / "effects"
    results: list[Result] = []
    async with Worker(TARGET, executors=2, max_restarts=1_000, restart_delay_ms=1, on_output=quiet) as worker:
        killer = asyncio.ensure_future(kill_at_random(worker, Random(11)))

        def rows() -> Iterator[dict[str, object]]:
            for i in count():
                if killer.done():
                    return
                yield {"x": i, "path": str(path)}

        async for result in worker.map("effect", rows()):
            results.append(result)
        assert await killer == KILLS
    begun = Counter(int(line) for line in path.read_text().split())
    assert max(begun.values()) == 1, "no call ran twice"
    assert [result.index for result in results] == list(range(len(results))), "none lost"
    assert set(begun) <= set(range(len(results)))
    for result in results:
        if result.ok:
            assert begun[result.index] == 1
        else:
            assert result.error is not None
            assert result.error.kind is ErrorKind.CRASHED
            assert result.error.outcome is Outcome.UNKNOWN


@pytest.mark.requirement("X45")
async def test_a_crash_costs_the_call_that_crashed() -> None:
    async with Worker(TARGET, executors=1, spare_executors=1, on_output=quiet) as worker:
        others = [asyncio.ensure_future(worker.call("safe_nap", [i])) for i in range(50)]
        with pytest.raises(CallError) as caught:
            await worker.call("die", [1])
        assert await asyncio.gather(*others) == list(range(50))
    assert caught.value.kind is ErrorKind.CRASHED
    assert "SIGKILL" in str(caught.value)


@pytest.mark.requirement("X12")
async def test_a_transient_error_is_retried_whatever_the_promise(tmp_path: Path) -> None:
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        result = await worker.call_result("moody", [str(tmp_path / "mood")])
    assert result.value == "well"
    assert result.attempts == 2


@pytest.mark.requirement("X37")
async def test_a_stopped_executor_is_replaced_and_never_goes_on(tmp_path: Path) -> None:
    """SIGSTOP, then SIGCONT after the loss: nothing it held goes on beside the new attempt (X63)."""
    async with Worker(TARGET, executors=1, spare_executors=0, restart_delay_ms=1, on_output=quiet) as worker:
        pid = worker.slots()[0].pid
        call = asyncio.ensure_future(worker.call("safe_nap", [1, 0.3]))
        await asyncio.sleep(0.1)
        kill(pid, signal.SIGSTOP)
        assert await call == 1
        assert not is_alive(pid)
        kill(pid, signal.SIGCONT)


@pytest.mark.requirement("X43")
async def test_leaving_the_loop_early_cancels_the_rest() -> None:
    async with Worker(TARGET, executors=2, on_output=quiet) as worker:
        stream = worker.map("nap", [0.0] * 10 + [60.0] * 200)
        async for result in stream:
            assert result.ok
            break
        await stream.aclose()
        assert worker.statistics().calls == 0
        assert await worker.call("double", [1]) == 2


@pytest.mark.requirement("X43")
async def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        stream = worker.map("nap", [60.0] * 300, deadline_ms=300)
        results = [result async for result in stream]
    kinds = Counter(result.error.kind for result in results if result.error is not None)
    assert kinds[ErrorKind.TIMEOUT] == 128, "its running calls"
    assert kinds[ErrorKind.DEADLINE] == len(results) - 128
    assert all(result.error.attempts == 0 for result in results if result.error.kind is ErrorKind.DEADLINE)


async def test_a_deadline_that_has_passed_lets_nothing_run(tmp_path: Path) -> None:
    path = tmp_path / "effects"
    rows = [{"x": i, "path": str(path)} for i in range(50)]
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        single = [await worker.call_result("effect", rows[0], deadline_ms=0) for _ in range(50)]
        listed = [result async for result in worker.map("effect", rows, deadline_ms=0)]
    assert {result.error.kind for result in single + listed if result.error} == {ErrorKind.DEADLINE}
    assert not any(result.ok for result in single + listed)
    assert not path.exists()


async def test_cancelling_the_caller_cancels_the_call() -> None:
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        call = asyncio.ensure_future(worker.call("spin", [60.0]))
        while worker.statistics().inflight == 0:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await worker.call("double", [3]) == 6
        assert worker.last_loss == "", "it was interrupted, not killed"


@pytest.mark.requirement("X44")
async def test_close_lets_running_calls_finish_and_leaves_no_process() -> None:
    worker = Worker(TARGET, executors=2, on_output=quiet)
    await worker.start()
    call = asyncio.ensure_future(worker.call("nap", [0.2]))
    while worker.statistics().inflight == 0:
        await asyncio.sleep(0)
    pids = [slot.pid for slot in worker.slots()]
    await worker.close()
    assert await call == 0.2
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(UsageError):
        await worker.call("double", [1])


@pytest.mark.requirement("X44")
async def test_close_stops_calls_that_outlive_the_deadline() -> None:
    worker = Worker(TARGET, executors=1, spare_executors=0, drain_deadline_ms=50, on_output=quiet)
    await worker.start()
    call = asyncio.ensure_future(worker.call("spin", [60.0]))
    while worker.statistics().inflight == 0:
        await asyncio.sleep(0)
    pids = [slot.pid for slot in worker.slots()]
    await worker.close()
    with pytest.raises(CallError) as caught:
        await call
    assert caught.value.kind is ErrorKind.CANCELLED
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.requirement("X44")
def test_a_killed_worker_leaves_no_executor(tmp_path: Path) -> None:
    """SIGKILL of the worker while one call sleeps, one holds a tight loop, and one waits for a program."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import asyncio
from callyard import Worker

async def main():
    async with Worker({str(TARGET)!r}, executors=3) as worker:
        calls = [asyncio.ensure_future(worker.call(name, [300.0])) for name in ("nap", "spin", "program")]
        while worker.statistics().inflight < 3:
            await asyncio.sleep(0.01)
        print("running", flush=True)
        await asyncio.gather(*calls)

asyncio.run(main())
"""
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        executors = children_of(process.pid)
        assert len(executors) >= 3
        programs: list[int] = []

        def started() -> bool:
            programs[:] = [pid for executor in executors for pid in children_of(executor)]
            return bool(programs)

        wait_until(started, "the program started")
        process.kill()
    wait_gone([*executors, *programs])


@pytest.mark.requirement("X20")
async def test_a_consumer_that_stops_stops_the_production() -> None:
    taken: list[int] = []

    def rows() -> object:
        for i in range(1_000_000):
            taken.append(i)
            yield i

    async with Worker(TARGET, executors=1, spare_executors=0, max_outstanding_batches=4, on_output=quiet) as worker:
        stream = worker.map("double", rows())  # type: ignore[arg-type]
        first = await anext(stream)
        assert first.value == 0
        seen = -1
        while seen != len(taken):
            seen = len(taken)
            await asyncio.sleep(0.3)
        assert len(taken) <= 4 * 64 + 2_048 + 64, "four batches, and what the thread reads ahead"
        await stream.aclose()


async def test_what_the_rows_raise_reaches_the_consumer() -> None:
    def rows() -> object:
        yield 1
        yield 2
        raise LookupError("the database is gone")

    got: list[Result] = []
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:

        async def take() -> None:
            async for result in worker.map("double", rows()):  # type: ignore[arg-type]
                got.append(result)

        with pytest.raises(LookupError, match="the database is gone"):
            await take()
        assert [result.value for result in got] == [2, 4]
        assert await worker.call("double", [1]) == 2


async def test_run_to_a_callable_and_its_summary() -> None:
    seen: list[int] = []
    async with Worker(TARGET, executors=2, on_output=quiet) as worker:
        sink = CallableOutput(lambda result: seen.append(result.index))
        summary = await worker.run("boom", IterableSource(range(9)), sink)
    assert seen == list(range(9))
    assert (summary.calls, summary.ok, summary.failed) == (9, 6, 3)
    group = summary.failures[ErrorKind.INTERNAL]
    assert (group.count, group.example_index) == (3, 0)


async def test_max_failures_stops_a_hopeless_run() -> None:
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        sink = MemoryOutput()
        run = worker.open_run("boom", IterableSource([3] * 100_000), sink, max_failures=10)
        summary = await run.wait()
    assert summary.stop_reason == "max_failures"
    assert 10 < summary.failed <= summary.calls < 100_000


async def test_a_failing_sink_stops_the_run_and_is_raised() -> None:
    class Full(Exception):
        pass

    def take(_: object) -> None:
        raise Full

    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        with pytest.raises(Full):
            await worker.run("double", IterableSource(range(100_000)), CallableOutput(take))
        assert await worker.call("double", [1]) == 2


@pytest.mark.requirement("X32")
async def test_the_dialled_link_runs_calls_too() -> None:
    async with Worker(TARGET, executors=2, link_mode="path", on_output=quiet) as worker:
        results = [result async for result in worker.map("double", range(500))]
        assert [result.value for result in results] == [2 * i for i in range(500)]
        kill(worker.slots()[0].pid, signal.SIGKILL)
        assert await worker.call("double", [1]) == 2


async def test_prints_reach_the_worker() -> None:
    lines: list[str] = []
    arrived = asyncio.Event()

    def note(_: object, line: str) -> None:
        lines.append(line)
        arrived.set()

    async with Worker(TARGET, executors=1, spare_executors=0, on_output=note) as worker:
        assert await worker.call("say", ["hello"]) == "hello"
        async with asyncio.timeout(20):
            await arrived.wait()
    assert lines == ["printed: hello"]


async def test_an_unknown_function_names_the_close_ones() -> None:
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        with pytest.raises(UsageError, match="did you mean 'double'"):
            await worker.call("duble", [1])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:\n", r"m\.py:1"),
        ("import nowhere_to_be_found\n", r"m\.py:1.*nowhere_to_be_found"),
        ("\n\nraise RuntimeError('at import')\n", r"m\.py:3.*RuntimeError: at import"),
        ("import sys\nsys.exit(4)\n", r"m\.py:2"),
        ("import os\nos._exit(4)\n", "exited with status 4"),
        ("import time\ntime.sleep(60)\n", "start_timeout_ms"),
        ("import callyard\ncallyard.run(__file__, [])\n", "__main__"),
    ],
)
async def test_a_file_that_cannot_be_imported_says_where_and_what(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "m.py"
    path.write_text(source)
    with pytest.raises(UsageError, match=message):
        async with Worker(path, executors=1, spare_executors=0, start_timeout_ms=3_000, on_output=quiet):
            pass
    assert not [pid for pid in children_of(os.getpid()) if "callyard.executor" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


async def test_yard_is_registry_and_worker_with_one_close() -> None:
    async with Yard(TARGET, executors=1, spare_executors=0, on_output=quiet) as yard:
        assert await yard.call("double", {"x": 2}) == 4
        assert [result.value async for result in yard.map("double", [1, 2])] == [2, 4]
        pid = yard.worker.slots()[0].pid
    assert not is_alive(pid)


def test_run_without_a_loop_and_inside_one() -> None:
    results = callyard.run(f"{TARGET}:double", [1, 2, 3], executors=1, spare_executors=0)
    assert [result.value for result in results] == [2, 4, 6]

    async def inside() -> list[Result]:
        return callyard.run(f"{TARGET}:double", [4], executors=1, spare_executors=0)

    assert asyncio.run(inside())[0].value == 8


def test_run_from_a_file_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n[2]\n')
    summary = callyard.run(f"{TARGET}:double", tmp_path / "in.jsonl", tmp_path / "out.jsonl", executors=1)
    assert (tmp_path / "out.jsonl").read_text() == (
        '{"index":0,"ok":true,"output":2}\n{"index":1,"ok":true,"output":4}\n'
    )
    assert (summary.calls, summary.failed) == (2, 0)


async def test_a_memory_limit_that_no_executor_can_keep_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="an idle executor uses"):
        async with Worker(TARGET, executors=1, spare_executors=0, executor_memory_high_watermark=1, on_output=quiet):
            pass


async def test_a_call_error_shows_the_users_traceback_as_a_note() -> None:
    async with Worker(TARGET, executors=1, spare_executors=0, on_output=quiet) as worker:
        with pytest.raises(CallError) as caught:
            await worker.call("boom", [3])
    assert str(caught.value) == str(caught.value.failure) == "internal: ValueError: 3 is divisible by 3"
    (note,) = caught.value.__notes__
    assert "functions_file.py" in note
    assert "in boom" in note


def test_run_replaces_or_adds_to_an_output_only_when_told(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    line = '{"index":0,"ok":true,"output":2}\n'
    for existing, expected in (("refuse", line), ("append", line * 2), ("overwrite", line)):
        callyard.run(f"{TARGET}:double", [1], output, existing=existing, executors=1)  # type: ignore[call-overload]
        assert output.read_text().count('"output":2') == expected.count('"output":2')
    with pytest.raises(UsageError, match='existing="overwrite"'):
        callyard.run(f"{TARGET}:double", [1], output, executors=1)
