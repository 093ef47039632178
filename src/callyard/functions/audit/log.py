"""The audit log: one JSON line per verdict, on disk before the bundle may run.

A line is written whole or not at all: what a full disk cut off is taken back, and what a lost machine left half
written is removed when the log is opened again. Several workers may share one file. Source: call-execution X41.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

from callyard.errors import UsageError
from callyard.ids import Digest
from callyard.locks import lock

_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_TAIL_BYTES: Final = 1024 * 1024
"""No line is longer: reasons are cut."""
_BEGINNING: Final = b'{"time":'


class AuditRecord(msgspec.Struct, frozen=True):
    """One verdict."""

    time: str
    """UTC, RFC 3339."""
    audit: str
    """The verdict's id, which every call that it let through carries."""
    digest: Digest
    target: str
    policy: str
    verdict: Literal["accepted", "refused"]
    reasons: tuple[str, ...] = ()


def now_text() -> str:
    return time_text(datetime.now(UTC))


def time_text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def opened_to_append(path: Path) -> Iterator[int]:
    """The file, locked against other writers, and made with mode 0600 when it is not there. Raises UsageError for one
    that cannot be written, whatever the body meets as OSError included."""
    try:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError("not a regular file")
            lock(fd)
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise UsageError(f"audit log {path} cannot be written: {error.strerror or error}") from error


def read_at(fd: int, count: int, offset: int) -> bytes:
    """So many bytes from there on, or what there is of them. The file's position is not kept."""
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, count)


def append_whole(fd: int, lines: bytes, *, fsync: bool = True) -> None:
    """Write the lines at the end, all of them or none, and have them on disk. Raises OSError when that fails."""
    end = os.fstat(fd).st_size
    try:
        written = os.write(fd, lines)
        if written < len(lines):
            raise OSError(f"{written} of {len(lines)} bytes written")
        if fsync:
            os.fsync(fd)
    except OSError:
        os.ftruncate(fd, end)
        raise


class AuditLog:
    """Appends to a file, which is made when it is not there, readable by its owner alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it. Raises UsageError for a file that cannot be written, or is no audit log."""
        self.path = Path(path)
        with opened_to_append(self.path) as fd:
            self._remove_cut_line(fd)

    def append(self, record: AuditRecord) -> None:
        """Write the line and have it on disk. Raises UsageError when that fails: nothing of it is left then."""
        with opened_to_append(self.path) as fd:
            self._remove_cut_line(fd)
            append_whole(fd, msgspec.json.encode(record) + b"\n")

    def _remove_cut_line(self, fd: int) -> None:
        """Cut after the last whole line. Raises UsageError for what is no line of ours."""
        size = os.fstat(fd).st_size
        tail = read_at(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        rest = tail[tail.rfind(b"\n") + 1 :]
        if rest and rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
            raise UsageError(f"{self.path} does not end with a line of an audit log: give another file")
        if rest:
            os.ftruncate(fd, size - len(rest))
