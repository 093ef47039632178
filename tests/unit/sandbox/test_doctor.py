"""`callyard doctor`: what it says and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from callyard.cli import doctor
from callyard.executor.confine import Evidence
from callyard.worker.config import WorkerConfig
from callyard.worker.sandbox.cgroups import CgroupHome
from callyard.worker.sandbox.levels import Level, Limits
from callyard.worker.sandbox.machine import Trial
from callyard.worker.sandbox.plan import Plan

EVIDENCE = Evidence(1_000, 0, True, 1, 7, 2, 1, 0, ("lo",), {}, "3.11.7")


@pytest.fixture
def allows(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_levels(*levels: str) -> None:
        home = CgroupHome(version=2, parents={"memory": Path("/"), "pids": Path("/")})

        def try_level(level: Level, limits: Limits, interpreter: object = None) -> Trial:
            if level not in levels:
                return Trial(level=level, reason=f"no {level} here", advice=f"install {level}")
            plan = Plan(level=level, limits=limits, visible=(), cgroups=home)
            return Trial(level=level, plan=plan, evidence=EVIDENCE)

        monkeypatch.setattr(doctor, "try_level", try_level)
        monkeypatch.setattr(doctor, "find_home", lambda limits: home)

    return set_levels


@pytest.mark.requirement("X46")
def test_it_says_what_works_and_what_mends_the_rest(allows: Any) -> None:
    allows("landlock")
    report = doctor.gather(WorkerConfig(sandbox_cpu_percent=50))
    text = "\n".join(line.plain for line in doctor.show(report, Level.LANDLOCK))
    for part in (
        "sandbox bwrap  does not work here",
        "no bwrap here",
        "install bwrap",
        "sandbox landlock  works",
        "2 GiB (address space of a process, cgroup v2 with /tmp: 2.1 GiB)",
        "CPU is not limited",
        "version 2: memory, pids; cpu cannot be limited by group",
        "--sandbox auto takes landlock",
    ):
        assert part in text, text


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    ("levels", "least", "status"),
    [
        (["bwrap", "landlock"], "bwrap", 0),
        (["landlock"], "landlock", 0),
        (["landlock"], "bwrap", 1),
        ([], "landlock", 1),
        ([], "off", 0),
    ],
)
def test_the_exit_status(
    allows: Any, capfdbinary: pytest.CaptureFixture[bytes], levels: list[str], least: str, status: int
) -> None:
    allows(*levels)
    assert doctor.examine(WorkerConfig(), Level(least), as_json=True) == status
    report = json.loads(capfdbinary.readouterr().out)
    assert report["strongest"] == next(iter(levels), "off")
    assert [level["works"] for level in report["levels"]] == ["bwrap" in levels, "landlock" in levels]
    assert doctor.examine(WorkerConfig(), Level(least), as_json=False) == status
    assert b"callyard " in capfdbinary.readouterr().out
