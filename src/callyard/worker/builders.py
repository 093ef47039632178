"""Call builders: where the rows of a call list come from.

A source reads on demand, holds at most one line and one chunk, and never ends the run for a bad row: a line that is no
row becomes a row with a failure, in its place. Arguments stay JSON bytes; only CSV cells and Python values are encoded
here. Source: call-execution X20, X43, X76, X84.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import msgspec

from callyard.errors import CallFailure, ErrorKind, UsageError, fail
from callyard.functions.encoding import ResultMisfit, encode_canonical
from callyard.functions.packing import encode_crossing
from callyard.wire.frames import FRAME_BYTES_MAX
from callyard.worker.compression import broken_data, open_compressed, split_format

if TYPE_CHECKING:
    from callyard.worker.tables import FrameSource, ParquetSource

LINE_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024
"""Most bytes of one row's arguments: they travel in one frame, beside the rest of its message."""
CHUNK_BYTES: Final = 256 * 1024
BOM: Final = codecs.BOM_UTF8
_STARTS: Final = b"{["
"""What arguments begin with."""
_CELL_CHARS_FREE: Final = 64 * 1024
"""A row of no more characters has no cell that Python's csv module would call too large."""
_SHOWN_NAMES: Final = 8
_SHOWN_BYTES: Final = 60

_ROW_TYPES: Final = frozenset({dict, list, tuple})
_SYNTAX: Final = msgspec.json.Decoder(msgspec.Raw)


class Row(msgspec.Struct, frozen=True, gc=False):
    """One call to be: its arguments, or why it cannot be one."""

    index: int
    """Its place among the rows, from 0; blank lines are no rows."""
    args: bytes = b""
    """JSON: an object (by name, or a whole row) or an array (by position)."""
    function: str | None = None
    """Only when each row names its own."""
    strings: bool = False
    """The values in `args` are text, to be parsed by each parameter's type."""
    failure: CallFailure | None = None
    echo: bytes = b""
    """JSON members for its line in the output, such as `"id":"A7"`; see `columns`."""


class CallSource(Protocol):
    """A call list. Raises `UsageError` where it cannot be read at all."""

    name: str
    """What it is called in messages: a path, `-`."""
    total: int | None
    """How many rows there are, when that is known beforehand."""
    may_block: bool
    """Taking a row may take long (it waits on more than a disk, or unpacks), so it must not happen on an event loop."""

    def rows(self) -> Iterator[Row]:
        """The rows, once. Closing the iterator closes the source."""
        ...

    @property
    def read_fraction(self) -> float | None:
        """Part of the bytes read so far, 0..1; None: not known."""
        ...


class NamedLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line that names its function."""

    function: str
    args: msgspec.Raw


_NAMED: Final = msgspec.json.Decoder(NamedLine)


class Line(msgspec.Struct, gc=False):
    """One line without its end."""

    number: int
    """From 1, as editors count."""
    content: bytes
    start: int
    """Byte offset of the line in its file."""
    size: int
    """Its whole length; greater than `len(content)` when it was too long to be held."""
    ended: bool = True
    """It had a line end; False: the file ends in it."""


class _ByteSource:
    """A file or a stream, read in chunks and cut into lines."""

    columns: Sequence[str] | None = None
    """The names that every row has, where they stand at its head and that can be read already."""

    def __init__(
        self, path: str | os.PathLike[str], stream: IO[bytes] | None = None, compression: str | None = None
    ) -> None:
        self.name = str(path)
        self.total: int | None = None
        self.bytes_read = 0
        """Of text: more than were read of a compressed file."""
        self.bytes_total: int | None = None
        self.path: Path | None = None
        """The file, when it is one; an output must not be the same."""
        self.line_number = 0
        """The line, from 1, at which the last row began; 0: none yet."""
        if stream is not None or self.name == "-":
            self._stream = stream if stream is not None else _standard_input()
            self.may_block = True
        else:
            self.path = Path(path)
            self._stream, size = _open(self.path)
            self.bytes_total = size
            self.may_block = size is None  # a pipe with a name, a device
        self._file = self._stream
        """What is read from the disk; `_stream` gives the text in it."""
        if compression is not None:
            try:
                self._stream = open_compressed(self.name, self._file, compression)
            except UsageError:
                self.close()
                raise
        self._comes_late = self.may_block
        """Its first bytes need not be there yet."""
        self._is_compressed = compression is not None
        self.may_block |= self._is_compressed  # gigabytes without a row may hide in a few bytes

    @property
    def read_fraction(self) -> float | None:
        if self.bytes_total is None:
            return None
        read = self.bytes_read
        if self._is_compressed:
            try:
                read = self._file.tell()
            except ValueError:  # closed, by the thread that read it to its end
                read = self.bytes_total
        return fraction_of(read, self.bytes_total)

    def close(self) -> None:
        if self.name != "-":
            self._stream.close()
            self._file.close()

    def _chunks(self) -> Iterator[bytes]:
        """Raises `UsageError` for what is no text of ours, and when reading fails."""
        read = getattr(self._stream, "read1", self._stream.read)  # a pipe's lines are taken as they come
        while True:
            try:
                chunk = read(CHUNK_BYTES)
            except Exception as error:
                problem = broken_data(error)
                if problem is None:
                    raise
                raise UsageError(f"cannot read {self.name}: {problem}") from error
            if not chunk:
                return
            if self.bytes_read == 0:
                _check_magic(self.name, chunk)
            self.bytes_read += len(chunk)
            yield chunk

    def _lines(self) -> Iterator[Line]:
        """Lines in order. A line above `LINE_BYTES_MAX` is given with its first bytes only."""
        held: list[bytes] = []
        held_bytes = size = start = 0
        number = 1
        for chunk in self._chunks():
            parts = chunk.split(b"\n")
            last = len(parts) - 1
            for position, part in enumerate(parts):
                size += len(part)
                if position == last or held:
                    room = LINE_BYTES_MAX + 1 - held_bytes
                    held.append(part if len(part) <= room else part[: max(0, room)])
                    held_bytes += len(held[-1])
                    if position == last:
                        break
                    part = b"".join(held)
                    held.clear()
                    held_bytes = 0
                yield Line(number, part, start, size) if number > 1 else _first_line(part, size)
                number += 1
                start += size + 1
                size = 0
        if size:
            rest = b"".join(held)
            yield Line(number, rest, start, size, False) if number > 1 else _first_line(rest, size, ended=False)


class JsonlSource(_ByteSource):
    """JSON Lines: each line holds the arguments of one call, or with `named` a `{"function": …, "args": …}`.

    `path` may be `-` for standard input. Blank lines are skipped, a byte order mark and CRLF are taken. Raises
    `UsageError` when the file cannot be opened.
    """

    _expected = "expected one whole JSON object or array on each line"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        named: bool = False,
        stream: IO[bytes] | None = None,
        compression: str | None = None,
    ) -> None:
        super().__init__(path, stream, compression)
        self.named = named
        """Each line names its function. May be set until `rows` is called."""
        self.named_hint = ""
        """Why, and what else could be done: added where a line does not."""

    def rows(self) -> Iterator[Row]:
        index = 0
        decode = _SYNTAX.decode
        try:
            for line in self._lines():
                content = line.content
                if not content or content.isspace():
                    continue
                self.line_number = line.number
                if line.size > LINE_BYTES_MAX or self.named or not content.isascii():
                    yield self._read_with_care(index, line)
                else:
                    try:
                        decode(content)
                    except (msgspec.DecodeError, RecursionError) as error:
                        yield self._malformed(index, line, error)
                    else:
                        first = content[0]
                        if first in _STARTS and content[-1] > 0x20:
                            yield Row(index, content)
                        else:
                            yield self._trimmed(index, line)
                index += 1
        finally:
            self.close()

    def _read_with_care(self, index: int, line: Line) -> Row:
        if line.size > LINE_BYTES_MAX:
            return Row(index, failure=too_large(line.size, "line", line.number))
        try:
            line.content.decode()
        except UnicodeDecodeError as error:
            return Row(index, failure=_not_utf8(line, error))
        try:
            if not self.named:
                _SYNTAX.decode(line.content)
                return self._trimmed(index, line)
            named = _NAMED.decode(line.content)
        except msgspec.ValidationError:
            shown = line.content.strip()[:_SHOWN_BYTES].decode(errors="replace")
            cut = "…" if len(line.content.strip()) > _SHOWN_BYTES else ""
            expected = f'{{"function": name, "args": object or array}} on each line{self.named_hint}'
            problem = f"line {line.number}: expected {expected}; got {shown}{cut}"
            return Row(index, failure=_misfit(problem, line.number))
        except (msgspec.DecodeError, RecursionError) as error:
            return self._malformed(index, line, error)
        args = bytes(named.args)
        if args[0] not in _STARTS:
            return Row(index, function=named.function, failure=_no_arguments(line.number, args, "args"))
        return Row(index, args, named.function)

    def _trimmed(self, index: int, line: Line) -> Row:
        content = line.content.strip()
        if content[0] not in _STARTS:
            return Row(index, failure=_no_arguments(line.number, content, "line"))
        return Row(index, content)

    def _malformed(self, index: int, line: Line, error: Exception) -> Row:
        if isinstance(error, RecursionError):
            return Row(index, failure=_misfit(f"line {line.number}: nested too deeply", line.number))
        if b"NaN" in line.content or b"Infinity" in line.content:
            advice = "NaN and Infinity are not JSON: use null"
        elif not line.ended:
            advice = "the file ends inside this line: it was cut off"
        else:
            advice = self._expected
        if self.name == "-" and index == 0 and _looks_like_csv(line.content):
            advice += "; CSV on standard input needs --format csv"
        reason = str(error).replace("JSON is malformed: ", "")
        return Row(index, failure=_misfit(f"line {line.number} is not JSON: {reason}; {advice}", line.number))


class CsvSource(_ByteSource):
    """CSV with a header: each row's cells by column name, as text. `path` may be `-`.

    Without a `delimiter` it is a comma, or what the first line has in its stead: a semicolon, tab or bar. Raises
    `UsageError` when the file cannot be opened, or, from `rows`, for a header that names no columns.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        delimiter: str | None = None,
        stream: IO[bytes] | None = None,
        compression: str | None = None,
    ) -> None:
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise UsageError(f"delimiter must be one character other than a quote or a line end, got {delimiter!r}")
        super().__init__(path, stream, compression)
        self._delimiter = delimiter
        self._header: list[str] | None = None
        self._text = _CsvLines(self._lines())
        self._reader: Iterator[list[str]] = iter(())

    @property
    def columns(self) -> Sequence[str] | None:  # type: ignore[override]  # read when it is asked for
        """The header, empty where the file is. None: of a pipe it comes with its rows. Raises `UsageError`."""
        return None if self._comes_late and self._header is None else self._read_header()

    def rows(self) -> Iterator[Row]:
        encode = msgspec.json.Encoder().encode
        lines = self._text
        index = 0
        try:
            header = self._read_header()
            while True:
                lines.begin_row()
                try:
                    cells = next(self._reader)
                    if not cells:
                        continue  # a blank line
                    if lines.problem is not None:
                        row = Row(index, failure=lines.problem)
                    elif len(cells) != len(header):
                        row = Row(index, failure=self._ragged(cells, header, lines.row_number))
                    else:
                        args = encode(dict(zip(header, cells, strict=True)))
                        row = Row(index, args, None, True)
                        if len(args) > LINE_BYTES_MAX:
                            row = Row(index, failure=too_large(len(args), "line", lines.row_number))
                except StopIteration:
                    return
                except csv.Error as error:
                    row = Row(index, failure=self._malformed(error, lines))
                self.line_number = lines.row_number
                yield row
                index += 1
        finally:
            self.close()

    def _read_header(self) -> list[str]:
        """Once. Raises `UsageError` for one that names no columns, or cannot be read."""
        if self._header is not None:
            return self._header
        lines = self._text
        try:
            self._reader = csv.reader(lines, delimiter=self._delimiter or lines.guess_delimiter(), strict=True)
            while self._header is None:
                lines.begin_row()
                try:
                    cells = next(self._reader)
                except StopIteration:
                    self._header = []
                except csv.Error as error:
                    raise UsageError(f"{self.name}: {self._malformed(error, lines).message}") from error
                else:
                    self._header = self._check_header(cells, lines) if cells else None
        except BaseException:
            self.close()
            raise
        return self._header

    def _check_header(self, cells: list[str], lines: _CsvLines) -> list[str]:
        if lines.problem is not None:
            raise UsageError(f"{self.name}: {lines.problem.message}")
        names = [cell.strip() for cell in cells]
        where = f"{self.name}:{lines.row_number}"
        expected = "expected a first line with the names of the columns"
        for position, name in enumerate(names, 1):
            if not name:
                pandas = " (pandas writes its index so, without index=False)" if position == 1 else ""
                raise UsageError(f"{where}: column {position} has no name: {expected}{pandas}")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{where}: two columns are named {twice[0]!r}: {expected}, each another")
        if 2 * sum(map(_is_number, names)) >= len(names):
            raise UsageError(f"{where}: the first line looks like data ({shorten_names(names)}): {expected}")
        return names

    def _ragged(self, cells: list[str], header: list[str], number: int) -> CallFailure:
        count = f"{len(cells)} cell" if len(cells) == 1 else f"{len(cells)} cells"
        problem = f"line {number} has {count}, expected {len(header)} ({shorten_names(header)})"
        return _misfit(problem, number)

    def _malformed(self, error: csv.Error, lines: _CsvLines) -> CallFailure:
        if lines.problem is not None:
            return lines.problem
        reason = str(error)
        if "unexpected end of data" in reason:
            reason = "a quoted cell is not closed before the file ends"
        elif "new-line character" in reason:
            reason = "it has a carriage return within: end lines with LF or CRLF, and quote a cell that holds one"
        return _misfit(f"line {lines.row_number} is not CSV: {reason}", lines.row_number)


