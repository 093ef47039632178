"""What an executor takes away from itself before anything foreign is loaded (X46).

The worker says what, by `--confine`; each step either holds or ends the process, so that an executor that says hello is
confined. In the order below: the cgroups joined, limits, user and capabilities, Landlock, system calls, and a look at
what the kernel then says. All by ctypes: nothing to install, no set-uid helper.

`python -m callyard.executor.confine JSON` does it and prints what holds: the worker's trial, and `callyard doctor`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any, Final

import msgspec

from callyard.errors import UsageError
from callyard.executor.seccomp import FilterPolicy, assemble, build_filter, this_machine

LANDLOCK_ABI_MIN: Final = 3
"""Older ones cannot refuse truncation: files of the same user could be emptied."""
THREAD_END_S: Final = 5.0
LANDLOCK_ABI_SCOPES: Final = 6
"""From here on signals and abstract sockets end at the border."""

_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_AMBIENT_CLEAR_ALL: Final = 4
_SECCOMP_MODE_FILTER: Final = 2
_CAPABILITY_VERSION: Final = 0x20080522
_CAP_SETPCAP: Final = 8
_CAPABILITIES: Final = 64

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_NET_TCP: Final = 0b11
_SCOPES: Final = 0b11
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Confinement(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is taken away. A limit of 0 is none."""

    level: str
    """For messages."""
    tmp: str
    """The only folder that can be written to."""
    uid: int = -1
    """User and group to become; -1: stay."""
    landlock: bool = False
    """Else a mount namespace has done its part."""
    readable: tuple[str, ...] = ()
    """Files and folders that Landlock leaves readable."""
    cgroup_fds: tuple[int, ...] = ()
    """`cgroup.procs` of the groups to join, open for writing."""
    memory_bytes: int = 0
    """Address space."""
    processes: int = 0
    """Processes and threads of the user."""
    open_files: int = 0
    file_bytes: int = 0
    """The largest file that can be written."""
    subprocesses: bool = False
    """User code may start programs."""


class Evidence(msgspec.Struct, frozen=True):
    """What the kernel says of a confined process."""

    uid: int
    capabilities: int
    """Those in force and those that could come back, as bits; 0: none."""
    no_new_privileges: bool
    filters: int
    """System call filters in force."""
    landlock_abi: int
    """0: not used."""
    pid: int
    parent_pid: int
    processes_seen: int
    """Processes that /proc lists; 0: it cannot be listed."""
    interfaces: tuple[str, ...]
    """Network interfaces."""
    limits: dict[str, int]
    python: str


def parse_confinement(text: str) -> Confinement:
    """Raises `UsageError`."""
    try:
        return msgspec.json.decode(text, type=Confinement)
    except msgspec.DecodeError as error:
        raise UsageError(f"--confine: {error}") from error


def apply(wanted: Confinement, wait_joined: Callable[[], None] | None = None) -> None:
    """Confine this process, which must have one thread, for good. Raises `UsageError` when any step fails.

    `wait_joined`: another thread joins the control groups already; that one may still be there.
    Before it: whatever needs more rights, such as opening the link, and `F_SETOWN` of the lifeline.
    """
    machine = this_machine()
    if not sys.platform.startswith("linux") or machine is None:
        raise UsageError(f"the sandbox level {wanted.level!r} needs Linux on x86_64 or aarch64")
    kernel = _Kernel()
    with _step(wanted, "joining the control groups"):
        if wait_joined is not None:
            wait_joined()
        _wait_single_thread()
        for fd in wanted.cgroup_fds:
            os.write(fd, b"0")
            os.close(fd)
    with _step(wanted, "setting limits"):
        _set_limits(wanted)
    with _step(wanted, "giving up privileges"):
        _give_up_privileges(kernel, wanted.uid)
    abi = 0
    if wanted.landlock:
        with _step(wanted, "restricting files with Landlock"):
            abi = kernel.landlock_abi()
            _restrict_files(kernel, abi, wanted)
    with _step(wanted, "filtering system calls"):
        policy = FilterPolicy(
            pid=os.getpid(),
            processes=wanted.subprocesses,
            metadata=not wanted.landlock,
            tkill=not wanted.landlock or abi >= LANDLOCK_ABI_SCOPES,
        )
        kernel.set_filter(assemble(build_filter(policy, machine)))
    with _step(wanted, "looking at the result"):
        _check(wanted)


def _wait_single_thread() -> None:
    """Rights are given up by thread. One that has done its work needs a moment to end."""
    end = time.monotonic() + THREAD_END_S
    while len(os.listdir("/proc/self/task")) != 1:
        if time.monotonic() > end:
            raise OSError("the process has more than one thread")
        time.sleep(0.0001)


@contextmanager
def _step(wanted: Confinement, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the sandbox level {wanted.level!r} failed at {what}: {error}; see `callyard doctor`"
        ) from error


# --- limits, user, capabilities -----------------------------------------------------------------------------------


