"""Rows from files and from Python values; a line that is no row is that row's failure."""

from __future__ import annotations

import csv
import gzip
import io
import os
import stat
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from callyard.errors import ErrorKind, Outcome, UsageError
from callyard.worker import builders
from callyard.worker.builders import (
    CHUNK_BYTES,
    LINE_BYTES_MAX,
    CallSource,
    CsvSource,
    IterableSource,
    JsonlSource,
    Row,
    open_source,
)


class Trickle(io.RawIOBase):
    """A pipe that gives a few bytes at a time."""

    def __init__(self, content: bytes, step: int) -> None:
        self._content = content
        self._step = step

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        part, self._content = self._content[: self._step], self._content[self._step :]
        return part


def jsonl(content: bytes, *, named: bool = False, step: int = CHUNK_BYTES) -> list[Row]:
    return list(JsonlSource("rows.jsonl", named=named, stream=stream(content, step)).rows())


def table(content: bytes, *, delimiter: str | None = None, step: int = CHUNK_BYTES) -> list[Row]:
    return list(CsvSource("rows.csv", delimiter=delimiter, stream=stream(content, step)).rows())


def stream(content: bytes, step: int) -> IO[bytes]:
    return Trickle(content, step)  # type: ignore[return-value]


def failure(row: Row) -> tuple[str, dict[str, Any]]:
    assert row.failure is not None
    assert (row.failure.kind, row.failure.attempts, row.failure.outcome) == (ErrorKind.SCHEMA, 0, Outcome.NOT_RUN)
    assert row.args == b""
    return row.failure.message, dict(row.failure.details)


def decoded(rows: Iterable[Row]) -> list[Any]:
    return [msgspec.json.decode(row.args) if row.failure is None else row.failure.message for row in rows]


# --- JSON Lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 7, CHUNK_BYTES])
def test_each_line_is_a_row_as_it_was_sent(step: int) -> None:
    content = b'{"a": 1}\n[1, 2]\r\n\n   \n\t{"b":"\xc3\xa9"}  \n{"c":3}'
    assert jsonl(content, step=step) == [
        Row(0, b'{"a": 1}'),
        Row(1, b"[1, 2]"),
        Row(2, b'{"b":"\xc3\xa9"}'),
        Row(3, b'{"c":3}'),
    ]


@pytest.mark.parametrize("step", [1, 2, CHUNK_BYTES])
def test_a_byte_order_mark_is_taken(step: int) -> None:
    assert jsonl(b'\xef\xbb\xbf{"a":1}\n[]\n', step=step) == [Row(0, b'{"a":1}'), Row(1, b"[]")]
    assert jsonl(b"\xef\xbb\xbf", step=step) == []
    assert jsonl(b"\xef\xbb\xbf[1]", step=step) == [Row(0, b"[1]")]


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\r\n", b"  \n\t\n"])
def test_an_empty_file_has_no_rows(content: bytes) -> None:
    assert jsonl(content) == []


NESTED = b"[" * 200_000


