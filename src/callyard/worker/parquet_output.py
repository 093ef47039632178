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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from callyard.scheduler import CallResult
from callyard.worker.outputs import Existing, OutputError, error_fields
from callyard.worker.results import echo_of, printed_of
from callyard.worker.tables import import_arrow

PART_ROWS: Final = 8_192
PART_BYTES: Final = 16 * 1024 * 1024
PART_AFTER_S: Final = 30.0
"""Slow results are on disk after so long, though their part is small."""
_PART: Final = re.compile(r"part-(\d{6,12})\.parquet")
_LEVELS_MAX: Final = 32
_ENCODE: Final = msgspec.json.Encoder(enc_hook=str).encode
_ECHO: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ParquetOutput:
    """One row per result, in parts. Needs pyarrow.

    `repeated`: what results repeat of their rows, `id` and `args`. With `existing` "overwrite" the parts that are there
    go when the first new one is written; with "append" theirs are the numbers before. Raises `OutputError`.
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
    ) -> None:
        self._arrow = import_arrow("pyarrow", "writing Parquet")
        self._parquet = import_arrow("pyarrow.parquet", "writing Parquet")
        self.name = str(path)
        self.lines = 0
        """Results on disk."""
        self._folder = Path(path)
        old = check_folder(self._folder, existing, source)
        self._to_remove = old if existing == "overwrite" else []
        self._next = 1 + max((_number(part) for part in old), default=-1) if existing == "append" else 0
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

    def flush(self) -> None:
        """A part for a few results would be a file for each: it is written when they waited for long."""
        if self._results and time.monotonic() - self._written_at_s >= PART_AFTER_S:
            self._write_part()

    def close(self) -> None:
        if not self._closed:
            if self._results or not self._next or self._to_remove:
                self._write_part()  # of no results too: readers find the columns
            self._closed = True

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            if self._results:
                with contextlib.suppress(OutputError):
                    self._write_part()

    def _write_part(self) -> None:
        results, self._results, self._bytes = self._results, [], 0
        table = self._arrow.Table.from_pydict(self._columns(results), schema=self._schema)
        part = self._folder / f"part-{self._next:06d}.parquet"
        partial = part.with_name(f".{part.name}.partial")
        try:
            self._parquet.write_table(table, partial, compression="zstd")
            old, self._to_remove = self._to_remove, []
            for path in old:
                path.unlink(missing_ok=True)
            partial.replace(part)
        except (OSError, self._arrow.ArrowException) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise self._problem(error) from error
        self._next += 1
        self.lines += len(results)
        self._written_at_s = time.monotonic()

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
        raise OutputError(
            f"{path} is not empty: give --force to replace its parts, --append to add to them, or another folder"
            ' (in Python: existing="overwrite" or "append")'
        )
    return parts


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
                ("output", self._type),
                ("error", self._arrow.struct(error)),
                ("output_json", text),
                *told,
            ]
        )

    def place(self, outputs: Sequence[bytes | None]) -> tuple[Any, list[str | None]]:
        """The column `output`, and the JSON of those values that it cannot hold."""
        if self._is_text:
            return [None if raw is None else raw.decode() for raw in outputs], [None] * len(outputs)
        values = [None if raw is None else msgspec.json.decode(raw) for raw in outputs]
        with contextlib.suppress(*_misfits(self._arrow)):
            return self._array(values), [None] * len(outputs)
        kept: list[Any] = []
        texts: list[str | None] = []
        for raw, value in zip(outputs, values, strict=True):
            try:
                self._array([value])
            except _misfits(self._arrow):
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
    return (arrow.ArrowException, TypeError, ValueError, OverflowError)


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
