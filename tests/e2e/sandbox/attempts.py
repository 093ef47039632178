"""Attempts to get out of the sandbox or to harm what is beside it, each a user function. Runs in executors only.

An attempt returns what it got hold of, as text; empty: nothing. What it got must be worth having: a refused attempt
says nothing about a path that is not there anyway, so the runner hands in real targets.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from callyard import function

LIBC = ctypes.CDLL(None, use_errno=True)
X86_64 = os.uname().machine == "x86_64"
FRAME_BYTES_MAX = 16 * 1024 * 1024
ATTEMPTS: dict[str, Callable[[dict[str, Any]], str]] = {}


def attempt(found: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    ATTEMPTS[found.__name__] = found
    return found


@function
def run_attempt(name: str, targets: dict[str, Any]) -> str:
    return ATTEMPTS[name](targets)


KEPT: list[str] = []


@function
def keep(secret: str) -> None:
    """A call of another tenant, which leaves its argument behind."""
    KEPT.append(secret)


@function
def neighbour(steps: int) -> int:
    """A call on another executor, while an attempt runs."""
    total = 0
    for step in range(steps):
        total += step * step
        if step % 1_000 == 0:
            time.sleep(0.001)
    return total


def got(*works: Callable[[], object]) -> str:
    """What of `works` went through, by their results."""
    through = []
    for work in works:
        try:
            through.append(str(work())[:200])
        except (OSError, ValueError, RuntimeError, MemoryError, subprocess.SubprocessError):
            continue
    return "; ".join(through)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(20)


def call(name: str, *arguments: Any) -> int:
    """A function of the C library; raises OSError."""
    result = int(getattr(LIBC, name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def syscall(x86_64: int, aarch64: int, *arguments: Any) -> int:
    """A system call by its number; raises OSError."""
    return call("syscall", ctypes.c_long(x86_64 if X86_64 else aarch64), *arguments)


@contextmanager
def link_socket() -> Iterator[socket.socket]:
    """The executor's own link, held, so that its heartbeats do not get between."""
    gc.unfreeze()  # what was set aside is found, too
    link = next(found for found in gc.get_objects() if type(found).__name__ == "Link" and hasattr(found, "lock"))
    with link.lock, socket.socket(fileno=os.dup(link.fd)) as found:
        yield found


# --- the network ----------------------------------------------------------------------------------------------------


@attempt
def internet_socket(targets: dict[str, Any]) -> str:
    return got(lambda: socket.create_connection(("127.0.0.1", targets["port"]), timeout=5))


@attempt
def other_sockets(targets: dict[str, Any]) -> str:
    kinds = [(socket.AF_INET6, socket.SOCK_DGRAM), (socket.AF_NETLINK, socket.SOCK_RAW), (socket.AF_PACKET, 3)]
    return got(*(lambda kind=kind: socket.socket(*kind) for kind in kinds))


@attempt
def pathname_socket(targets: dict[str, Any]) -> str:
    def connect() -> object:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(targets["socket"])
            return "connected"

    return got(connect)


@attempt
def abstract_socket(targets: dict[str, Any]) -> str:
    def connect() -> object:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + targets["abstract"])
            return "connected"

    return got(connect)


@attempt
def datagram_by_address(targets: dict[str, Any]) -> str:
    """A connected pair can send elsewhere, by an address: `connect` is not needed for it."""

    def by_sendto() -> object:
        ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return ours.sendto(b"x", targets["datagram"])

    def by_sendmsg() -> object:
        ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return ours.sendmsg([b"x"], [], 0, "\0" + targets["datagram_abstract"])

    return got(by_sendto, by_sendmsg)


@attempt
def listen_for_others(targets: dict[str, Any]) -> str:
    def listen() -> object:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.path.join(os.environ["TMPDIR"], "door"))
            sock.listen()
            return "listening"

    return got(listen)


# --- files ----------------------------------------------------------------------------------------------------------


