"""Rows that had begun, as the next process finds them."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from callyard.ids import CallNumber
from callyard.worker.begun import CHUNK_ROWS, BegunRows, read_begun


class Folder:
    """A run folder of a worker that is gone."""

    def __init__(self, path: Path) -> None:
        self.table = path / "rows"
        self.marks = path / "marks"
        self.marks.mkdir()
        self.effects = 0
        self.rows = BegunRows(self.table, self._on_first_effect)

    def _on_first_effect(self) -> None:
        self.effects += 1

    def mark(self, *numbers: int) -> None:
        (self.marks / "exec-1").write_bytes(struct.pack(f"={len(numbers)}Q", *numbers))

    def read(self, first: int, end: int) -> list[int] | None:
        return read_begun(self.table, self.marks, first, end)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.requirement("X88", "X62")
def test_begun_is_what_a_page_marks_or_has_ended(folder: Folder) -> None:
    for row in range(5):
        folder.rows.bind(row, CallNumber(100 + row))
    folder.rows.end(0)  # its mark is overwritten by now
    folder.mark(101, 103, 999)
    assert folder.read(0, 5) == [0, 1, 3]
    assert folder.read(1, 3) == [1]


@pytest.mark.requirement("X88", "X62")
def test_another_attempt_has_not_begun_though_an_earlier_one_had(folder: Folder) -> None:
    folder.rows.bind(0, CallNumber(1))
    folder.rows.end(0)  # TransientError: nothing was done
    folder.rows.bind(0, CallNumber(2))
    folder.mark(1)
    assert folder.read(0, 1) == []
    folder.mark(2)
    assert folder.read(0, 1) == [0]


@pytest.mark.requirement("X88", "X64")
def test_an_effect_below_stays_whatever_the_next_attempt(folder: Folder) -> None:
    folder.rows.note_effect(7)
    folder.rows.bind(7, CallNumber(3))
    folder.rows.note_effect(9)
    assert folder.effects == 1
    assert folder.read(0, 10) == [7, 9]


@pytest.mark.requirement("X88")
def test_it_holds_no_more_than_what_is_under_way(folder: Folder) -> None:
    for chunk in range(5):
        folder.rows.bind(chunk * CHUNK_ROWS, CallNumber(1 + chunk))
        folder.rows.forget_before(chunk * CHUNK_ROWS)
        assert len(list(folder.table.iterdir())) == 1
    folder.mark(5)
    assert folder.read(0, 5 * CHUNK_ROWS) == [4 * CHUNK_ROWS]
    folder.rows.close()
    assert folder.read(0, 10) is None


@pytest.mark.requirement("X88", "X62")
def test_without_room_there_is_no_table_rather_than_half_of_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rows.bind(0, CallNumber(1))
    folder.rows.end(0)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    folder.rows.bind(CHUNK_ROWS, CallNumber(2))
    assert folder.read(0, 2 * CHUNK_ROWS) is None
    monkeypatch.undo()
    folder.rows.end(0)
    folder.rows.bind(2 * CHUNK_ROWS, CallNumber(3))
    folder.rows.forget_before(CHUNK_ROWS)
    assert folder.read(0, 3 * CHUNK_ROWS) is None
    folder.rows.close()
    assert [path.name for path in folder.table.parent.iterdir()] == ["marks"]