def _set_limits(wanted: Confinement) -> None:
    limits = {
        resource.RLIMIT_AS: wanted.memory_bytes,
        resource.RLIMIT_NPROC: wanted.processes,
        resource.RLIMIT_NOFILE: wanted.open_files,
        resource.RLIMIT_FSIZE: wanted.file_bytes,
    }
    for kind, value in limits.items():
        if value:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _give_up_privileges(kernel: _Kernel, uid: int) -> None:
    effective = int(_read_status()["CapEff"], 16)
    if effective & 1 << _CAP_SETPCAP:
        for capability in range(_CAPABILITIES):
            if not kernel.try_prctl(_PR_CAPBSET_DROP, capability):
                break  # the kernel knows no more
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.prctl(_PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root, and cannot be listed
    kernel.try_prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)
    kernel.drop_capabilities()
    kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _check(wanted: Confinement) -> None:
    status = _read_status()
    found = {
        "capabilities": (int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapInh"], 16), 0),
        "NoNewPrivs": (int(status["NoNewPrivs"]), 1),
        "Seccomp": (int(status["Seccomp"]), _SECCOMP_MODE_FILTER),
    }
    if wanted.uid >= 0:
        found["uid"] = (int(os.getresuid() == (wanted.uid,) * 3 and os.getresgid() == (wanted.uid,) * 3), 1)
    for what, (value, expected) in found.items():
        if value != expected:
            raise OSError(f"{what} is {value:#x}, expected {expected:#x}")


def _read_status() -> dict[str, str]:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


# --- Landlock -----------------------------------------------------------------------------------------------------


def _restrict_files(kernel: _Kernel, abi: int, wanted: Confinement) -> None:
    if abi < LANDLOCK_ABI_MIN:
        raise OSError(f"Landlock ABI {abi}, expected at least {LANDLOCK_ABI_MIN} (Linux 6.2)")
    every = (1 << 15) - 1 | (_IOCTL_DEV if abi >= 5 else 0)
    attributes = every.to_bytes(8, "little")
    if abi >= 4:
        attributes += _NET_TCP.to_bytes(8, "little")
    if abi >= LANDLOCK_ABI_SCOPES:
        attributes += _SCOPES.to_bytes(8, "little")
    ruleset = kernel.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    try:
        run = _EXECUTE if wanted.subprocesses else 0
        read = _READ_FILE | _READ_DIR | run
        for path in (*wanted.readable, "/proc/self"):
            _allow(kernel, ruleset, path, read)
        for path in _DEVICES:
            _allow(kernel, ruleset, path, _READ_FILE | _WRITE_FILE)
        _allow(kernel, ruleset, wanted.tmp, every & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK) | run)
        kernel.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(kernel: _Kernel, ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
        kernel.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0)
    finally:
        os.close(fd)


def landlock_abi() -> int:
    """Of this kernel; 0: it has none, or it is switched off."""
    try:
        return _Kernel().landlock_abi()
    except (OSError, AttributeError):
        return 0


# --- the C library ------------------------------------------------------------------------------------------------


class _FilterProgram(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


class _Kernel:
    """System calls that Python has no function for; a failure is an OSError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._syscall = self._library.syscall
        self._syscall.restype = ctypes.c_long

    def syscall(self, number: int, *arguments: int | bytes | None) -> int:
        result = self._syscall(ctypes.c_long(number), *(_to_c(argument) for argument in arguments))
        return _checked(int(result))

    def prctl(self, option: int, *values: int) -> None:
        padded = (*values, 0, 0, 0, 0)[:4]
        _checked(int(self._library.prctl(ctypes.c_int(option), *(ctypes.c_ulong(value) for value in padded))))

    def try_prctl(self, option: int, *values: int) -> bool:
        try:
            self.prctl(option, *values)
        except OSError:
            return False
        return True

    def landlock_abi(self) -> int:
        return self.syscall(_LANDLOCK_CREATE, None, 0, 1)

    def drop_capabilities(self) -> None:
        header = _CAPABILITY_VERSION.to_bytes(4, "little") + bytes(4)
        _checked(int(self._library.capset(header, bytes(24))))

    def set_filter(self, program: bytes) -> None:
        steps = _FilterProgram(len(program) // 8, program)
        address = ctypes.addressof(steps)
        self.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address)


def _to_c(argument: int | bytes | None) -> Any:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# --- the trial ----------------------------------------------------------------------------------------------------


def gather_evidence(abi: int) -> Evidence:
    """What holds for this process, asked of the kernel."""
    status = _read_status()
    capabilities = (int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh"))
    return Evidence(
        uid=os.getuid(),
        capabilities=reduce(or_, capabilities),
        no_new_privileges=status["NoNewPrivs"] == "1",
        filters=int(status.get("Seccomp_filters", "1")),
        landlock_abi=abi,
        pid=os.getpid(),
        parent_pid=os.getppid(),
        processes_seen=_count_processes(),
        interfaces=_interfaces(),
        limits={
            "memory_bytes": resource.getrlimit(resource.RLIMIT_AS)[0],
            "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "file_bytes": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        },
        python=sys.version.partition(" ")[0],
    )


def main(argv: list[str]) -> int:
    """Confine, then say what holds; status 1 and a message when something does not."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m callyard.executor.confine JSON\n")
        return 64
    try:
        wanted = parse_confinement(argv[0])
        abi = landlock_abi() if wanted.landlock else 0
        apply(wanted)
        evidence = gather_evidence(abi)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(evidence) + b"\n")
    return 0


def _count_processes() -> int:
    try:
        return sum(name.isdigit() for name in os.listdir("/proc"))
    except OSError:
        return 0


def _interfaces() -> tuple[str, ...]:
    try:
        with open("/proc/self/net/dev", encoding="ascii") as file:
            return tuple(line.partition(":")[0].strip() for line in file if ":" in line)
    except OSError:
        return ()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
