"""One large numpy array to a function and another back: by the arena, as base64 in JSON, and pickled by the standard
library's pool, side by side in one run. And one array that many calls read: shared, and sent with each of them.

    python -m bench.values [--quick] [--json]

The worker's own arguments and results are made anew for each round, so that nothing is found warm.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from bench import median, print_table
from bench.values_file import add_one, one_of
from callyard import Worker

TARGET: Final = Path(__file__).with_name("values_file.py")
MB: Final = 1_000_000
ROUNDS: Final = 5
READERS: Final = 100
"""Calls that read one array."""
MEASURES: Final = ("arena", "base64 in JSON", "process pool (pickle)")


async def measure(megabytes: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of one call, by how the array travels."""
    count = megabytes * MB // 8
    taken: dict[str, list[float]] = {name: [] for name in MEASURES}
    pool = ProcessPoolExecutor(1, mp_context=get_context("forkserver"))
    with pool:
        async with Worker(TARGET, executors=1, spare_executors=0) as worker:

            async def by_arena(array: np.ndarray) -> np.ndarray:
                return np.asarray(await worker.call("array_in_and_out", {"x": array}))

            async def by_json(array: np.ndarray) -> np.ndarray:
                text = base64.b64encode(array.tobytes()).decode()
                return np.frombuffer(base64.b64decode(await worker.call("text_in_and_out", {"x": text})), "f8")

            async def by_pool(array: np.ndarray) -> np.ndarray:
                return await asyncio.wrap_future(pool.submit(add_one, array))

            ways: dict[str, Callable[[np.ndarray], Awaitable[np.ndarray]]] = dict(
                zip(MEASURES, (by_arena, by_json, by_pool), strict=True)
            )
            for round in range(rounds + 1):
                for name, way in ways.items():
                    array = np.arange(count, dtype="f8") + round
                    started = time.perf_counter()
                    back = await way(array)
                    passed_ms = (time.perf_counter() - started) * 1_000
                    assert back[-1] == array[-1] + 1
                    if round:  # the first starts processes and imports numpy
                        taken[name].append(passed_ms)
    return {name: median(values) for name, values in taken.items()}


async def measure_shared(megabytes: int, readers: int) -> dict[str, float]:
    """Milliseconds of a call list whose calls all read one array; what is shared is shared within that time."""
    array = np.arange(megabytes * MB // 8, dtype="f8")
    async with Worker(TARGET, executors=1, spare_executors=0) as worker:

        async def read(given: np.ndarray, count: int) -> float:
            started = time.perf_counter()
            rows = ({"x": given, "index": index} for index in range(count))
            assert [r.value async for r in worker.map(one_of, rows)] == list(range(count))
            return (time.perf_counter() - started) * 1_000

        await read(np.zeros(1), 1)  # imports numpy
        started = time.perf_counter()
        with worker.shared(array) as shared:
            await read(shared, readers)
        passed_ms = (time.perf_counter() - started) * 1_000
        return {"shared": passed_ms, "sent with each": await read(array, readers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 MB, two rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    megabytes, rounds = (10, 2) if options.quick else (100, ROUNDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(megabytes, rounds))
        shared = runner.run(measure_shared(megabytes, READERS))
    if options.json:
        print(json.dumps({"megabytes": megabytes, "milliseconds": found, "shared_milliseconds": shared}))
        return
    least = found["arena"]
    rows = [[name, f"{value:,.0f}", f"{value / least:.2f}"] for name, value in found.items()]
    print_table(f"{megabytes} MB of numbers there and back, one call", ["", "ms", "x arena"], rows)
    least = shared["shared"]
    rows = [[name, f"{value:,.0f}", f"{value / least:.2f}"] for name, value in shared.items()]
    print_table(f"{megabytes} MB of numbers, read by {READERS} calls", ["", "ms", "x shared"], rows)


if __name__ == "__main__":
    main()
