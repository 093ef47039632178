"""Spawn mode `sandbox`: a child confined by a plan. Source: call-execution X46."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from callyard.worker.interpreter import Interpreter
from callyard.worker.sandbox.levels import OFF, Level, Sandbox
from callyard.worker.sandbox.machine import choose
from callyard.worker.sandbox.plan import Enclosure, Plan
from callyard.worker.spawner import (
    ChildProcess,
    ExecutorProcess,
    OutputCallback,
    ProcessSpawner,
    Spawner,
    SpawnOrder,
    start_child,
)

if TYPE_CHECKING:
    from callyard.worker.config import WorkerConfig

REMOVE_AGAIN_S: Final = 0.01
REMOVALS_MAX: Final = 500
STATUS_WAIT_S: Final = 0.5
_CHILD_PID: Final = re.compile(rb'"child-pid"\s*:\s*(\d+)')


async def open_spawner(config: WorkerConfig, interpreter: Interpreter | None = None) -> tuple[Spawner, Sandbox]:
    """The spawner for a worker's settings. It tries the level first, in a thread. Raises UsageError."""
    if config.sandbox_choice == "off":
        return ProcessSpawner(interpreter), OFF
    plan, sandbox = await asyncio.to_thread(choose, config, interpreter)
    return (ProcessSpawner(interpreter) if plan is None else SandboxSpawner(plan)), sandbox


class SandboxSpawner(ProcessSpawner):
    sends_code = True

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def spawn(self, order: SpawnOrder, on_output: OutputCallback) -> ExecutorProcess:
        assert not order.token, "the link is inherited"
        with ExitStack() as undo:
            lifeline, ours = os.pipe()
            undo.callback(os.close, ours)
            inherited = [lifeline, *order.inherited_fds]
            info, info_theirs = os.pipe()
            undo.callback(os.close, info)
            try:
                enclosure = Enclosure(self._plan, order.environment, info_theirs)
                undo.callback(enclosure.release)
                undo.callback(enclosure.started)
                child = start_child(
                    enclosure.command(self.build_arguments(order, lifeline)),
                    enclosure.environment,
                    [*inherited, *enclosure.inherited, *([info_theirs] if enclosure.prefix else [])],
                    None if enclosure.prefix else enclosure.tmp,
                )
            finally:
                os.close(lifeline)
                os.close(info_theirs)
            enclosure.started()
            undo.pop_all()
        kind = BwrapProcess if self._plan.level is Level.BWRAP else ConfinedProcess
        return kind(order, child, ours, on_output, enclosure, info)


class ConfinedProcess(ChildProcess):
    """A confined child: what it was started in is given back after its end."""

    def __init__(
        self,
        order: SpawnOrder,
        child: subprocess.Popen[bytes],
        lifeline_fd: int,
        on_output: OutputCallback,
        enclosure: Enclosure,
        info_fd: int,
    ) -> None:
        self._enclosure = enclosure
        self._info_fd = info_fd
        """Where bubblewrap tells its child's number."""
        self._removals = 0
        super().__init__(order.executor_id, child, lifeline_fd, on_output)

    def _end(self) -> None:
        cgroup = self._enclosure.cgroup
        if cgroup is not None and cgroup.ran_out_of_memory():
            self._emit(b"ended by the kernel: over the memory limit of its sandbox (sandbox_memory_bytes)")
        os.close(self._info_fd)
        self._end_when_empty(super()._end)

    def _end_when_empty(self, end: Callable[[], None]) -> None:
        """Once its control group is empty, so that programs it started are dead as well."""
        cgroup = self._enclosure.cgroup
        self._removals += 1
        if cgroup is not None and not cgroup.remove() and self._removals < REMOVALS_MAX:
            self._loop.call_later(REMOVE_AGAIN_S, self._end_when_empty, end)
            return
        self._enclosure.release()
        end()


class BwrapProcess(ConfinedProcess):
    """Our child is bubblewrap's monitor; its child is the first process of the namespace, and that one's is Python.

    When the first process of the namespace is dead, all in it are: only then this one counts as ended.
    """

    _init_pid = 0
    _init_pidfd = -1
    _python_pid = 0

    @property
    def returncode(self) -> int | None:
        status = self._child.returncode
        # Bubblewrap tells a signal as a shell does.
        return 128 - status if status is not None and 128 < status <= 128 + 64 else status

    def _watched_pid(self) -> int:
        if not self._python_pid:
            init = self._find_init()
            self._python_pid = next(iter(_children(init)), 0) if init else 0
        return self._python_pid or self.pid

    def is_exiting(self) -> bool:
        return self._python_is_gone() or super().is_exiting()

    def kill(self) -> None:
        if self.is_exiting():
            # The monitor is about to end by itself, with Python's status; killed now, it could not tell it.
            self._loop.call_later(STATUS_WAIT_S, super().kill)
        else:
            super().kill()

    def _python_is_gone(self) -> bool:
        init = self._find_init()
        if not init:
            return False
        children = _children(init)
        return self._python_pid not in children if self._python_pid else not children

    def _find_init(self) -> int:
        """The namespace's first process, as bubblewrap tells it; 0: not yet, or there never was one."""
        if self._init_pid == 0:
            os.set_blocking(self._info_fd, False)
            try:
                found = _CHILD_PID.search(os.read(self._info_fd, 4_096))
            except BlockingIOError:
                return 0
            pid = int(found[1]) if found else 0
            if pid:
                self._hold(pid)
        return self._init_pid

    def _hold(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # it has ended
        if _is_init(pid):
            self._init_pid, self._init_pidfd = pid, pidfd
        else:  # its number has been given to somebody else
            os.close(pidfd)

    def _end(self) -> None:
        self._find_init()
        if self._init_pidfd < 0:
            super()._end()
            return
        try:
            signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._loop.add_reader(self._init_pidfd, self._see_init_end, super()._end)

    def _see_init_end(self, end: Callable[[], None]) -> None:
        self._loop.remove_reader(self._init_pidfd)
        os.close(self._init_pidfd)
        self._init_pidfd = -1
        end()


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _is_init(pid: int) -> bool:
    """Whether a process is the first one of a namespace inside ours."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            numbers = next((line.split()[1:] for line in file if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return len(numbers) > 1 and numbers[-1] == "1"