class _CsvLines:
    """Text lines for the csv module, with the line that the current row began at.

    The module's own line count is of no use here: it forgets where a row of several lines began. A line that is no
    text is handed on as an empty cell, and `problem` says why: raising would end the reader.
    """

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self.row_number = 0
        self.problem: CallFailure | None = None
        self._fresh = True
        self._row_chars = 0

    def guess_delimiter(self) -> str:
        """By the first line that is not blank, which stays to be read."""
        for line in self._lines:
            if line.content.strip():
                self._lines = itertools.chain((line,), self._lines)
                return next((mark for mark in ",;\t|" if mark.encode() in line.content), ",")
        return ","

    def begin_row(self) -> None:
        self._fresh = True
        self.problem = None
        self._row_chars = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        if self._fresh:
            self.row_number = line.number
            self._fresh = False
        content = line.content
        if line.size > LINE_BYTES_MAX:
            self.problem = too_large(line.size, "line", line.number)
            return "?\n"
        if b"\0" in content:
            problem = f"line {line.number} holds a NUL byte: expected CSV text"
            self.problem = self.problem or _misfit(problem, line.number)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            self.problem = self.problem or _not_utf8(line, error)
            text = content.decode(errors="replace")
        self._row_chars += len(text) + 1
        if self._row_chars > _CELL_CHARS_FREE:
            self._admit_row(line)
        return f"{text}\n" if line.ended else text

    def _admit_row(self, line: Line) -> None:
        """Let the csv module take large cells, whose limit it has for the whole process; the row is bounded here.

        Raises `csv.Error` for a row that is too large, which ends the row and not the reader.
        """
        if self._row_chars > LINE_BYTES_MAX:
            problem = (
                f"line {self.row_number} begins a row that exceeds line_bytes_max={LINE_BYTES_MAX} at line"
                f" {line.number}: is a quote not closed?"
            )
            self.problem = self.problem or _misfit(problem, self.row_number, limit=LINE_BYTES_MAX)
            raise csv.Error("the row is too large")
        if csv.field_size_limit() < LINE_BYTES_MAX:
            csv.field_size_limit(LINE_BYTES_MAX)