@attempt
def read_files(targets: dict[str, Any]) -> str:
    return got(*(lambda path=path: open(path, "rb").read(20) for path in targets["secret_files"]))


@attempt
def list_folders(targets: dict[str, Any]) -> str:
    return got(*(lambda path=path: list_unknown(path) for path in targets["secret_folders"]))


def list_unknown(path: str) -> list[str]:
    """Names in a folder, but for those on the way to what is shown anyway. Raises OSError when there are none."""
    shown = {*sys.prefix.split("/"), *sys.base_prefix.split("/"), *os.path.dirname(__file__).split("/"), "src", "build"}
    found = sorted(set(os.listdir(path)) - shown)
    if not found:
        raise OSError("empty")
    return found


@attempt
def write_files(targets: dict[str, Any]) -> str:
    def write(path: str) -> str:
        with open(path, "w") as file:
            file.write("x")
        os.unlink(path)
        return path

    places = [
        os.path.dirname(__file__),
        *targets["folders"],
        "/",
        "/usr/bin",
        "/etc",
        "/dev/shm",
        "/var/tmp",
        sys.prefix,
    ]
    places += [os.path.dirname(os.__file__), os.path.dirname(sys.modules["callyard"].__file__ or "")]
    names = [os.path.join(place, "planted.py") for place in places[1:]]
    return got(*(lambda name=name: write(name) for name in names))


@attempt
def change_own_package(targets: dict[str, Any]) -> str:
    """What the next executor would load."""
    path = sys.modules["callyard"].__file__ or ""
    return got(
        lambda: os.truncate(path, os.stat(path).st_size),
        lambda: change_mode(path),
        lambda: os.setxattr(path, "user.planted", b"x"),
        lambda: os.rename(path, path),
    )


def change_mode(path: str) -> str:
    before = os.stat(path).st_mode
    os.chmod(path, before ^ 0o222)
    if os.stat(path).st_mode == before:
        raise OSError("nothing changed")
    return path


@attempt
def change_modes(targets: dict[str, Any]) -> str:
    """A folder opened to everybody, or closed to its owner."""
    paths = [*targets["own_files"], os.path.dirname(targets["own_files"][0])]
    return got(*(lambda path=path: change_mode(path) for path in paths))


@attempt
def look_up_files(targets: dict[str, Any]) -> str:
    return got(*(lambda path=path: os.stat(path).st_size for path in targets["own_files"]))


@attempt
def watch_folders(targets: dict[str, Any]) -> str:
    """The names of files that others make."""

    def watch(path: str) -> object:
        return call("inotify_add_watch", call("inotify_init1", 0), path.encode(), 0x100)

    return got(*(lambda path=path: watch(path) for path in targets["secret_folders"]))


@attempt
def unlink_files(targets: dict[str, Any]) -> str:
    names = [targets["socket"], *targets["own_files"]]
    return got(
        *(lambda name=name: os.unlink(name) for name in names),
        *(lambda name=name: os.rename(name, name + "x") for name in names),
        *(lambda name=name: os.truncate(name, 0) for name in names),
        *(lambda name=name: os.close(os.open(name, os.O_RDONLY | os.O_TRUNC)) for name in names),
    )


@attempt
def link_out_of_tmp(targets: dict[str, Any]) -> str:
    found = []
    for number, path in enumerate((*targets["secret_files"], *targets["secret_folders"])):
        link = os.path.join(os.environ["TMPDIR"], f"link{number}")
        os.symlink(path, link)
        found.append(got(lambda link=link: read(link), lambda link=link: list_unknown(link)))
        found.append(got(lambda path=path, link=link: os.link(path, link + "hard")))
    return "".join(found)


