"""Tables as call lists: Parquet files, and the frames of pandas, Polars and Arrow.

A library is used only by whom it belongs to: a frame brings its own, a Parquet file asks for pyarrow. Rows are turned
into Python values a slice at a time. What a table leaves empty is null, and so is NaN, by which pandas says the same.
Source: call-execution X43, X95.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from callyard.errors import ErrorKind, UsageError, fail
from callyard.extras import needs
from callyard.functions.encoding import ResultMisfit, encode_table_row, encode_value
from callyard.functions.foreign import arrow_rows, holds_integers, pandas_rows
from callyard.worker.builders import LINE_BYTES_MAX, Row, check_readable, fraction_of, shorten_names, too_large

SLICE_ROWS: Final = 1_024
"""Rows that are Python values at one time."""


def import_arrow(module: str, why: str) -> Any:
    """`pyarrow`, or a module of it. Raises `UsageError` when it is not there."""
    with needs("parquet", why):
        return importlib.import_module(module)


class _TableSource:
    """Rows with named cells, from slices of a table."""

    may_block = False
    line_number = 0
    """A table has no lines: its rows go by their index."""
    columns: Sequence[str] = ()
    total: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._taken = 0

    @property
    def read_fraction(self) -> float | None:
        return fraction_of(self._taken, self.total)

    def close(self) -> None:
        """Nothing is open between two slices."""

    def rows(self) -> Iterator[Row]:
        index = 0
        for cells in self._slices():
            for row in cells:
                self._taken = index + 1
                yield _row_of(index, row)
                index += 1

    def _slices(self) -> Iterator[list[dict[str, Any]]]:
        raise NotImplementedError

    def _check_names(self, names: Sequence[object], advice: str) -> list[str]:
        for name in names:
            if not isinstance(name, str):
                raise UsageError(f"{self.name}: expected texts as names of columns, got {name!r}: {advice}")
        texts = [str(name) for name in names]
        twice = sorted({name for name in texts if texts.count(name) > 1})
        if twice:
            raise UsageError(f"{self.name}: two columns are named {twice[0]!r}: {advice}")
        return texts


class ParquetSource(_TableSource):
    """The rows of a Parquet file, or of all `*.parquet` files of a folder by name. Needs pyarrow.

    Raises `UsageError` for what is no Parquet, for files with other columns than the first, and for a pipe.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(str(path))
        if self.name == "-":
            raise UsageError("Parquet cannot be read from standard input, since its index is at its end: give a file")
        self.path: Path | None = Path(path)
        self._parquet = import_arrow("pyarrow.parquet", f"{self.name}: Parquet")
        self._errors = (import_arrow("pyarrow", "Parquet").ArrowException, OSError)
        self._paths = [self.path]
        if self.path.is_dir():
            self._paths = sorted(self.path.glob("*.parquet"))
            if not self._paths:
                raise UsageError(f"{self.name} is a folder without .parquet files; folders within are not read")
        self.total = 0
        for number, part in enumerate(self._paths):
            check_readable(part)
            with self._open(part) as file:
                names = self._check_names(file.schema_arrow.names, "rename one")
                if number and names != self.columns:
                    expected = f"expected the columns of {self._paths[0].name} ({shorten_names(self.columns)})"
                    raise UsageError(f"{part}: {expected}, got {shorten_names(names)}")
                self.columns = names
                self.total += file.metadata.num_rows

    def _open(self, path: Path) -> Any:
        try:
            # Without pre_buffer: else a whole row group waits in memory.
            return self._parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
        except self._errors as error:
            raise UsageError(f"cannot read {path} as Parquet: {error}") from error

    def _slices(self) -> Iterator[list[dict[str, Any]]]:
        for path in self._paths:
            with self._open(path) as file:
                batches = file.iter_batches(batch_size=SLICE_ROWS, use_threads=False)
                while True:
                    try:
                        batch = next(batches, None)
                    except self._errors as error:
                        raise UsageError(f"cannot read {path} as Parquet after row {self._taken}: {error}") from error
                    if batch is None:
                        break
                    yield arrow_rows(batch)