class IterableSource:
    """Rows from Python values: a mapping is an object, a list or tuple is positional, anything else the one argument.

    A value that JSON cannot hold is that row's failure. What the iterable raises passes through.
    """

    def __init__(
        self, values: Iterable[Any], *, strings: bool = False, name: str = "rows", nan_null: bool = False
    ) -> None:
        if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
            raise UsageError(f"rows must be a list or another iterable of rows, got {type(values).__name__}")
        if hasattr(values, "iterrows") or hasattr(values, "iter_rows"):
            raise UsageError(
                "a DataFrame of this library is iterated by column: pass frame.to_dict('records'), or"
                " frame.iter_rows(named=True)"
            )
        self._values = values
        self._strings = strings
        self._encode: Callable[[Any], bytes] = (
            partial(encode_canonical, nan_null=nan_null)
            if strings
            else partial(encode_crossing, canonical=True, nan_null=nan_null)
        )
        self.name = name
        self.total: int | None = len(values) if isinstance(values, Sized) else None
        self.may_block = not isinstance(values, Sequence)
        self._taken = 0

    @property
    def read_fraction(self) -> float | None:
        return fraction_of(self._taken, self.total)

    def rows(self) -> Iterator[Row]:
        for index, value in enumerate(self._values):
            self._taken = index + 1
            try:
                is_row = type(value) in _ROW_TYPES or isinstance(value, Mapping | list | tuple)
                args = self._encode(value if is_row else [value])
            except ResultMisfit as misfit:
                details = {**misfit.details, "row": index}
                yield Row(index, failure=fail(ErrorKind.SCHEMA, f"row {index}: {misfit.message}", **details))
                continue
            yield Row(index, args, None, self._strings)


