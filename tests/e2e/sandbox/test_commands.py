"""The command line: the level is printed at start, and doctor's findings are those of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.sandbox.expected import as_markdown

ROOT = Path(__file__).parent.parent.parent.parent
FUNCTIONS = "def double(value: int) -> int:\n    return 2 * value\n"


def callyard(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from callyard.cli import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.requirement("X46")
def test_the_level_and_its_limits_are_printed_at_start(level: str, tmp_path: Path) -> None:
    target = tmp_path / "functions.py"
    target.write_text(FUNCTIONS)
    done = callyard("call", f"{target}:double", "value=21", "--sandbox", level)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert f"sandbox: {level}, network no" in done.stderr
    assert "memory 2 GiB" in done.stderr
    listed = callyard("list", str(target), "--sandbox", level)
    assert "double(value: int) -> int" in listed.stdout
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"value": 1}\n{"value": 2}\n')
    run = callyard("run", f"{target}:double", str(rows), "--sandbox", level, "--quiet")
    assert [json.loads(line)["output"] for line in run.stdout.splitlines()] == [2, 4]
    assert "sandbox:" not in run.stderr, "quiet"


@pytest.mark.requirement("X46")
def test_a_level_below_the_least_is_a_wrong_command(tmp_path: Path) -> None:
    target = tmp_path / "functions.py"
    target.write_text(FUNCTIONS)
    done = callyard("call", f"{target}:double", "value=21", "--sandbox", "landlock", "--sandbox-min", "bwrap")
    assert done.returncode == 2
    assert "sandbox=landlock is below sandbox_min=bwrap" in done.stderr


@pytest.mark.requirement("X46")
def test_doctor_finds_what_a_run_uses(level: str) -> None:
    done = callyard("doctor", "--json", "--sandbox-min", level)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    found = {entry["level"]: entry for entry in report["levels"]}[level]
    assert found["works"]
    assert found["sandbox"]["level"] == level
    assert "sandbox " + level + "  works" in callyard("doctor").stdout


def test_the_design_page_shows_the_table_of_attempts() -> None:
    page = (ROOT / "docs/design/sandbox.md").read_text(encoding="utf-8")
    assert as_markdown() in page, "run: python -m tests.e2e.sandbox.expected, and put the table into the page"
