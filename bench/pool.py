"""`PoolExecutor` against `ProcessPoolExecutor`, side by side in one run.

    python -m bench.pool [--quick] [--json]

Short calls by `map`, with and without chunks, one call after the other, and arguments of 10 MB that come back. Both
pools are warm, have two processes, and take turns; shown are medians of the rounds, and of the ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, Final

from bench import median, print_table
from callyard import PoolExecutor

WORKERS: Final = 2
LARGE_BYTES: Final = 10_000_000
TEXT: Final = {
    "short": "short calls, /s",
    "chunked": "short calls in chunks of 100, /s",
    "single": "one after the other, /s",
    "large": "10 MB and back, MB/s",
}


def echo(value: Any) -> Any:
    return value


def measure(pool: Executor, calls: int, large: int) -> dict[str, float]:
    """What a pool does in a second."""
    payload = os.urandom(LARGE_BYTES)

    def one_by_one() -> None:
        for number in range(calls // 10):
            pool.submit(echo, number).result()

    return {
        "short": calls / seconds(lambda: pool.map(echo, range(calls))),
        "chunked": 20 * calls / seconds(lambda: pool.map(echo, range(20 * calls), chunksize=100)),
        "single": calls // 10 / seconds(one_by_one),
        "large": 2 * large * LARGE_BYTES / 1e6 / seconds(lambda: pool.map(echo, [payload] * large)),
    }


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    deque(work() or (), maxlen=0)
    return time.perf_counter() - started


def run(rounds: int, calls: int, large: int) -> dict[str, dict[str, float]]:
    with ProcessPoolExecutor(WORKERS) as theirs, PoolExecutor(WORKERS) as ours:
        for pool in (theirs, ours):
            measure(pool, 200, 4)
        found = [(measure(ours, calls, large), measure(theirs, calls, large)) for _ in range(rounds)]
    return {
        name: {
            "ours": median([own[name] for own, _ in found]),
            "theirs": median([other[name] for _, other in found]),
            "ratio": median([own[name] / other[name] for own, other in found]),
        }
        for name in TEXT
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of fewer calls")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    found = run(1, 2_000, 10) if options.quick else run(5, 10_000, 40)
    if options.json:
        print(json.dumps(found))
        return
    print_table(
        f"PoolExecutor against ProcessPoolExecutor, {WORKERS} processes",
        ["", "ours", "theirs", "ratio"],
        [
            [text, f"{found[name]['ours']:,.0f}", f"{found[name]['theirs']:,.0f}", f"{found[name]['ratio']:.2f}"]
            for name, text in TEXT.items()
        ],
    )


if __name__ == "__main__":
    main()