@attempt
def inherited_descriptors(targets: dict[str, Any]) -> str:
    """Whatever leads to a file of this machine; pipes, the link, the memory that values go by and the executor's own
    are none."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        own = (
            "socket:",
            "pipe:",
            "anon_inode:",
            "/memfd:callyard-arena",
            "/memfd:callyard-shared",
            "/dev/null",
            "/proc/",
            "/usr/",
            sys.base_prefix,
        )
        if not target.startswith(own):
            found.append(target)
    return "; ".join(found)


@attempt
def devices(targets: dict[str, Any]) -> str:
    def make() -> object:
        path = os.path.join(os.environ["TMPDIR"], "device")
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 1))
        return open(path, "rb").read(1)

    names = [
        "/dev/mem",
        "/dev/kmsg",
        "/dev/kvm",
        "/dev/vda",
        "/dev/sda",
        "/dev/fuse",
        "/dev/net/tun",
        "/dev/tty",
        "/dev/ptmx",
    ]
    if targets["level"] == "bwrap":
        names.remove("/dev/ptmx")  # of an instance of its own
    return got(*(lambda name=name: open(name, "r+b", 0) for name in names), make)


@attempt
def kernel_settings(targets: dict[str, Any]) -> str:
    def write(path: str) -> str:
        with open(path, "w") as file:
            file.write("1")
        return path

    names = ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/sys/power/state"]
    return got(
        *(lambda name=name: write(name) for name in names),
        lambda: open("/proc/kcore", "rb").read(1),
        lambda: open("/proc/kmsg", "rb", 0).read(1),
        lambda: syscall(103, 116, 3, ctypes.create_string_buffer(100), 100),  # syslog
    )


@attempt
def mounts(targets: dict[str, Any]) -> str:
    tmp = os.environ["TMPDIR"].encode()
    return got(
        lambda: call("mount", b"none", tmp, b"tmpfs", 0, None),
        lambda: call("umount2", b"/tmp", 2),
        lambda: call("chroot", tmp),
        lambda: syscall(155, 41, tmp, tmp),  # pivot_root
        lambda: syscall(428, 428, -100, b"/", 0),  # open_tree
        lambda: syscall(430, 430, b"tmpfs", 0),  # fsopen
        lambda: syscall(304, 265, -100, ctypes.create_string_buffer(64), 0),  # open_by_handle_at
    )


# --- other processes ------------------------------------------------------------------------------------------------


@attempt
def trace(targets: dict[str, Any]) -> str:
    return got(
        *(
            lambda pid=pid: call("ptrace", 16, pid, 0, 0)
            for pid in (targets["worker"], *targets["siblings"], os.getppid())
        )
    )


@attempt
def read_memory(targets: dict[str, Any]) -> str:
    """The worker holds the arguments and results of all tenants."""
    worker = targets["worker"]
    buffer = ctypes.create_string_buffer(64)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
    return got(
        lambda: open(f"/proc/{worker}/mem", "rb"),
        lambda: open(f"/proc/{worker}/maps", "rb").read(20),
        lambda: open(f"/proc/{worker}/environ", "rb").read(20),
        lambda: open(f"/proc/{worker}/cmdline", "rb").read(20),
        lambda: os.listdir(f"/proc/{worker}/fd"),
        lambda: os.listdir(f"/proc/{worker}/root"),
        lambda: syscall(310, 270, worker, vector, 1, vector, 1, 0),  # process_vm_readv
        lambda: syscall(438, 438, syscall(434, 434, worker, 0), 0, 0),  # pidfd_getfd
        lambda: syscall(312, 272, worker, os.getpid(), 0, 0, 0),  # kcmp
    )


@attempt
def list_processes(targets: dict[str, Any]) -> str:
    return got(lambda: [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 2] or call("close", -1))


@attempt
def signal_worker(targets: dict[str, Any]) -> str:
    pid = targets["worker"]
    return got(
        lambda: os.kill(pid, 0),
        lambda: syscall(234, 131, pid, pid, 0),  # tgkill
        lambda: syscall(200, 130, pid, 0),  # tkill
        lambda: syscall(129, 138, pid, 0, ctypes.create_string_buffer(128)),  # rt_sigqueueinfo
        lambda: syscall(434, 434, pid, 0),  # pidfd_open
    )


@attempt
def signal_others(targets: dict[str, Any]) -> str:
    others = [pid for pid in targets["siblings"] if pid != os.getpid()]
    return got(
        *(lambda pid=pid: os.kill(pid, 0) for pid in others),
        lambda: os.kill(-1, 0),
        lambda: os.killpg(targets["worker"], 0),
    )


@attempt
def signal_parent(targets: dict[str, Any]) -> str:
    return got(lambda: os.kill(os.getppid(), signal.SIGKILL))


@attempt
def signal_by_descriptor(targets: dict[str, Any]) -> str:
    """The kernel sends the owner of a descriptor a signal of its owner's choice."""

    def own() -> object:
        reader, _ = os.pipe()
        fcntl.fcntl(reader, fcntl.F_SETOWN, targets["worker"])
        return "owned"

    def own_socket() -> object:
        ours, _ = socket.socketpair()
        fcntl.ioctl(ours, 0x8901, struct.pack("i", targets["worker"]))
        return "owned"

    return got(own, own_socket, lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, signal.SIGKILL))


