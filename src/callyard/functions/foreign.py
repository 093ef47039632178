"""Arrays and tables of other libraries: numpy, pandas, Polars, pyarrow. None of them is imported before it is met.

A value is known by the module that made it, so whoever has one has its library. An array travels as its bytes in C
order, a table as an Arrow stream: never pickled, and read without trust. Arrow's own checks run over all that is read.
Source: call-execution X95.
"""

from __future__ import annotations

import datetime
import importlib
import math
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

Library = Literal["numpy", "pandas", "polars", "pyarrow"]
_CLASSES: Final[Mapping[Library, str]] = {
    "numpy": "ndarray",
    "pandas": "DataFrame",
    "polars": "DataFrame",
    "pyarrow": "Table",
}
FRAMES: Final = frozenset({"pandas", "polars", "pyarrow"})
_DTYPE: Final = re.compile(
    r"[<|](?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SU][1-9]\d{0,8}|[Mm]8\[(?:[1-9]\d{0,5})?[A-Za-z]{1,2}\])"
)
"""Numbers, truth values, dates, durations, and text of one length: what has no Python objects in it."""
_DIMENSIONS_MAX: Final = 64
_EXACT_MAX: Final = 2**53
"""To here a float holds every integer."""


class NotCrossing(Exception):
    """A value that cannot travel. The text says why, and what to pass instead."""


class NotReadable(Exception):
    """Bytes that are not what they are said to be, or a library that is not here."""


def library_of(value: object) -> Library | None:
    """Whose array or table this is; None: it is neither."""
    for library, name in _CLASSES.items():
        module = sys.modules.get(library)
        kind = getattr(module, name, None)
        if kind is not None and isinstance(value, kind):
            return library
    return None


def is_plain(value: object) -> bool:
    """Whether it is an array or a table and no subclass of one, which would arrive as the class itself."""
    library = library_of(value)
    return library is not None and type(value) is getattr(sys.modules[library], _CLASSES[library])


def library_of_type(kind: object) -> Library | None:
    """As `library_of`, of a type in an annotation."""
    if not isinstance(kind, type):
        return None
    for library, name in _CLASSES.items():
        base = getattr(sys.modules.get(library), name, None)
        if base is not None and issubclass(kind, base):
            return library
    return None


def any_loaded() -> bool:
    return any(library in sys.modules for library in _CLASSES)


def shown_name(library: str) -> str:
    """As one would write the type: `numpy.ndarray`."""
    return f"{library}.{_CLASSES[library]}"  # type: ignore[index]


# --- out ------------------------------------------------------------------------------------------------------------


