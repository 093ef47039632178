"""How executors are confined at one level on this machine, and what one of them is started in."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from callyard.executor import launch
from callyard.executor.confine import Confinement
from callyard.functions.bundle import remove_tree
from callyard.worker.interpreter import Interpreter, own_interpreter
from callyard.worker.sandbox.bwrap import TMP, build_arguments
from callyard.worker.sandbox.cgroups import CONTROLLERS, Cgroup, CgroupHome, find_home
from callyard.worker.sandbox.levels import Level, Limits
from callyard.worker.sandbox.uids import UidClaim
from callyard.worker.sandbox.view import (
    SETTINGS,
    SYSTEM,
    build_environment,
    bytecode_paths,
    closed_folder,
    python_paths,
)

TMP_PREFIX: Final = "callyard-tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The same for every executor of a worker."""

    level: Level
    limits: Limits
    visible: tuple[str, ...]
    """The interpreter, its packages, ours."""
    cgroups: CgroupHome
    interpreter: Interpreter = field(default_factory=own_interpreter)
    program: str = ""
    """Of bubblewrap."""
    is_root: bool = False
    kept_root: str = ""
    """Why executors stay root, without its capabilities; empty: each becomes a user of its own, or we are not root."""

    @property
    def becomes_other(self) -> bool:
        return self.is_root and not self.kept_root

    @property
    def counts_processes(self) -> bool:
        """Whether RLIMIT_NPROC binds: for root it never does."""
        return not self.kept_root


def make_plan(level: Level, limits: Limits, program: str = "", interpreter: Interpreter | None = None) -> Plan:
    """`interpreter`: None is our own. Raises UsageError when it lies where it cannot be shown."""
    chosen = interpreter or own_interpreter()
    visible = (*python_paths(chosen), *bytecode_paths(chosen))
    is_root = os.geteuid() == 0
    kept_root = ""
    if is_root and level is Level.LANDLOCK:
        closed = closed_folder(visible)
        kept_root = f"{closed}, on the way to the interpreter, is closed to other users" if closed else ""
    # A limit per user counts exactly where the user is the executor's alone: no group is needed for it.
    is_alone = level is Level.BWRAP or (is_root and not kept_root)
    controllers = [name for name in CONTROLLERS if name != "pids" or not is_alone]
    return Plan(
        level=level,
        limits=limits,
        visible=visible,
        cgroups=find_home(limits, controllers),
        interpreter=chosen,
        program=program,
        is_root=is_root,
        kept_root=kept_root,
    )


class Enclosure:
    """What one confined process is started in. `release` gives everything back, after its end."""

    def __init__(self, plan: Plan, environment: Mapping[str, str], info_fd: int | None = None) -> None:
        """`environment` is added to the little that every executor gets. Raises OSError."""
        self.cgroup: Cgroup | None = None
        self.tmp = TMP
        self.uid = -1
        self.prefix: list[str] = []
        with ExitStack() as undo:
            if plan.becomes_other:
                claim = UidClaim()
                undo.callback(claim.release)
                self.uid = claim.uid
            if plan.cgroups.parents:
                self.cgroup = plan.cgroups.make(plan.limits)
                undo.callback(self.cgroup.remove)
                undo.callback(self.cgroup.close)
            if plan.level is Level.BWRAP:
                self.prefix = build_arguments(
                    plan.program,
                    as_root=plan.is_root,
                    tmp_bytes=plan.limits.tmp_bytes,
                    visible=plan.visible,
                    info_fd=info_fd,
                )
            else:
                self.tmp = _make_tmp(self.uid)
                undo.callback(_remove_tmp, self.tmp)
            self.environment = build_environment(self.tmp, environment, plan.interpreter)
            self._python = start_words(plan.interpreter)
            self.confinement = self._confine(plan)
            self._undo = undo.pop_all()

    def _confine(self, plan: Plan) -> Confinement:
        limits = plan.limits
        processes = limits.processes if plan.counts_processes else 0
        if processes and not plan.becomes_other and plan.level is not Level.BWRAP:
            processes += _count_tasks(os.getuid())  # those of the same user count as well
        landlock = plan.level is Level.LANDLOCK
        return Confinement(
            level=plan.level,
            tmp=self.tmp,
            uid=self.uid,
            landlock=landlock,
            readable=tuple(path for path in (*SYSTEM, *SETTINGS, *plan.visible) if os.path.exists(path))
            if landlock
            else (),
            memory_bytes=limits.memory_bytes,
            processes=processes,
            open_files=limits.open_files,
            file_bytes=limits.tmp_bytes,
            subprocesses=limits.subprocesses,
        )

    def trial_command(self) -> list[str]:
        """A process that confines itself and says what holds."""
        confinement = msgspec.structs.replace(self.confinement, cgroup_fds=tuple(self.inherited))
        return [*self.prefix, *self._python, launch.TRIAL, _encode(confinement)]

    def command(self, arguments: Sequence[str]) -> list[str]:
        """An executor, with these arguments beside its confinement."""
        groups = ",".join(map(str, self.inherited))
        return [*self.prefix, *self._python, groups, *arguments, "--confine", _encode(self.confinement)]

    @property
    def inherited(self) -> list[int]:
        """Descriptors that the child needs; until `started`."""
        return [] if self.cgroup is None else list(self.cgroup.fds)

    def started(self) -> None:
        """The child has its copies of the descriptors."""
        if self.cgroup is not None:
            self.cgroup.close()

    def release(self) -> None:
        self._undo.close()


def start_words(interpreter: Interpreter) -> list[str]:
    """The beginning of a command that runs `launch`."""
    # -P: the current folder is not the bundle
    return [interpreter.path, "-P", launch.__file__, *([] if interpreter.is_own else [launch.BIND])]


def _encode(confinement: Confinement) -> str:
    return msgspec.json.encode(confinement).decode()


def _make_tmp(uid: int) -> str:
    """A folder of the executor's own, beside ours: the run folder is closed to other users."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    path = tempfile.mkdtemp(prefix=f"{TMP_PREFIX}{os.getpid()}-")
    if uid >= 0:
        os.chown(path, uid, uid)
    return path


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{TMP_PREFIX}*"):
        pid = folder.name.removeprefix(TMP_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _remove_tmp(str(folder))


def _remove_tmp(path: str) -> None:
    with contextlib.suppress(RecursionError):  # nested on purpose, deeper than can be walked
        remove_tree(Path(path))


def _count_tasks(uid: int) -> int:
    """Processes and threads of a user, by /proc."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            found = os.stat(f"/proc/{name}/task")
            if found.st_uid == uid:
                count += max(1, found.st_nlink - 2)
    return count
