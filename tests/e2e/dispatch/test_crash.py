"""A process is killed while a keyed call runs in it; the next one finds the key. Source: D19, D21."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import WAIT_S, wait_until

ROOT = Path(__file__).parents[3]


class Till:
    def __init__(self, folder: Path, tool: str) -> None:
        self.store, self.effects, self.tool = folder / "keys.db", folder / "effects", tool

    def start(self, mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.e2e.dispatch.till", str(self.store), str(self.effects), self.tool, mode]
        return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def crash(self) -> None:
        """One that is killed once the effect has happened."""
        known = len(self.lines())
        child = self.start("hang")
        try:
            wait_until(lambda: len(self.lines()) > known or child.poll() is not None, "the effect")
            assert child.poll() is None, child.communicate()
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.communicate()

    def run(self, mode: str = "finish") -> dict[str, Any]:
        child = self.start(mode)
        out, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, err
        answer: dict[str, Any] = json.loads(out)
        return answer

    def lines(self) -> list[str]:
        return self.effects.read_text().splitlines() if self.effects.exists() else []


@pytest.mark.requirement("D19", "D21")
def test_a_charge_is_never_made_twice(tmp_path: Path) -> None:
    till = Till(tmp_path, "charge")
    till.crash()
    for _ in range(2):
        answer = till.run()
        assert (answer["kind"], answer["outcome"], answer["attempts"]) == ("crashed", "unknown", 1)
        assert answer["deduplicated"]
        assert answer["details"]["cause"] == "holder_lost"
    assert till.lines() == ["charge 500 order-7 1"]
    answer = till.run("resolve")
    assert (answer["value"], answer["deduplicated"]) == ({"paid": -1}, True)
    assert till.run()["value"] == {"paid": -1}
    assert till.lines() == ["charge 500 order-7 1"]


@pytest.mark.requirement("D21")
def test_what_is_safe_to_run_again_runs_again(tmp_path: Path) -> None:
    till = Till(tmp_path, "search")
    till.crash()
    till.crash()
    answer = till.run()
    assert (answer["value"], answer["deduplicated"]) == ({"paid": 500}, False)
    stored = till.run()
    assert (stored["deduplicated"], stored["call_id"]) == (True, answer["call_id"])
    assert till.lines() == ["search 500 order-7 1"] * 3


@pytest.mark.requirement("D18", "D21")
def test_a_result_outlives_its_process(tmp_path: Path) -> None:
    till = Till(tmp_path, "charge")
    first, second = till.run(), till.run()
    assert first["value"] == second["value"] == {"paid": 500}
    assert (first["deduplicated"], second["deduplicated"]) == (False, True)
    assert first["call_id"] == second["call_id"]
    assert till.lines() == ["charge 500 order-7 1"]
