"""Results of earlier generations of a run: read from its output, kept beside it, put back between the new ones.

A generation goes on where the first row is that has to run. What the output holds behind that place is copied to a file
beside the journal, in order; each line says whether it stands, or is only to be replaced by a new result. Source:
call-execution X88.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome, UsageError
from callyard.worker.disk import Disk
from callyard.worker.results import Printed, ToldResult

STANDS: Final = b"+"
REPLACED: Final = b"-"
STOPPED: Final = frozenset(
    {ErrorKind.CANCELLED, ErrorKind.DEADLINE, ErrorKind.SHUTTING_DOWN, ErrorKind.UNAVAILABLE, ErrorKind.TIMEOUT}
)
"""Kinds by which a call ends that the end of its run has ended."""
_COPY_BYTES: Final = 1024 * 1024


_ABSENT: Final = msgspec.Raw(b"")


class Line(msgspec.Struct, gc=False):
    """A result's line."""

    index: int
    ok: bool
    output: msgspec.Raw = _ABSENT
    error: _Error | None = None
    id: msgspec.Raw = _ABSENT
    args: msgspec.Raw = _ABSENT
    printed: str | None = None
    cut_bytes: int = 0


class _Error(msgspec.Struct, gc=False):
    kind: ErrorKind
    message: str
    attempts: int
    outcome: Outcome
    details: dict[str, object] | None = None


_DECODER: Final = msgspec.json.Decoder(Line)


def read_result(line: bytes) -> ToldResult:
    """The result that a line says. Raises msgspec.DecodeError."""
    found = _DECODER.decode(line)
    output = bytes(found.output)
    if found.ok is (found.error is not None) or found.ok is not bool(output):
        raise msgspec.ValidationError("expected an output or an error")
    failure = None
    if found.error is not None:
        error = found.error
        failure = CallFailure(
            error.kind, error.message, attempts=error.attempts, outcome=error.outcome, details=error.details or {}
        )
    members = [b'"%b":%b' % (name, raw) for name, raw in ((b"id", found.id), (b"args", found.args)) if bytes(raw)]
    printed = None if found.printed is None else Printed(found.printed, found.cut_bytes)
    attempts = 0 if failure is None else failure.attempts
    return ToldResult(found.index, output or None, failure, attempts, (), printed, b",".join(members))


class OldResult(msgspec.Struct):
    """A result of an earlier generation, and the place where it begins in the output; -1: in the file of kept ones."""

    index: int
    failure: CallFailure | None
    line: bytes
    at: int
    fits: bool = True
    """It may stay where it is; else it is written anew, in the columns that results have now."""


def read_lines(stream: IO[bytes], name: str, start: int, end: int, first_line: int = 1) -> Iterator[OldResult]:
    """The results in an output from an offset up to another, their numbers rising. Raises UsageError."""
    stream.seek(start)
    at, number, last = start, first_line - 1, -1
    while at < end:
        line = stream.readline()
        number += 1
        try:
            result = read_result(line)
        except msgspec.DecodeError as error:
            raise _foreign(name, number, str(error)) from error
        if result.index <= last or not line.endswith(b"\n"):
            raise _foreign(
                name, number, f"index {result.index} after {last}" if line.endswith(b"\n") else "it is cut off"
            )
        last = result.index
        yield OldResult(result.index, result.failure, line, at)
        at += len(line)
    if at != end:
        raise _foreign(name, number, "it does not end where a result did")


def _foreign(name: str, number: int, problem: str) -> UsageError:
    return refuse_edited(name, f"line {number}: {problem}")


def refuse_edited(name: str, problem: str) -> UsageError:
    return UsageError(
        f"{name} is not as its run left it: {problem}. It cannot be resumed: give --force to replace it (in Python:"
        ' existing="overwrite"), or write to another file'
    )


class KeptFile:
    """Kept results, being written."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._buffer: list[bytes] = []
        self._buffered = 0

    def add(self, line: bytes, *, stands: bool) -> None:
        self._buffer += (STANDS if stands else REPLACED, line)
        self._buffered += len(line)
        if self._buffered >= _COPY_BYTES:
            self._write()

    def _write(self) -> None:
        self._disk.write_all(self._fd, b"".join(self._buffer))
        self._buffer.clear()
        self._buffered = 0

    def finish(self) -> None:
        """It is on disk."""
        self._write()
        self._disk.sync(self._fd)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_kept(path: Path) -> Iterator[tuple[bool, bytes]]:
    """Whether each kept line stands, and the line. Raises UsageError for a file that is gone or damaged."""
    try:
        with path.open("rb") as stream:
            for line in stream:
                if line[:1] not in (STANDS, REPLACED) or line[-1:] != b"\n":
                    raise UsageError(f"{path} is damaged: its run cannot be resumed")
                yield line[:1] == STANDS, line[1:]
    except OSError as error:
        raise UsageError(f"cannot read {path}, which the run left: {error.strerror}") from error
