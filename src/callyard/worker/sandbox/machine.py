"""What this machine allows, found out by trying: a process is confined for real, and says what the kernel shows it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from callyard.errors import UsageError
from callyard.executor.confine import LANDLOCK_ABI_MIN, LANDLOCK_ABI_SCOPES, Evidence, landlock_abi
from callyard.executor.seccomp import this_machine
from callyard.extras import pip_line
from callyard.worker.interpreter import Interpreter, own_interpreter
from callyard.worker.sandbox.bwrap import find_programs
from callyard.worker.sandbox.levels import OFF, Level, LimitInForce, Limits, Sandbox, SandboxChoice
from callyard.worker.sandbox.plan import Enclosure, Plan, make_plan

if TYPE_CHECKING:
    from callyard.worker.config import WorkerConfig

TRIAL_S: Final = 60.0
CONFINED: Final = (Level.BWRAP, Level.LANDLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One level on this machine: a plan that held, or why there is none."""

    level: Level
    plan: Plan | None = None
    evidence: Evidence | None = None
    reason: str = ""
    advice: str = ""
    """The command, or the step, that mends it."""

    @property
    def works(self) -> bool:
        return self.plan is not None


def choose(config: WorkerConfig, interpreter: Interpreter | None = None) -> tuple[Plan | None, Sandbox]:
    """The plan for a worker's settings, and what it comes to; None: plain processes.

    `auto` takes the strongest level that works, and at least `sandbox_min`. Raises UsageError when there is none: it
    says what is missing and what mends it.
    """
    asked = config.sandbox_choice
    if asked == "off":
        return None, OFF
    least = config.sandbox_least
    failed: list[Trial] = []
    for level in CONFINED if asked == "auto" else (Level(asked),):
        if level.strength < least.strength:
            break
        trial = try_level(level, config.sandbox_limits, interpreter or own_interpreter())
        if trial.plan is not None and trial.evidence is not None:
            return trial.plan, describe(trial.plan, trial.evidence, asked, failed)
        failed.append(trial)
    passed_over = tuple(f"{trial.level}: {trial.reason}" for trial in failed)
    if asked == "auto" and least is Level.OFF:
        return None, replace(OFF, asked=asked, passed_over=passed_over, gaps=("nothing is confined",))
    raise UsageError(explain_failure(asked, least, failed))


def explain_failure(asked: SandboxChoice, least: Level, failed: list[Trial]) -> str:
    wanted = f"sandbox={asked}" if asked != "auto" else f"a sandbox of at least {least!s}"
    lines = [f"this machine does not allow {wanted}:"]
    for trial in failed:
        lines.append(f"  {trial.level}: {trial.reason}")
        if trial.advice:
            lines.append(f"    {trial.advice}")
    lines.append("`callyard doctor` shows what it allows; --sandbox off runs the code unconfined.")
    return "\n".join(lines)


def try_level(level: Level, limits: Limits, interpreter: Interpreter | None = None) -> Trial:
    """Confine a process at that level, of our own interpreter if None. A success is remembered for this process."""
    try:
        return _try_remembered(level, limits, os.geteuid(), interpreter or own_interpreter())
    except _Failed as failed:
        return failed.trial


class _Failed(Exception):
    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.reason)
        self.trial = trial


@functools.lru_cache(maxsize=16)
def _try_remembered(level: Level, limits: Limits, _euid: int, interpreter: Interpreter) -> Trial:
    trial = _try(level, limits, interpreter)
    if not trial.works:
        raise _Failed(trial)
    return trial


def _try(level: Level, limits: Limits, interpreter: Interpreter) -> Trial:
    if not sys.platform.startswith("linux"):
        return Trial(level=level, reason=f"there is none for {sys.platform}: it needs Linux")
    if this_machine() is None:
        return Trial(level=level, reason="there is no list of system calls for this kind of processor")
    if level is Level.LANDLOCK:
        return _try_landlock(limits, interpreter)
    programs = find_programs()
    if not programs:
        advice = f"{pip_line('sandbox')}, or: apt install bubblewrap"
        return Trial(level=level, reason="bubblewrap is not installed", advice=advice)
    trials = []
    for program in programs:
        trials.append(_run(make_plan(level, limits, program, interpreter)))
        if trials[-1].works:
            break
    return trials[-1]


def _try_landlock(limits: Limits, interpreter: Interpreter) -> Trial:
    abi = landlock_abi()
    if abi == 0:
        advice = "boot with `lsm=landlock,…` on the kernel's command line, on Linux 6.2 or newer"
        return Trial(level=Level.LANDLOCK, reason="the kernel has no Landlock, or it is switched off", advice=advice)
    if abi < LANDLOCK_ABI_MIN:
        reason = f"Landlock ABI {abi} cannot refuse that files are emptied; {LANDLOCK_ABI_MIN} can"
        return Trial(level=Level.LANDLOCK, reason=reason, advice="use Linux 6.2 or newer")
    return _run(make_plan(Level.LANDLOCK, limits, interpreter=interpreter))


def _run(plan: Plan) -> Trial:
    try:
        done = _confine_once(plan)
        if done.returncode == 0:
            evidence = msgspec.json.decode(done.stdout, type=Evidence)
            wrong = _contradiction(plan, evidence)
            if not wrong:
                return Trial(level=plan.level, plan=plan, evidence=evidence)
            return Trial(level=plan.level, reason=f"a trial showed that {wrong}")
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"a trial ended with status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        reason = f"a trial failed: {error}"
    return Trial(level=plan.level, reason=reason, advice=_advise(plan, reason))


