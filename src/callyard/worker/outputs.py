"""Where results go: a JSONL file or stream, memory, a callable.

A sink takes results in the order in which they are to appear. It holds a bounded buffer of whole lines. Source:
call-execution X43, X87.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol

import msgspec

from callyard.errors import CallFailure, UsageError
from callyard.scheduler import CallResult
from callyard.worker.disk import DISK, Disk
from callyard.worker.results import echo_of, printed_of

__all__ = [
    "CallResult",
    "CallableOutput",
    "Existing",
    "JsonlOutput",
    "MemoryOutput",
    "OutputClosed",
    "OutputError",
    "OutputSink",
    "check_output",
    "open_output",
]

BUFFER_BYTES: Final = 256 * 1024
FLUSH_AFTER_S: Final = 0.5
"""Slow results are not held back until the buffer is full."""
Existing = Literal["refuse", "overwrite", "append"]

_ENCODE: Final = msgspec.json.Encoder(enc_hook=str).encode


class OutputError(UsageError):
    """Results cannot be written. Says where, why, and what to do."""


class OutputClosed(Exception):
    """The reader of a stream went away, as `head` does: the run ends without a complaint."""


class OutputSink(Protocol):
    """Takes the results of a run, in order. Called from one thread; a call may wait on the disk or the reader."""

    def write(self, results: Sequence[CallResult]) -> None:
        """Take some results. Raises `OutputError` or `OutputClosed`; then only `abort` may follow."""
        ...

    def flush(self) -> None:
        """Hand on what is buffered. Raises as `write`."""
        ...

    def close(self) -> None:
        """Everything is out. Raises as `write`."""
        ...

    def abort(self) -> None:
        """The run ended early: hand on what was taken, if that can be done. Never raises."""
        ...


Place = tuple[int, int]
"""How far an output is written: bytes, or parts, and the row that comes next."""


class DurableOutput(OutputSink, Protocol):
    """An output that a run can go on with: it knows how far it is, and what is there can be put on disk."""

    name: str

    @property
    def place(self) -> Place:
        """What was handed to the system so far; it grows in `write` and `flush` only."""
        ...

    def sync(self) -> None:
        """What `place` says is on disk. From any thread. Raises `OutputError`."""
        ...

    def drain(self) -> None:
        """Hand on all that was taken: `place` is behind it. Raises as `write`."""
        ...

    def write_kept(self, lines: Sequence[bytes]) -> None:
        """Take results as the lines that they were before. Raises as `write`."""
        ...


class JsonlOutput:
    """One JSON line per result, to a path, `-` (standard output) or an open binary stream.

    The file is opened when the sink is made, so that a path that cannot be written fails before any call runs.
    `existing` says what becomes of a file that is not empty. `with_printed` adds what is attached to a result of its
    call's output, as `printed`. `source` is the path of the call list, which must not be
    the output. `start`, a place in the file, goes before `existing`: what is behind it goes at the first write. After a
    full disk the file ends with its last whole line. Raises `OutputError`.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | IO[bytes],
        *,
        existing: Existing = "refuse",
        source: str | os.PathLike[str] | None = None,
        with_printed: bool = False,
        start: Place | None = None,
        disk: Disk = DISK,
    ) -> None:
        self._format = format_line_with_printed if with_printed else format_line
        self._disk = disk
        self._cuts = False
        """The file still holds what is to be replaced: it goes when there is something to take its place."""
        self.lines = 0
        """Lines handed on so far."""
        self._buffer: list[bytes] = []
        self._buffer_bytes = 0
        self._buffer_lines = 0
        self._flushed_at_s = time.monotonic()
        self._closed = False
        self._owned: int | None = None
        """The file descriptor, when the sink opened it."""
        self._written = 0
        """Bytes in the file up to the end of its last whole line."""
        self._row = self._written_row = 0 if start is None else start[1]
        """The row behind the last one that was taken, and that was written."""
        if not isinstance(target, str | os.PathLike):
            self.name, self._stream = getattr(target, "name", "the stream"), target
        elif str(target) == "-":
            self.name, self._stream = "standard output", _standard_output()
        else:
            self.name = str(target)
            begin = None if start is None else start[0]
            self._owned, self._written, self._cuts = _open(Path(target), existing, source, begin)

    def write(self, results: Sequence[CallResult]) -> None:
        add = self._buffer.append
        size = 0
        for result in results:
            line = self._format(result)
            size += len(line)
            add(line)
        self._took(size, len(results), results[-1].index + 1 if results else self._row)

    def write_kept(self, lines: Sequence[bytes]) -> None:
        self._buffer += lines
        self._took(sum(map(len, lines)), len(lines), index_of(lines[-1]) + 1 if lines else self._row)

    def _took(self, size: int, lines: int, row: int) -> None:
        self._buffer_bytes += size
        self._buffer_lines += lines
        self._row = row
        if self._buffer_bytes >= BUFFER_BYTES or time.monotonic() - self._flushed_at_s >= FLUSH_AFTER_S:
            self.flush()

    def flush(self) -> None:
        if not self._buffer:
            return
        self._cut()
        self._flushed_at_s = time.monotonic()
        data = b"".join(self._buffer)
        self._buffer.clear()
        self._buffer_bytes = 0
        try:
            if self._owned is None:
                _write_all(self._stream.write, data)
                self._stream.flush()
            else:
                _write_all(functools.partial(self._disk.write, self._owned), data)
        except BrokenPipeError as error:
            self._disown_standard_output()
            raise OutputClosed(f"the reader of {self.name} went away") from error
        except (OSError, ValueError) as error:  # ValueError: a stream that was closed meanwhile
            self._cut_to_whole_lines()
            raise OutputError(self._describe(error)) from error
        self._written += len(data)
        self._written_row = self._row
        self.lines += self._buffer_lines
        self._buffer_lines = 0

    def close(self) -> None:
        if self._closed:
            return
        self.drain()
        self._closed = True
        if self._owned is not None:
            try:
                os.close(self._owned)
            except OSError as error:  # some file systems report a full disk only now
                raise OutputError(self._describe(error)) from error

    def abort(self) -> None:
        with contextlib.suppress(OutputError, OutputClosed):
            self.flush()
        if not self._closed:
            self._closed = True
            if self._owned is not None:
                with contextlib.suppress(OSError):
                    os.close(self._owned)

    def drain(self) -> None:
        self.flush()
        self._cut()  # a run without results replaces what is there, too

    @property
    def place(self) -> Place:
        return self._written, self._written_row

    def sync(self) -> None:
        assert self._owned is not None, "only a file of its own is on disk"
        try:
            self._disk.sync(self._owned)
        except OSError as error:
            raise OutputError(self._describe(error)) from error
        if self._is_removed(self._owned):
            raise OutputError(f"{self.name} was removed while its run wrote it, and its results with it: run it anew")

    def _is_removed(self, fd: int) -> bool:
        info = os.fstat(fd)
        if info.st_nlink:
            return False
        try:
            return not os.path.samestat(os.stat(self.name), info)  # there are file systems that count no links
        except OSError:
            return True

    def _cut(self) -> None:
        if self._cuts:
            assert self._owned is not None
            self._cuts = False
            self._disk.truncate(self._owned, self._written)

    def _describe(self, error: Exception) -> str:
        code = getattr(error, "errno", None)
        reason = getattr(error, "strerror", None) or str(error)
        if code in {errno.ENOSPC, errno.EDQUOT}:
            advice = "make room, or write elsewhere"
        elif code == errno.EFBIG:
            advice = "the file may not grow further: write elsewhere, or raise the limit"
        else:
            advice = "write elsewhere"
        return f"cannot write {self.name}: {reason}; it holds {self.lines} results, each line whole: {advice}"

    def _cut_to_whole_lines(self) -> None:
        """A write that failed may have left part of its data."""
        if self._owned is not None and stat.S_ISREG(os.fstat(self._owned).st_mode):
            data_end = _last_line_end(self._owned, self._written)
            with contextlib.suppress(OSError):
                self._disk.truncate(self._owned, data_end)
            if data_end > self._written:
                data = os.pread(self._owned, data_end - self._written, self._written)
                self.lines += data.count(b"\n")
                self._written, self._written_row = data_end, index_of(data[data.rfind(b"\n", 0, -1) + 1 :]) + 1

    def _disown_standard_output(self) -> None:
        """Else the interpreter complains at its exit that it cannot flush."""
        if self._owned is None and self.name == "standard output":
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