def array_parts(array: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """Type, shape and bytes in C order of an array. Raises `NotCrossing`."""
    numpy = sys.modules["numpy"]
    if isinstance(array, numpy.ma.MaskedArray):
        raise NotCrossing("numpy.ma.MaskedArray cannot cross with its mask: pass array.filled(value)")
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    if dtype.str.startswith(">"):  # the machine's own order, on one that is big-endian
        dtype = dtype.newbyteorder("<")
    if not _DTYPE.fullmatch(dtype.str):
        advice = "pass array.tolist()"
        if dtype.names is not None and not dtype.hasobject:
            advice = "pass one array for each of its fields"
        elif dtype.kind in "mM":
            advice = f"give it a unit, as by array.astype('{dtype.kind}8[us]')"
        raise NotCrossing(f"a numpy array of dtype {array.dtype} cannot cross as bytes: {advice}")
    plain = numpy.ascontiguousarray(array.astype(dtype, copy=False)).reshape(-1)
    return dtype.str, array.shape, memoryview(plain.view(numpy.uint8)) if plain.size else memoryview(b"")


def frame_bytes(frame: Any, library: Library) -> memoryview:
    """A table as an Arrow stream. Raises `NotCrossing`."""
    if library == "polars":
        polars = sys.modules["polars"]
        import io

        objects = frame.select(polars.selectors.object()).columns
        if objects:  # Polars itself would write where they lie in memory
            raise NotCrossing(f"column {objects[0]!r} of this Polars frame holds Python objects: {_ONE_TYPE}")
        sink = io.BytesIO()
        try:
            frame.write_ipc_stream(sink, compat_level=polars.CompatLevel.oldest())
        except (Exception, polars.exceptions.PanicException) as error:
            raise NotCrossing(f"this Polars frame cannot cross as Arrow: {_first_line(error)}") from error
        return sink.getbuffer()
    arrow = _import("pyarrow", f"a {shown_name(library)} travels as Arrow")
    if library == "pandas":
        _check_pandas(arrow, frame)
    try:
        table = frame if library == "pyarrow" else arrow.Table.from_pandas(frame)
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        text = str(error.args[-1]) if error.args else type(error).__name__  # before it stands the value's repr
        raise NotCrossing(f"this {shown_name(library)} cannot cross as Arrow: {text}") from error
    return memoryview(sink.getvalue())


def _check_pandas(arrow: Any, frame: Any) -> None:
    """Raises `NotCrossing` for a frame that Arrow would take, and silently change."""
    if not _keeps_labels(arrow, frame):
        raise NotCrossing(
            "the column names of this pandas.DataFrame would not stay what they are: name them by text, as by"
            " frame.rename(columns=str)"
        )
    index = frame.index
    columns = [(f"column {name!r}", column) for name, column in frame.items()]
    columns += [("the index", index.get_level_values(level)) for level in range(index.nlevels)]
    for where, column in columns:
        mixed = _find_confused(column) if column.dtype == object else ()
        if mixed:
            raise NotCrossing(f"{where} of this pandas.DataFrame holds {' and '.join(mixed)}: {_ONE_TYPE}")


def _find_confused(column: Any) -> Sequence[str]:
    """Kinds of values of which Arrow makes one: bytes of text, a date of a time, a naive time of one in a zone."""
    kinds = set(map(type, column))
    texts = [base.__name__ for base in (bytes, str) if any(issubclass(kind, base) for kind in kinds)]
    times = ["date"] if datetime.date in kinds else []
    if any(issubclass(kind, datetime.datetime) for kind in kinds):
        found = (value for value in column if isinstance(value, datetime.datetime) and value == value)  # no NaT
        zoned = {value.tzinfo is not None for value in found}
        times += ["datetime with a time zone" if one else "datetime" for one in sorted(zoned)]
    return next((mixed for mixed in (texts, times) if len(mixed) > 1), ())


def _keeps_labels(arrow: Any, frame: Any) -> bool:
    """Whether they are the same after a way there and back, which the frame without its rows goes here."""
    labels = frame.columns
    if labels.inferred_type in ("string", "empty") or labels.dtype == "int64":
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they will not
        try:
            crossed = arrow.Table.from_pandas(frame.iloc[:0])
        except Exception:  # noqa: BLE001 - so the frame itself will say
            return True
    try:
        return bool(crossed.to_pandas().columns.equals(labels))
    except Exception:  # noqa: BLE001 - of names that pandas itself does not read again
        return False


_ONE_TYPE: Final = "only columns of one type cross"


# --- in -------------------------------------------------------------------------------------------------------------


def read_array(dtype: str, shape: Sequence[int], data: bytearray | memoryview) -> Any:
    """An array that owns `data`, and may be written to where that may. Raises `NotReadable`."""
    if not _DTYPE.fullmatch(dtype):
        raise NotReadable(f"an array of unknown dtype {dtype[:40]!r}")
    numpy = _import("numpy", "the value is a numpy array")
    try:
        kind = numpy.dtype(dtype)
    except (TypeError, OverflowError) as error:
        raise NotReadable(f"an array of unknown dtype {dtype!r}") from error
    try:
        if len(shape) <= _DIMENSIONS_MAX and math.prod(shape) * kind.itemsize == len(data):
            if not data:
                return numpy.empty(shape, kind)
            _check_items(numpy, kind, data)
            array = numpy.frombuffer(data, kind).reshape(shape)
            if array.flags.aligned:
                return array
            array = array.copy()  # behind bytes of an odd number, in a value that is used where it lies
            array.flags.writeable = False
            return array
    except ValueError:  # more than a number of dimensions or items that it can hold
        pass
    raise NotReadable(f"an array of {kind} and shape {list(shape)[:8]} with {len(data)} bytes")


def _check_items(numpy: Any, kind: Any, data: bytearray | memoryview) -> None:
    """Raise `NotReadable` for bytes that are no items of this kind: numpy takes its own at their word."""
    if kind.kind == "U":
        largest = numpy.frombuffer(data, "<u4").max()
        if largest > sys.maxunicode:
            raise NotReadable(f"an array of text with a character {largest:#x}")
    elif kind.kind == "b":
        largest = numpy.frombuffer(data, "u1").max()
        if largest > 1:
            raise NotReadable(f"an array of truth values with a {largest}")


def read_frame(data: bytearray | memoryview, library: str) -> Any:
    """A table of `library`, from an Arrow stream. Raises `NotReadable`."""
    what = f"the value is a {shown_name(library)}"
    if library == "polars":
        polars = _import("polars", what)
        import io

        try:
            return polars.read_ipc_stream(io.BytesIO(data))
        except (Exception, polars.exceptions.PanicException) as error:
            raise NotReadable(f"no Arrow stream: {_first_line(error)}") from error
    arrow = _import("pyarrow", what)
    if library == "pandas":
        _import("pandas", what)
    try:
        with arrow.ipc.open_stream(arrow.py_buffer(data)) as reader:
            table = reader.read_all()
        table.validate(full=True)
        if library != "pandas":
            return table
        # A column of pandas integers with empty cells was one of objects, or has a type that says so.
        return table.to_pandas(integer_object_nulls=b"pandas" in (table.schema.metadata or {}))
    except Exception as error:  # what it was made from may be anybody's, and the libraries differ in what they raise
        raise NotReadable(f"no Arrow stream: {_first_line(error)}") from error


# --- as JSON --------------------------------------------------------------------------------------------------------


def json_schema(library: Library) -> dict[str, Any]:
    """Of an array, nested arrays; of a table, its rows or its columns."""
    if library == "numpy":
        return {"type": "array"}
    return {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "object"}]}


