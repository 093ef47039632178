"""Results as Parquet: a folder in which each batch of them is a part, a file of its own.

A part is there whole or not at all: it is written under another name, then renamed. All parts have the same columns,
whatever the batch holds, so that any reader takes the folder as one table:

    index, [id, args], ok, output, error{kind, message, attempts, outcome, details}, output_json, [printed, cut_bytes]

`output` has the type of the function's result as its JSON Schema says it; where that is no one type, it is JSON text. A
value that does not fit its column is in `output_json` as text, and `output` is null: nothing is lost. `id`, `args` and
`error.details` are JSON text, but an `id` that is text stands as it is. Source: call-execution X43, X87.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from callyard.errors import CallFailure, ErrorKind, Outcome
from callyard.functions.packing import NotReadable, decode_json
from callyard.scheduler import CallResult
from callyard.worker.disk import DISK, Disk
from callyard.worker.kept import read_result, refuse_edited
from callyard.worker.outputs import (
    Existing,
    OutputError,
    Place,
    error_fields,
    format_line_with_printed,
    refuse_to_replace,
)
from callyard.worker.results import Printed, ToldResult, echo_of, printed_of
from callyard.worker.tables import import_arrow

PART_ROWS: Final = 8_192
PART_BYTES: Final = 16 * 1024 * 1024
PART_AFTER_S: Final = 30.0
"""Slow results are on disk after so long, though their part is small."""
_PART: Final = re.compile(r"part-(\d{6,12})\.parquet")
_LEVELS_MAX: Final = 32
_JSON: Final = b"callyard:json"
"""Beside the column `output` whose text is JSON."""
_ENCODE: Final = msgspec.json.Encoder(enc_hook=str).encode
_ECHO: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ParquetOutput:
    """One row per result, in parts. Needs pyarrow.

    `repeated`: what results repeat of their rows, `id` and `args`. With `existing` "overwrite" the parts that are there
    go when the first new one is written; with "append" theirs are the numbers before. `start`, the number of a part and
    the row it begins with, goes before `existing`: the parts from there on go. Raises `OutputError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        output_schema: bytes = b"{}",
        *,
        existing: Existing = "refuse",
        source: str | os.PathLike[str] | None = None,
        with_printed: bool = False,
        repeated: Sequence[str] = (),
        start: Place | None = None,
        disk: Disk = DISK,
    ) -> None:
        self._arrow = import_arrow("pyarrow", "writing Parquet")
        self._parquet = import_arrow("pyarrow.parquet", "writing Parquet")
        self.name = str(path)
        self.lines = 0
        """Results on disk."""
        self._folder = Path(path)
        self._disk = disk
        old = check_folder(self._folder, existing if start is None else "append", source)
        self._to_remove = old if existing == "overwrite" else []
        self._next = 1 + max((_number(part) for part in old), default=-1) if existing == "append" else 0
        self._written_row = 0
        """The row behind the last one that is in a part."""
        if start is not None:
            self._next, self._written_row = start
            self._to_remove = [part for part in old if _number(part) >= self._next]
        self._with_printed = with_printed
        self._types = _Types(self._arrow, output_schema)
        self._echoes = tuple(repeated)
        self._schema = self._types.schema_of_results(repeated, with_printed=with_printed)
        self._results: list[CallResult] = []
        self._bytes = 0
        self._written_at_s = time.monotonic()
        self._closed = False
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise self._problem(error) from error

    def write(self, results: Sequence[CallResult]) -> None:
        for result in results:
            self._results.append(result)
            self._bytes += len(result.output or b"") + len(echo_of(result)) + 256
            if len(self._results) >= PART_ROWS or self._bytes >= PART_BYTES:
                self._write_part()
        self.flush()

    def write_kept(self, lines: Sequence[bytes]) -> None:
        self.write([read_result(line) for line in lines])

    @property
    def place(self) -> Place:
        return self._next, self._written_row

    def sync(self) -> None:
        """Each part is on disk when it has its name."""

    def flush(self) -> None:
        """A part for a few results would be a file for each: it is written when they waited for long."""
        if self._results and time.monotonic() - self._written_at_s >= PART_AFTER_S:
            self._write_part()

    def close(self) -> None:
        if not self._closed:
            self.drain()
            self._closed = True

    def drain(self) -> None:
        if self._results or not self._next:
            self._write_part()  # of no results too: readers find the columns
        else:
            self._remove_old()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            if self._results:
                with contextlib.suppress(OutputError):
                    self._write_part()

    def _write_part(self) -> None:
        results, self._results, self._bytes = self._results, [], 0
        table = self._arrow.Table.from_pydict(self._columns(results), schema=self._schema)
        part = _part(self._folder, self._next)
        partial = part.with_name(f".{part.name}.partial")
        try:
            self._parquet.write_table(table, partial, compression="zstd")
            self._disk.sync_path(partial)
            self._remove_old()
            self._disk.replace(partial, part)
        except (OSError, self._arrow.ArrowException) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise self._problem(error) from error
        self._next += 1
        self.lines += len(results)
        if results:
            self._written_row = results[-1].index + 1
        self._written_at_s = time.monotonic()

    def _remove_old(self) -> None:
        """The last one first: what is left is always a run's beginning."""
        old, self._to_remove = self._to_remove, []
        for path in reversed(old):
            self._disk.remove(path)

    def _columns(self, results: Sequence[CallResult]) -> dict[str, Any]:
        outputs, texts = self._types.place([result.output for result in results])
        columns: dict[str, Any] = {
            "index": [result.index for result in results],
            "ok": [result.failure is None for result in results],
            "output": outputs,
            "error": [None if result.failure is None else _error_of(result) for result in results],
            "output_json": texts,
        }
        echoes = [_ECHO.decode(b"{%b}" % echo_of(result)) for result in results] if self._echoes else []
        for name in self._echoes:
            columns[name] = [_text_of(echo.get(name)) for echo in echoes]
        if self._with_printed:
            told = [printed_of(result) for result in results]
            columns["printed"] = [None if printed is None else printed.text for printed in told]
            columns["cut_bytes"] = [0 if printed is None else printed.cut_bytes for printed in told]
        return columns

    def _problem(self, error: Exception) -> OutputError:
        reason = getattr(error, "strerror", None) or str(error)
        return OutputError(
            f"cannot write {self.name}: {reason}; it holds {self.lines} results, each part whole: make room, or write"
            " elsewhere"
        )


def check_folder(path: Path, existing: Existing, source: str | os.PathLike[str] | None) -> list[Path]:
    """The parts that are there. Raises `OutputError` for a place that must not be written."""
    if source is not None and str(source) != "-" and path.exists() and os.path.exists(source):
        inner = Path(source).resolve()
        if path.resolve() in (inner, inner.parent):
            raise OutputError(f"{path} is the input too, or holds it: write elsewhere")
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent} for {path.name}: make it first")
    if not path.exists():
        return []
    if not path.is_dir():
        raise OutputError(f"{path} is a file: results as Parquet are a folder of parts: remove it, or name another")
    found = sorted(path.iterdir())
    parts = [entry for entry in found if _PART.fullmatch(entry.name)]
    others = [entry for entry in found if entry not in parts and not entry.name.startswith(".")]
    if others:
        raise OutputError(f"{path} holds {others[0].name}, which is no part of results: write to another folder")
    if parts and existing == "refuse":
        raise OutputError(refuse_to_replace(path, f"{path} is not empty", "its parts", "folder"))
    return parts


def has_part(path: Path, number: int) -> bool:
    return _part(path, number).exists()


def read_parts(
    path: Path, first: int, end: int, output_schema: bytes, repeated: Sequence[str], *, with_printed: bool
) -> Iterator[tuple[int, bytes, bool]]:
    """The results in the parts from a number up to another: the number, the result's line, and whether the part has the
    columns that a `ParquetOutput` of these arguments gives it. They are read as the part says. Raises UsageError.
    """
    arrow = import_arrow("pyarrow", "reading Parquet")
    parquet = import_arrow("pyarrow.parquet", "reading Parquet")
    schema = _Types(arrow, output_schema).schema_of_results(repeated, with_printed=with_printed)
    for number in range(first, end):
        part = _part(path, number)
        try:
            with parquet.ParquetFile(part) as file:
                table = file.read()
            output = table.schema.field("output")
        except (OSError, KeyError, arrow.ArrowException) as error:
            raise refuse_edited(str(part), str(error)) from error
        # A type of Arrow's that stands for JSON, as it does inside of a value.
        kind = arrow.large_string() if _is_json(output) else output.type
        is_alike = table.schema.equals(schema) and _is_json(output) is _is_json(schema.field("output"))
        for row in table.to_pylist():
            yield number, format_line_with_printed(_result_of(row, arrow, kind)), is_alike


def _is_json(field: Any) -> bool:
    return _JSON in (field.metadata or {})


def _result_of(row: Mapping[str, Any], arrow: Any, kind: Any) -> CallResult:
    index, error = row["index"], row["error"]
    failure = output = None
    if error is not None:
        details = error["details"]
        failure = CallFailure(
            ErrorKind(error["kind"]),
            error["message"],
            attempts=error["attempts"],
            outcome=Outcome(error["outcome"]),
            details={} if details is None else msgspec.json.decode(details),
        )
    elif row["output_json"] is not None:
        output = row["output_json"].encode()
    else:
        output = _ENCODE(_from_arrow(arrow, kind, row["output"]))
    echo = ",".join(f'"{name}":{_echo_to_json(name, row[name])}' for name in ("id", "args") if name in row)
    told = row.get("printed")
    printed = None if told is None else Printed(told, row["cut_bytes"])
    return ToldResult(index, output, failure, 0, (), printed, echo.encode())


def _echo_to_json(name: str, text: str | None) -> str:
    """JSON text as it stood in the row; an `id` that was text stands without its quotes."""
    if text is None:
        return "null"
    if name == "id":
        try:
            if not isinstance(msgspec.json.decode(text), str):
                return text
        except msgspec.DecodeError:
            pass
        return _ENCODE(text).decode()
    return text


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


def _number(part: Path) -> int:
    match = _PART.fullmatch(part.name)
    assert match is not None
    return int(match[1])


def _error_of(result: CallResult) -> dict[str, Any]:
    assert result.failure is not None
    fields = error_fields(result.failure)
    details = fields.get("details")
    return {
        **fields,
        "kind": str(result.failure.kind.value),
        "outcome": str(result.failure.outcome.value),
        "details": None if details is None else _ENCODE(details).decode(),
    }


def _text_of(raw: msgspec.Raw | None) -> str | None:
    if raw is None or bytes(raw) == b"null":
        return None
    value = bytes(raw)
    return str(msgspec.json.decode(value)) if value[:1] == b'"' else value.decode()


class _Types:
    """The Arrow type of a function's results, and their values as it takes them."""

    def __init__(self, arrow: Any, output_schema: bytes) -> None:
        self._arrow = arrow
        schema = msgspec.json.decode(output_schema)
        self._parts: Mapping[str, Any] = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._type = self._type_of(schema, 0)
        self._is_text = self._type is None
        """JSON text in place of values."""
        if self._type is None:
            self._type = arrow.string()

    def schema_of_results(self, echoes: Sequence[str], *, with_printed: bool) -> Any:
        text, whole = self._arrow.string(), self._arrow.int64()
        error = [("kind", text), ("message", text), ("attempts", whole), ("outcome", text), ("details", text)]
        told = [("printed", text), ("cut_bytes", whole)] if with_printed else []
        return self._arrow.schema(
            [
                ("index", whole),
                *((name, text) for name in echoes),
                ("ok", self._arrow.bool_()),
                self._arrow.field("output", self._type, metadata={_JSON: b""} if self._is_text else None),
                ("error", self._arrow.struct(error)),
                ("output_json", text),
                *told,
            ]
        )

    def place(self, outputs: Sequence[bytes | None]) -> tuple[Any, list[str | None]]:
        """The column `output`, and the JSON of those values that it cannot hold."""
        if self._is_text:
            return [None if raw is None else raw.decode() for raw in outputs], [None] * len(outputs)
        misfits = _misfits(self._arrow)
        with contextlib.suppress(*misfits):
            return self._array([None if raw is None else decode_json(raw) for raw in outputs]), [None] * len(outputs)
        kept: list[Any] = []
        texts: list[str | None] = []
        for raw in outputs:
            try:
                value = None if raw is None else decode_json(raw)
                self._array([value])
            except misfits:
                assert raw is not None
                kept.append(None)
                texts.append(raw.decode())
            else:
                kept.append(value)
                texts.append(None)
        return self._array(kept), texts

    def _array(self, values: Sequence[Any]) -> Any:
        return self._arrow.array([_to_arrow(self._arrow, self._type, value) for value in values], self._type)

    def _type_of(self, schema: Any, level: int) -> Any:
        """None: there is no one type, or none that is known."""
        arrow = self._arrow
        while isinstance(schema, dict) and "$ref" in schema and level < _LEVELS_MAX:
            schema = self._parts.get(str(schema["$ref"]).rpartition("/")[2])
            level += 1
        if not isinstance(schema, dict) or level >= _LEVELS_MAX:
            return None
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches:
            some = [branch for branch in branches if branch.get("type") != "null"]
            return self._type_of(some[0], level + 1) if len(some) == 1 else None
        match schema.get("type"):
            case "integer":
                return arrow.int64()
            case "number":
                return arrow.float64()
            case "boolean":
                return arrow.bool_()
            case "string":
                # Not "date-time": the schema does not say whether there is a zone.
                return arrow.date32() if schema.get("format") == "date" else arrow.string()
            case "array" if isinstance(schema.get("items"), dict) and "prefixItems" not in schema:
                item = self._type_of(schema["items"], level + 1)
                return None if item is None else arrow.list_(item)
            case "object" if schema.get("properties") and not isinstance(schema.get("additionalProperties"), dict):
                fields = [(name, self._type_of(part, level + 1)) for name, part in schema["properties"].items()]
                # Its JSON, told from text by the type.
                return arrow.struct([(name, arrow.large_string() if kind is None else kind) for name, kind in fields])
            case _:
                return None


def _misfits(arrow: Any) -> tuple[type[Exception], ...]:
    return (arrow.ArrowException, NotReadable, TypeError, ValueError, OverflowError)


def _from_arrow(arrow: Any, kind: Any, value: Any) -> Any:
    types = arrow.types
    if value is None:
        return None
    if types.is_struct(kind):
        return {name: _from_arrow(arrow, kind.field(name).type, part) for name, part in value.items()}
    if types.is_list(kind):
        return [_from_arrow(arrow, kind.value_type, item) for item in value]
    return msgspec.Raw(value.encode()) if types.is_large_string(kind) else value


def _to_arrow(arrow: Any, kind: Any, value: Any) -> Any:
    """A JSON value for a column of `kind`. Raises ValueError or TypeError when something of it would be lost."""
    types = arrow.types
    if value is None:
        return None
    if types.is_struct(kind):
        names = {kind.field(i).name for i in range(kind.num_fields)}
        if not isinstance(value, dict) or value.keys() - names:
            raise TypeError("expected an object of the fields that the schema names")
        return {name: _to_arrow(arrow, kind.field(name).type, part) for name, part in value.items()}
    if types.is_list(kind):
        if not isinstance(value, list):
            raise TypeError("expected an array")
        return [_to_arrow(arrow, kind.value_type, item) for item in value]
    if types.is_date(kind):
        return datetime.date.fromisoformat(value)
    if types.is_large_string(kind):
        return _ENCODE(value).decode()
    if isinstance(value, bool) is not types.is_boolean(kind):
        raise TypeError("a boolean is no number")
    if types.is_integer(kind) and not isinstance(value, int):
        raise TypeError("a fraction would be cut off")
    if types.is_floating(kind) and isinstance(value, int) and int(float(value)) != value:
        raise ValueError("a float cannot hold this number")
    return value
