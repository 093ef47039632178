"""Running a program as somebody else, in a mount namespace of its own where its interpreter can be reached."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import callyard

_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_CLONE_NEWNS = 0x00020000
_LIBC = ctypes.CDLL(None, use_errno=True)


def needed_paths() -> list[str]:
    return [os.path.realpath(sys.base_prefix), sys.prefix, str(Path(callyard.__file__).parent), os.getcwd()]


def closed_folder(path: str) -> str:
    """The first folder on the way to `path` that other users may not enter; empty: none."""
    places = (*reversed(Path(path).parents), Path(path))
    return next((str(place) for place in places if not os.stat(place).st_mode & 0o001), "")


def is_closed() -> bool:
    """Whether another user cannot reach the interpreter here."""
    return any(closed_folder(path) for path in needed_paths())


def can_become_others() -> bool:
    """Root, with the right to mount."""
    if os.geteuid() != 0:
        return False
    pid = os.fork()
    if pid == 0:
        try:
            _check(_LIBC.unshare(_CLONE_NEWNS))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def become(uid: int | None) -> Callable[[], None]:
    """For `preexec_fn`: open the way to the interpreter, for this process alone, then become `uid` (None: stay)."""
    ways = [(closed_folder(path), path) for path in needed_paths()]

    def act() -> None:
        _check(_LIBC.unshare(_CLONE_NEWNS))
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        held = [(closed, path, os.open(path, os.O_PATH)) for closed, path in ways if closed]
        for closed in dict.fromkeys(closed for closed, _, _ in held):
            _mount("tmpfs", closed, "tmpfs", 0, "mode=755")
        for _, path, fd in held:
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)
            os.close(fd)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)

    return act


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    _check(_LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