class MemoryOutput:
    """Keeps every result, in order."""

    def __init__(self) -> None:
        self.results: list[CallResult] = []

    def write(self, results: Sequence[CallResult]) -> None:
        self.results.extend(results)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""

    def abort(self) -> None:
        """The results so far stay."""


class CallableOutput:
    """Gives each result to a function. What it raises ends the run, and is raised there."""

    def __init__(self, take: Callable[[CallResult], object]) -> None:
        self._take = take

    def write(self, results: Sequence[CallResult]) -> None:
        for result in results:
            self._take(result)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""

    def abort(self) -> None:
        """Nothing to undo."""


def open_output(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    existing: Existing = "refuse",
    source: str | os.PathLike[str] | None = None,
    with_printed: bool = False,
    output_schema: bytes = b"{}",
    repeated: Sequence[str] = (),
    start: Place | None = None,
    disk: Disk = DISK,
) -> DurableOutput:
    """The sink for a path, by its suffix or by `format` (`jsonl`, `parquet`); `-` is standard output.

    Parquet is a folder of parts; `output_schema`, JSON Schema of the results, gives its columns their types, and
    `repeated` names what results repeat of their rows. `start`: see `JsonlOutput`. Raises
    `OutputError`, and `UsageError` where pyarrow is missing.
    """
    if check_format(path, format) == "parquet":
        from callyard.worker.parquet_output import ParquetOutput

        return ParquetOutput(
            path,
            output_schema,
            existing=existing,
            source=source,
            with_printed=with_printed,
            repeated=repeated,
            start=start,
            disk=disk,
        )
    return JsonlOutput(path, existing=existing, source=source, with_printed=with_printed, start=start, disk=disk)


