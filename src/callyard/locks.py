"""A lock on an open file, against other processes and other handles of this one. Closing the file gives it back."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_POLL_S: Final = 0.02
_BYTE: Final = 1 << 30
"""Windows locks bytes, and keeps readers from them: this one lies beyond what anybody reads or writes."""


def try_lock(fd: int) -> bool:
    """False: somebody else has it."""
    try:
        if sys.platform == "win32":
            os.lseek(fd, _BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock(fd: int) -> None:
    """Wait for it."""
    if sys.platform == "win32":
        while not try_lock(fd):
            time.sleep(_POLL_S)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX)
