"""An output is one process's. Source: call-execution X88."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from callyard.worker.outputs import OutputError


class OutputLock:
    """Held from its making to `release`, or to the end of the process, however that comes. The output is made for it.

    Raises OutputError for an output that another run holds, or that cannot be made.
    """

    def __init__(self, path: Path, *, is_folder: bool) -> None:
        self._path = path
        self._is_folder = is_folder
        self._fd = -1
        self._made = False
        try:
            while self._fd < 0 or not os.fstat(self._fd).st_nlink:  # another run may just remove what it made
                self._close()
                self._made = not path.exists()
                if is_folder:
                    path.mkdir(exist_ok=True)
                    self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                else:
                    self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise OutputError(f"another run writes {path}: wait for its end, or write to another output") from None
        except OSError as error:
            self._close()
            raise OutputError(f"cannot write {path}: {error.strerror}") from error

    def release(self, *, unused: bool) -> None:
        """Idempotent. `unused`: if it was made for the lock, and is still empty, it goes."""
        if self._fd < 0:
            return
        if unused and self._made:
            with contextlib.suppress(OSError):
                if self._is_folder:
                    self._path.rmdir()
                elif not self._path.stat().st_size:
                    self._path.unlink()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
