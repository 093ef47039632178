"""A long call list while its executors are killed and frozen: nothing lost, nothing twice, and how much slower.

    python -m bench.chaos [--calls 300000] [--quick] [--json]

An undisturbed run first, then the same with SIGKILL to a random executor every 300 ms and SIGSTOP to one every 5 s.
Nine in ten calls are of an idempotent function, one in ten of one without a promise, which appends its number to a file
of its process before it answers. Checked: one result an index, in order, each right or, of a call without a promise
that had begun, `crashed` with outcome unknown; in the files no number twice, and none missing whose call succeeded.
Exit status 1 when one of this does not hold. `--quick`: 20,000 calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import uvloop

from bench import print_table, thousands
from callyard import Worker
from callyard.errors import ErrorKind, Outcome

CALLS: Final = 300_000
CALLS_QUICK: Final = 20_000
EXECUTORS: Final = 2
KILL_EVERY_S: Final = 0.3
FREEZE_EVERY_S: Final = 5.0
FREEZE_EVERY_QUICK_S: Final = 1.0
UNPROMISED_EVERY: Final = 10
ATTEMPTS: Final = 50
"""A call may be hit by several kills; with the default of 3 attempts some would end `crashed` by chance alone."""
FUNCTIONS: Final = """
import os

from callyard import function

FOLDER = {folder!r}
effects = os.open(os.path.join(FOLDER, f"effects-{{os.getpid()}}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@function
def work(number: int) -> int:
    # One of ten has an effect. What a call may do twice is the business of `twice`.
    os.write(effects, b"%d\\n" % number)
    return number * 7 + 1


@function(idempotent=True)
def twice(number: int) -> int:
    return number * 7 + 1
"""


def is_unpromised(number: int) -> bool:
    return number % UNPROMISED_EVERY == 0


class Chaos:
    """Signals to the executors of one worker, by the process ids that it tells."""

    def __init__(self, worker: Worker, freeze_every_s: float) -> None:
        self._worker = worker
        self._rng = Random(7)
        self._freeze_every_s = freeze_every_s
        self.kills = self.freezes = 0

    def _signal(self, number: int) -> bool:
        pids = [slot.pid for slot in self._worker.slots() if slot.pid and slot.is_attached]
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(self._rng.choice(pids), number)
            return True
        return False

    async def kill(self) -> None:
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            self.kills += self._signal(signal.SIGKILL)

    async def freeze(self) -> None:
        while True:
            await asyncio.sleep(self._freeze_every_s)
            self.freezes += self._signal(signal.SIGSTOP)


async def run_list(
    folder: Path, calls: int, freeze_every_s: float | None, **settings: Any
) -> tuple[float, list[str], dict[str, Any]]:
    """Seconds, what is wrong, and counts. `freeze_every_s`: None for an undisturbed run."""
    target = folder / "functions.py"
    target.write_text(FUNCTIONS.format(folder=str(folder)), encoding="utf-8")
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    failed: set[int] = set()
    async with Worker(target, executors=EXECUTORS, default_max_attempts=ATTEMPTS, **settings) as worker:
        async for _ in worker.map("twice", [{"number": 0}] * 64):  # the code is loaded
            pass
        chaos = None if freeze_every_s is None else Chaos(worker, freeze_every_s)
        disturbers = [] if chaos is None else [asyncio.create_task(chaos.kill()), asyncio.create_task(chaos.freeze())]
        started = time.perf_counter()
        lists = [
            asyncio.create_task(check_list(worker, name, numbers, wrong, counts, failed))
            for name, numbers in (
                ("work", range(0, calls, UNPROMISED_EVERY)),
                ("twice", [number for number in range(calls) if not is_unpromised(number)]),
            )
        ]
        await asyncio.gather(*lists)
        seconds = time.perf_counter() - started
        for task in disturbers:
            task.cancel()
        for ended in await asyncio.gather(*disturbers, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended
    wrong += check_effects(folder, calls, failed)
    if chaos is not None:
        counts.update(kills=chaos.kills, freezes=chaos.freezes)
    return seconds, wrong, dict(counts)


async def check_list(
    worker: Worker, name: str, numbers: Any, wrong: list[str], counts: Counter[str], failed: set[int]
) -> None:
    index = -1
    async for result in worker.map(name, ({"number": number} for number in numbers)):
        index += 1
        number = numbers[index]
        if result.index != index:
            wrong.append(f"{name} {index} came as {result.index}")
        elif result.ok:
            if result.value != number * 7 + 1:
                wrong.append(f"{name}({number}) is {result.value}")
        elif name == "work" and result.error.kind is ErrorKind.CRASHED and result.error.outcome is Outcome.UNKNOWN:
            counts["crashed"] += 1
            failed.add(number)
        else:
            wrong.append(f"{name}({number}): {result.error}")
    if index != len(numbers) - 1:
        wrong.append(f"{name}: {index + 1} results of {len(numbers)}")
    counts["calls"] += index + 1


def check_effects(folder: Path, calls: int, failed: set[int]) -> list[str]:
    """What the side-effect files say against the results. A call that crashed may have written, or not."""
    seen: Counter[int] = Counter()
    for path in folder.glob("effects-*"):
        seen.update(int(line) for line in path.read_text().splitlines())
    wrong = [f"work({number}) ran {count} times" for number, count in seen.items() if count > 1]
    missing = set(range(0, calls, UNPROMISED_EVERY)) - seen.keys() - failed
    wrong += [f"work({number}) succeeded and did not run" for number in sorted(missing)]
    return wrong


async def measure(calls: int, freeze_every_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, every_s in (("calm", None), ("chaos", freeze_every_s)):
        with tempfile.TemporaryDirectory() as folder:
            seconds, wrong, counts = await run_list(Path(folder), calls, every_s)
        found[name] = {"seconds": seconds, "wrong": wrong, **counts}
    found["ratio"] = found["chaos"]["seconds"] / found["calm"]["seconds"]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=None, help=f"{CALLS:,} by default")
    parser.add_argument("--quick", action="store_true", help=f"{CALLS_QUICK:,} calls, frozen every second")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    calls = options.calls or (CALLS_QUICK if options.quick else CALLS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(calls, FREEZE_EVERY_QUICK_S if options.quick else FREEZE_EVERY_S))
    wrong = found["calm"]["wrong"] + found["chaos"]["wrong"]
    if options.json:
        print(json.dumps(found))
    else:
        print_table(
            f"{calls:,} calls, {EXECUTORS} executors, one in {UNPROMISED_EVERY} without a promise",
            ["", "seconds", "calls/s", "kills", "freezes", "crashed", "wrong"],
            [
                [
                    name,
                    f"{found[name]['seconds']:.1f}",
                    thousands(calls / found[name]["seconds"]),
                    str(found[name].get("kills", 0)),
                    str(found[name].get("freezes", 0)),
                    str(found[name].get("crashed", 0)),
                    str(len(found[name]["wrong"])),
                ]
                for name in ("calm", "chaos")
            ],
        )
        print(f"chaos / calm: {found['ratio']:.2f}")
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
