"""Control groups, where this machine lets us make any: memory, processes and CPU of one executor, all its children.

Version 2 is looked for first, then version 1, controller by controller; what cannot be made is left out, and the caller
says so. A group is a folder `callyard-PID-N` under the worker's own group or beside it; the executor joins it itself,
by the inherited descriptor of `cgroup.procs`, whose rights are those of the worker that opened it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from callyard.worker.sandbox.levels import Limits

PREFIX: Final = "callyard-"
PERIOD_US: Final = 100_000
CONTROLLERS: Final = ("memory", "pids", "cpu")
_NUMBERS: Final = itertools.count(1)


def make_folder(path: Path) -> None:
    path.mkdir(mode=0o755)


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupHome:
    """Where groups can be made: the parent folder of each controller that works. Empty: nowhere."""

    version: int
    parents: Mapping[str, Path]
    mkdir: Callable[[Path], None] = make_folder

    def make(self, limits: Limits) -> Cgroup:
        """A group with its limits in force. Raises OSError, and leaves nothing behind.

        Only where a limit needs one: to join a group costs the executor some milliseconds.
        """
        name = f"{PREFIX}{os.getpid()}-{next(_NUMBERS)}"
        wanted = {
            controller: parent for controller, parent in self.parents.items() if any(self._values(controller, limits))
        }
        group = Cgroup(folders={controller: parent / name for controller, parent in wanted.items()})
        try:
            for folder in dict.fromkeys(group.folders.values()):
                self.mkdir(folder)
            for controller, folder in group.folders.items():
                for file, value in self._values(controller, limits):
                    _write(folder / file, value)
            for folder in dict.fromkeys(group.folders.values()):
                group.fds.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            group.close()
            group.remove()
            raise
        return group

    def _values(self, controller: str, limits: Limits) -> Iterator[tuple[str, str]]:
        match controller:
            case "memory" if limits.memory_bytes:
                # Above the address space: one call then gets MemoryError, and only /tmp or several processes get here.
                most = str(limits.memory_bytes + limits.tmp_bytes)
                yield "memory.max" if self.version == 2 else "memory.limit_in_bytes", most
                if self.version == 2:
                    yield "?memory.swap.max", "0"
                    yield "?memory.oom.group", "1"
                else:
                    yield "?memory.memsw.limit_in_bytes", most
            case "pids" if limits.processes:
                yield "pids.max", str(limits.processes)
            case "cpu" if limits.cpu_percent:
                quota = limits.cpu_percent * PERIOD_US // 100
                if self.version == 2:
                    yield "cpu.max", f"{quota} {PERIOD_US}"
                else:
                    yield "cpu.cfs_period_us", str(PERIOD_US)
                    yield "cpu.cfs_quota_us", str(quota)


@dataclass(slots=True, kw_only=True)
class Cgroup:
    """One executor's groups: one folder in version 2, one per controller in version 1."""

    folders: Mapping[str, Path]
    fds: list[int] = field(default_factory=list)
    """`cgroup.procs`, open for the child to inherit; ours until `close`."""

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel ended a process of it over its memory limit."""
        folder = self.folders.get("memory")
        if folder is None:
            return False
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                words = dict(line.split() for line in (folder / name).read_text().splitlines())
                return int(words.get("oom_kill", "0")) > 0
        return False

    def remove(self) -> bool:
        """End whatever is left in it and take it away; False: try again, something is still ending."""
        done = True
        for folder in dict.fromkeys(self.folders.values()):
            with contextlib.suppress(OSError, ValueError):
                for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                    if pid > 0:  # 0: somebody we cannot see; sent to it, the signal would be our own group's
                        os.kill(pid, signal.SIGKILL)
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                done = False
        return done


def find_home(
    limits: Limits,
    controllers: Sequence[str] = CONTROLLERS,
    *,
    mountinfo: Path = Path("/proc/self/mountinfo"),
    membership: Path = Path("/proc/self/cgroup"),
    mkdir: Callable[[Path], None] = make_folder,
) -> CgroupHome:
    """Try, with a group that is taken away again, which of `controllers` can limit here. Never raises."""
    own = _read_membership(membership)
    mounts = _read_mounts(mountinfo)
    unified = mounts.get("")
    if unified is not None:
        here = _own_folder(unified, own.get("", "/"))
        for parent in (here, here.parent):
            enabled = [name for name in _enabled(parent) if name in controllers]
            home = _try_home(2, dict.fromkeys(enabled, parent), limits, mkdir)
            if home.parents:
                return home
    parents: dict[str, Path] = {}
    for name in controllers:
        if name in mounts:
            parents[name] = _own_folder(mounts[name], own.get(name, "/"))
    return _try_home(1, parents, limits, mkdir)


def _try_home(version: int, parents: Mapping[str, Path], limits: Limits, mkdir: Callable[[Path], None]) -> CgroupHome:
    # Tried with a limit of each kind: a group without any would prove nothing.
    limits = replace(
        limits,
        memory_bytes=limits.memory_bytes or 1 << 30,
        processes=limits.processes or 64,
        cpu_percent=limits.cpu_percent or 100,
    )
    working: dict[str, Path] = {}
    for controller, parent in parents.items():
        _remove_abandoned(parent)
        one = CgroupHome(version=version, parents={controller: parent}, mkdir=mkdir)
        try:
            group = one.make(limits)
        except OSError:
            continue
        group.close()
        group.remove()
        working[controller] = parent
    return CgroupHome(version=version, parents=working, mkdir=mkdir)


def _enabled(parent: Path) -> list[str]:
    """Controllers that groups below `parent` have in version 2; switched on where that is allowed."""
    control = parent / "cgroup.subtree_control"
    for name in CONTROLLERS:
        with contextlib.suppress(OSError):  # not ours to switch, or the group has processes of its own
            _write(control, f"+{name}")
    try:
        return [name for name in control.read_text().split() if name in CONTROLLERS]
    except OSError:
        return []


def _remove_abandoned(parent: Path) -> None:
    """Groups of workers that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            Cgroup(folders={"": folder}).remove()


def _read_membership(path: Path) -> dict[str, str]:
    """Own group by controller; "" is version 2's."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        for name in names.split(","):
            found[name] = group
    return found


def _read_mounts(path: Path) -> dict[str, tuple[Path, str]]:
    """Mount point and mounted group by controller; "" is version 2's."""
    found: dict[str, tuple[Path, str]] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, *rest = after.split()
        fields = before.split()
        if len(fields) < 5 or kind not in ("cgroup", "cgroup2"):
            continue
        place = (Path(fields[4]), fields[3])
        for name in [""] if kind == "cgroup2" else rest[-1].split(","):
            found.setdefault(name, place)
    return found


def _own_folder(mount: tuple[Path, str], group: str) -> Path:
    point, mounted = mount
    inside = Path(group)
    if mounted != "/":  # a container sees its own group as the root
        inside = Path("/") / inside.relative_to(mounted) if inside.is_relative_to(mounted) else Path("/")
    return point / str(inside).lstrip("/")


def _write(path: Path, value: str) -> None:
    """`?` before the name: it need not be there."""
    optional = path.name.startswith("?")
    target = path.with_name(path.name.lstrip("?"))
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if optional:
            return
        raise
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
