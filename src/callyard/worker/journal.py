"""The journal of a run: what is known of it whatever ended it, in the file `OUT.state` beside its output.

    00000068 1c291ca3 {"version":1,"header":{…}}        length of the text, its CRC-32, both hexadecimal
    00000015 9b1a88f0 {"open_row":4096}
    0000001d 0f3f4a19 {"settled":[231423,4032]}

Records are added at the end; each says anew some of the fields of `Notes`, and what it does not say stays as it was. So
nothing is lost when the file is written anew with one record of each kind, which happens at `COMPACT_BYTES`. A record
that was cut off at the end of the file never was; one that is damaged anywhere else makes the file unusable.

A run *opens* its rows up to a number, on disk, before the first call of them is sent; it *settles* its output up to an
offset, and the rows before a number with it, after their bytes are on disk. Source: call-execution X88.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from callyard.errors import UsageError
from callyard.worker.disk import DISK, Disk

VERSION: Final = 1
COMPACT_BYTES: Final = 1024 * 1024
RECORD_BYTES_MAX: Final = 256 * 1024 * 1024
_HEAD_BYTES: Final = 18

Range = tuple[int, int]
"""Rows from the first number up to the second, which is not of them."""


class InputMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an input file looked when the run began."""

    size: int
    modified_ns: int


class RunHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run is."""

    run_id: str
    generation: int
    """From 1; each resume is one more."""
    function: str
    """Empty: each row names its own."""
    digest: str
    """Of the functions' files."""
    shape: Mapping[str, Any]
    """Options that the lines depend on."""
    input: InputMark | None
    """None: rows that are in no file."""
    hash_seed: int
    boot: str
    """The start of the machine in which `folder` means something."""
    folder: str
    """Name of the run folder with the begun-marks."""
    base: int
    """Offset, or part, at which its results begin."""
    start: tuple[int, int]
    """Offset, or part, and row where this generation went on; what is behind it in the output goes."""
    kept: str = ""
    """Name of the file beside this one with the results of earlier generations behind `start`."""
    lost: tuple[Range, ...] = ()
    """Rows that earlier generations had begun, and no result is known of."""
    doubtful: tuple[Range, ...] = ()
    """Rows that they had opened, of which nobody knows more: calls without a promise count as begun."""
    effects: bool = False
    """In the doubtful rows even a call with a promise may have made a call without one."""


