"""The executor's view of what its worker shares: a value is mapped for reading when a call first gets it.

A mapping holds a file descriptor, so values that lie in one window of the file share one: any number of small values
takes few of both.

A value is kept, with what was made of it, until the worker has freed it: then its place begins with a zero, as no
encoded value does, or has another value. Source: call-execution X95.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from callyard.errors import ProtocolError, UsageError
from callyard.wire.arena import GRAIN_BYTES, SHARED_WINDOW_BYTES

if TYPE_CHECKING:
    from callyard.functions.packing import Kept


class SharedValues:
    def __init__(self, fd: int) -> None:
        """Raises `UsageError` when there is no file behind `fd`."""
        try:
            os.fstat(fd)
            os.set_inheritable(fd, False)
        except OSError as error:
            raise UsageError(f"--shared-fd {fd}: {error}") from error
        self.fd: Final = fd
        self._kept: dict[tuple[int, int, int], Kept] = {}
        """By number, offset and length: no two values have all three."""
        self._windows: weakref.WeakValueDictionary[tuple[int, int], mmap.mmap] = weakref.WeakValueDictionary()
        """Mappings that somebody still looks into, by offset and length."""

    def open(self, place: tuple[int, int, int]) -> Kept:
        """Raises `NotReadable`."""
        kept = self._kept.get(place)
        if kept is None:
            self._drop_freed(place)
            kept = self._kept[place] = self._read(place)
        return kept

    def _read(self, place: tuple[int, int, int]) -> Kept:
        from callyard.functions.packing import Kept, NotReadable

        _, offset, length = place
        size = os.fstat(self.fd).st_size
        if offset % GRAIN_BYTES or length == 0 or offset + length > size:
            raise NotReadable(f"no shared value is at {offset} with {length} bytes")
        start = offset // SHARED_WINDOW_BYTES * SHARED_WINDOW_BYTES
        end = min(start + SHARED_WINDOW_BYTES, size)
        if offset + length > end:  # it has a mapping of its own
            start, end = offset, offset + length
        try:
            mapped = self._window(start, end - start)
        except OSError as error:
            raise NotReadable(f"no room to map a shared value of {length:,} bytes: {error}") from error
        try:
            return Kept(memoryview(mapped)[offset - start :][:length])
        except ProtocolError as error:
            raise NotReadable(f"no shared value: {error}") from error

    def _window(self, start: int, length: int) -> mmap.mmap:
        """Raises `OSError`."""
        mapped = self._windows.get((start, length))
        if mapped is None:
            mapped = mmap.mmap(self.fd, length, prot=mmap.PROT_READ, offset=start)
            self._windows[start, length] = mapped
        return mapped

    def _drop_freed(self, new: tuple[int, int, int]) -> None:
        """`new`: another value's place now. What user code still holds of them is its own affair."""
        _, start, length = new
        for place in list(self._kept):
            _, offset, size = place
            if (offset < start + length and start < offset + size) or os.pread(self.fd, 1, offset) == b"\0":
                del self._kept[place]

    def close_in_child(self, close: Callable[[int], None]) -> None:
        close(self.fd)
