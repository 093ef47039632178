"""Shared values of one worker: one file that it alone writes, and every executor of it reads.

A memfd where the system has one; executors inherit a descriptor of it that was opened for reading only. A value goes
when its handle was closed or collected and no task that was given it is left.

Plain executors are of the worker's own user, and so no border. Values are appended, and the place of one that is gone
becomes a hole: whoever still looks at it sees zeros, never another value. A confined executor may be of that user too,
who can make a writing descriptor of a reading one by /proc. So where there is one the file is *sealed*: nothing but
the mapping that the worker made before can write to it. The kernel makes no holes in such a file either: its memory is
used again for other values, and goes with the worker.

All but `let_go` is the loop's. Source: call-execution X95.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import mmap
import os
import tempfile
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from callyard.errors import CallFailure, ErrorKind, UsageError, fail
from callyard.functions.encoding import ResultMisfit
from callyard.functions.packing import encode_crossing, read_parts
from callyard.functions.shared import Shared, SharedPlace
from callyard.wire.arena import GRAIN_BYTES, SHARED_WINDOW_BYTES, Room, round_up
from callyard.worker.arena import punch, write_at

T = TypeVar("T")
_NUMBERS: Final = itertools.count(1)
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Of Linux 5.1 and later; `fcntl` has no name for it."""


class SharedMemory:
    def __init__(self, bytes_max: int, folder: Path, *, sealed: bool = False) -> None:
        """`bytes_max`: of all values together. `folder`: for a system without memfd. `sealed`: readers may be hostile.
        Raises `OSError`."""
        self._bytes_max = max(GRAIN_BYTES, bytes_max // GRAIN_BYTES * GRAIN_BYTES)
        self._fd, self.reading_fd = _open(folder)
        """The second is for executors to inherit."""
        self._sealed: tuple[mmap.mmap, Room] | None = None
        """Where it is sealed: what writes to it, and what lies where."""
        self._grants: dict[int, int] = {}
        """Of the places in the room, by number."""
        try:
            if sealed:
                os.ftruncate(self._fd, self._bytes_max)
                self._sealed = mmap.mmap(self._fd, self._bytes_max), Room(0, self._bytes_max)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self._fd)
            os.close(self.reading_fd)
            raise
        self._loop = asyncio.get_running_loop()
        self._end = 0
        """Of what was appended; of no use where the file is sealed."""
        self._places: dict[int, SharedPlace] = {}
        """Of the values that are there, by number."""
        self._users: dict[int, set[Hashable]] = {}
        """Tasks that were given a value, by number, and not ended."""
        self._used: dict[Hashable, set[int]] = {}
        """The same by task."""
        self.used_bytes = 0
        """That values take up."""

    def add(self, value: T) -> Shared[T]:
        """Raises `UsageError` for a value that cannot cross, and when there is no room."""
        try:
            encoded = encode_crossing(value, canonical=True, aligned=True)
        except ResultMisfit as error:
            raise UsageError(f"the value cannot cross: {error.message}") from error
        if any(part.kind == "shared" for part in read_parts(encoded)):
            raise UsageError("a Shared cannot be shared in another value: pass both to the call")
        size = round_up(len(encoded))
        number = next(_NUMBERS)
        offset = self._place(number, size)
        if offset is None:
            raise UsageError(
                f"a value of {len(encoded):,} bytes, and shared values take up {self.used_bytes:,} of"
                f" {self._bytes_max:,}: close one that is not needed, or raise shared_bytes_max"
            )
        try:
            self._write(encoded, offset)
        except OSError as error:
            self._free(number, offset, size)
            raise UsageError(f"no memory to share a value of {len(encoded):,} bytes: {error}") from error
        place = SharedPlace(number, offset, len(encoded))
        self.used_bytes += size
        self._places[number] = place
        self._users[number] = set()
        return Shared(place, self.let_go)

    def _place(self, number: int, size: int) -> int | None:
        """None: there is no room."""
        if self.used_bytes + size > self._bytes_max:
            return None
        if self._sealed is None:
            offset, self._end = self._end, self._end + size
            return offset
        stored = self._sealed[1].allocate(size)
        if stored is None:
            return None
        self._grants[number] = stored.grant
        return stored.offset

    def _write(self, encoded: bytes, offset: int) -> None:
        if self._sealed is not None:
            self._sealed[0][offset : offset + len(encoded)] = encoded
            return
        os.ftruncate(self._fd, round_up(offset + len(encoded), SHARED_WINDOW_BYTES))
        write_at(self._fd, encoded, offset)

    def _free(self, number: int, offset: int, size: int) -> None:
        if self._sealed is None:
            punch(self._fd, offset, size)
        else:
            mapped, room = self._sealed
            mapped[offset] = 0
            room.release(self._grants.pop(number))

    def let_go(self, place: SharedPlace) -> None:
        """Nobody holds the handle any more. On any thread, in a collection too."""
        place.closed = True
        with suppress(RuntimeError):  # the loop is closed, and the memory with it
            self._loop.call_soon_threadsafe(self._look_at, place.number)

    def use(self, task: Hashable, args: bytes) -> CallFailure | None:
        """Keep the shared values in these packed arguments until `task` has ended. A failure: they are not ours, or
        gone."""
        for part in read_parts(args):
            if part.place is None:
                continue
            number = part.place[0]
            if number not in self._places:
                place = "".join(f"/{token}" for token in part.at)
                text = f"{place}: this Shared is of another worker, or was closed before its call began"
                return fail(ErrorKind.SCHEMA, text, pointer=place)
            self._users[number].add(task)
            self._used.setdefault(task, set()).add(number)
        return None

    def end_use(self, task: Hashable) -> None:
        """Idempotent."""
        for number in self._used.pop(task, ()):
            self._users[number].discard(task)
            self._look_at(number)

    def _look_at(self, number: int) -> None:
        place = self._places.get(number)
        if place is None or not place.closed or self._users[number]:
            return
        del self._places[number], self._users[number]
        size = round_up(place.length)
        self.used_bytes -= size
        self._free(number, place.offset, size)

    def close(self) -> None:
        """Handles that are left are closed. Idempotent."""
        for place in self._places.values():
            place.closed = True
        self._places.clear()
        self._users.clear()
        self._used.clear()
        self.used_bytes = 0
        if self._sealed is not None:
            self._sealed[0].close()
            self._sealed = None
        for fd in (self._fd, self.reading_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self.reading_fd = -1


def _open(folder: Path) -> tuple[int, int]:
    """For writing and for reading."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("callyard-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o400)
            return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # no /proc
            os.close(fd)
        except BaseException:
            os.close(fd)
            raise
    fd, path = tempfile.mkstemp(dir=folder)
    try:
        return fd, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(path)
