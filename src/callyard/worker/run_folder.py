"""The worker's private folder: bundles by digest, begun-mark pages, sockets.

It is locked while its worker lives. A worker that was killed leaves its folder; the next one to start on the machine
removes those whose lock nobody holds, but for one that a journal needs: by it a run knows which of its calls had begun
(call-execution X88).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Final

from callyard.functions.bundle import remove_tree

PREFIX: Final = "callyard-run-"
_LOCK: Final = "lock"
_JOURNALS: Final = "journals"
_HEADER_BYTES_MAX: Final = 16 * 1024 * 1024


class RunFolder:
    """Made at construction, mode 0700; `remove` takes it away."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path, self._lock_fd = _make_locked()
        for name in ("bundles", "marks", "links"):
            (self.path / name).mkdir(mode=0o700)

    def keep_for(self, journal: Path) -> Path:
        """Where a run notes which rows had begun. The folder outlives a kill while that journal names it."""
        rows = self.path / "rows"
        rows.mkdir(mode=0o700, exist_ok=True)
        with (self.path / _JOURNALS).open("a") as file:
            file.write(f"{json.dumps(str(journal.absolute()))}\n")
        return rows

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
            if not _is_needed(folder):
                remove_tree(folder)
        finally:
            os.close(fd)


def find_run_folder(name: str) -> Path | None:
    """The folder of a worker that is gone, by its name; None: it was removed."""
    path = Path(tempfile.gettempdir()) / name
    return path if name.startswith(PREFIX) and Path(name).name == name and path.is_dir() else None


def _is_needed(folder: Path) -> bool:
    """Whether there is a journal that names it."""
    try:
        journals = [json.loads(line) for line in (folder / _JOURNALS).read_text().splitlines()]
        for journal in journals:
            with contextlib.suppress(OSError), open(journal, "rb") as file:
                if folder.name.encode() in file.read(_HEADER_BYTES_MAX):
                    return True
    except (OSError, ValueError, TypeError):
        pass
    return False
