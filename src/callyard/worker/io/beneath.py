"""Opening a path below a folder so that nothing leads out of it.

Links are followed as long as they stay below the root. Where the kernel has openat2, it does so in one step
(RESOLVE_BENEATH); elsewhere the path is walked, one component at a time, each opened without following links and by the
descriptor of its folder, so that a folder swapped for a link while we walk leads nowhere. Both give the same answers.
A hard link cannot be told from a file, and a mount below the root belongs to it. Source: call-execution X42.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections import deque
from functools import cache
from typing import Any, Final

LINKS_MAX: Final = 40
COMPONENTS_MAX: Final = 256

_SYS_OPENAT2: Final = 437  # on every architecture
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_BENEATH: Final = 0x08
_TRIES: Final = 8
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


class Escape(OSError):
    """The path leads out of its root."""

    def __init__(self) -> None:
        super().__init__(errno.EXDEV, "leads out of its root")


def open_beneath(root: int, path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of `path` below the folder `root`; "" is the folder itself.

    Never blocks on a FIFO and never opens for writing. Raises `Escape`, other OSError, or ValueError for a NUL.
    """
    if "\0" in path:
        raise ValueError("a path must not hold a NUL")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts:
        raise Escape
    if len(parts) > COMPONENTS_MAX:
        raise OSError(errno.ENAMETOOLONG, f"more than {COMPONENTS_MAX} parts")
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if has_openat2():
        found = _open_by_kernel(root, "/".join(parts) or ".", flags)
        if found is not None:
            return found
    return walk_beneath(root, parts, flags)


@cache
def has_openat2() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    folder = os.open("/", _FOLDER)
    try:
        os.close(_openat2(folder, ".", _FOLDER))
    except OSError:  # an older kernel, or a filter that does not know the call
        return False
    finally:
        os.close(folder)
    return True


def _open_by_kernel(root: int, path: str, flags: int) -> int | None:
    """None: the tree moved all the time while the kernel looked; it asks to try again."""
    for _ in range(_TRIES):
        try:
            return _openat2(root, path, flags)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise Escape from error
            if error.errno != errno.EAGAIN:
                raise
    return None


def _openat2(folder: int, path: str, flags: int) -> int:
    how = _OpenHow(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    found: int = _syscall()(_SYS_OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return found


@cache
def _syscall() -> Any:
    """syscall(2) with the types that openat2 needs: each is a whole register."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    return syscall


def walk_beneath(root: int, parts: list[str], flags: int) -> int:
    """`open_beneath` without the kernel's help.

    `..` of a link goes back to the folder we came from, by its descriptor, and never above the root.
    """
    folders = [os.dup(root)]
    try:
        todo = deque(parts)
        links = 0
        while todo:
            part = todo.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                if len(folders) == 1:
                    raise Escape
                os.close(folders.pop())
                continue
            wanted = _FOLDER if todo else flags
            try:
                found = os.open(part, wanted | os.O_NOFOLLOW, dir_fd=folders[-1])
            except OSError as error:
                target = _read_link(part, folders[-1], error)
                links += 1
                if links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
                if target.startswith("/"):
                    raise Escape from error
                todo.extendleft(reversed(target.split("/")))
                continue
            if not todo:
                return found
            folders.append(found)
        return os.open(".", flags, dir_fd=folders[-1])
    finally:
        for folder in folders:
            os.close(folder)


def _read_link(part: str, folder: int, error: OSError) -> str:
    """Where the link leads that could not be opened; the error itself when it was no link."""
    if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
        raise error
    try:
        return os.readlink(part, dir_fd=folder)
    except OSError:
        raise error from None
