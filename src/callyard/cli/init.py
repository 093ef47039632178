"""What process 1 of a container has to do: hand on signals, and bury the dead.

Process 1 becomes the parent of every process whose parent has ended, and nobody else waits for those: left alone they
stay as zombies until there are no process numbers left. The server cannot do it itself, because it must not take the
exit of an executor from whoever waits for that. So as process 1 the command divides in two before it starts anything:

    1  init: waits for signals, and for children   --signals-->   the server, which is an ordinary process

A container that is started with an init of its own (`docker run --init`) has a process 1, and this does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

_NOT_HANDED_ON: Final[set[int]] = {
    signal.SIGCHLD,
    *(signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
    *(signal.SIGTTIN, signal.SIGTTOU),
}
"""Its own: they tell of this process, not of somebody's wish."""


def divide_as_init() -> None:
    """As process 1: returns in a child that goes on, while this process stays as its init and ends with its status. As
    any other process it returns at once. Must be called before there are threads."""
    if os.getpid() == 1:
        divide(os._exit)


def divide(leave: Callable[[int], object]) -> None:
    """Returns in the child. The parent calls `leave` with the child's exit status, 128 and its number for a signal."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_all_but_its_own(), signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    while True:
        told = signal.sigwaitinfo({*_all_but_its_own(), signal.SIGCHLD})
        if told.si_signo == signal.SIGCHLD:
            status = _bury(child)
            if status is not None:
                leave(status)
                return
        elif told.si_code <= 0:  # sent by a process; a terminal's goes to the child as well
            os.kill(child, told.si_signo)


def _bury(child: int) -> int | None:
    """Wait for all who have ended. The child's exit status; None: it lives."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _all_but_its_own() -> set[int]:
    return {*map(int, signal.Signals)} - {signal.SIGKILL, signal.SIGSTOP} - _NOT_HANDED_ON