@pytest.mark.requirement("X84")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"a":1',
            "line 2 is not JSON: Input data was truncated; expected one whole JSON object or array on each line",
        ),
        (b"{'a':1}", "line 2 is not JSON: expected '\"' (byte 1); expected one whole JSON object"),
        (b'{"a":1} {"b":2}', "line 2 is not JSON: trailing characters (byte 9)"),
        (b'{"a":NaN}', "line 2 is not JSON: invalid character (byte 5); NaN and Infinity are not JSON: use null"),
        (b"[-Infinity]", "NaN and Infinity are not JSON: use null"),
        (b"5", "line 2: expected a JSON object (by name) or array (by position), got 5"),
        (b" null ", "line 2: expected a JSON object (by name) or array (by position), got null"),
        (b'"text"', 'line 2: expected a JSON object (by name) or array (by position), got "text"'),
        (b"hello", "line 2 is not JSON"),
        (NESTED, "line 2: nested too deeply"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_line_is_its_rows_failure(line: bytes, message: str) -> None:
    rows = jsonl(b"[1]\n" + line + b"\n[3]\n")
    assert [row.index for row in rows] == [0, 1, 2]
    assert (rows[0].args, rows[2].args) == (b"[1]", b"[3]")
    text, details = failure(rows[1])
    assert message in text
    assert details == {"line": 2}


def test_line_numbers_count_blank_lines_and_indexes_do_not() -> None:
    rows = jsonl(b"\n\n[1]\n\nbad\n")
    assert [row.index for row in rows] == [0, 1]
    assert failure(rows[1])[1] == {"line": 5}


def test_a_truncated_last_line_says_so() -> None:
    rows = jsonl(b'{"a":1}\n{"a":2,"b')
    assert failure(rows[1]) == (
        "line 2 is not JSON: Input data was truncated; the file ends inside this line: it was cut off",
        {"line": 2},
    )


@pytest.mark.parametrize("step", [1, 5, CHUNK_BYTES])
@pytest.mark.parametrize(("mark", "offset"), [(b"", 0), (b"\xef\xbb\xbf", 3)])
def test_a_line_that_is_not_utf8_names_the_byte(step: int, mark: bytes, offset: int) -> None:
    content = mark + b'{"a":"ok"}\n\n{"a":"caf\xe9"}\n["\xc3\xa9"]\n'
    rows = jsonl(content, step=step)
    position = 21 + offset
    assert content[position : position + 1] == b"\xe9"
    assert failure(rows[1]) == (
        f"line 3 is not UTF-8: byte 0xe9 at byte {position} of the file",
        {"line": 3, "byte": position},
    )
    assert rows[2].args == b'["\xc3\xa9"]'
    assert failure(jsonl(mark + b"\xff\n", step=step)[0])[1] == {"line": 1, "byte": offset}


@pytest.mark.parametrize("size", [LINE_BYTES_MAX, LINE_BYTES_MAX + 1])
def test_the_longest_line(size: int) -> None:
    line = b'["' + b"x" * (size - 4) + b'"]'
    row, after = jsonl(line + b"\n[2]\n")
    assert after == Row(1, b"[2]")
    if size == LINE_BYTES_MAX:
        assert row == Row(0, line)
    else:
        assert failure(row) == (
            f"line 1 of {size} bytes exceeds line_bytes_max={LINE_BYTES_MAX}",
            {"line": 1, "limit": LINE_BYTES_MAX, "size": size},
        )


def test_a_line_of_a_hundred_megabytes_is_never_held(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    size = 100_000_000
    with file.open("wb") as out:
        out.write(b"[1]\n")
        out.truncate(4 + size)  # a line of NUL bytes, without the disk
        out.seek(4 + size)
        out.write(b"\n[3]\n")
    source = JsonlSource(file)
    tracemalloc.start()
    try:
        rows = list(source.rows())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row.args for row in rows] == [b"[1]", b"", b"[3]"]
    assert failure(rows[1])[1] == {"line": 2, "limit": LINE_BYTES_MAX, "size": size}
    assert peak < 3 * LINE_BYTES_MAX


LINE = b'["' + b"x" * 1_019 + b'"]\n'


def test_memory_does_not_grow_with_the_file() -> None:
    class Endless(io.RawIOBase):
        left = 200

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            return LINE * (CHUNK_BYTES // 1_024) if self.left >= 0 else b""

    source = JsonlSource("rows.jsonl", stream=Endless())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        count = sum(1 for _ in source.rows())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 200 * (CHUNK_BYTES // 1_024)
    assert peak < 8 * CHUNK_BYTES


def test_rows_that_name_their_function() -> None:
    rows = jsonl(
        b'{"function":"f","args":{"a": 1}}\n{"args":[1],"function":"g"}\n{"function":"f"}\n{"function":5,"args":[]}\n'
        b'{"function":"f","args":5}\n{"function":"f","args":[],"more":1}\n[1]\n{"function":"caf\xe9","args":[]}\n{\n',
        named=True,
    )
    assert rows[:2] == [Row(0, b'{"a": 1}', "f"), Row(1, b"[1]", "g")]
    expected = 'expected {"function": name, "args": object or array} on each line; got '
    assert failure(rows[2])[0] == f'line 3: {expected}{{"function":"f"}}'
    assert failure(rows[3])[0] == f'line 4: {expected}{{"function":5,"args":[]}}'
    assert failure(rows[4]) == (
        "line 5: expected a JSON object (by name) or array (by position) in args, got 5",
        {"line": 5},
    )
    assert failure(rows[5])[0] == f'line 6: {expected}{{"function":"f","args":[],"more":1}}'
    assert failure(rows[6])[0] == f"line 7: {expected}[1]"
    assert failure(rows[7])[0].startswith("line 8 is not UTF-8")
    assert failure(rows[8])[0].startswith("line 9 is not JSON")


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_tells_how_far_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"[1]\n" * (2 * CHUNK_BYTES // 4))
    source: CallSource = JsonlSource(file)
    assert (source.name, source.total, source.may_block, source.read_fraction) == (str(file), None, False, 0.0)
    rows = source.rows()
    next(rows)
    assert source.read_fraction == 0.5
    assert sum(1 for _ in rows) == 2 * CHUNK_BYTES // 4 - 1
    assert source.read_fraction == 1.0


def test_leaving_early_closes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"[1]\n[2]\n")
    source = JsonlSource(file)
    rows = source.rows()
    assert isinstance(rows, Iterator)
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert source._stream.closed


def test_an_empty_file_is_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.touch()
    source = CsvSource(file)
    assert list(source.rows()) == []
    assert source.read_fraction == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]\n".encode("utf-16"), "is UTF-16 or UTF-32 text: save it as UTF-8"),
        ("[1]\n".encode("utf-32"), "is UTF-16 or UTF-32 text"),
        (b"\x1f\x8b\x08\x00", r"is compressed: let its name end so, or say it with --format jsonl\.gz"),
        (b"\x28\xb5\x2f\xfdrest", r"is compressed: let its name end so, or say it with --format jsonl\.zst"),
        (b"PK\x03\x04rest", "is compressed, and neither by gzip nor by zstd: unpack it first"),
        (b"PAR1\x15\x04", r"is Parquet: let its name end in \.parquet"),
    ],
)
def test_a_file_of_another_kind_is_refused_whole(tmp_path: Path, content: bytes, message: str) -> None:
    for name in ("rows.jsonl", "rows.csv"):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            list(open_source(file).rows())


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.jsonl does not exist: expected a file of rows"):
        open_source(tmp_path / "gone.jsonl")
    with pytest.raises(UsageError, match=r"gone\.txt does not exist"):
        open_source(tmp_path / "gone.txt")
    folder = tmp_path / "rows.csv"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"rows\.csv is a folder: expected a file of rows"):
        open_source(folder)
    file = tmp_path / "rows.txt"
    file.touch()
    with pytest.raises(
        UsageError, match=r"rows\.txt: unknown format 'txt': expected jsonl \(or ndjson\), csv, tsv.*--format"
    ):
        open_source(file)
    with pytest.raises(UsageError, match=r"under/rows\.jsonl: Not a directory"):
        open_source(tmp_path / "rows.txt" / "under" / "rows.jsonl")
    bare = tmp_path / "rows"
    bare.touch()
    with pytest.raises(UsageError, match="has no suffix"):
        open_source(bare)
    packed = tmp_path / "rows.gz"
    packed.touch()
    with pytest.raises(UsageError, match=r"rows\.gz has no suffix: expected jsonl"):
        open_source(packed)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read anything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.touch(mode=0o000)
    with pytest.raises(UsageError, match="Permission denied"):
        open_source(file)


