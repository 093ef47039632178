"""Which rows of a run had begun, in memory that survives the worker's end.

A begun-mark holds the number of an attempt (X62). For each row that is under way this table, a mapped file of the run
folder, holds the number of its latest attempt; so whoever finds the folder of a worker that was killed knows the rows
that had begun, and not only their numbers. An end is noted before its context can be used again, and a page has room
for as many marks again as calls can be seated, so a mark is overwritten only after its end is noted here.

A power cut does not spare it, and where its folder has no room it is given up: then all that may have begun counts as
begun. Source: call-execution X62, X64, X88.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from callyard.ids import CallNumber

CHUNK_ROWS: Final = 8_192
"""One file holds so many."""
_ENTRY_BYTES: Final = 8
_ENDED: Final = 1
"""It has begun, and is over."""
_EFFECT: Final = 2
"""Below it a call without a promise was sent: it must not run again, whatever its own promise (X64)."""
_NUMBER_SHIFT: Final = 2


class BegunRows:
    """The table of one run. All methods take some 100 ns; the first of a chunk makes a file."""

    def __init__(self, folder: Path, on_first_effect: Callable[[], None]) -> None:
        """`folder` is made. `on_first_effect` is called before the first effect is noted. Raises OSError."""
        self._folder = folder
        self._is_given_up = False
        """It is in no file: whoever comes after a kill finds no table."""
        folder.mkdir(mode=0o700)
        self._chunks: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self._first_chunk = 0
        self._has_effects = False
        self._on_first_effect = on_first_effect

    def bind(self, row: int, number: CallNumber) -> None:
        """An attempt is about to be sent."""
        entries = self._entries(row)
        place = row % CHUNK_ROWS
        entries[place] = number << _NUMBER_SHIFT | entries[place] & _EFFECT

    def end(self, row: int) -> None:
        """The latest attempt had begun, and is over."""
        self._entries(row)[row % CHUNK_ROWS] |= _ENDED

    def note_effect(self, row: int) -> None:
        if not self._has_effects:
            self._has_effects = True
            self._on_first_effect()
        self._entries(row)[row % CHUNK_ROWS] |= _EFFECT

    def forget_before(self, row: int) -> None:
        """Their results are on disk."""
        first = row // CHUNK_ROWS
        if first > self._first_chunk:
            for number in [number for number in self._chunks if number < first]:
                self._remove(number)
            self._first_chunk = first

    def close(self) -> None:
        while self._chunks:
            _unmap(*self._chunks.popitem()[1])
        if not self._is_given_up:
            self._give_up()

    def _entries(self, row: int) -> memoryview:
        number = row // CHUNK_ROWS
        chunk = self._chunks.get(number)
        return chunk[1] if chunk is not None else self._make(number)

    def _make(self, number: int) -> memoryview:
        size = CHUNK_ROWS * _ENTRY_BYTES
        try:
            mapped = mmap.mmap(-1, size) if self._is_given_up else self._map_file(number, size)
        except OSError:
            self._give_up()
            mapped = mmap.mmap(-1, size)
        view = memoryview(mapped).cast("Q")
        self._chunks[number] = mapped, view
        return view

    def _give_up(self) -> None:
        """In one step: a table that lacks some rows would say that they had not begun. Raises OSError."""
        gone = self._folder.rename(self._folder.with_name(f"{self._folder.name}.gone"))
        self._is_given_up = True
        shutil.rmtree(gone, ignore_errors=True)

    def _map_file(self, number: int, size: int) -> mmap.mmap:
        fd = os.open(self._folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)  # a full disk is an error here, not a SIGBUS at the first note
            else:
                os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def _remove(self, number: int) -> None:
        _unmap(*self._chunks.pop(number))
        (self._folder / str(number)).unlink(missing_ok=True)


def _unmap(mapped: mmap.mmap, view: memoryview) -> None:
    view.release()
    mapped.close()


def read_begun(table: Path, marks: Path, first: int, end: int) -> list[int] | None:
    """Rows from `first` up to `end` that had begun, ascending; None: the table is not there any more."""
    if not table.is_dir():
        return None
    numbers: set[int] = set()
    for page in marks.glob("*"):
        data = page.read_bytes()
        numbers.update(memoryview(data[: len(data) // 8 * 8]).cast("Q"))
    found: list[int] = []
    for chunk in range(first // CHUNK_ROWS, -(-end // CHUNK_ROWS)):
        try:
            entries = memoryview((table / str(chunk)).read_bytes()).cast("Q")
        except FileNotFoundError:
            continue  # none of its rows was sent
        start = chunk * CHUNK_ROWS
        for place in range(max(first - start, 0), min(end - start, len(entries))):
            entry = entries[place]
            if entry and (entry & (_ENDED | _EFFECT) or entry >> _NUMBER_SHIFT in numbers):
                found.append(start + place)
    return found
