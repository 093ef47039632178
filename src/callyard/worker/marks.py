"""The begun-mark page of one executor, as the worker reads it.

The executor writes a call's number into its context's u64 before the call's first user instruction; the page is a
mapped file of the run folder and can be read after the process died. A number belongs to one attempt, so an old mark
is never taken for a new attempt. The last u64 is for the call whose code runs at the moment.

There are twice as many u64 as contexts, used in turn: a mark is overwritten only after as many calls came to the
executor as it holds at once, so after the worker heard of the end of the call that left it. Who finds the page of a
worker that was killed needs that. Source: call-execution X38, X62, X88.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final, cast

from callyard.ids import CallNumber

MARK_BYTES: Final = 8


class MarkPage:
    """Two u64 for each context, and one more. `fd` is for the child to inherit; `close` gives everything back."""

    def __init__(self, path: Path, contexts: int) -> None:
        self.path = path
        size = -(-(2 * contexts + 1) * MARK_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size)  # a full disk is an error here, not a SIGBUS at the first mark
            else:
                os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            path.unlink()
            raise
        self._view = memoryview(self._map).cast("Q")

    def begun(self) -> set[CallNumber]:
        """Numbers of all attempts that have begun in a context since it was last used."""
        marks = cast(set[CallNumber], set(self._view.tolist()))
        marks.discard(CallNumber(0))
        return marks

    def running(self) -> CallNumber | None:
        """The attempt whose code ran when the executor last wrote; None: none did."""
        number = self._view[-1]
        return CallNumber(number) if number else None

    def close(self) -> None:
        if self.fd < 0:
            return
        self._view.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1
        self.path.unlink(missing_ok=True)