def test_a_disk_that_fails_is_a_usage_error() -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(UsageError, match=r"cannot read rows\.jsonl: Input/output error"):
        list(JsonlSource("rows.jsonl", stream=Broken()).rows())  # type: ignore[arg-type]


def test_the_suffix_or_the_format_chooses(tmp_path: Path) -> None:
    content = {
        "a.jsonl": b"[1]\n",
        "a.NDJSON": b"[1]\n",
        "a.csv": b"x\n1\n",
        "a.tsv": b"x\ty\n1\t2\n",
        "a.dat": b"x;y\n1;2\n",
    }
    for name, text in content.items():
        (tmp_path / name).write_bytes(text)
    assert decoded(open_source(tmp_path / "a.jsonl").rows()) == [[1]]
    assert decoded(open_source(str(tmp_path / "a.NDJSON")).rows()) == [[1]]
    assert decoded(open_source(tmp_path / "a.csv").rows()) == [{"x": "1"}]
    assert decoded(open_source(tmp_path / "a.tsv").rows()) == [{"x": "1", "y": "2"}]
    assert decoded(open_source(tmp_path / "a.dat", "csv", delimiter=";").rows()) == [{"x": "1", "y": "2"}]
    with pytest.raises(UsageError, match="unknown format 'xml'"):
        open_source(tmp_path / "a.csv", "xml")
    with pytest.raises(UsageError, match="a delimiter is for CSV"):
        open_source(tmp_path / "a.jsonl", delimiter=";")
    with pytest.raises(UsageError, match=r"rows of a CSV file name no function: give the target as FILE\.py:FUNCTION"):
        open_source(tmp_path / "a.csv", named=True)
    with pytest.raises(UsageError, match="delimiter must be one character"):
        open_source(tmp_path / "a.csv", delimiter="||")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[1]\n[2]\n")))
    source = open_source("-")
    assert (source.name, source.may_block, source.read_fraction) == ("-", True, None)
    assert decoded(source.rows()) == [[1], [2]]
    assert not sys.stdin.closed
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\n1\n")))
    assert decoded(open_source("-", "csv").rows()) == [{"x": "1"}]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        open_source("-")


