"""The system call filter, run by a small interpreter of its language."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from callyard.executor.seccomp import (
    ALLOW,
    KILL,
    MACHINES,
    NOT_THERE,
    PRETEND,
    REFUSE,
    FilterPolicy,
    Machine,
    Op,
    Step,
    assemble,
    build_filter,
)

PID = 4_321
STRICT = FilterPolicy(pid=PID)
FREE = FilterPolicy(pid=PID, processes=True, metadata=True, tkill=True)
X86_64, AARCH64 = MACHINES["x86_64"], MACHINES["aarch64"]
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def run(steps: list[Step], machine: Machine, number: int, *arguments: int) -> Step:
    """What the kernel would do: `struct seccomp_data` as 32-bit words, little-endian."""
    words = [number, machine.audit_arch, 0, 0]
    for argument in (*arguments, *[0] * 6)[:6]:
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    accumulator, place = 0, 0
    while True:
        step = steps[place]
        place += 1
        match step.op:
            case Op.LOAD:
                accumulator = words[step.value // 4]
            case Op.AND:
                accumulator &= step.value
            case Op.EQUAL:
                place += step.if_true if accumulator == step.value else step.if_false
            case Op.AT_LEAST:
                place += step.if_true if accumulator >= step.value else step.if_false
            case Op.RETURN:
                return step


CASES = [
    ("read", 0, (), ALLOW, ALLOW),
    ("mmap", 9, (), ALLOW, ALLOW),
    ("socket", 41, (1, 1, 0), REFUSE, REFUSE),
    ("connect", 42, (), REFUSE, REFUSE),
    ("bind", 49, (), REFUSE, REFUSE),
    ("accept4", 288, (), REFUSE, REFUSE),
    ("socketpair of streams", 53, (1, 1 | 0o2000000, 0), ALLOW, ALLOW),
    ("socketpair of datagrams", 53, (1, 2, 0), REFUSE, REFUSE),
    ("socketpair of another family", 53, (2, 1, 0), REFUSE, REFUSE),
    ("sendto without an address", 44, (3, 1, 1, 0, 0, 0), ALLOW, ALLOW),
    ("sendto with one", 44, (3, 1, 1, 0, 0x7000, 16), REFUSE, REFUSE),
    ("sendto with one above 4 GiB", 44, (3, 1, 1, 0, 0x7F00_0000_0000, 16), REFUSE, REFUSE),
    ("clone of a thread", 56, (0x3D0F00,), ALLOW, ALLOW),
    ("clone of a process", 56, (17,), REFUSE, ALLOW),
    ("clone with a user namespace", 56, (0x10000011,), REFUSE, REFUSE),
    ("clone of a thread with a namespace", 56, (0x3D0F00 | 0x40000000,), REFUSE, REFUSE),
    ("clone3", 435, (), NOT_THERE, NOT_THERE),
    ("fork", 57, (), REFUSE, ALLOW),
    ("execve", 59, (), REFUSE, ALLOW),
    ("unshare", 272, (0x10000000,), REFUSE, REFUSE),
    ("mount", 165, (), REFUSE, REFUSE),
    ("ptrace", 101, (), REFUSE, REFUSE),
    ("process_vm_readv", 310, (), REFUSE, REFUSE),
    ("setuid", 105, (0,), REFUSE, REFUSE),
    ("kill of itself", 62, (PID, 9), ALLOW, ALLOW),
    ("kill of another", 62, (PID + 1, 9), REFUSE, ALLOW),
    ("kill of everybody", 62, (0xFFFF_FFFF_FFFF_FFFF, 9), REFUSE, ALLOW),
    ("tgkill of its own thread", 234, (PID, 77, 14), ALLOW, ALLOW),
    ("tgkill of another's", 234, (1, 1, 9), REFUSE, ALLOW),
    ("tkill", 200, (77, 9), REFUSE, ALLOW),
    ("rt_sigqueueinfo", 129, (1, 9), REFUSE, REFUSE),
    ("prctl to be killed with the parent", 157, (1, 9), ALLOW, ALLOW),
    ("prctl not to be", 157, (1, 0), REFUSE, REFUSE),
    ("prctl of a name", 157, (15, 0x7000), ALLOW, ALLOW),
    ("fcntl to copy", 72, (3, 0), ALLOW, ALLOW),
    ("fcntl of an owner", 72, (3, 8, 1), REFUSE, REFUSE),
    ("fcntl of an owner's signal", 72, (3, 10, 9), REFUSE, REFUSE),
    ("ioctl of a size", 16, (1, 0x5413), ALLOW, ALLOW),
    ("ioctl that types", 16, (0, 0x5412), REFUSE, REFUSE),
    ("ioctl of an owner", 16, (3, 0x8901), REFUSE, REFUSE),
    ("prlimit of itself", 302, (0, 7), ALLOW, ALLOW),
    ("prlimit of another", 302, (1, 7), REFUSE, REFUSE),
    ("chmod", 90, (), PRETEND, ALLOW),
    ("utimensat", 280, (), PRETEND, ALLOW),
    ("setxattr", 188, (), REFUSE, REFUSE),
    ("inotify_add_watch", 254, (), REFUSE, REFUSE),
    ("memfd_create", 319, (), REFUSE, REFUSE),
    ("io_uring_setup", 425, (), REFUSE, REFUSE),
    ("one of another decade", 5_000, (), NOT_THERE, NOT_THERE),
    ("read by the x32 entrance", 0x40000000, (), NOT_THERE, NOT_THERE),
]


@pytest.mark.requirement("X46")
@pytest.mark.parametrize(
    ("number", "arguments", "strict", "free"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_what_becomes_of_a_call(number: int, arguments: tuple[int, ...], strict: Step, free: Step) -> None:
    assert run(build_filter(STRICT, X86_64), X86_64, number, *arguments) == strict
    assert run(build_filter(FREE, X86_64), X86_64, number, *arguments) == free


@pytest.mark.requirement("X46")
def test_another_architecture_is_killed() -> None:
    for ours, other in ((X86_64, AARCH64), (AARCH64, X86_64)):
        assert run(build_filter(STRICT, ours), other, 0) == KILL


@pytest.mark.requirement("X46")
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("policy", [STRICT, FREE], ids=["strict", "free"])
def test_every_number_ends_in_an_answer(machine: Machine, policy: FilterPolicy) -> None:
    steps = build_filter(policy, machine)
    answers = {run(steps, machine, number) for number in range(1_000)}
    assert answers <= {ALLOW, REFUSE, NOT_THERE, PRETEND}
    assert len(steps) < 4_096, "the kernel takes no more"
    assert len(assemble(steps)) == len(steps) * 8
    assert all(0 <= jump < 256 for step in steps for jump in (step.if_true, step.if_false))


def test_the_same_call_on_the_other_machine() -> None:
    steps = build_filter(STRICT, AARCH64)
    assert run(steps, AARCH64, 63) == ALLOW  # read
    assert run(steps, AARCH64, 198, 1, 1, 0) == REFUSE  # socket
    assert run(steps, AARCH64, 220, 17) == REFUSE  # clone of a process
    assert run(steps, AARCH64, 129, PID, 9) == ALLOW  # kill of itself


def test_numbers_are_the_kernels() -> None:
    if not HEADER.exists():
        pytest.skip(f"no {HEADER}")
    from callyard.executor import seccomp

    known = dict(line.split()[1:3] for line in HEADER.read_text().splitlines() if line.startswith("#define __NR_"))
    for names in (seccomp._FREE, seccomp._METADATA, seccomp._PROCESSES, seccomp._LOOKED_AT):
        for name, number in seccomp.numbers(names, X86_64).items():
            assert known.get(f"__NR_{name}", str(number)) == str(number), name


def test_refusals_are_errors_that_libraries_know() -> None:
    assert REFUSE.value & 0xFFFF == errno.EPERM
    assert NOT_THERE.value & 0xFFFF == errno.ENOSYS