def _confine_once(plan: Plan) -> subprocess.CompletedProcess[bytes]:
    enclosure = Enclosure(plan, {})
    try:
        return subprocess.run(
            enclosure.trial_command(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=enclosure.inherited,
            env=enclosure.environment,
            cwd=None if enclosure.prefix else enclosure.tmp,
            start_new_session=True,
            timeout=TRIAL_S,
            check=False,
        )
    finally:
        enclosure.started()
        enclosure.release()


def _contradiction(plan: Plan, evidence: Evidence) -> str:
    """What a trial says against the plan; empty: nothing."""
    if evidence.capabilities or not evidence.no_new_privileges or evidence.filters < 1:
        return "privileges or system calls were left"
    if plan.becomes_other and evidence.uid == os.geteuid():
        return "it stayed root"
    if plan.level is Level.BWRAP and set(evidence.interfaces) - {"lo"}:
        return f"it saw the network: {', '.join(evidence.interfaces)}"
    if plan.level is Level.BWRAP and evidence.processes_seen > 2:
        return "it saw other processes"
    if plan.level is Level.LANDLOCK and (evidence.landlock_abi < LANDLOCK_ABI_MIN or evidence.processes_seen):
        return "it could list /proc"
    return ""


def _advise(plan: Plan, reason: str) -> str:
    if plan.level is not Level.BWRAP:
        return ""
    if "mount proc" in reason:
        return "in a container: start it with --security-opt systempaths=unconfined"
    if "ermission" in reason or "not permitted" in reason or "uid map" in reason:
        if plan.is_root:
            return (
                "in a container: start it with --cap-add SYS_ADMIN --security-opt seccomp=unconfined"
                " --security-opt apparmor=unconfined"
            )
        return (
            "let ordinary users make user namespaces: sudo sysctl kernel.unprivileged_userns_clone=1"
            " kernel.apparmor_restrict_unprivileged_userns=0, or: sudo apt install bubblewrap"
        )
    if "nknown option" in reason:
        return f"bubblewrap 0.8 or newer is needed: {pip_line('sandbox')}"
    return ""


def describe(plan: Plan, evidence: Evidence, asked: SandboxChoice, failed: list[Trial]) -> Sandbox:
    bwrap = plan.level is Level.BWRAP
    return Sandbox(
        level=plan.level,
        asked=asked,
        user=_describe_user(plan),
        network="none" if bwrap else "no sockets; the machine's interfaces can be listed",
        files="the interpreter, read-only; a /tmp of its own" if bwrap else "the interpreter, read-only; a tmp folder",
        limits=tuple(_limits_in_force(plan)),
        gaps=tuple(_gaps(plan, evidence)),
        passed_over=tuple(f"{trial.level}: {trial.reason}" for trial in failed),
    )


def _describe_user(plan: Plan) -> str:
    if plan.becomes_other:
        return "one of its own for each executor, without an account"
    if plan.kept_root:
        return f"root without capabilities: {plan.kept_root}"
    return f"your own ({os.getuid()})" + (", in a namespace" if plan.level is Level.BWRAP else "")


def _limits_in_force(plan: Plan) -> list[LimitInForce]:
    limits, groups = plan.limits, plan.cgroups
    by_group = f"cgroup v{groups.version}"
    found = []

    def add(name: str, value: str, *by: str) -> None:
        if by:
            found.append(LimitInForce(name=name, value=value, by=", ".join(by)))

    if limits.memory_bytes:
        grouped = (f"{by_group} with /tmp: {_size(limits.memory_bytes + limits.tmp_bytes)}",)
        add(
            "memory",
            _size(limits.memory_bytes),
            "address space of a process",
            *(grouped if "memory" in groups.parents else ()),
        )
    if limits.processes:
        is_shared = plan.level is Level.LANDLOCK and not plan.becomes_other
        of_user = ["RLIMIT_NPROC" + (", above what the user has at its start" if is_shared else "")]
        of_user = of_user if plan.counts_processes else []
        add("threads", str(limits.processes), *of_user, *([by_group] if "pids" in groups.parents else ()))
    if limits.cpu_percent and "cpu" in groups.parents:
        add("cpu", f"{limits.cpu_percent} %", by_group)
    if limits.tmp_bytes:
        add("tmp", _size(limits.tmp_bytes), "size of /tmp" if plan.level is Level.BWRAP else "size of one file")
    if limits.open_files:
        add("open files", str(limits.open_files), "RLIMIT_NOFILE")
    return found


def _gaps(plan: Plan, evidence: Evidence) -> list[str]:
    limits, groups = plan.limits, plan.cgroups.parents
    gaps = []
    if limits.cpu_percent and "cpu" not in groups:
        gaps.append("CPU is not limited: no control group for it can be made here")
    if limits.processes and not plan.counts_processes and "pids" not in groups:
        gaps.append("threads are not limited: root has no such limit, and no control group can be made here")
    if plan.level is Level.LANDLOCK:
        gaps.append("all files in the tmp folder together may fill its disk")
        gaps.append("files elsewhere cannot be opened, but whether they exist, and their sizes and times, can be asked")
        if limits.subprocesses:
            gaps.append("programs that user code starts may outlive a worker that is killed")
            if evidence.landlock_abi < LANDLOCK_ABI_SCOPES:
                gaps.append(f"Landlock ABI {evidence.landlock_abi} lets them signal processes of the same user")
    return gaps


def _size(count: int) -> str:
    for unit, shown in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {shown}" if count % unit == 0 else f"{count / unit:.1f} {shown}"
    return f"{count} B"
