"""Every attempt to get out, at every level, as root and as an ordinary user: as the table says, and nobody is hurt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.sandbox.attempts import ATTEMPTS
from tests.e2e.sandbox.expected import EXPECTED
from tests.e2e.sandbox.people import become, can_become_others, is_closed
from tests.e2e.sandbox.runner import WORKER_BYTES_MAX

TIMEOUT_S = 600
ROOT = os.geteuid() == 0


def test_the_table_has_every_attempt_once() -> None:
    assert [row.attempt for row in EXPECTED] == list(dict.fromkeys(row.attempt for row in EXPECTED))
    assert {row.attempt for row in EXPECTED} == set(ATTEMPTS)
    assert len(EXPECTED) >= 24


@pytest.mark.slow
@pytest.mark.requirement("X46")
@pytest.mark.requirement("X32")
@pytest.mark.requirement("X92")
def test_as_who_runs_the_tests(level: str, open_folder: Path) -> None:
    check(level, run(level, open_folder, None))


@pytest.mark.slow
@pytest.mark.requirement("X46")
def test_as_an_ordinary_user(level: str, open_folder: Path, user_uid: int) -> None:
    if not ROOT:
        pytest.skip("the tests run as an ordinary user already")
    if not can_become_others():
        pytest.skip("this root may not mount, and so not show the interpreter to another user")
    os.chown(open_folder, user_uid, user_uid)
    check(level, run(level, open_folder, become(user_uid)))


@pytest.mark.slow
@pytest.mark.requirement("X46")
def test_as_root_whose_interpreter_others_can_reach(level: str, open_folder: Path) -> None:
    """At level landlock executors become users of their own only then."""
    if level != "landlock" or not ROOT or not is_closed():
        pytest.skip("the same as above here")
    if not can_become_others():
        pytest.skip("this root may not mount")
    check(level, run(level, open_folder, become(None)))


def run(level: str, folder: Path, act: Callable[[], None] | None) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.sandbox.runner", level, str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        preexec_fn=act,
        env={**os.environ, "HOME": os.path.expanduser("~"), "TMPDIR": str(folder)},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4_000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(level: str, lines: list[dict[str, Any]]) -> None:
    *results, last = lines
    assert [result["attempt"] for result in results] == [row.attempt for row in EXPECTED]
    wrong = [
        f"{row.attempt}: {result['outcome']}, expected {expected}: {result['detail']}"
        for row, result in zip(EXPECTED, results, strict=True)
        if result["outcome"] != (expected := row.bwrap if level == "bwrap" else row.landlock)
    ]
    wrong += [f"{result['attempt']}: {result['neighbours']}" for result in results if result["neighbours"] != "fine"]
    assert wrong == []
    assert last["secret"] == "secret"
    assert last["peak_bytes"] < WORKER_BYTES_MAX