def test_a_pipe_gives_its_rows_as_they_come() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        rows = JsonlSource("-", stream=reader).rows()
        writer.write(b"[1]\n[2]\n[3")
        assert next(rows) == Row(0, b"[1]")
        assert next(rows) == Row(1, b"[2]")
        writer.write(b"]\n")
        assert next(rows) == Row(2, b"[3]")


def test_unpacking_may_take_long_and_names_are_known_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    source = open_source(path)
    assert isinstance(source, CsvSource)
    assert source.may_block
    assert source.columns == ["a", "b"]
    source.close()


def test_a_named_pipe_may_block(tmp_path: Path) -> None:
    fifo = tmp_path / "rows.jsonl"
    os.mkfifo(fifo)
    keep_open = os.open(fifo, os.O_RDWR)  # so that neither side waits for the other to open it
    try:
        assert stat.S_ISFIFO(fifo.stat().st_mode)
        source = JsonlSource(fifo)
        assert (source.may_block, source.read_fraction) == (True, None)
        os.write(keep_open, b"[1]\n")
        rows = source.rows()
        assert next(rows).args == b"[1]"
        rows.close()  # type: ignore[attr-defined]
    finally:
        os.close(keep_open)


# --- CSV ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, CHUNK_BYTES])
def test_cells_are_text_by_column(step: int) -> None:
    content = (
        b'\xef\xbb\xbforigin, km ,note\r\nJFK,5,"a ""b"", c"\r\n\r\n LAX ,,\nSFO,7,"two\nlines\r\n"\n"\xc3\xa9",1,x'
    )
    rows = table(content, step=step)
    assert all(row.strings and row.failure is None and row.function is None for row in rows)
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert decoded(rows) == [
        {"origin": "JFK", "km": "5", "note": 'a "b", c'},
        {"origin": " LAX ", "km": "", "note": ""},
        {"origin": "SFO", "km": "7", "note": "two\nlines\r\n"},
        {"origin": "é", "km": "1", "note": "x"},
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"origin,km\n", b"origin,km"])
def test_no_rows(content: bytes) -> None:
    assert table(content) == []


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_another_delimiter_is_seen_in_the_header(mark: str) -> None:
    content = f"\norigin{mark}km\nJFK{mark}1,5\n".encode()
    assert decoded(table(content)) == [{"origin": "JFK", "km": "1,5"}]
    assert decoded(table(b"one;two\n1;2\n", delimiter=",")) == [{"one;two": "1;2"}]


