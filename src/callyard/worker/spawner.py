"""Starting, watching and ending executor processes, behind one small port.

Each child is the leader of a session of its own, so that Ctrl-C reaches the worker alone and its whole group can be
killed. Its exit is seen by pidfd where the system has one, without a SIGCHLD handler: the host program may own that.
Spawn from the thread of the worker's loop: the child's parent-death signal follows that thread. Source: call-execution
X32, X44, X46.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from callyard.executor import launch
from callyard.ids import ExecutorId
from callyard.wire.messages import PROTOCOL_VERSION
from callyard.worker.interpreter import Interpreter

TAIL_LINES: Final = 20
TAIL_LINE_BYTES_MAX: Final = 2_000
PARTIAL_LINE_S: Final = 0.2
"""Part of a line is shown when it has not grown for so long."""
PF_EXITING: Final = 0x4
"""The kernel's flag for a process that is past the point of no return."""
OutputCallback = Callable[[ExecutorId, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnOrder:
    """What a child is started with."""

    executor_id: ExecutorId
    executor_max_inflight: int
    executor_max_runnable: int
    heartbeat_interval_ms: int
    capture_locals: bool
    nice: int
    mark_fd: int
    arena_fd: int | None = None  # None: there is none
    shared_fd: int | None = None  # for reading; None: there is none
    socket_fd: int | None  # an inherited socketpair end
    socket_path: Path | None = None  # or the path it dials
    token: str = ""  # one-time, for the path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def inherited_fds(self) -> list[int]:
        """What the child is to have open, besides what its spawner gives it."""
        return [fd for fd in (self.mark_fd, self.arena_fd, self.shared_fd, self.socket_fd) if fd is not None]


class ExecutorProcess(Protocol):
    """A running child: its exit, its output's tail, and its end."""

    @property
    def pid(self) -> int: ...
    @property
    def tail(self) -> Sequence[str]:
        """The last lines it printed."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        ...

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Call back on the loop once the child is dead and reaped."""
        ...

    async def wait_exited(self) -> None: ...
    async def wait_output_ended(self, timeout_s: float) -> None: ...
    def kill(self) -> None:
        """SIGKILL to the child and everything in its process group. Safe at any time before the reaping."""
        ...

    def is_stopped(self) -> bool:
        """Whether the kernel shows the process in state T. False where that cannot be seen."""
        ...

    def is_exiting(self) -> bool:
        """Whether the process is on its way out by itself. True where that cannot be seen: the likelier case."""
        ...

    def cpu_ticks(self) -> int:
        """User and system time used so far, in clock ticks; 0 where that cannot be seen."""
        ...


class Spawner(Protocol):
    """Turns an order into a running process."""

    @property
    def sends_code(self) -> bool:
        """Its children cannot read the run folder: bundles are sent to them."""
        ...

    def spawn(self, order: SpawnOrder, on_output: OutputCallback) -> ExecutorProcess: ...


class ProcessSpawner:
    """Spawn mode `process`: a plain child, of this interpreter or another."""

    sends_code = False

    def __init__(self, interpreter: Interpreter | None = None) -> None:
        """None: our own."""
        self._interpreter = interpreter

    def build_command(self, order: SpawnOrder, lifeline_fd: int) -> list[str]:
        arguments = self.build_arguments(order, lifeline_fd)
        # -P: the current folder is not the bundle
        if self._interpreter is None or self._interpreter.is_own:
            return [sys.executable, "-P", "-m", "callyard.executor", *arguments]
        return [self._interpreter.path, "-P", launch.__file__, launch.BIND, "", *arguments]

    def build_arguments(self, order: SpawnOrder, lifeline_fd: int) -> list[str]:
        link = (
            ("--socket-fd", str(order.socket_fd))
            if order.socket_fd is not None
            else (
                "--socket-path",
                str(order.socket_path),
            )
        )
        return [
            "--executor-id",
            order.executor_id,
            *link,
            "--executor-max-inflight",
            str(order.executor_max_inflight),
            "--executor-max-runnable",
            str(order.executor_max_runnable),
            "--protocol",
            str(PROTOCOL_VERSION),
            "--mark-fd",
            str(order.mark_fd),
            *(["--arena-fd", str(order.arena_fd)] if order.arena_fd is not None else []),
            *(["--shared-fd", str(order.shared_fd)] if order.shared_fd is not None else []),
            "--lifeline-fd",
            str(lifeline_fd),
            "--heartbeat-interval-ms",
            str(order.heartbeat_interval_ms),
            *(["--capture-locals"] if order.capture_locals else []),
            *(["--nice", str(order.nice)] if order.nice else []),
        ]

    def spawn(self, order: SpawnOrder, on_output: OutputCallback) -> ExecutorProcess:
        environment = {**os.environ, **order.environment}
        if order.token:
            environment["CALLYARD_LINK_TOKEN"] = order.token
        theirs, ours = os.pipe()
        inherited = [theirs, *order.inherited_fds]
        try:
            child = start_child(self.build_command(order, theirs), environment, inherited)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return ChildProcess(order.executor_id, child, ours, on_output)


def start_child(
    command: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int], folder: str | None = None
) -> subprocess.Popen[bytes]:
    """A child in a session of its own, with these descriptors and no others, in `folder` or where we are."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=inherited,
        start_new_session=True,
        env=environment,
        cwd=folder,
        bufsize=0,
    )


class ChildProcess:
    """A child of ours, on Linux watched by pidfd and /proc."""

    def __init__(
        self, executor_id: ExecutorId, child: subprocess.Popen[bytes], lifeline_fd: int, on_output: OutputCallback
    ) -> None:
        self.executor_id = executor_id
        self.pid = child.pid
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._child = child
        self._lifeline_fd = lifeline_fd
        """Our end of a pipe to which nothing is written: the child's group dies with it."""
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._on_exit: Callable[[], None] | None = None
        self._pidfd = -1
        self._on_output = on_output
        self._partial = b""
        self._partial_timer: asyncio.TimerHandle | None = None
        self._partial_shown = False
        """The line that goes on was shown in part: its end alone is no line."""
        assert child.stdout is not None
        self._output_fd = os.dup(child.stdout.fileno())
        child.stdout.close()
        os.set_blocking(self._output_fd, False)
        self._loop.add_reader(self._output_fd, self._read_output)
        self._watch_exit()

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def on_exit(self, callback: Callable[[], None]) -> None:
        if self._exited.is_set():
            self._loop.call_soon(callback)
        else:
            self._on_exit = callback

    async def wait_exited(self) -> None:
        await self._exited.wait()

    async def wait_output_ended(self, timeout_s: float) -> None:
        """The last lines a dying child wrote, or the timeout: a grandchild may hold the pipe open."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._output_ended.wait()
        except TimeoutError:
            self._end_output()

    def kill(self) -> None:
        if self._child.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._child.send_signal(signal.SIGKILL)  # between fork and setsid it leads no group yet
            except PermissionError:
                pass  # macOS answers so for a zombie leader: it is dead already

    def is_stopped(self) -> bool:
        return _read_stat(self._watched_pid())[0] in ("T", "t")

    def is_exiting(self) -> bool:
        state, _, flags = _read_stat(self._watched_pid())
        return state in ("Z", "X", "") or bool(flags & PF_EXITING)

    def cpu_ticks(self) -> int:
        return _read_stat(self._watched_pid())[1]

    def _watched_pid(self) -> int:
        """The process that runs the calls."""
        return self.pid

    def _watch_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            threading.Thread(target=self._wait_in_thread, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._see_exit)

    def _wait_in_thread(self) -> None:
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # the host program reaped it: gone all the same
        try:
            self._loop.call_soon_threadsafe(self._see_exit)
        except RuntimeError:
            return  # the loop is closed: nobody asks any more

    def _see_exit(self) -> None:
        if self._exited.is_set():
            return
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        try:
            os.killpg(self.pid, signal.SIGKILL)  # what it left behind; the zombie still holds the group's id
        except (ProcessLookupError, PermissionError):
            pass
        self._child.wait()
        self._end()

    def _end(self) -> None:
        """It is dead and reaped."""
        os.close(self._lifeline_fd)
        self._exited.set()
        if self._on_exit is not None:
            self._on_exit()

    def _read_output(self) -> None:
        try:
            data = os.read(self._output_fd, 65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end_output()
            return
        self._stop_partial_timer()
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines and self._partial_shown:
            self._partial_shown = False
            if lines[0] in (b"", b"\r"):
                del lines[0]
        for line in lines:
            self._emit(line)
        if len(self._partial) > TAIL_LINE_BYTES_MAX:
            self._show_partial()
        elif self._partial:
            self._partial_timer = self._loop.call_later(PARTIAL_LINE_S, self._show_partial)

    def _show_partial(self) -> None:
        if self._partial:
            self._emit(self._partial)
            self._partial, self._partial_shown = b"", True

    def _stop_partial_timer(self) -> None:
        if self._partial_timer is not None:
            self._partial_timer.cancel()
            self._partial_timer = None

    def _emit(self, line: bytes) -> None:
        text = line[:TAIL_LINE_BYTES_MAX].decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        try:
            self._on_output(self.executor_id, text)
        except Exception as error:  # noqa: BLE001  # the listener's own: told, and the next line is read all the same
            message = f"on_output failed for a line of {self.executor_id}"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def _end_output(self) -> None:
        if self._output_fd < 0:
            return
        self._loop.remove_reader(self._output_fd)
        os.close(self._output_fd)
        self._output_fd = -1
        self._stop_partial_timer()
        self._show_partial()
        self._output_ended.set()


def _read_stat(pid: int) -> tuple[str, int, int]:
    """State letter, CPU ticks and kernel flags of a process; empty and 0 where there is no /proc, or no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0, 0
    return fields[0].decode(), int(fields[11]) + int(fields[12]), int(fields[6])


def describe_exit(returncode: int | None) -> str:
    """How a process ended, in words that follow its name."""
    if returncode is None:
        return "still runs"
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def open_socketpair() -> tuple[socket.socket, socket.socket]:
    """The worker's end, not blocking, and the child's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return ours, theirs