def check_output(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    existing: Existing = "refuse",
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Refuse what `open_output` would refuse at a look, and touch nothing. Raises as it does."""
    if check_format(path, format) == "parquet":
        from callyard.worker.parquet_output import check_folder

        check_folder(Path(path), existing, source)
    elif str(path) == "-":
        _standard_output()
    else:
        _check_place(Path(path), existing, source)


def check_format(path: str | os.PathLike[str], format: str | None = None) -> Literal["jsonl", "parquet"]:
    """The format of an output. Raises `OutputError` for one that is not known."""
    text = str(path)
    chosen = (format or Path(text).suffix).lower().removeprefix(".")
    if chosen == "parquet" and text != "-":
        return "parquet"
    if format is None and (text == "-" or not _is_regular(Path(text))):
        chosen = "jsonl"
    if chosen not in {"jsonl", "ndjson"}:
        raise OutputError(f"{text}: unknown output format {chosen!r}: expected .jsonl, .ndjson or .parquet")
    return "jsonl"


def format_line(result: CallResult) -> bytes:
    """A result as its line, with the line end.

    `{"index":0,"ok":true,"output":…}`, or `{"index":0,"ok":false,"error":{"kind","message","attempts","outcome"}}` with
    `details` when there are any; after the index what is repeated of the row, `"id":…` and `"args":…`. Source: X87.
    """
    failure = result.failure
    echo = echo_of(result)
    if echo:
        echo += b","
    if failure is not None:
        error = _ENCODE(error_fields(failure))
        return b'{"index":%d,%b"ok":false,"error":%b}\n' % (result.index, echo, error)
    output = result.output
    assert output is not None, f"result {result.index} has neither output nor failure"
    if b"\n" in output or b"\r" in output:  # white space in foreign JSON; inside text it is always escaped
        output = output.replace(b"\n", b" ").replace(b"\r", b" ")
    return b'{"index":%d,%b"ok":true,"output":%b}\n' % (result.index, echo, output)


def format_line_with_printed(result: CallResult) -> bytes:
    """The same with `"printed":"…"`, and `"cut_bytes":…` when not all of it is there. Source: X58."""
    line = format_line(result)
    printed = printed_of(result)
    if printed is None:
        return line
    cut = b',"cut_bytes":%d' % printed.cut_bytes if printed.cut_bytes else b""
    return b'%b,"printed":%b%b}\n' % (line[:-2], _ENCODE(printed.text), cut)


def error_fields(failure: CallFailure) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": failure.kind,
        "message": failure.message,
        "attempts": failure.attempts,
        "outcome": failure.outcome,
    }
    if failure.details:
        fields["details"] = failure.details
    return fields


def _standard_output() -> IO[bytes]:
    if sys.stdout is None:
        raise OutputError("standard output is closed: give a file")
    return sys.stdout.buffer


def _is_regular(path: Path) -> bool:
    """Also true of a path that does not exist yet: a regular file will be made."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return True


def _open(
    path: Path, existing: Existing, source: str | os.PathLike[str] | None, start: int | None
) -> tuple[int, int, bool]:
    """Open for writing: the descriptor, how many bytes it holds that stay, whether others are to go."""
    is_regular = _check_place(path, existing if start is None else "append", source)
    flags = os.O_RDWR if is_regular else os.O_WRONLY  # read back after a failed write, to cut to whole lines
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if start is not None:
            os.lseek(fd, start, os.SEEK_SET)
            return fd, start, True
        kept = _continue_after(fd) if existing == "append" and is_regular else 0
        return fd, kept, is_regular and existing != "append"
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _check_place(path: Path, existing: Existing, source: str | os.PathLike[str] | None) -> bool:
    """Whether it is a regular file, or will be one. Raises `OutputError` for what must not be written."""
    try:
        info: os.stat_result | None = path.stat()
    except FileNotFoundError:
        info = None
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    if info is not None:
        if stat.S_ISDIR(info.st_mode):
            raise OutputError(f"{path} is a folder: expected a file, such as {path / 'out.jsonl'}")
        if source is not None and _is_same(info, source):
            raise OutputError(f"{path} is the input too: write to another file")
        if existing == "refuse" and stat.S_ISREG(info.st_mode) and info.st_size:
            raise OutputError(refuse_to_replace(path, f"{path} exists and is not empty", "it", "file"))
    elif not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent} for {path.name}: make it first")
    if not os.access(path if info is not None else path.parent, os.W_OK):
        raise OutputError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
    return info is None or stat.S_ISREG(info.st_mode)