class Notes(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What was noted; of a record, what it says anew."""

    version: int | None = None
    header: RunHeader | None = None
    open_row: int | None = None
    """Calls of rows before it may have been sent."""
    settled: tuple[int, int] | None = None
    """Offset up to which the output is on disk, and the row that comes next there."""
    input_digest: str | None = None
    rows_digest: tuple[int, str] | None = None
    """Of rows that are in no file: how many from the first on, and the digest of those."""
    effects: bool | None = None
    """Some call with a promise has made a call without one (X64)."""
    begun: tuple[Range, ...] | None = None
    """The run ended in order: of the rows that are not settled these had begun, and no others."""
    ended: bool | None = None
    """The output holds all that the run did; `kept` is in it."""
    complete: bool | None = None
    """Every row has its result."""

    def update(self, record: Notes) -> None:
        for name in self.__struct_fields__:
            value = getattr(record, name)
            if value is not None:
                setattr(self, name, value)

    @property
    def run(self) -> RunHeader:
        assert self.header is not None, "a journal begins with its header"
        return self.header

    @property
    def settled_place(self) -> tuple[int, int]:
        return self.run.start if self.settled is None else self.settled

    @property
    def opened(self) -> int:
        return max(self.settled_place[1], self.open_row or 0)


_ENCODE: Final = msgspec.json.Encoder().encode
_DECODER: Final = msgspec.json.Decoder(Notes)


class Journal:
    """An open journal, written by one run. The methods raise OSError."""

    def __init__(self, path: Path, header: RunHeader, *, disk: Disk = DISK, **notes: Any) -> None:
        """Write it, in the place of one that is there, with a header and what is already known."""
        self.path = path
        self.notes = Notes(version=VERSION, header=header, **notes)
        self._disk = disk
        self._fd = -1
        self._size = 0
        self._write_anew()

    def append(self, record: Notes) -> None:
        """It is on disk when this returns. Waits for the disk."""
        self.notes.update(record)
        if self._size >= COMPACT_BYTES:
            self._write_anew()
            return
        data = encode_record(record)
        self._disk.write_all(self._fd, data)
        self._size += len(data)
        self._disk.sync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_anew(self) -> None:
        fresh = self.path.with_name(self.path.name + ".new")
        data = encode_record(self.notes)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self._disk.write_all(fd, data)
            self._disk.sync(fd)
            self._disk.replace(fresh, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._disk.remove(fresh)
            raise
        self.close()
        self._fd, self._size = fd, len(data)


def encode_record(record: Notes) -> bytes:
    text = _ENCODE(record)
    return b"%08x %08x %b\n" % (len(text), zlib.crc32(text), text)


def read_journal(path: Path) -> Notes | None:
    """What a journal says; None: there is none. Raises UsageError for one that cannot be read or is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    notes = Notes()
    at = 0
    while at < len(data):
        text, end = _next_record(data, at)
        if text is None:
            if at and not _is_record_behind(data, at):
                break  # cut off as it was written
            raise _damaged(path, f"the record at byte {at} does not match its checksum")
        try:
            record = _DECODER.decode(text)
        except msgspec.DecodeError as error:
            version = _version_of(text)
            if version not in (None, VERSION):
                raise UsageError(
                    f"{path} is of version {version}, and this Callyard reads version {VERSION}: resume with the"
                    ' Callyard that began the run, or start anew with --force (in Python: existing="overwrite")'
                ) from error
            raise _damaged(path, f"the record at byte {at} is none: {error}") from error
        notes.update(record)
        at = end
    if notes.header is None or notes.version != VERSION:
        raise _damaged(path, "it has no header")
    return notes


def _next_record(data: bytes, at: int) -> tuple[bytes | None, int]:
    """The text of the record that begins there, and where the next one does; None: there is no whole record."""
    head = data[at : at + _HEAD_BYTES]
    try:
        size, checksum = int(head[:8], 16), int(head[9:17], 16)
    except ValueError:
        return None, at
    end = at + _HEAD_BYTES + size + 1
    text = data[at + _HEAD_BYTES : end - 1]
    whole = head[8:9] == head[17:18] == b" " and data[end - 1 : end] == b"\n" and size <= RECORD_BYTES_MAX
    return (text, end) if whole and zlib.crc32(text) == checksum else (None, at)


def _is_record_behind(data: bytes, at: int) -> bool:
    """Whether a whole record begins at a later line, or where the one here should end: what is damaged then was not cut
    off by the end."""
    with contextlib.suppress(ValueError):
        if _next_record(data, at + _HEAD_BYTES + int(data[at : at + 8], 16) + 1)[0] is not None:
            return True
    while (line_end := data.find(b"\n", at)) >= 0:
        at = line_end + 1
        if _next_record(data, at)[0] is not None:
            return True
    return False


def _version_of(text: bytes) -> object:
    with contextlib.suppress(msgspec.DecodeError):
        record = msgspec.json.decode(text)
        return record.get("version") if isinstance(record, dict) else None
    return None


def _damaged(path: Path, problem: str) -> UsageError:
    return UsageError(
        f"{path} is damaged: {problem}. What it stood for cannot be resumed: keep the output under another name and"
        ' start anew, or give --force to replace it (in Python: existing="overwrite")'
    )


def to_ranges(rows: Sequence[int]) -> list[Range]:
    """Ascending rows as ranges."""
    ranges: list[Range] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges


def read_boot() -> str:
    """What tells this start of the machine from others; empty: not to be known here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
