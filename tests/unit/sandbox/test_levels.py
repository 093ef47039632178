"""Which level is taken: what was asked for, the least, and what the machine allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from callyard.errors import UsageError
from callyard.executor.confine import Evidence
from callyard.worker.config import ExecutorSpawnMode, WorkerConfig
from callyard.worker.sandbox import machine
from callyard.worker.sandbox.cgroups import CgroupHome
from callyard.worker.sandbox.levels import Level, Limits
from callyard.worker.sandbox.machine import Trial, choose
from callyard.worker.sandbox.plan import Plan
from callyard.worker.sandbox.report import summarize

EVIDENCE = Evidence(60_000, 0, True, 1, 7, 2, 1, 2, ("lo",), {}, "3.11.7")
ADVICE = {Level.BWRAP: "apt install bubblewrap", Level.LANDLOCK: "use a newer kernel"}


@pytest.fixture
def allows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`allows("bwrap", …)`: the levels that this machine has."""

    def set_levels(*levels: str, groups: tuple[str, ...] = (), kept_root: str = "") -> None:
        def try_level(level: Level, limits: Limits, interpreter: object = None) -> Trial:
            if level not in levels:
                return Trial(level=level, reason=f"no {level} here", advice=ADVICE[level])
            home = CgroupHome(version=2, parents=dict.fromkeys(groups, Path("/")))
            plan = Plan(level=level, limits=limits, visible=(), cgroups=home, is_root=True, kept_root=kept_root)
            return Trial(level=level, plan=plan, evidence=EVIDENCE)

        monkeypatch.setattr(machine, "try_level", try_level)

    return set_levels


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    ("settings", "here", "level"),
    [
        ({}, ["bwrap"], "off"),
        ({"sandbox": "off"}, ["bwrap"], "off"),
        ({"sandbox": "auto"}, ["bwrap", "landlock"], "bwrap"),
        ({"sandbox": "auto"}, ["landlock"], "landlock"),
        ({"sandbox": "auto", "sandbox_min": "off"}, [], "off"),
        ({"sandbox": "auto", "sandbox_min": "bwrap"}, ["bwrap"], "bwrap"),
        ({"sandbox_min": "bwrap"}, ["bwrap"], "bwrap"),
        ({"sandbox_min": "off"}, ["bwrap"], "off"),
        ({"sandbox": "landlock"}, ["bwrap", "landlock"], "landlock"),
        ({"executor_spawn_mode": ExecutorSpawnMode.SANDBOX}, ["landlock"], "landlock"),
        ({"executor_spawn_mode": ExecutorSpawnMode.SANDBOX, "sandbox": "off"}, ["landlock"], "off"),
    ],
)
def test_the_level_taken(allows: Any, settings: dict[str, Any], here: list[str], level: str) -> None:
    allows(*here)
    plan, sandbox = choose(WorkerConfig(**settings))
    assert sandbox.level == level
    assert (plan is None) == (level == "off")


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    ("settings", "here", "told"),
    [
        ({"sandbox": "auto"}, [], ["at least landlock", "no bwrap here", "apt install bubblewrap", "no landlock here"]),
        ({"sandbox": "auto", "sandbox_min": "bwrap"}, ["landlock"], ["at least bwrap", "apt install bubblewrap"]),
        ({"sandbox": "bwrap"}, ["landlock"], ["sandbox=bwrap", "apt install bubblewrap"]),
    ],
)
def test_below_the_least_it_says_what_is_missing_and_what_mends_it(
    allows: Any, settings: dict[str, Any], here: list[str], told: list[str]
) -> None:
    allows(*here)
    with pytest.raises(UsageError) as error:
        choose(WorkerConfig(**settings))
    assert [text for text in told if text not in str(error.value)] == []
    assert "callyard doctor" in str(error.value)


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox": "docker"}, "sandbox must be one of auto, bwrap, landlock, off, got 'docker'"),
        ({"sandbox_min": "auto"}, "sandbox_min must be one of bwrap, landlock, off, got 'auto'"),
        ({"sandbox": "landlock", "sandbox_min": "bwrap"}, "sandbox=landlock is below sandbox_min=bwrap"),
        ({"sandbox": "off", "sandbox_min": "landlock"}, "sandbox=off is below sandbox_min=landlock"),
        ({"sandbox": "auto", "link_mode": "path"}, "link_mode=path has no sandbox"),
        ({"sandbox_cpu_percent": -1}, "sandbox_cpu_percent must be from 0"),
    ],
)
def test_settings_that_do_not_go(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        WorkerConfig(**settings)
    assert message in str(error.value)


@pytest.mark.requirement("X46")
@pytest.mark.requirement("X73")
def test_settings_from_the_environment() -> None:
    environ = {
        "CALLYARD_SANDBOX": "auto",
        "CALLYARD_SANDBOX_MIN": "bwrap",
        "CALLYARD_SANDBOX_MEMORY_BYTES": "1000",
        "CALLYARD_SANDBOX_SUBPROCESSES": "1",
    }
    config = WorkerConfig.from_environment(environ)
    assert (config.sandbox_choice, config.sandbox_least) == ("auto", Level.BWRAP)
    assert config.sandbox_limits.memory_bytes == 1_000
    assert config.sandbox_limits.subprocesses is True
    assert WorkerConfig.from_environment({"CALLYARD_EXECUTOR_SPAWN_MODE": "sandbox"}).sandbox_choice == "auto"
    with pytest.raises(UsageError, match="CALLYARD_SANDBOX must be one of"):
        WorkerConfig.from_environment({"CALLYARD_SANDBOX": "magic"})


@pytest.mark.requirement("X46")
def test_only_limits_in_force_are_told(allows: Any) -> None:
    allows("landlock", kept_root="/root is closed")
    sandbox = choose(WorkerConfig(sandbox="landlock", sandbox_cpu_percent=50))[1]
    assert [limit.name for limit in sandbox.limits] == ["memory", "tmp", "open files"]
    assert any("CPU is not limited" in gap for gap in sandbox.gaps)
    assert any("threads are not limited" in gap for gap in sandbox.gaps)
    assert "root without capabilities: /root is closed" in sandbox.user
    allows("bwrap", groups=("memory", "pids", "cpu"))
    sandbox = choose(WorkerConfig(sandbox="bwrap", sandbox_cpu_percent=50))[1]
    assert {limit.name: limit.by for limit in sandbox.limits}["threads"] == "RLIMIT_NPROC, cgroup v2"
    assert {limit.name: limit.value for limit in sandbox.limits}["cpu"] == "50 %"
    assert sandbox.gaps == ()


@pytest.mark.requirement("X46")
def test_the_line_at_start(allows: Any) -> None:
    allows("landlock")
    text = summarize(choose(WorkerConfig(sandbox="auto"))[1])
    assert text.startswith("sandbox: landlock, network no sockets")
    assert "memory 2 GiB" in text
    assert "not there: bwrap: no bwrap here" in text
    assert "open: all files in the tmp folder" in text
    allows()
    text = summarize(choose(WorkerConfig(sandbox="auto", sandbox_min="off"))[1])
    assert text.startswith("sandbox: off, the functions run with your rights")
    assert "no landlock here" in text
