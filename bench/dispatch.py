"""The cost of a dispatch against a bare `asyncio.wait_for`, other tool runners, and `Worker.call`.

    python -m bench.dispatch [--quick] [--json] [--memory]

Every call runs an async no-op with one int, one call after another; ours is validated, with time limit, slot, breaker
and a subscriber on. pydantic-ai and fastmcp are measured where they are installed. All take turns in short chunks, on
uvloop and on asyncio, and the ratios are those of each one's fastest chunk: what else the machine does then counts
for little. `--memory` makes 100,000 keyed calls instead and shows the peak memory on the way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import uvloop

from bench import microseconds, print_table
from callyard import Dispatcher, Registry, Yard
from callyard.worker.worker import peak_memory_bytes

TARGET: Final = Path(__file__).with_name("functions_file.py")
CHUNK_S: Final = 0.004
"""About how long one measure runs before the next one has its turn."""
MEMORY_CALLS: Final = (10_000, 30_000, 100_000)
TIMEOUT_S: Final = 30
BARE: Final = "asyncio.wait_for(handler(), …)"
TASK: Final = "create_task(handler()), awaited"
OURS: Final = "dispatch"
KEYED: Final = "dispatch, a new key each"
STORED: Final = "dispatch, the key's stored answer"
PYDANTIC_AI: Final = "pydantic-ai handle_call"
FASTMCP: Final = "fastmcp server.call_tool"
FASTMCP_CLIENT: Final = "fastmcp in-memory client"
WORKER: Final = "Worker.call"
YARD: Final = "Yard.dispatch"
INLINE: Final = (BARE, TASK, OURS, KEYED, STORED, PYDANTIC_AI, FASTMCP, FASTMCP_CLIENT)
LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
Measure = Callable[[int], Awaitable[object]]
"""Makes one call with this int."""


async def no_op(value: int) -> int:
    return value


def make_registry() -> Registry:
    registry = Registry()
    registry.add_function(no_op)
    registry.add_function(no_op, name="keyed", idempotent=True)  # its kept ends may be forgotten: the store stays open
    return registry


@asynccontextmanager
async def ours() -> AsyncIterator[dict[str, Measure]]:
    async def bare(value: int) -> object:
        return await asyncio.wait_for(no_op(value), TIMEOUT_S)

    async def task(value: int) -> object:
        return await asyncio.create_task(no_op(value))

    async with Dispatcher(make_registry(), timeout_ms=TIMEOUT_S * 1_000) as dispatcher:
        dispatcher.subscribe(lambda event: None)
        dispatch, keys = dispatcher.dispatch, count()

        async def plain(value: int) -> object:
            return await dispatch("no_op", {"value": value})

        async def keyed(value: int) -> object:
            return await dispatch("keyed", {"value": value}, key=f"key-{next(keys)}")

        async def stored(value: int) -> object:
            return await dispatch("keyed", {"value": 0}, key="stored")

        for measure in (plain, keyed, stored):
            done: Any = await measure(0)
            assert done.ok, done
        yield {BARE: bare, TASK: task, OURS: plain, KEYED: keyed, STORED: stored}


@asynccontextmanager
async def over_an_executor() -> AsyncIterator[dict[str, Measure]]:
    async with Yard(TARGET, executors=1, spare_executors=0) as yard:

        async def call(value: int) -> object:
            return await yard.worker.call("no_op", {"value": value})

        async def dispatch(value: int) -> object:
            return await yard.dispatch("no_op", {"value": value})

        done: Any = await dispatch(0)
        assert done.ok, done
        yield {WORKER: call, YARD: dispatch}


@asynccontextmanager
async def pydantic_ai() -> AsyncIterator[dict[str, Measure]]:
    try:
        from pydantic_ai import FunctionToolset, RunContext, RunUsage
        from pydantic_ai.messages import ToolCallPart
        from pydantic_ai.models.test import TestModel
        from pydantic_ai.tool_manager import ToolManager
    except ImportError:
        yield {}
        return
    context = RunContext(deps=None, model=TestModel(), usage=RunUsage(), run_step=0)
    manager = await ToolManager(FunctionToolset([no_op])).for_run_step(context)

    async def call(value: int) -> object:
        return await manager.handle_call(ToolCallPart("no_op", {"value": value}))

    assert await call(7) == 7
    yield {PYDANTIC_AI: call}


@asynccontextmanager
async def fastmcp() -> AsyncIterator[dict[str, Measure]]:
    try:
        from fastmcp import Client, FastMCP
    except ImportError:
        yield {}
        return
    server = FastMCP("bench")
    server.tool(no_op)

    async def call(value: int) -> object:
        return await server.call_tool("no_op", {"value": value})

    async with Client(server) as client:

        async def by_client(value: int) -> object:
            return await client.call_tool("no_op", {"value": value})

        assert (await client.call_tool("no_op", {"value": 7})).data == 7
        yield {FASTMCP: call, FASTMCP_CLIENT: by_client}


async def time_chunk(measure: Measure, calls: int) -> float:
    """Seconds a call."""
    started = time.perf_counter()
    for value in range(calls):
        await measure(value)
    return (time.perf_counter() - started) / calls


async def compare(rounds: int) -> dict[str, float]:
    """Seconds a call in each one's fastest chunk."""
    async with ours() as mine, pydantic_ai() as theirs, fastmcp() as served, over_an_executor() as far:
        measures = mine | theirs | served | far
        chunks = {}
        for name, measure in measures.items():
            await time_chunk(measure, 20)
            chunks[name] = max(5, round(CHUNK_S / await time_chunk(measure, 20)))
        fastest = dict.fromkeys(measures, float("inf"))
        for _ in range(rounds):
            for name, measure in measures.items():
                fastest[name] = min(fastest[name], await time_chunk(measure, chunks[name]))
        return fastest


