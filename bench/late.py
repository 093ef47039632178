"""A few long calls among many short ones: work is bound late, so that none waits long behind a long one.

    python -m bench.late [--quick] [--json]

4 calls of 2 s among 256 of 1 ms on 2 executors, in an order drawn anew each round; the calls hold their executor, as
computing does. Ideal is the sum of all, shared evenly. Beside it, in the same round and order, a worker that may queue
up to 128 calls ahead at an executor (`queue_ahead_ms=0`). `--quick`: calls of 0.5 s, one round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Final

import uvloop

from bench import median, print_table
from callyard import Worker

LONG: Final = 4
SHORT: Final = 256
SHORT_S: Final = 0.001
EXECUTORS: Final = 2
FUNCTIONS: Final = """
import time

from callyard import function


@function(idempotent=True)
def hold(seconds: float) -> float:
    time.sleep(seconds)
    return seconds
"""


async def time_list(path: Path, rows: list[float], queue_ahead_ms: int) -> float:
    async with Worker(path, executors=EXECUTORS, spare_executors=0, queue_ahead_ms=queue_ahead_ms) as worker:
        async for _ in worker.map("hold", [0.0] * 64):  # the code is loaded everywhere
            pass
        started = time.perf_counter()
        results = [result.unwrap() async for result in worker.map("hold", rows)]
        assert results == rows
        return time.perf_counter() - started


async def measure(rounds: int, long_s: float) -> dict[str, float]:
    ideal = (LONG * long_s + SHORT * SHORT_S) / EXECUTORS
    found: dict[str, list[float]] = {"late": [], "cap": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "functions.py"
        path.write_text(FUNCTIONS, encoding="utf-8")
        for seed in range(rounds):
            rows = [long_s] * LONG + [SHORT_S] * SHORT
            Random(seed).shuffle(rows)
            found["late"].append(await time_list(path, rows, 5) / ideal)
            found["cap"].append(await time_list(path, rows, 0) / ideal)
    return {
        "ideal_s": ideal,
        "late": median(found["late"]),
        "late_max": max(found["late"]),
        "cap": median(found["cap"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of shorter calls")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    rounds, long_s = (1, 0.5) if options.quick else (5, 2.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(rounds, long_s))
    if options.json:
        print(json.dumps(found))
        return
    print_table(
        f"{LONG} calls of {long_s} s among {SHORT} of {SHORT_S * 1e3:.0f} ms, {EXECUTORS} executors;"
        f" ideal {found['ideal_s']:.2f} s",
        ["", "/ ideal, median", "worst"],
        [
            ["work bound late", f"{found['late']:.2f}", f"{found['late_max']:.2f}"],
            ["up to 128 ahead", f"{found['cap']:.2f}", ""],
        ],
    )


if __name__ == "__main__":
    main()