@pytest.mark.requirement("X84")
@pytest.mark.parametrize(
    ("line", "message", "number"),
    [
        (b"JFK", "line 3 has 1 cell, expected 2 (origin, km)", 3),
        (b"JFK,5,7", "line 3 has 3 cells, expected 2 (origin, km)", 3),
        (b"JFK,caf\xe9", "line 3 is not UTF-8: byte 0xe9 at byte 23 of the file", 3),
        (b"JFK,\0", "line 3 holds a NUL byte: expected CSV text", 3),
        (b'"JFK"x,5', "line 3 is not CSV: ',' expected after '\"'", 3),
        (b"JFK,5\r6", "line 3 is not CSV: it has a carriage return within: end lines with LF or CRLF", 3),
        (
            b'JFK,"' + (b"x" * 999_999 + b"\n") * (LINE_BYTES_MAX // 1_000_000) + b"x" * 1_000_000,
            f"line 3 begins a row that exceeds line_bytes_max={LINE_BYTES_MAX} at line",
            3,
        ),
        (b"JFK," + b"x" * (LINE_BYTES_MAX + 1), f"line 3 of {LINE_BYTES_MAX + 5} bytes exceeds line_bytes_max", 3),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_row_is_its_own_failure(line: bytes, message: str, number: int) -> None:
    rows = table(b"origin,km\nSFO,1\n" + line + b"\nLAX,2\n")
    assert [row.index for row in rows] == [0, 1, 2]
    assert decoded([rows[0], rows[2]]) == [{"origin": "SFO", "km": "1"}, {"origin": "LAX", "km": "2"}]
    text, details = failure(rows[1])
    assert text.startswith(message)
    assert details["line"] == number


@pytest.mark.parametrize("cell", [b"x" * 10_000_000, b'"' + b"x\n" * 100_000 + b'"'], ids=["one line", "many lines"])
def test_a_cell_may_be_as_large_as_a_line(cell: bytes) -> None:
    before = csv.field_size_limit(131_072)  # as Python begins with
    try:
        rows = table(b"origin,km\nJFK," + cell + b"\nLAX,2\n")
    finally:
        csv.field_size_limit(max(before, csv.field_size_limit()))
    assert decoded(rows) == [
        {"origin": "JFK", "km": cell.strip(b'"').decode()},
        {"origin": "LAX", "km": "2"},
    ]


def test_a_row_that_never_ends_is_bounded() -> None:
    """Each of its cells is small, and each line goes on with the row that the one before began."""

    class Endless(io.RawIOBase):
        left = 200

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            if self.left == 199:
                return b'origin,km\n"x'
            return (b'\n","' + b"x" * 1_000) * (CHUNK_BYTES // 1_004) if self.left >= 0 else b""

    tracemalloc.start()
    try:
        rows = [row for row in CsvSource("rows.csv", stream=Endless()).rows() if row.failure is not None]  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert failure(rows[0])[0].startswith(f"line 2 begins a row that exceeds line_bytes_max={LINE_BYTES_MAX}")
    assert len(rows) >= 3
    assert peak < 6 * LINE_BYTES_MAX


def test_a_row_of_several_lines_is_named_by_its_first() -> None:
    rows = table(b'origin,km\n"a\nb\nc",1,2\nx,1\n"d\n\xff",1\n')
    assert failure(rows[0]) == ("line 2 has 3 cells, expected 2 (origin, km)", {"line": 2})
    assert decoded(rows[1:2]) == [{"origin": "x", "km": "1"}]
    assert failure(rows[2])[0].startswith("line 7 is not UTF-8")


def test_a_quote_that_is_not_closed_before_the_end() -> None:
    rows = table(b'origin,km\nJFK,1\n"LAX,2\nSFO,3\n')
    assert len(rows) == 2
    assert failure(rows[1]) == ("line 3 is not CSV: a quoted cell is not closed before the file ends", {"line": 3})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b",origin,km\n0,JFK,3\n", r"column 1 has no name: .* \(pandas writes its index so, without index=False\)$"),
        (b"origin,,km\n1,2,3\n", r"rows\.csv:1: column 2 has no name: expected a first line with the names"),
        (b"\n\norigin,km,origin\n", r"rows\.csv:3: two columns are named 'origin'"),
        (b"2013,1,JFK\n2014,2,LAX\n", r"rows\.csv:1: the first line looks like data \(2013, 1, JFK\)"),
        (b"5\n6\n", r"rows\.csv:1: the first line looks like data \(5\)"),
        (b'"origin"x,km\n1,2\n', r"rows\.csv: line 1 is not CSV"),
        (b"caf\xe9,km\n1,2\n", r"rows\.csv: line 1 is not UTF-8: byte 0xe9 at byte 3"),
        (b'"origin,km\n1,2\n', r"rows\.csv: line 1 is not CSV: a quoted cell is not closed"),
        (b"a\0b,c\n1,2\n", r"rows\.csv: line 1 holds a NUL byte"),
    ],
)
def test_a_header_that_names_no_columns_ends_it(content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        table(content)


def test_many_columns_are_not_all_listed() -> None:
    names = ",".join(f"c{n}" for n in range(30)).encode()
    assert failure(table(names + b"\n1\n")[0])[0].endswith("expected 30 (c0, c1, c2, c3, c4, c5, c6, c7, …)")


# --- Python values --------------------------------------------------------------------------------------------------


@dataclass
class Leg:
    origin: str
    km: float | None = None


def test_values_become_rows() -> None:
    values = [{"b": 1, "a": 2}, [1, "x"], (1,), 5, "text", None, Leg("JFK"), {"at": {3, 1}}]
    source: CallSource = IterableSource(values)
    assert (source.total, source.may_block, source.read_fraction) == (8, False, 0.0)
    assert [row.args for row in source.rows()] == [
        *(b'{"a":2,"b":1}', b'[1,"x"]', b"[1]", b"[5]", b'["text"]', b"[null]"),
        *(b'[{"origin":"JFK","km":null}]', b'{"at":[1,3]}'),
    ]
    assert source.read_fraction == 1.0


def test_texts_are_marked_as_such() -> None:
    assert list(IterableSource([{"a": "1"}], strings=True).rows()) == [Row(0, b'{"a":"1"}', None, True)]


def test_a_value_that_json_cannot_hold_is_its_rows_failure() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    rows = list(IterableSource([{"a": 1}, {"a": [float("nan")]}, object(), cyclic, ["\ud800"], {(1,): 2}, [2]]).rows())
    assert [row.failure is None for row in rows] == [True, False, False, False, False, False, True]
    assert failure(rows[1]) == (
        "row 1: /a/0: nan is not JSON: use None, or text, instead; nan='null' makes it null",
        {"pointer": "/a/0", "type": "float", "row": 1},
    )
    assert failure(rows[2])[0].startswith("row 2: /0: object has no JSON form")
    assert failure(rows[3])[0].startswith("row 3: /0: the value holds itself")
    assert failure(rows[4])[0].startswith("row 4: /0: text with a lone surrogate")
    assert failure(rows[5])[0] == "row 5: a key must be text or a number, got tuple"


@pytest.mark.requirement("X95")
def test_a_value_may_be_larger_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builders, "LINE_BYTES_MAX", 100)
    (row,) = IterableSource(["x" * 97]).rows()
    assert row.failure is None
    assert len(row.args) == 101


def test_a_generator_is_read_on_demand_and_its_error_passes() -> None:
    taken: list[int] = []

    def values() -> Iterator[int]:
        for number in range(3):
            taken.append(number)
            yield number
        raise LookupError("no more")

    source = IterableSource(values())
    assert (source.total, source.may_block, source.read_fraction) == (None, True, None)
    rows = source.rows()
    next(rows)
    assert taken == [0]
    next(rows), next(rows)
    with pytest.raises(LookupError, match="no more"):
        next(rows)


class Frame:
    iterrows = None

    def __iter__(self) -> Iterator[str]:
        return iter(("origin", "km"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("rows.csv", "rows must be a list or another iterable of rows, got str"),
        (b"[1]", "got bytes"),
        ({"a": 1}, "got dict"),
        (5, "got int"),
        (None, "got NoneType"),
        (Frame(), r"a DataFrame of this library is iterated by column: pass frame\.to_dict\('records'\)"),
    ],
)
def test_what_is_no_list_of_rows(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        IterableSource(values)