def measure_loops(rounds: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, new_loop in LOOPS.items():
        with asyncio.Runner(loop_factory=new_loop) as runner:
            found[name] = runner.run(compare(rounds))
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    for loop, seconds in found.items():
        rows = [
            [
                name,
                microseconds(seconds[name]),
                f"{seconds[name] / seconds[BARE]:.2f}",
                f"{seconds[name] / seconds[OURS]:.2f}",
            ]
            if name in seconds
            else [name, "not installed", "", ""]
            for name in INLINE
        ]
        print_table(
            f"One call of an async no-op, {loop} (fastest chunks)", ["", "time", "/ wait_for", "/ dispatch"], rows
        )
        rows = [
            [name, microseconds(seconds[name]), f"{seconds[name] / seconds[WORKER]:.2f}"] for name in (WORKER, YARD)
        ]
        print_table(f"One call of a no-op in an executor, {loop}", ["", "time", "/ Worker.call"], rows)


async def keyed_peaks() -> list[int]:
    """Peak memory of this process after so many calls, each with a key of its own, in bytes."""
    peaks = []
    async with Dispatcher(make_registry()) as dispatcher:
        dispatcher.subscribe(lambda event: None)
        for number in range(MEMORY_CALLS[-1]):
            done = await dispatcher.dispatch("keyed", {"value": number}, key=f"order-{number}")
            assert done.ok, done
            if number + 1 in MEMORY_CALLS:
                peaks.append(peak_memory_bytes())
    return peaks


def keyed_memory() -> dict[str, int]:
    """In a process of its own: peaks never fall."""
    command = [sys.executable, "-m", "bench.dispatch", "--memory-child"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TARGET.parents[1])
    return dict(zip((f"{calls:,} calls" for calls in MEMORY_CALLS), json.loads(done.stdout), strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object, in seconds or bytes")
    parser.add_argument("--memory", action="store_true", help="peak memory of 100,000 keyed calls instead of speed")
    parser.add_argument("--memory-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory_child:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(keyed_peaks())))
        return 0
    if options.memory:
        peaks = keyed_memory()
        if options.json:
            print(json.dumps(peaks))
            return 0
        rows = [[calls, f"{peak / 1e6:.1f} MB"] for calls, peak in peaks.items()]
        print_table("Peak memory, keyed calls", ["", "resident"], rows)
        return 0
    found = measure_loops(5 if options.quick else 100)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