class FrameSource(_TableSource):
    """The rows of a pandas or Polars DataFrame, a pyarrow Table, or anything with `__arrow_c_stream__`.

    A pandas index is no column. Raises `UsageError` for lazy frames and for columns that have no names.
    """

    def __init__(self, frame: Any) -> None:
        super().__init__(f"the {_library(frame)} frame")
        self._frame = frame
        kind = type(frame).__name__
        if _library(frame) == "polars":
            if kind != "DataFrame":
                raise UsageError(f"a Polars {kind} has no rows to call with: pass a DataFrame, such as lazy.collect()")
            self.columns, self.total = self._check_names(frame.columns, "rename one"), frame.height
            self._cut = self._cut_polars
        elif _library(frame) == "pandas":
            if kind != "DataFrame":
                raise UsageError(f"a pandas {kind} has no named columns: pass series.to_frame(NAME), or its .tolist()")
            advice = 'give each a name of its own, such as frame.columns = ["a", "b"]'
            self.columns, self.total = self._check_names(list(frame.columns), advice), len(frame)
            self._cut = self._cut_pandas
        else:
            arrow = import_arrow("pyarrow", "an Arrow table")
            self._reader = arrow.RecordBatchReader.from_stream(frame)
            self.columns = self._check_names(self._reader.schema.names, "rename one")
            self.total = getattr(frame, "num_rows", None)
            self._cut = self._cut_arrow

    def _slices(self) -> Iterator[list[dict[str, Any]]]:
        return self._cut()

    def _cut_polars(self) -> Iterator[list[dict[str, Any]]]:
        for part in self._frame.iter_slices(SLICE_ROWS):
            yield part.to_dicts()

    def _cut_pandas(self) -> Iterator[list[dict[str, Any]]]:
        whole = {name: "Int64" for name in self.columns if holds_integers(self._frame[name])}
        for start in range(0, len(self._frame), SLICE_ROWS):
            part = self._frame.iloc[start : start + SLICE_ROWS]
            yield pandas_rows(part, whole)

    def _cut_arrow(self) -> Iterator[list[dict[str, Any]]]:
        for batch in self._reader:
            for start in range(0, batch.num_rows, SLICE_ROWS):
                yield arrow_rows(batch.slice(start, SLICE_ROWS))


def is_frame(value: object) -> bool:
    """Whether it is a table of a library, which is known without importing it."""
    return _library(value) in {"pandas", "polars"} or hasattr(value, "__arrow_c_stream__")


def with_results(frame: Any, values: list[Any], errors: list[str | None], into: str) -> Any:
    """`frame` with two more columns, `into` and `into_error`, in its own library. Values of types that the library
    does not put into one column become their JSON text.

    Raises `UsageError` when it has such a column already.
    """
    names = (into, f"{into}_error")
    check_free(frame, into)
    library = _library(frame)
    if library == "pandas":
        return frame.assign(**dict(zip(names, (values, errors), strict=True)))
    if library == "polars":
        polars = importlib.import_module("polars")
        misfits: tuple[type[Exception], ...] = (TypeError, OverflowError, polars.exceptions.PolarsError)
        columns = [
            _column(lambda cells: polars.Series(names[0], cells, strict=True), values, misfits),
            polars.Series(names[1], errors, dtype=polars.String),
        ]
        return frame.with_columns(columns)
    arrow = importlib.import_module("pyarrow")
    misfits = (arrow.ArrowException, TypeError, OverflowError)
    table = frame.append_column(names[0], _column(arrow.array, values, misfits))
    return table.append_column(names[1], arrow.array(errors, arrow.string()))


def hold(frame: Any) -> Any:
    """A frame that can be read more than once. Raises `UsageError` for what is none."""
    if not is_frame(frame):
        raise UsageError(f"expected a pandas or Polars DataFrame or an Arrow table, got {type(frame).__name__}")
    if _library(frame) in {"pandas", "polars"}:
        return frame
    arrow = import_arrow("pyarrow", "an Arrow table")
    return frame if isinstance(frame, arrow.Table) else arrow.table(frame)


def check_free(frame: Any, into: str) -> None:
    """Raises `UsageError` when results have no place beside the columns of `frame`."""
    taken = {into, f"{into}_error"} & set(FrameSource(frame).columns)
    if taken:
        raise UsageError(f"the frame has a column {sorted(taken)[0]!r} already: name the new one with into=")


def _column(make: Any, values: list[Any], errors: tuple[type[Exception], ...]) -> Any:
    try:
        return make(values)
    except errors:
        return make([None if value is None else encode_value(value, nan_null=True).decode() for value in values])


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _row_of(index: int, cells: Mapping[str, Any]) -> Row:
    try:
        args = encode_table_row(cells)
    except ResultMisfit as misfit:
        return Row(index, failure=fail(ErrorKind.SCHEMA, f"row {index}: {misfit.message}", **misfit.details, row=index))
    if len(args) > LINE_BYTES_MAX:
        return Row(index, failure=too_large(len(args), "row", index))
    return Row(index, args)
