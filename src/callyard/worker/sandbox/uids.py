"""One user id per executor, so that limits and files of one are never another's.

An id is claimed by an abstract socket of its name: whoever binds it has it, on the whole machine, and the kernel gives
it back when the worker ends in whatever way. Nothing on disk. Ids of 60000 and up belong to no account.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

FIRST_UID: Final = 60_000
UIDS: Final = 5_000


class UidClaim:
    """A user id that no other executor has. `release` gives it back."""

    def __init__(self) -> None:
        """Raises OSError when all are taken."""
        start = os.getpid() * 97
        for offset in range(UIDS):
            self.uid = FIRST_UID + (start + offset) % UIDS
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.bind(f"\0callyard-uid-{self.uid}")
            except OSError as error:
                self._socket.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return
        raise OSError(errno.EAGAIN, f"all {UIDS} user ids from {FIRST_UID} on are in use")

    def release(self) -> None:
        self._socket.close()