def array_from_json(value: list[Any], dtype: Any) -> Any:
    """An array of nested lists; `dtype`: None for what numpy finds. Raises `ValueError`: no number is changed."""
    numpy = importlib.import_module("numpy")
    try:
        array = numpy.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError("expected lists of one shape") from error
    if array.dtype.kind not in "biufU":
        raise ValueError("expected numbers, true and false, or text, in lists of one shape")
    if dtype is None or array.dtype == dtype:
        return array
    takes = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "c": "iuf", "S": "U", "U": "U"}.get(dtype.kind, "U")
    if array.size and array.dtype.kind not in takes:
        raise ValueError(f"expected values of {dtype}, got {array.dtype}")
    try:
        cast = array.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(_first_line(error)) from error
    if array.size and not _is_kept(numpy, array, cast):
        raise ValueError(f"expected values of {dtype}, got {array.dtype} that would not stay what they are")
    return cast


def _is_kept(numpy: Any, array: Any, cast: Any) -> bool:
    if cast.dtype.kind in "iu":
        limits = numpy.iinfo(cast.dtype)
        return bool(int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    return cast.dtype.kind not in "SU" or bool((cast.astype(array.dtype) == array).all())


def frame_from_json(value: list[Any] | dict[str, Any], library: Library) -> Any:
    """A table of rows, or of columns. Raises `ValueError`."""
    module = importlib.import_module(library)
    try:
        if library == "pyarrow":
            return module.Table.from_pylist(value) if isinstance(value, list) else module.table(value)
        return module.DataFrame(value)
    except Exception as error:  # each library has classes of its own for it
        raise ValueError(_first_line(error)) from error


def frame_rows(frame: Any, library: Library) -> list[dict[str, Any]]:
    """The rows of a table as mappings; what is empty, NaN or infinite is None. Raises `NotCrossing`."""
    names = list(map(str, frame.column_names if library == "pyarrow" else frame.columns))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise NotCrossing(f"two columns of the frame are named {twice[0]!r}: rename one")
    if library == "polars":
        rows = frame.to_dicts()
    elif library == "pyarrow":
        rows = arrow_rows(frame)
    else:
        rows = pandas_rows(frame, {name: "Int64" for name in frame.columns if holds_integers(frame[name])})
    return [{name: None if _is_not_finite(cell) else cell for name, cell in row.items()} for row in rows]


def pandas_rows(frame: Any, whole: Mapping[Any, str]) -> list[dict[str, Any]]:
    """`whole`: columns to be read as integers though they are floats."""
    part = frame.astype(whole)
    rows: list[dict[str, Any]] = part.astype(object).where(part.notna(), None).to_dict("records")
    return rows  # NaT and NA have no JSON


def holds_integers(column: Any) -> bool:
    """Whether a pandas column of floats is one of integers with empty cells, for which pandas has no other place."""
    if getattr(column.dtype, "kind", "") != "f":
        return False
    filled = column.dropna()
    return 0 < len(filled) < len(column) and bool(((filled % 1 == 0) & (filled.abs() <= _EXACT_MAX)).all())


def arrow_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow batch. A map is an object, but pairs where one has a key twice: so nothing is lost."""
    try:
        return list(batch.to_pylist(maps_as_pydicts="strict"))
    except (ValueError, KeyError):
        return list(batch.to_pylist())


def _is_not_finite(cell: object) -> bool:
    return type(cell) is float and not math.isfinite(cell)


def _import(library: str, why: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise NotReadable(f"{why}, and {library} is not installed here: pip install {library}") from error


def _first_line(error: BaseException) -> str:
    try:
        return str(error).strip().partition("\n")[0][:300]
    except Exception:  # noqa: BLE001 - __str__ of a foreign class
        return type(error).__name__