FileSource: TypeAlias = "JsonlSource | CsvSource | ParquetSource"
"""Rows of a file or a pipe."""


def open_source(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    named: bool = False,
    delimiter: str | None = None,
) -> FileSource:
    """The source for a file, by its suffixes or by `format`; `-` is standard input, JSONL.

    Formats are `jsonl`, `csv`, `tsv`, `json` (one array) and `parquet` (a file, or a folder of them); all but the last
    may be compressed: `csv.gz`, `jsonl.zst`. Raises `UsageError` for a file that cannot be read, or whose format is not
    known.
    """
    text = str(path)
    chosen, compression = split_format(Path(text).name if format is None else f".{format}")
    if format is None and text == "-":
        chosen = "jsonl"
    elif format is None and _is_folder_of_parquet(Path(text)):
        chosen, compression = "parquet", None
    if delimiter is not None and chosen not in {"csv", "tsv"}:
        raise UsageError(f"a delimiter is for CSV, but {text} is read as {_CALLED.get(chosen, chosen)}")
    if named and chosen in {"csv", "tsv", "parquet"}:
        advice = "give the target as FILE.py:FUNCTION"
        raise UsageError(f"{text}: rows of a {_CALLED[chosen]} file name no function: {advice}")
    if chosen in {"jsonl", "ndjson"}:
        return JsonlSource(path, named=named, compression=compression)
    if chosen == "json":
        from callyard.worker.json_array import JsonArraySource  # which builds on this module

        return JsonArraySource(path, named=named, compression=compression)
    if chosen in {"csv", "tsv"}:
        return CsvSource(path, delimiter=delimiter or ("\t" if chosen == "tsv" else None), compression=compression)
    if chosen == "parquet" and compression is None:
        from callyard.worker.tables import ParquetSource

        return ParquetSource(path)
    if format is not None:
        raise UsageError(f"unknown format {format!r}: expected {FORMATS}")
    if text != "-":
        check_readable(Path(text))
    known = f"expected {FORMATS} as its suffix, or the format by --format (in Python: format=…)"
    raise UsageError(f"{text}: unknown format {chosen!r}: {known}" if chosen else f"{text} has no suffix: {known}")


def _is_folder_of_parquet(path: Path) -> bool:
    try:
        return path.is_dir() and any(path.glob("*.parquet"))
    except (OSError, ValueError):
        return False  # who opens it says why


FORMATS: Final = "jsonl (or ndjson), csv, tsv, json or parquet, text also with .gz or .zst after it"
_CALLED: Final = {"jsonl": "JSON Lines", "ndjson": "JSON Lines", "csv": "CSV", "tsv": "CSV", "parquet": "Parquet"}


