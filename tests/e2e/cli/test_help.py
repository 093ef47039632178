"""`--help` imports no more than it has to: what a command stands on is imported when it runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.cli.shell import ENVIRONMENT, TARGET, TIMEOUT_S, run

HEAVY = (
    *("asyncio", "uvloop", "rich", "pydantic", "multiprocessing", "sqlite3", "ssl", "greenlet", "jsonschema_rs"),
    *(
        "aiohttp",
        "mcp",
        "mcp_types",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "pyarrow",
        "pandas",
        "numpy",
        "redis",
    ),
    *("callyard.worker.worker", "callyard.worker.config", "callyard.dispatch", "callyard.serve", "callyard.host"),
    *("callyard.scheduler", "callyard.executor", "callyard.functions.registry", "callyard.yard"),
)
SHOW = """
import atexit, json, os, sys
sys.argv = ["callyard", *json.loads(os.environ["WORDS"])]
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from callyard.cli import main
main()
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["call", "-h"],
        ["list", "--help"],
        ["serve", "--help"],
        ["doctor", "--help"],
        ["mcp-config", "--help"],
        ["keys", "list", "--help"],
        ["token", "new", "--help"],
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**ENVIRONMENT, "WORDS": json.dumps(words)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert not loaded & set(HEAVY), done.stderr[-2_000:]
    assert "callyard.cli.app" in loaded


def test_help_has_a_heading_for_each_subject_and_whole_examples() -> None:
    out = run("run", "--help", env={"COLUMNS": "60"}).out
    headings = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        *("Arguments:", "Input and output:", "When calls fail:", "Executors:", "Settings:", "Other options:"),
        *("Examples:", "Exit status:"),
    ]
    assert out.startswith("Usage: callyard run [OPTIONS] TARGET[:FUNCTION] CALLS\n")
    assert "  callyard run prices.py:total orders.csv -o totals.jsonl --force --budget 30s --max-failures 100\n" in out


def test_a_wrong_option_is_told_in_plain_words() -> None:
    done = run("run", TARGET, "-", "--limit", "many")
    assert done.status == 2
    assert done.err.splitlines()[-1] == (
        "Error: Invalid value for '--limit': expected a whole number of at least 0, got 'many'"
    )
