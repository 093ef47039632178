"""The file operations that an output and its journal are made of, in one place: each may be the last one of a process.

Source: call-execution X88.
"""

from __future__ import annotations

import os
from pathlib import Path


class Disk:
    """The real one. Every method raises OSError."""

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """How many bytes were taken: as of `os.write`, maybe not all."""
        return os.write(fd, data)

    def write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.write(fd, view) :]

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """What was written is on disk."""
        os.fsync(fd)

    def replace(self, old: Path, new: Path) -> None:
        """Give a file the name of another, which goes. The names are on disk."""
        os.replace(old, new)
        self.sync_path(new.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_path(self, path: Path) -> None:
        """A file by its name, or of a folder the names that were made or changed in it."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)


DISK = Disk()