def open_rows(rows: Iterable[Any], *, nan_null: bool = False) -> IterableSource | FrameSource:
    """The source for rows in memory: a pandas or Polars frame, an Arrow table, or any iterable of rows.

    `nan_null`: NaN and infinities are null, as they always are in a frame.

    Raises `UsageError` for what is none of these.
    """
    from callyard.worker.tables import FrameSource, is_frame

    return FrameSource(rows) if is_frame(rows) else IterableSource(rows, nan_null=nan_null)


def _standard_input() -> IO[bytes]:
    stream = sys.stdin
    if stream is None:
        raise UsageError("standard input is closed: give a file")
    # Unbuffered: a thread that waits in a buffered read holds its lock, and the interpreter aborts at exit for it.
    return cast(IO[bytes], getattr(stream.buffer, "raw", stream.buffer))


def check_readable(path: Path) -> os.stat_result:
    expected = "expected a file of rows, such as rows.jsonl or rows.csv"
    try:
        info = path.stat()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: {expected}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(info.st_mode):
        raise UsageError(f"{path} is a folder: {expected}")
    return info


def _open(path: Path) -> tuple[IO[bytes], int | None]:
    """The open file and its size; None for what has none, such as a named pipe."""
    info = check_readable(path)
    try:
        stream = path.open("rb", buffering=0)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return stream, info.st_size if stat.S_ISREG(info.st_mode) else None


def _check_magic(name: str, chunk: bytes) -> None:
    """Refuse a file whose every line would fail for one reason."""
    if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise UsageError(f"{name} is UTF-16 or UTF-32 text: save it as UTF-8")
    for magic, suffix in ((b"\x1f\x8b", "gz"), (b"\x28\xb5\x2f\xfd", "zst")):
        if chunk.startswith(magic):
            raise UsageError(f"{name} is compressed: let its name end so, or say it with --format jsonl.{suffix}")
    if chunk.startswith((b"BZh", b"\xfd7zXZ", b"PK\x03\x04")):
        raise UsageError(f"{name} is compressed, and neither by gzip nor by zstd: unpack it first")
    if chunk.startswith(b"PAR1"):
        raise UsageError(f"{name} is Parquet: let its name end in .parquet, or say --format parquet")


def _first_line(content: bytes, size: int, *, ended: bool = True) -> Line:
    mark = len(BOM) if content.startswith(BOM) else 0
    return Line(1, content[mark:], mark, size - mark, ended)


def _misfit(problem: str, line: int, **details: Any) -> CallFailure:
    return fail(ErrorKind.SCHEMA, problem, line=line, **details)


def fraction_of(done: int, total: int | None) -> float | None:
    """0..1; None: the total is not known."""
    if total is None:
        return None
    return min(1.0, done / total) if total else 1.0


def too_large(size: int, place: str, number: int) -> CallFailure:
    problem = f"{place} {number} of {size} bytes exceeds line_bytes_max={LINE_BYTES_MAX}"
    details: dict[str, Any] = {place: number, "limit": LINE_BYTES_MAX, "size": size}
    return fail(ErrorKind.SCHEMA, problem, **details)


def _not_utf8(line: Line, error: UnicodeDecodeError) -> CallFailure:
    offset = line.start + error.start
    problem = f"line {line.number} is not UTF-8: byte 0x{line.content[error.start]:02x} at byte {offset} of the file"
    return _misfit(problem, line.number, byte=offset)


def _no_arguments(line: int, content: bytes, what: str) -> CallFailure:
    shown = content[:40].decode(errors="replace")
    problem = f"line {line}: expected a JSON object (by name) or array (by position)"
    return _misfit(f"{problem}{' in args' if what == 'args' else ''}, got {shown}", line)


def _looks_like_csv(line: bytes) -> bool:
    """Whether a first line looks like the header of a CSV file: no JSON, and of several columns or one name."""
    text = line.strip()
    return text[:1] not in _STARTS and (any(mark in text for mark in (b",", b";", b"\t")) or text.isalpha())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def shorten_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown}, …" if len(names) > _SHOWN_NAMES else shown
