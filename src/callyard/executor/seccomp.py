"""The system call filter of a confined executor: a list of what is allowed, as a BPF program (X46).

What is not on the list is refused: EPERM for a call of the time this list was made, ENOSYS for a newer one, so that
libraries fall back. Assembled here, since a dependency on libseccomp would be one more thing that may be missing.
Pure but for `load`; a few lines of BPF: load the number, compare, look at an argument, return.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from enum import IntEnum
from struct import pack
from typing import Final, NamedTuple

import msgspec

_FREE: Final = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
preadv2:327:286 pwritev2:328:287 lseek:8:62 close:3:57 fstat:5:80 newfstatat:262:79 stat:4: lstat:6: statx:332:291
statfs:137:43 fstatfs:138:44 open:2: openat:257:56 creat:85: access:21: faccessat:269:48 faccessat2:439:439
readlink:89: readlinkat:267:78 getdents:78: getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:
mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35 rename:82: renameat:264:38 renameat2:316:276 link:86:
linkat:265:37 symlink:88: symlinkat:266:36 umask:95:166 truncate:76:45 ftruncate:77:46 fallocate:285:47
fsync:74:82 fdatasync:75:83 sync_file_range:277:84 flock:73:32 fadvise64:221:223 readahead:187:213
copy_file_range:326:285 sendfile:40:71 splice:275:76
getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
dup:32:23 dup2:33: dup3:292:24 pipe:22: pipe2:293:59 close_range:436:436
poll:7: ppoll:271:73 select:23: pselect6:270:72 epoll_create:213: epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232: epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284: eventfd2:290:19 signalfd:282: signalfd4:289:74
timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233 msync:26:227 mincore:27:232 brk:12:214
mlock:149:228 munlock:150:229 mlock2:325:284 membarrier:324:283 pkey_alloc:330:289 pkey_free:331:290
pkey_mprotect:329:288 futex:202:98 futex_waitv:449:449 set_robust_list:273:99 rseq:334:293
set_tid_address:218:96 arch_prctl:158: sched_yield:24:124 restart_syscall:219:128 exit:60:93 exit_group:231:94
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
rt_sigtimedwait:128:137 sigaltstack:131:132 pause:34: alarm:37: getitimer:36:102 setitimer:38:103
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
time:201: times:100:153 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111 getpid:39:172 gettid:186:178 getppid:110:173 getpgrp:111:
getpgid:121:155 getsid:124:156 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
getresgid:120:150 getgroups:115:158 getrusage:98:165 getpriority:140:141 getrlimit:97:163 setrlimit:160:164
sysinfo:99:179 uname:63:160 getcpu:309:168 getrandom:318:278 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 wait4:61:260 waitid:247:95
recvfrom:45:207 recvmsg:47:212 recvmmsg:299:243 sendmsg:46:211 sendmmsg:307:269 shutdown:48:210
getsockname:51:204 getpeername:52:205 getsockopt:55:209 setsockopt:54:208 capget:125:90
"""
"""Allowed whatever the arguments: name, number on x86_64, number on aarch64 (empty: that machine has none)."""
_METADATA: Final = """
chmod:90: fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92: fchown:93:55 fchownat:260:54 lchown:94:
utimensat:280:88 utimes:235: utime:132: futimesat:261:
"""
"""Modes, owners and times of files. Landlock does not know them, and lets a file of the same user be changed anywhere:
there they say that they have done it and do nothing, as on file systems without modes, so that `shutil.copy` works."""
_PROCESSES: Final = """
fork:57: vfork:58: execve:59:221 execveat:322:281 kill:62:129 tgkill:234:131 tkill:200:130 setpgid:109:154
setsid:112:157 pidfd_open:434:434 pidfd_send_signal:424:424
"""
"""Allowed besides where user code may start programs."""
_LOOKED_AT: Final = """
clone:56:220 clone3:435:435 sendto:44:206 socketpair:53:199 prctl:157:167 fcntl:72:25 ioctl:16:29 prlimit64:302:261
kill:62:129 tgkill:234:131 tkill:200:130
"""
_NEWEST: Final = 462
"""The newest system call when this list was made, `mseal`."""

_PR_SET_PDEATHSIG: Final = 1
_SIGKILL: Final = 9
_CLONE_THREAD: Final = 0x10000
_CLONE_NEW: Final = 0x7E020080
"""All CLONE_NEW… flags: namespaces."""
_OWNER_FCNTLS: Final = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: they make the kernel send a signal to somebody else."""
_REFUSED_IOCTLS: Final = (0x5412, 0x541C, 0x8901, 0x8902, 0x40086602)
"""TIOCSTI and TIOCLINUX type for the terminal; FIOSETOWN and SIOCSPGRP are F_SETOWN for sockets; FS_IOC_SETFLAGS needs
no more than a file that can be read."""
_AF_UNIX: Final = 1
_SOCK_STREAM: Final = 1
_SOCK_TYPE_MASK: Final = 0xF


class Machine(NamedTuple):
    audit_arch: int
    column: int
    """Of this machine's numbers in the lists."""


MACHINES: Final = {"x86_64": Machine(0xC000003E, 1), "aarch64": Machine(0xC00000B7, 2)}


class FilterPolicy(msgspec.Struct, frozen=True):
    pid: int
    """Of the process that loads the filter, as it sees itself: the only one it may signal."""
    processes: bool = False
    """User code may start programs, and signal them."""
    metadata: bool = False
    """Modes and times of files may be changed: something else keeps that inside."""
    tkill: bool = False
    """Something else keeps signals inside: `tkill` names a thread, which cannot be checked here."""


