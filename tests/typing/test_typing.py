"""What type checkers say of the typed ways to call: nothing where all is right, and every fault where one is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.node import find_packages, node_command, node_environment

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = ("tests/typing/right.py", "tests/typing/wrong.py")
TIMEOUT_S = 600

pytestmark = pytest.mark.slow


def marked_lines() -> set[tuple[str, int]]:
    lines = (ROOT / WRONG).read_text().splitlines()
    return {(WRONG, number) for number, line in enumerate(lines, 1) if "  # wrong: " in line}


def test_mypy_sees_each_fault_and_no_other() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", RIGHT, WRONG],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    found = {(file, int(line)) for file, line in re.findall(r"^(tests/\S+?):(\d+): error:", done.stdout, re.M)}
    assert found == marked_lines(), done.stdout + done.stderr


def test_pyright_sees_each_fault_and_no_other(tmp_path: Path) -> None:
    command = [*node_command(find_packages(), "pyright"), "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, RIGHT, WRONG],
        cwd=ROOT,
        env=node_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    found = {
        (Path(one["file"]).relative_to(ROOT).as_posix(), one["range"]["start"]["line"] + 1)
        for one in report["generalDiagnostics"]
        if one["severity"] == "error" and not one.get("rule", "").startswith("reportUnknown")
    }
    told = [one["message"] for one in report["generalDiagnostics"] if RIGHT in one["file"]]
    assert told == []
    assert found == marked_lines(), done.stdout
