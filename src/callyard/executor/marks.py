"""The begun-mark page: which calls this process had begun, readable after it died (X62).

A file that the worker made, mapped shared: one native u64 per slot, holding the number of the call that began there
last. A call takes a slot when it is received; the slot comes back only after the flush that sent the call's terminal
frame, so a mark is never overwritten while its result is still here. At most half of the slots are out at once, and
they are used in turn: between the end of a call and the next mark in its slot at least as many calls come here as the
worker seats at once, so by then it has heard of that end (X88).

The last u64 is no slot: it holds the number of the call whose code runs now. Where not even a heartbeat can leave,
since C code holds the GIL, the worker finds there whose code it is (X38).
"""

from __future__ import annotations

import os
from collections import deque

from callyard.errors import UsageError
from callyard.ids import CallNumber

MARK_BYTES = 8
NO_SLOT = -1
"""Where there is no page."""
NO_CALL = CallNumber(0)


class Marks:
    """No page: every call has `NO_SLOT` and nothing is written."""

    slot_count = 1 << 31
    """Most calls that can be here at once."""

    def take(self) -> int | None:
        """A free slot; None: there is none."""
        return NO_SLOT

    def give_back(self, slots: list[int]) -> None:
        """Slots whose terminal frames have left. Safe from any thread."""

    def mark(self, slot: int, number: CallNumber) -> None:
        """This call begins now."""

    def set_running(self, number: CallNumber) -> None:
        """This call's code runs from now on; `NO_CALL`: none does."""

    def close(self) -> None:
        """In a forked child: the page is its parent's."""


class MarkPage(Marks):
    def __init__(self, fd: int) -> None:
        """Map the file behind `fd` and close `fd`. Raises `UsageError` when that file is no page."""
        import mmap

        try:
            size = os.fstat(fd).st_size
            if size < 3 * MARK_BYTES or size % MARK_BYTES:
                raise UsageError(f"--mark-fd {fd}: expected a file of 24 bytes or more, a multiple of 8, got {size}")
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED)
            _point_elsewhere(fd)
            os.close(fd)
        except OSError as error:
            raise UsageError(f"--mark-fd {fd}: {error}") from error
        self._page = memoryview(self._map).cast("Q")
        self._places = size // MARK_BYTES - 1
        self.slot_count = self._places // 2
        self._free = deque(range(self._places))
        self._kept_back = self._places - self.slot_count

    def take(self) -> int | None:
        return self._free.popleft() if len(self._free) > self._kept_back else None

    def give_back(self, slots: list[int]) -> None:
        self._free.extend(slots)

    def mark(self, slot: int, number: CallNumber) -> None:
        self._page[slot] = number

    def set_running(self, number: CallNumber) -> None:
        self._page[self._places] = number

    def close(self) -> None:
        self._page.release()
        self._map.close()
        self._page = memoryview(bytearray((self._places + 1) * MARK_BYTES)).cast("Q")  # what is written goes nowhere


def _point_elsewhere(fd: int) -> None:
    """Python keeps a copy of the descriptor beside the mapping. User code that found it could shorten the file, and the
    worker's next look at its page would be its death: the copy becomes one of /dev/null."""
    null = os.open(os.devnull, os.O_RDONLY)
    page = os.fstat(fd)
    for name in os.listdir("/dev/fd"):
        copy = int(name)
        try:
            if copy != fd and os.path.samestat(os.fstat(copy), page):
                os.dup2(null, copy, inheritable=False)
        except OSError:  # what the listing itself had open
            continue
    os.close(null)
