"""What becomes of each attempt at each level: the one table, for the tests and for docs/design/sandbox.md."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Outcome(StrEnum):
    REFUSED = "refused"  # it got nothing, and its call ended well
    CONTAINED = "contained"  # its call failed, or its executor was replaced
    OPEN = "open"  # it got through


class Expected(NamedTuple):
    attempt: str
    what: str
    bwrap: Outcome
    landlock: Outcome
    by: str
    """What stops it: at bwrap / at landlock, or at both."""


R, C, O = Outcome.REFUSED, Outcome.CONTAINED, Outcome.OPEN  # noqa: E741

EXPECTED: Final = (
    Expected(
        "internet_socket", "connect to a TCP port of the machine", R, R, "system calls; no network / system calls"
    ),
    Expected("other_sockets", "IPv6, netlink and packet sockets", R, R, "system calls"),
    Expected("pathname_socket", "connect to somebody's Unix socket", R, R, "not mounted / system calls"),
    Expected("abstract_socket", "connect to an abstract Unix socket", R, R, "system calls"),
    Expected("datagram_by_address", "send a datagram to a socket by its address", R, R, "system calls"),
    Expected("listen_for_others", "listen on a Unix socket", R, R, "system calls"),
    Expected("read_files", "read the user's files, the run folder, /etc/shadow", R, R, "not mounted / Landlock"),
    Expected("list_folders", "list the project, the home folder, the run folder", R, R, "not mounted / Landlock"),
    Expected(
        "write_files", "plant a module in the interpreter, packages, /dev/shm", R, R, "read-only mounts / Landlock"
    ),
    Expected("change_own_package", "change Callyard's own code", R, R, "read-only mounts / Landlock"),
    Expected("change_modes", "open or close files and folders by their modes", R, R, "not mounted / system calls"),
    Expected("look_up_files", "whether a file exists, its size", R, O, "not mounted / nothing"),
    Expected("watch_folders", "be told the names of new files", R, R, "system calls"),
    Expected("unlink_files", "remove, rename or empty the worker's files", R, R, "not mounted / Landlock"),
    Expected("link_out_of_tmp", "symbolic and hard links in tmp to files outside", R, R, "not mounted / Landlock"),
    Expected("inherited_descriptors", "files that the worker has open", R, R, "only named descriptors are passed on"),
    Expected(
        "devices", "/dev/mem, disks, /dev/kvm; make a device", R, R, "/dev of its own, no capabilities / Landlock"
    ),
    Expected("kernel_settings", "sysrq, core_pattern, kernel memory and log", R, R, "read-only /proc, user / Landlock"),
    Expected("mounts", "mount, unmount, chroot, pivot_root, file handles", R, R, "system calls"),
    Expected("trace", "ptrace the worker and another executor", R, R, "system calls"),
    Expected(
        "read_memory", "the worker's memory, maps, environment", R, R, "no such process here / Landlock; system calls"
    ),
    Expected("list_processes", "the machine's processes", R, R, "process namespace / Landlock"),
    Expected("signal_worker", "signal the worker, by every way of it", R, R, "system calls; namespace / Landlock"),
    Expected("signal_others", "signal another executor, or everybody", R, R, "system calls; namespace / Landlock"),
    Expected("signal_parent", "kill the parent process", R, R, "system calls"),
    Expected("signal_by_descriptor", "have the kernel signal the worker (F_SETOWN)", R, R, "system calls"),
    Expected("limit_worker", "the worker's limits, priority, CPUs", R, R, "system calls"),
    Expected("stop_itself", "SIGSTOP of itself", C, C, "the worker sees it and replaces it"),
    Expected("leave_group", "leave the process group, to outlive it", R, R, "system calls"),
    Expected("outlive_worker", "take back the parent-death signal", R, R, "system calls"),
    Expected("gain_rights", "another user, capabilities, higher limits", R, R, "no_new_privs, system calls"),
    Expected("namespaces", "new namespaces; join another", R, R, "system calls"),
    Expected("rare_system_calls", "io_uring, bpf, keys, perf, memfd, System V memory", R, R, "system calls"),
    Expected("other_architecture", "the 32-bit entrance of the kernel", C, C, "system calls: the process is killed"),
    Expected("run_programs", "a shell, Python, by every way of it", R, R, "system calls"),
    Expected("environment", "secrets in the worker's environment", R, R, "an environment of named variables"),
    Expected("fork_bomb", "200 processes", R, R, "system calls"),
    Expected("zombies", "200 zombies", R, R, "system calls"),
    Expected("thread_bomb", "four times the threads allowed", R, R, "RLIMIT_NPROC, control group"),
    Expected("memory", "twice the memory allowed", C, C, "address space: MemoryError"),
    Expected("large_file", "a file above the size of tmp", R, R, "size of tmp, RLIMIT_FSIZE"),
    Expected("memory_in_tmp", "many files, together above the size of tmp", R, O, "size of tmp / nothing"),
    Expected("descriptors", "5,000 descriptors", R, R, "RLIMIT_NOFILE"),
    Expected("second_connection", "a second connection to the worker", R, R, "it listens nowhere"),
    Expected("other_marks", "the begun-marks of other executors", R, R, "not mounted / Landlock"),
    Expected("forged_results", "results and failures of others' calls", R, R, "they count for its own calls only"),
    Expected("forged_waits", "IO requests of others' calls", C, C, "it speaks for calls it does not hold: replaced"),
    Expected("forged_heartbeat", "a heartbeat in another's name", R, R, "they count for its own link only"),
    Expected("other_code", "the code of another bundle", C, C, "an executor is sent its own bundle only"),
    Expected("other_tenant", "another tenant's arguments, in its own memory", R, R, "an executor serves one tenant"),
    Expected("oversized_frame", "a frame of 16 MiB and 1 byte", C, C, "malformed: the executor is replaced"),
    Expected("garbage", "bytes that are no message", C, C, "malformed: the executor is replaced"),
    Expected(
        "frame_flood", "120 MiB in large frames, 20,000 small ones", R, R, "one frame at a time is read and dropped"
    ),
    Expected("close_standard_streams", "close descriptors 0, 1 and 2", R, R, "nothing of the worker's is on them"),
    Expected("close_everything", "close every descriptor", C, C, "its connection ends: the executor is replaced"),
)


def as_markdown() -> str:
    """The table for the design page."""
    rows = ["| attempt | | bwrap | landlock | stopped by |", "| --- | --- | --- | --- | --- |"]
    rows += [f"| `{row.attempt}` | {row.what} | {row.bwrap} | {row.landlock} | {row.by} |" for row in EXPECTED]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
