"""The examples that are programs, run as their first lines say."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.docs.test_pages import ROOT, shell


@pytest.mark.requirement("D13")
@pytest.mark.requirement("D15")
@pytest.mark.requirement("D19")
@pytest.mark.requirement("D25")
def test_agent_loop() -> None:
    done = shell(f"{sys.executable} examples/agent_loop.py", ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line.split(None, 1)[0] for line in done.stdout.splitlines()]
    # one of each: refused arguments, a service that is down, a payment whose answer is lost
    for what in ("schema", "replan", "transient", "retry", "repeat", "timeout", "look", "checked"):
        assert what in told, done.stdout
    assert done.stdout.count("stored under its key") == 2
    assert done.stderr == ""
