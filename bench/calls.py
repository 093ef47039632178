"""The full path against the raw limit and the standard library's pool, side by side in one run.

    python -m bench.calls [--quick] [--json] [--memory]

Every call is validated by its signature. Rounds of all measures follow one another and the median of the ratios is
shown: these machines are shared, and a single figure means little. `--memory` streams 30 thousand and 3 million no-op
calls from a file instead, each in a process of its own, and compares the worker's peak memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

from bench import median, microseconds, p99, print_table, thousands
from bench.limits import CHILDREN, process_pool, raw_limit
from callyard import Worker
from callyard.scheduler import CallResult
from callyard.worker.builders import open_source
from callyard.worker.file_run import FileRun, Rerun
from callyard.worker.outputs import CallableOutput, open_output
from callyard.worker.worker import peak_memory_bytes

TARGET: Final = Path(__file__).with_name("functions_file.py")
ASYNC_TARGET: Final = Path(__file__).with_name("async_functions_file.py")
ROUNDS: Final = 3
WARM_CALLS: Final = 5_000
MEMORY_CALLS: Final = (30_000, 3_000_000)
RATES: Final = (
    *("map", "map, no promise", "map, async def"),
    *("file to sink", "file to file", "file to file, journal"),
)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def map_rate(worker: Worker, function: str, calls: int) -> float:
    """Calls a second through `Worker.map`, results taken and not decoded."""
    started = time.perf_counter()
    count = 0
    async for _ in worker.map(function, range(calls)):
        count += 1
    assert count == calls
    return calls / (time.perf_counter() - started)


async def file_rate(worker: Worker, function: str, path: Path, calls: int) -> float:
    """Calls a second from a JSONL file to a sink in memory of the last result."""
    last: deque[CallResult] = deque(maxlen=1)
    started = time.perf_counter()
    summary = await worker.run(function, open_source(path), CallableOutput(last.append))
    assert (summary.calls, summary.failed) == (calls, 0)
    return calls / (time.perf_counter() - started)


async def kept_rate(worker: Worker, path: Path, calls: int, *, journal: bool) -> float:
    """Calls a second from a JSONL file to another one, with the journal that every such run of the command has."""
    out = path.with_name("out.jsonl")
    out.unlink(missing_ok=True)
    started = time.perf_counter()
    if journal:
        file_run = FileRun.prepare(out, Rerun(), source=path)
        assert file_run is not None
        with closing(file_run):
            rows, sink = await file_run.begin(worker, open_source(path), "no_op", {})
            summary = await worker.run("no_op", rows, sink, file_run=file_run)
    else:
        summary = await worker.run("no_op", open_source(path), open_output(out))
    assert (summary.calls, summary.failed) == (calls, 0)
    return calls / (time.perf_counter() - started)


async def single_times(worker: Worker, count: int) -> list[float]:
    times = []
    for value in range(count):
        started = time.perf_counter()
        await worker.call("no_op", [value])
        times.append(time.perf_counter() - started)
    return times


async def measure_round(calls: int, path: Path) -> dict[str, float]:
    async with Worker(ASYNC_TARGET, executors=CHILDREN, spare_executors=0) as worker:
        await map_rate(worker, "no_op_async", WARM_CALLS)
        async_rate = await map_rate(worker, "no_op_async", calls)
    async with Worker(TARGET, executors=CHILDREN, spare_executors=0) as worker:
        for function in ("no_op", "no_op_unpromised"):
            await map_rate(worker, function, WARM_CALLS)
        singles = await single_times(worker, max(500, calls // 50))
        return {
            "map": await map_rate(worker, "no_op", calls),
            "map, no promise": await map_rate(worker, "no_op_unpromised", calls),
            "map, async def": async_rate,
            "file to sink": await file_rate(worker, "no_op", path, calls),
            "file to file": await kept_rate(worker, path, calls, journal=False),
            "file to file, journal": await kept_rate(worker, path, calls, journal=True),
            "single": median(singles),
            "single p99": p99(singles),
        }


def write_calls(path: Path, calls: int) -> None:
    with path.open("w") as file:
        for value in range(calls):
            file.write(f'{{"value":{value}}}\n')


def measure(calls: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All rounds: per round the raw limit, the pool, and the full path."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.jsonl"
        write_calls(path, calls)
        for _ in range(rounds):
            raw, pool = raw_limit(seconds), process_pool(seconds)
            ours = run(measure_round(calls, path))
            for name in RATES:
                found.setdefault(name, []).append(ours[name])
                found.setdefault(f"{name} / raw", []).append(ours[name] / raw.pipelined_per_s)
                found.setdefault(f"{name} / pool", []).append(ours[name] / pool.map_per_s)
            ping = raw.ping_two_cpus_s or raw.ping_s
            found.setdefault("single", []).append(ours["single"])
            found.setdefault("single p99", []).append(ours["single p99"])
            found.setdefault("single / ping", []).append(ours["single"] / ping)
            found.setdefault("single / pool", []).append(ours["single"] / pool.single_s)
    return {name: median(values) for name, values in found.items()}


def show(found: dict[str, Any]) -> None:
    rows = [
        [name, thousands(found[name]), f"{found[f'{name} / raw']:.2f}", f"{found[f'{name} / pool']:.1f}"]
        for name in RATES
    ]
    print_table(
        f"No-op calls a second, {CHILDREN} executors, validation on (medians of rounds)",
        ["", "calls/s", "/ raw echo", "/ ProcessPoolExecutor chunk 1"],
        rows,
    )
    print_table(
        "A single call, nothing else under way",
        ["", "time", "/ raw ping-pong, two CPUs", "/ ProcessPoolExecutor"],
        [
            ["p50", microseconds(found["single"]), f"{found['single / ping']:.2f}", f"{found['single / pool']:.2f}"],
            ["p99", microseconds(found["single p99"]), "", ""],
        ],
    )


def memory_of(calls: int) -> int:
    """Peak memory of a worker process that streams `calls` from a file to a file, bytes."""
    command = [sys.executable, "-m", "bench.calls", "--memory-child", str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TARGET.parents[1])
    return int(done.stdout)


def stream(calls: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.jsonl"
        write_calls(path, calls)

        async def work() -> None:
            async with Worker(TARGET, executors=CHILDREN, spare_executors=0) as worker:
                await worker.run("no_op", open_source(path), open_output(os.devnull))

        run(work())
    return peak_memory_bytes()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of few calls")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object, in seconds")
    parser.add_argument("--memory", action="store_true", help="peak memory by length of the list instead of speed")
    parser.add_argument("--memory-child", type=int, metavar="CALLS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory_child is not None:
        print(stream(options.memory_child))
        return 0
    if options.memory:
        peaks = {calls: memory_of(calls) for calls in MEMORY_CALLS}
        rows = [[f"{calls:,} calls", f"{peak / 1e6:.1f} MB"] for calls, peak in peaks.items()]
        print_table("Peak memory of the worker", ["", "resident"], rows)
        return 0
    found = measure(20_000, 1, 0.4) if options.quick else measure(100_000, ROUNDS, 2.0)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