@attempt
def limit_worker(targets: dict[str, Any]) -> str:
    pid = targets["worker"]
    everywhere = (ctypes.c_ulong * 16)(*[1] * 16)
    return got(
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda: syscall(203, 122, pid, 128, everywhere),  # sched_setaffinity
        lambda: syscall(251, 30, 1, pid, 3 << 13),  # ioprio_set
    )


@attempt
def stop_itself(targets: dict[str, Any]) -> str:
    os.kill(os.getpid(), signal.SIGSTOP)
    return "went on"


@attempt
def leave_group(targets: dict[str, Any]) -> str:
    """What leaves the worker's process group would outlive it."""
    return got(lambda: os.setsid(), lambda: os.setpgid(0, targets["siblings"][0]))


@attempt
def outlive_worker(targets: dict[str, Any]) -> str:
    return got(lambda: call("prctl", 1, 0, 0, 0, 0))


# --- rights ---------------------------------------------------------------------------------------------------------


@attempt
def gain_rights(targets: dict[str, Any]) -> str:
    header = struct.pack("II", 0x20080522, 0)
    return got(
        lambda: os.setuid(0) if os.getuid() else os.setuid(1),
        lambda: os.setgroups([0]),
        lambda: call("capset", header, b"\xff" * 24),
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100_000, 100_000)),
        lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2),
    )


@attempt
def namespaces(targets: dict[str, Any]) -> str:
    return got(
        *(lambda flag=flag: call("unshare", flag) for flag in (0x10000000, 0x00020000, 0x40000000)),
        lambda: syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0),  # clone
        lambda: syscall(435, 435, ctypes.create_string_buffer(88), 88),  # clone3
        lambda: call("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0),
    )


@attempt
def rare_system_calls(targets: dict[str, Any]) -> str:
    space = ctypes.create_string_buffer(256)
    return got(
        lambda: syscall(425, 425, 8, space),  # io_uring_setup
        lambda: syscall(321, 280, 0, space, 128),  # bpf
        lambda: syscall(250, 219, 0, -3, 0),  # keyctl
        lambda: syscall(298, 241, space, 0, -1, -1, 0),  # perf_event_open
        lambda: syscall(323, 282, 0),  # userfaultfd
        lambda: syscall(319, 279, b"x", 0),  # memfd_create: memory outside the address space
        lambda: syscall(29, 194, 0, 4096, 0o1600),  # shmget
        lambda: syscall(68, 186, 0, 0o1600),  # msgget
        lambda: syscall(175, 105, space, 0, b""),  # init_module
        lambda: syscall(135, 92, 0x0040000),  # personality
        lambda: syscall(5_000, 5_000),  # one that nobody knows yet
    )


@attempt
def other_architecture(targets: dict[str, Any]) -> str:
    """The same kernel by its 32-bit entrance, with other numbers."""
    import mmap

    if not X86_64:
        return ""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return f"getpid said {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}"


