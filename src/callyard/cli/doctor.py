"""`callyard doctor`: what this machine can enforce, found out by trying, and what would mend the rest."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable

import msgspec
from rich.text import Text

import callyard
from callyard.cli.listing import render
from callyard.cli.streams import check_stdout, write_stdout
from callyard.executor.confine import landlock_abi
from callyard.wire.messages import PROTOCOL_VERSION
from callyard.worker.config import WorkerConfig, count_available_cpus
from callyard.worker.sandbox.bwrap import find_programs
from callyard.worker.sandbox.cgroups import CONTROLLERS, find_home
from callyard.worker.sandbox.levels import Level, Sandbox
from callyard.worker.sandbox.machine import CONFINED, Trial, describe, try_level
from callyard.worker.sandbox.report import list_lines

NAME_CELLS = 16


class LevelReport(msgspec.Struct, frozen=True):
    level: str
    works: bool
    sandbox: Sandbox | None
    """What it comes to here."""
    reason: str
    """Why it does not work."""
    advice: str


class Report(msgspec.Struct, frozen=True):
    """What `doctor --json` prints."""

    callyard_version: str
    protocol: int
    """Of worker and executor."""
    python_version: str
    python: str
    system: str
    machine: str
    cpus: int
    user: int
    levels: tuple[LevelReport, ...]
    """The strongest first."""
    strongest: str
    """What `--sandbox auto` takes; `off`: nothing works."""
    bubblewrap: tuple[str, ...]
    landlock_abi: int
    """0: none."""
    system_call_filters: bool
    cgroup_version: int
    cgroup_controllers: tuple[str, ...]
    """Those that groups can be made with."""


def examine(config: WorkerConfig, least: Level, *, as_json: bool) -> int:
    """Print the report. Exit status 1: no level of at least `least` works."""
    check_stdout()
    report = gather(config)
    if as_json:
        write_stdout(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        write_stdout(render(show(report, least)))
    return 0 if Level(report.strongest).strength >= least.strength else 1


def gather(config: WorkerConfig) -> Report:
    """Try everything, under the settings' limits."""
    limits = config.sandbox_limits
    trials = [try_level(level, limits) for level in CONFINED]
    home = find_home(limits)
    return Report(
        callyard_version=callyard.__version__,
        protocol=PROTOCOL_VERSION,
        python_version=platform.python_version(),
        python=sys.executable,
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpus=count_available_cpus(),
        user=os.geteuid(),
        levels=tuple(_report(trial) for trial in trials),
        strongest=next((str(trial.level) for trial in trials if trial.works), str(Level.OFF)),
        bubblewrap=tuple(find_programs()),
        landlock_abi=landlock_abi(),
        system_call_filters=os.path.exists("/proc/sys/kernel/seccomp/actions_avail"),
        cgroup_version=home.version if home.parents else 0,
        cgroup_controllers=tuple(home.parents),
    )


def _report(trial: Trial) -> LevelReport:
    sandbox = None
    if trial.plan is not None and trial.evidence is not None:
        sandbox = describe(trial.plan, trial.evidence, "auto", [])
    return LevelReport(str(trial.level), trial.works, sandbox, trial.reason, trial.advice)


def show(report: Report, least: Level) -> Iterable[Text]:
    """The report in words."""
    yield Text(f"callyard {report.callyard_version}, executor protocol {report.protocol}")
    yield Text(f"Python {report.python_version}, {report.python}")
    who = "root" if report.user == 0 else f"user {report.user}"
    yield Text(f"{report.system}, {report.machine}, {report.cpus} CPUs, as {who}")
    for level in report.levels:
        yield Text()
        yield from _show_level(level)
    yield Text()
    yield from _show_parts(report)
    yield Text()
    yield _conclude(report, least)


def _show_level(level: LevelReport) -> Iterable[Text]:
    if level.sandbox is None:
        yield Text.assemble((f"sandbox {level.level}", "bold"), "  ", ("does not work here", "red"))
        yield _line("why", level.reason)
        if level.advice:
            yield _line("mend it", level.advice)
        return
    yield Text.assemble((f"sandbox {level.level}", "bold"), "  ", ("works", "green"))
    for name, value in list_lines(level.sandbox):
        yield _line(name, value, "yellow" if name == "open" else "")


def _show_parts(report: Report) -> Iterable[Text]:
    yield Text("what they are made of", "bold")
    yield _line("bubblewrap", ", ".join(report.bubblewrap) or "not installed")
    yield _line("Landlock", f"ABI {report.landlock_abi}" if report.landlock_abi else "not in this kernel")
    yield _line("system calls", "can be filtered" if report.system_call_filters else "cannot be filtered")
    missing = [name for name in CONTROLLERS if name not in report.cgroup_controllers]
    groups = f"version {report.cgroup_version}: {', '.join(report.cgroup_controllers)}" if report.cgroup_version else ""
    lost = f"{', '.join(missing)} cannot be limited by group" if missing else ""
    yield _line("control groups", "; ".join(part for part in (groups, lost) if part))


def _conclude(report: Report, least: Level) -> Text:
    if Level(report.strongest).strength >= least.strength:
        if report.strongest == Level.OFF:
            return Text("no level works: functions run with your rights", "yellow")
        return Text(f"--sandbox auto takes {report.strongest}", "green")
    return Text(f"no level of at least {least} works here", "red")


def _line(name: str, value: str, style: str = "") -> Text:
    return Text.assemble(f"  {name.ljust(NAME_CELLS)}", (value, style))
