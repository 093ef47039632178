"""The worker's end of an arena: large values into it, and out of it.

A memfd where the system has one, sealed so that nobody can make it shorter or longer; else (macOS) a file without a
name in the run folder. It is sparse: what is released becomes a hole again. Read and written by offset, never mapped:
an executor may write whatever and whenever it likes, so a value is copied out before anything looks at it, and a file
that somebody cut is a short read, not a signal. Source: call-execution X95.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from callyard.errors import ProtocolError
from callyard.ids import ExecutorId
from callyard.wire.arena import Room, check_within, halves
from callyard.wire.messages import Stored

_WRITE_BYTES_MAX: Final = 1 << 30
"""Of one system call: the kernel takes no more than 2 GiB less a page."""


class Arena:
    def __init__(self, size: int, folder: Path, executor_id: ExecutorId) -> None:
        """`size` bytes, half of them in each direction. `folder`: for a system without memfd. Raises `OSError`."""
        out, self._incoming = halves(size)
        self.room: Final = Room(*out)
        """What lies in our half."""
        self._executor_id = executor_id
        self.fd = _open(sum(self._incoming), folder)
        """For the child to inherit; -1: closed."""

    def store(self, value: bytes) -> Stored | None:
        """Put a value in; None: there is no room now. Raises `ArenaTooSmall`, or `OSError` when there is no memory."""
        stored = self.room.allocate(len(value))
        if stored is None:
            return None
        try:
            write_at(self.fd, value, stored.offset)
        except BaseException:
            self.release(stored.grant)
            raise
        return stored

    def check(self, stored: Stored, together: int = 0) -> None:
        """Raises `ProtocolError` for a place that is not the executor's to fill. `together`: the bytes of all that it
        has put in and we have not given back. More than its half would be one place named often: a copy each time."""
        check_within(stored, self._incoming, self._executor_id)
        if together > self._incoming[1]:
            raise ProtocolError(
                f"values of {together} bytes together: expected at most {self._incoming[1]} ({self._executor_id})"
            )

    def take(self, stored: Stored) -> bytes:
        """A copy of what the executor put in. Raises `ProtocolError` for a place that is not its own to fill."""
        self.check(stored)
        parts: list[bytes] = []
        done = 0
        while done < stored.length:
            part = os.pread(self.fd, min(_WRITE_BYTES_MAX, stored.length - done), stored.offset + done)
            if not part:
                raise ProtocolError(f"the arena of {self._executor_id} ends before byte {stored.offset + done}")
            parts.append(part)
            done += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self, grant: int) -> None:
        """Our value is needed no more. Idempotent."""
        place = self.room.release(grant)
        if place is not None:
            punch(self.fd, *place)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open(size: int, folder: Path) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("callyard-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        fd, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
    try:
        os.ftruncate(fd, size)
        if hasattr(fcntl, "F_ADD_SEALS"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_at(fd: int, value: bytes, offset: int) -> None:
    """All of it. Raises `OSError` when there is no memory."""
    view, done = memoryview(value), 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _WRITE_BYTES_MAX], offset + done)


def punch(fd: int, offset: int, size: int) -> None:
    """Give the memory of a place back to the system, where that can be done."""
    if not hasattr(mmap, "MADV_REMOVE"):
        return
    with suppress(OSError), mmap.mmap(fd, size, offset=offset) as place:  # the next value there takes its memory over
        place.madvise(mmap.MADV_REMOVE)
