"""The audit log: one JSON line per verdict, on disk before the bundle may run.

A line is written whole or not at all: what a full disk cut off is taken back, and what a lost machine left half
written is removed when the log is opened again. Several workers may share one file. Source: call-execution X41.
"""

from __future__ import annotations

import fcntl
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
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class AuditLog:
    """Appends to a file, which is made when it is not there, readable by its owner alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it. Raises UsageError for a file that cannot be written, or is no audit log."""
        self.path = Path(path)
        with self._opened() as fd:
            self._remove_cut_line(fd)

    def append(self, record: AuditRecord) -> None:
        """Write the line and have it on disk. Raises UsageError when that fails: nothing of it is left then."""
        line = msgspec.json.encode(record) + b"\n"
        with self._opened() as fd:
            end = self._remove_cut_line(fd)
            try:
                written = os.write(fd, line)
                if written < len(line):
                    raise OSError(f"{written} of {len(line)} bytes written")
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, end)
                raise

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError("not a regular file")
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            raise UsageError(f"audit log {self.path} cannot be written: {error.strerror or error}") from error

    def _remove_cut_line(self, fd: int) -> int:
        """Cut after the last whole line; returns its end. Raises UsageError for what is no line of ours."""
        size = os.fstat(fd).st_size
        tail = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        rest = tail[tail.rfind(b"\n") + 1 :]
        if rest and rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
            raise UsageError(f"{self.path} does not end with a line of an audit log: give another file")
        if rest:
            os.ftruncate(fd, size - len(rest))
        return size - len(rest)