_STATE_SUFFIX: Final = ".state"


def follow_link(path: Path) -> Path:
    """The file that an output's name leads to: whichever name is given, it has one journal and one lock."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def state_of(path: Path) -> Path:
    """The journal of an output, beside it."""
    real = follow_link(path)
    return real.with_name(real.name + _STATE_SUFFIX)


def name_state(path: Path) -> str:
    """As a message about that output names it."""
    state = state_of(path)
    return str(state) if path.is_symlink() else state.name


def refuse_to_replace(path: Path, problem: str, them: str, other: str) -> str:
    """What to do about an output that is there, and what each of it does."""
    text = f"{problem}: give --force to replace {them}, --append to add to {them}, or another {other}"
    words = 'existing="overwrite" or "append"'
    if state_of(path).exists():
        text += (
            f"; it has a run that can go on ({name_state(path)} is there): --resume runs the rows that have no result,"
            " --retry-failed those that failed, both together both"
        )
        words += ", resume=True, retry_failed=True"
    else:
        text += f"; there is no {name_state(path)}, so --resume and --retry-failed have nothing to go on with"
    return f"{text} (in Python: {words})"


def index_of(line: bytes) -> int:
    """Of a line that `format_line` made."""
    return int(line[len(b'{"index":') : line.index(b",")])


def _continue_after(fd: int) -> int:
    """Go to the end of the last whole line; a line that a kill cut off is removed."""
    end = _last_line_end(fd, 0)
    os.ftruncate(fd, end)
    os.lseek(fd, end, os.SEEK_SET)
    return end


def _last_line_end(fd: int, start: int) -> int:
    """Offset after the last line end at or after `start`; `start` when there is none."""
    end = os.fstat(fd).st_size
    while end > start:
        begin = max(start, end - BUFFER_BYTES)
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return start


def _is_same(info: os.stat_result, source: str | os.PathLike[str]) -> bool:
    try:
        other = os.fstat(sys.stdin.fileno()) if str(source) == "-" else os.stat(source)
    except (OSError, ValueError, AttributeError):  # no such file, or standard input is closed or none
        return False
    return stat.S_ISREG(info.st_mode) and os.path.samestat(info, other)


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    """A file or an unbuffered stream may take only part of what it is given."""
    view = memoryview(data)
    while view:
        taken = write(view)
        if taken is None:  # a stream that does not block, and is full
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        view = view[taken:]