@attempt
def run_programs(targets: dict[str, Any]) -> str:
    return got(
        lambda: subprocess.run(["/bin/sh", "-c", "true"], check=True),
        lambda: subprocess.run([sys.executable, "-c", "pass"], check=True),
        lambda: os.execv("/bin/sh", ["/bin/sh", "-c", "true"]),
        lambda: os.posix_spawn("/bin/sh", ["/bin/sh", "-c", "true"], {}),
    )


@attempt
def environment(targets: dict[str, Any]) -> str:
    with open("/proc/self/environ", "rb") as file:
        raw = file.read().decode()
    return "seen" if targets["secret_variable"] in os.environ or targets["secret_variable"] in raw else ""


# --- using things up ------------------------------------------------------------------------------------------------


@attempt
def fork_bomb(targets: dict[str, Any]) -> str:
    children = 0
    for _ in range(200):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            time.sleep(5)
            os._exit(0)
        children += 1
    return f"{children} processes" if children else ""


@attempt
def zombies(targets: dict[str, Any]) -> str:
    children = 0
    for _ in range(200):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            os._exit(0)
        children += 1
    return f"{children} zombies" if children else ""


@attempt
def thread_bomb(targets: dict[str, Any]) -> str:
    """Where other processes of the same user count, some may have ended since: not to the last thread."""
    stop = threading.Event()
    threads = []
    try:
        for _ in range(targets["threads_max"] * 4):
            thread = threading.Thread(target=stop.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        pass
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    return f"{len(threads)} threads" if len(threads) > targets["threads_max"] * 2 else ""


@attempt
def memory(targets: dict[str, Any]) -> str:
    return f"{len(bytearray(targets['memory_max'] * 2))} bytes"


@attempt
def memory_in_tmp(targets: dict[str, Any]) -> str:
    """Files of a /tmp in memory are memory as well."""
    block = bytes(1 << 20)
    written = 0
    for number in range(4):
        with open(os.path.join(os.environ["TMPDIR"], f"heavy{number}"), "wb") as file:
            for _ in range(targets["tmp_max"] // len(block)):
                try:
                    written += file.write(block)
                    file.flush()
                except OSError:
                    break
    return f"{written} bytes" if written > targets["tmp_max"] else ""


@attempt
def large_file(targets: dict[str, Any]) -> str:
    def write() -> object:
        with open(os.path.join(os.environ["TMPDIR"], "large"), "wb") as file:
            for _ in range(targets["tmp_max"] // (1 << 20) + 8):
                file.write(bytes(1 << 20))
            return file.tell()

    def stretch() -> object:
        with open(os.path.join(os.environ["TMPDIR"], "sparse"), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, targets["tmp_max"] + (8 << 20))
            return "allocated"

    return got(write, stretch)


@attempt
def descriptors(targets: dict[str, Any]) -> str:
    held = []
    try:
        for _ in range(5_000):
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    finally:
        for fd in held:
            os.close(fd)
    return f"{len(held)} descriptors" if len(held) > targets["files_max"] else ""


# --- the link -------------------------------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@attempt
def second_connection(targets: dict[str, Any]) -> str:
    """The worker listens nowhere."""

    def connect(path: str) -> object:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            return path

    links = os.path.join(targets["run_folder"], "links")
    return got(
        lambda: os.listdir(links), *(lambda n=n: connect(os.path.join(links, f"exec-{n}", "link")) for n in range(1, 4))
    )


@attempt
def other_marks(targets: dict[str, Any]) -> str:
    """The pages that say which calls of others have begun."""
    marks = os.path.join(targets["run_folder"], "marks")
    with open("/proc/self/maps") as file:
        maps = [f"/proc/self/map_files/{line.split()[0]}" for line in file if "marks" in line]
    return got(
        lambda: os.listdir(marks),
        *(lambda n=n: open(os.path.join(marks, f"exec-{n}"), "r+b") for n in range(1, 6)),
        *(lambda path=path: open(path, "r+b") for path in maps),
    )


@attempt
def forged_results(targets: dict[str, Any]) -> str:
    """Ends in the name of others; the neighbour's call must not notice."""
    frames = []
    for task in range(40):
        for call_id in (f"task-{task}-0", f"task-{task}-1"):
            for attempt_seq in (0, 1, 2):
                who = f'"call_id":"{call_id}"'
                seq = f'"attempt_seq":{attempt_seq},"task_id":"task-{task}"'
                frames.append(f'{{"message_type":"CallCompleted",{who},"payload":{{{seq},"output":-1}}}}')
                failed = '"error_kind":"internal","error_message":"forged"'
                frames.append(f'{{"message_type":"CallFailed",{who},"payload":{{{seq},{failed}}}}}')
    with link_socket() as link:
        link.sendall(b"".join(frame(text.encode()) for text in frames))
    return ""


@attempt
def forged_waits(targets: dict[str, Any]) -> str:
    """Requests in the name of others."""
    payload = '"wait_kind":"io","attempt_seq":1,"task_id":"task-1","io":{"provider":"files","operation":"read"}'
    with link_socket() as link:
        for task in range(40):
            text = f'"call_id":"task-{task}-0","request_id":"r{task}","payload":{{{payload}}}'
            link.sendall(frame(f'{{"message_type":"CallWaiting",{text}}}'.encode()))
    return ""


@attempt
def forged_heartbeat(targets: dict[str, Any]) -> str:
    payload = '"executor_id":"exec-1","heartbeat_seq":1000000,"available_contexts":1000000,"memory_bytes":0'
    with link_socket() as link:
        link.sendall(frame(f'{{"message_type":"Heartbeat","payload":{{{payload}}}}}'.encode()))
    return ""


@attempt
def other_code(targets: dict[str, Any]) -> str:
    """The code of another bundle, asked for by its digest."""
    payload = (
        '"wait_kind":"function_code","task_id":"task-1","attempt_seq":0,"function_code":{"digest":"' + "0" * 64 + '"}'
    )
    with link_socket() as link:
        link.sendall(
            frame(
                f'{{"message_type":"CallWaiting","call_id":"x","request_id":"forged","payload":{{{payload}}}}}'.encode()
            )
        )
    return ""


@attempt
def other_tenant(targets: dict[str, Any]) -> str:
    """Arguments of another tenant's calls, in the memory of this process."""
    wanted = "".join(targets["other_tenant"])
    gc.unfreeze()
    seen, held = set(), gc.get_objects()
    while held:
        one = held.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, str) and wanted in one and one != wanted:
            return one
        held += gc.get_referents(one)
    return ""


@attempt
def oversized_frame(targets: dict[str, Any]) -> str:
    with link_socket() as link:
        link.sendall(struct.pack(">I", FRAME_BYTES_MAX + 1) + bytes(1024))
    time.sleep(60)
    return "went on"


@attempt
def garbage(targets: dict[str, Any]) -> str:
    with link_socket() as link:
        link.sendall(frame(b"\xff\x00 this is no message"))
    time.sleep(60)
    return "went on"


@attempt
def frame_flood(targets: dict[str, Any]) -> str:
    """Large frames of an unknown type, and many small ones."""
    body = b'{"message_type":"Unknown","payload":"' + b"x" * (15 * 1024 * 1024) + b'"}'
    small = frame(b'{"message_type":"CallEvent","call_id":"x","payload":{"attempt_seq":0,"event_kind":"log"}}')
    with link_socket() as link:
        for _ in range(8):
            link.sendall(frame(body))
        for _ in range(20):
            link.sendall(small * 1_000)
    return ""


@attempt
def close_standard_streams(targets: dict[str, Any]) -> str:
    for fd in (0, 1, 2):
        LIBC.close(fd)
        got(lambda fd=fd: os.close(fd))
    return ""


@attempt
def close_everything(targets: dict[str, Any]) -> str:
    for fd in range(256):
        LIBC.close(fd)
    time.sleep(60)
    return "went on"
