"""Kill a run at random moments, again and again, resume it, and compare: for as long as one likes.

    python -m bench.kills --rounds 20 --rows 20000 --seed 7

Half of the rounds run a function without a promise: none of its calls may begin twice. The others run one with a
promise: the output must have the bytes of a run that was not killed. A round that fails leaves its folder, and says
where.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from callyard.worker.journal import read_journal

CALLYARD: Final = str(Path(sys.executable).with_name("callyard"))
CODE: Final = """
import os
from callyard import function

def note(x):
    fd = os.open("effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\\n" % x)
    os.close(fd)

@function
def effect(x: int) -> int:
    note(x)
    return 2 * x

@function(idempotent=True)
def safe(x: int) -> dict[str, set[str]]:
    return {"words": {f"{x}", f"word{x}", "end"}}
"""


class Round:
    """One run that is killed a few times, in a folder of its own."""

    def __init__(self, function: str, rows: int, rng: random.Random) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="callyard-kills-"))
        self.kills = 0
        self._function = function
        self._rows = rows
        self._rng = rng
        (self.folder / "f.py").write_text(CODE)
        (self.folder / "rows.jsonl").write_text("".join(f"[{row}]\n" for row in range(rows)))

    def run(self) -> str:
        """What is wrong; empty: nothing."""
        out, state = self.folder / "out.jsonl", self.folder / "out.jsonl.state"
        seed = None
        for _ in range(self._rng.randint(1, 5)):
            self._start_and_kill(self._rng.uniform(0.2, 3.0))
            notes = read_journal(state)
            if notes is None:
                break
            seed = notes.run.hash_seed
        if state.exists() or not out.exists() or not out.stat().st_size:
            self._command("--resume").wait()
        lines = [msgspec.json.decode(line) for line in out.read_bytes().splitlines()]
        if [line["index"] for line in lines] != list(range(self._rows)):
            return f"{len(lines)} lines, not one for each of {self._rows} rows in order"
        return self._check_effects(lines) if self._function == "effect" else self._check_bytes(out.read_bytes(), seed)

    def _check_effects(self, lines: list[dict[str, object]]) -> str:
        effects = Counter(map(int, (self.folder / "effects").read_text().split()))
        twice = [row for row, count in effects.items() if count > 1]
        unsaid = [line["index"] for line in lines if line["ok"] and not effects[int(str(line["index"]))]]
        return f"begun twice: {twice[:10]}; said and not done: {unsaid[:10]}" if twice or unsaid else ""

    def _check_bytes(self, found: bytes, seed: int | None) -> str:
        environment = {} if seed is None else {"PYTHONHASHSEED": str(seed)}
        self._command("--force", **environment).wait()
        return (
            "" if (self.folder / "out.jsonl").read_bytes() == found else "other bytes than of a run that was not killed"
        )

    def _command(self, *more: str, **environment: str) -> subprocess.Popen[bytes]:
        words = [
            CALLYARD,
            "run",
            f"f.py:{self._function}",
            "rows.jsonl",
            "-o",
            "out.jsonl",
            "-q",
        ]
        return subprocess.Popen([*words, *more], cwd=self.folder, env={**os.environ, **environment})

    def _start_and_kill(self, after_s: float) -> None:
        process = self._command("--resume")
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            self.kills += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kills = 0
    for number in range(options.rounds):
        one = Round(("effect", "safe")[number % 2], options.rows, rng)
        problem = one.run()
        kills += one.kills
        if problem:
            print(f"seed {options.seed}, round {number}: {problem}; see {one.folder}")
            return 1
        shutil.rmtree(one.folder)
    print(f"seed {options.seed}: {options.rounds} runs of {options.rows:,} rows, killed {kills} times: all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
