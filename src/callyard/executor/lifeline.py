"""No executor outlives its worker, and no child of user code outlives its executor (X44, X63).

Two ties, since each covers what the other cannot. The pipe: its other end is the worker's alone, and when the worker
ends in whatever way, Linux sends SIGKILL to this whole process group, programs that user code started included, and
does not need the GIL for it. The parent-death signal: it holds also when a fork of the worker's host program keeps the
pipe open. It comes when the worker's *thread* ends, and the pipe closes with the worker's last thread: were it SIGKILL
too, it could end this process before the pipe ends the group, and the programs would stay. So beside a pipe it is a
signal whose handler ends the group.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import select
import signal
import sys
from collections.abc import Iterable
from typing import Final, NoReturn, TextIO

_PR_SET_PDEATHSIG: Final = 1
PARENT_ENDED: Final = getattr(signal, "SIGRTMAX", signal.SIGTERM)


class Lifeline:
    """The parent-death signal: Linux tells this process when its parent ends, by SIGKILL or by one that is handled."""

    def __init__(self) -> None:
        self._prctl: object = None

    def end_group_with(self, parent_pid: int) -> None:
        """End our whole process group when `parent_pid`, our parent, ends. For the main thread."""
        signal.signal(PARENT_ENDED, lambda *_: end_group(0))
        self.tie_to(parent_pid, PARENT_ENDED)

    def tie_to(self, parent_pid: int, number: int = signal.SIGKILL) -> None:
        """Be sent the signal when process `parent_pid`, our parent, ends. Nothing where the system has no such thing.

        The signal follows the *thread* that spawned us: a worker spawns from one that lives as long as itself.
        """
        if not sys.platform.startswith("linux"):
            return
        if self._prctl is None:
            import ctypes

            self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        assert callable(self._prctl)
        self._prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent_pid:  # it ended before the signal was set
            end_group(0)


def tie_group_to(pipe_fd: int) -> bool:
    """Have the kernel kill this process group once nobody holds the pipe's other end, to which nothing is written.

    Returns False where the system cannot (F_SETSIG is Linux's), or where the group is not ours alone.
    """
    if not hasattr(fcntl, "F_SETSIG") or os.getpgrp() != os.getpid():
        return False
    fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(pipe_fd, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe_fd, 0)
    if poll.poll(0):  # it was closed before the signal was set
        end_group(0)
    return True


def peer_is_parent(sock: _socket.socket) -> bool:
    """Whether the process at the other end of a connected path is the one that started us."""
    option = getattr(_socket, "SO_PEERCRED", None)
    if option is None:
        return False
    return int.from_bytes(sock.getsockopt(_socket.SOL_SOCKET, option, 12)[:4], sys.byteorder) == os.getppid()


def end_group(status: int) -> NoReturn:
    """End this process at once, and whatever user code started beside it.

    A worker starts each executor as the leader of a session, so the group is ours alone to kill; it includes us.
    Started by hand inside someone else's group, only this process ends, with `status`.
    """
    flush_streams()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(status)


def flush_streams() -> None:
    flush_each((sys.stdout, sys.stderr))


def flush_each(streams: Iterable[TextIO]) -> None:
    for stream in streams:
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or not there: nothing left to write to
            continue
        except RuntimeError:  # a call that was put out of use stands in the middle of a write to it
            continue
