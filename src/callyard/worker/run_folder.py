"""The worker's private folder: bundles by digest, begun-mark pages, sockets.

It is locked while its worker lives. A worker that was killed leaves its folder; the next one to start on the machine
removes those whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final

from callyard.functions.bundle import remove_tree

PREFIX: Final = "callyard-run-"
_LOCK: Final = "lock"


class RunFolder:
    """Made at construction, mode 0700; `remove` takes it away."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path, self._lock_fd = _make_locked()
        for name in ("bundles", "marks", "links"):
            (self.path / name).mkdir(mode=0o700)

    def remove(self) -> None:
        remove_tree(self.path)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _make_locked() -> tuple[Path, int]:
    """A folder and its lock, held. Another worker that starts may lock the folder before us, and take it for abandoned:
    then there is another one."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # just being made or removed by somebody else
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its worker lives
        else:
            remove_tree(folder)
        finally:
            os.close(fd)
