"""The executor's end of an arena: large values into it, and out of it.

A place is mapped while it is written or read, and no longer. Writing by mapping also keeps clear of the sandbox's limit
on the size of files. Source: call-execution X95.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from callyard.errors import UsageError
from callyard.wire.arena import GRAIN_BYTES, Room, check_within, halves
from callyard.wire.messages import Stored


class Arena:
    def __init__(self, fd: int) -> None:
        """Raises `UsageError` when the file behind `fd` is no arena."""
        try:
            size = os.fstat(fd).st_size
            os.set_inheritable(fd, False)
        except OSError as error:
            raise UsageError(f"--arena-fd {fd}: {error}") from error
        if size < 2 * GRAIN_BYTES or size % GRAIN_BYTES:
            raise UsageError(f"--arena-fd {fd}: expected a file of two halves of whole {GRAIN_BYTES} bytes, got {size}")
        self.fd: Final = fd
        self._incoming, out = halves(size)
        self.room: Final = Room(*out)

    def store(self, value: bytes) -> Stored | None:
        """Put a value in; None: there is no room now. Raises `ArenaTooSmall`, or `OSError` when there is no memory."""
        stored = self.room.allocate(len(value))
        if stored is None:
            return None
        try:
            with mmap.mmap(self.fd, stored.length, offset=stored.offset) as place:
                place[:] = value
        except BaseException:
            self.release(stored.grant)
            raise
        return stored

    @contextmanager
    def open(self, stored: Stored) -> Iterator[memoryview]:
        """What the worker put in, while it is read. Raises `ProtocolError` for a place that is none."""
        check_within(stored, self._incoming, "worker")
        with (
            mmap.mmap(self.fd, stored.length, prot=mmap.PROT_READ, offset=stored.offset) as place,
            memoryview(place) as view,
        ):
            yield view

    def release(self, grant: int) -> None:
        """Our value was read. Idempotent."""
        place = self.room.release(grant)
        if place is not None and hasattr(mmap, "MADV_REMOVE"):
            offset, size = place
            with (
                suppress(OSError),
                mmap.mmap(self.fd, size, offset=offset) as mapped,
            ):  # no address space: it stays used
                mapped.madvise(mmap.MADV_REMOVE)

    def close_in_child(self, close: Callable[[int], None]) -> None:
        close(self.fd)
