"""The examples that are programs, run as their first lines say."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

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


@pytest.mark.requirement("R34")
def test_carts(tmp_path: Path) -> None:
    done = shell(f"{sys.executable} examples/carts.py --seconds 0.8 --flood 150 --plot {tmp_path}/run.svg", ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0" in done.stdout
    assert "permits: 64, most in use 64" in done.stdout
    for plot in (tmp_path / "run.svg", ROOT / "docs/guides/messages-and-owners.svg"):
        drawn = ElementTree.parse(plot).getroot()
        lines = [line.get("points", "") for line in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
        assert len(lines) == 5
        assert all(len(points.split()) > 5 for points in lines)
    assert done.stderr == ""