class Op(IntEnum):
    LOAD = 0x20
    AND = 0x54
    EQUAL = 0x15
    AT_LEAST = 0x35
    RETURN = 0x06


class Step(NamedTuple):
    op: Op
    value: int
    if_true: int = 0
    if_false: int = 0


ALLOW: Final = Step(Op.RETURN, 0x7FFF0000)
KILL: Final = Step(Op.RETURN, 0x80000000)
REFUSE: Final = Step(Op.RETURN, 0x00050000 | errno.EPERM)
PRETEND: Final = Step(Op.RETURN, 0x00050000)
NOT_THERE: Final = Step(Op.RETURN, 0x00050000 | errno.ENOSYS)
_NUMBER: Final = Step(Op.LOAD, 0)
_ARCH: Final = Step(Op.LOAD, 4)
_X32: Final = 0x40000000


def numbers(names: str, machine: Machine) -> dict[str, int]:
    """A list as above, for one machine."""
    words = (word.split(":") for word in names.split())
    return {word[0]: int(word[machine.column]) for word in words if word[machine.column]}


def build_filter(policy: FilterPolicy, machine: Machine) -> list[Step]:
    """The program. Every path through it ends in a RETURN."""
    free = numbers(_FREE, machine) | (numbers(_PROCESSES, machine) if policy.processes else {})
    steps = [_ARCH, Step(Op.EQUAL, machine.audit_arch, 1, 0), KILL, _NUMBER]
    if machine.audit_arch == MACHINES["x86_64"].audit_arch:
        steps += [Step(Op.AT_LEAST, _X32, 0, 1), NOT_THERE]
    for name, number in numbers(_LOOKED_AT, machine).items():
        if name not in free:
            body = list(_look(name, policy))
            steps += [Step(Op.EQUAL, number, 0, len(body)), *body]
    for number in sorted(numbers(_METADATA, machine).values()):
        steps += [Step(Op.EQUAL, number, 0, 1), ALLOW if policy.metadata else PRETEND]
    for number in sorted(free.values()):
        steps += [Step(Op.EQUAL, number, 0, 1), ALLOW]
    return [*steps, Step(Op.AT_LEAST, _NEWEST + 1, 0, 1), NOT_THERE, REFUSE]


def _look(name: str, policy: FilterPolicy) -> Iterator[Step]:
    match name:
        case "clone":
            # A thread, or with `processes` any child; never with a namespace of its own.
            yield from (_low(0), Step(Op.AND, _CLONE_NEW), Step(Op.EQUAL, 0, 1, 0), REFUSE)
            if policy.processes:
                yield ALLOW
            else:
                yield from (_low(0), Step(Op.AND, _CLONE_THREAD), Step(Op.EQUAL, 0, 0, 1), REFUSE, ALLOW)
        case "clone3":
            yield NOT_THERE  # its flags lie in memory; the C library falls back to clone
        case "kill" | "tgkill":
            yield from _one_of(_low(0), (policy.pid,), ALLOW, REFUSE)
        case "tkill":
            yield ALLOW if policy.tkill else REFUSE
        case "sendto":
            # With an address it would reach any datagram socket; a connected pair needs none.
            yield from (_low(4), Step(Op.EQUAL, 0, 1, 0), REFUSE, _high(4), Step(Op.EQUAL, 0, 1, 0), REFUSE, ALLOW)
        case "socketpair":
            yield from (_low(0), Step(Op.EQUAL, _AF_UNIX, 1, 0), REFUSE)
            # A datagram pair could send elsewhere, by an address inside sendmsg's structure.
            yield from (_low(1), Step(Op.AND, _SOCK_TYPE_MASK), Step(Op.EQUAL, _SOCK_STREAM, 1, 0), REFUSE, ALLOW)
        case "prctl":
            # What must not be undone: the parent-death signal. The rest cannot lead out.
            yield from (_low(0), Step(Op.EQUAL, _PR_SET_PDEATHSIG, 1, 0), ALLOW)
            yield from _one_of(_low(1), (_SIGKILL,), ALLOW, REFUSE)
        case "fcntl":
            yield from _one_of(_low(1), _OWNER_FCNTLS, REFUSE, ALLOW)
        case "ioctl":
            yield from _one_of(_low(1), _REFUSED_IOCTLS, REFUSE, ALLOW)
        case "prlimit64":
            # The worker may run as the same user, and its limits could be lowered to nothing.
            yield from _one_of(_low(0), (0, policy.pid), ALLOW, REFUSE)
        case _:
            raise AssertionError(name)


def _one_of(load: Step, values: Iterable[int], yes: Step, no: Step) -> Iterator[Step]:
    yield load
    for value in values:
        yield from (Step(Op.EQUAL, value, 0, 1), yes)
    yield no


def _low(argument: int) -> Step:
    """The low 32 bits of an argument, on a little-endian machine: what the kernel looks at of an int."""
    return Step(Op.LOAD, 16 + 8 * argument)


def _high(argument: int) -> Step:
    return Step(Op.LOAD, 20 + 8 * argument)


def assemble(steps: Iterable[Step]) -> bytes:
    """As the kernel's `struct sock_filter` array."""
    return b"".join(pack("=HBBI", step.op, step.if_true, step.if_false, step.value) for step in steps)


def this_machine() -> Machine | None:
    """None: no list for it."""
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return None
    return MACHINES.get(os.uname().machine)
