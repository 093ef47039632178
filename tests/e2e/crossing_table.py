"""What can cross: the table of the guide, and of the tests."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

from tests.e2e.crossing_file import Colour, Model, Photo, Point, Record


class Crossing(NamedTuple):
    name: str
    """Of the function that takes it and gives it back."""
    written: str
    """The value as one writes it."""
    value: Any
    annotation: str
    arrives: Any
    """What the function gets, and what its caller gets back by its annotation."""
    json: str
    """What it is as JSON, both ways: at the command line, in files, over HTTP. Empty: longer than a line."""
    beside: bool = False
    """Between Python and Python it travels beside the JSON, as it is."""


ID = UUID("9aa81549-4f1d-4144-8941-43d15347e038")
WHEN = dt.datetime(2024, 5, 1, 12, 30, tzinfo=dt.UTC)
_WHEN_JSON = '"2024-05-01T12:30:00Z"'
PHOTO = Photo("cat", b"\x89PNG", np.array([[1, 2]], "u1"))

TABLE: tuple[Crossing, ...] = (
    Crossing("none", "None", None, "None", None, "null"),
    Crossing("truth", "True", True, "bool", True, "true"),
    Crossing("whole", "2**70", 2**70, "int", 2**70, "1180591620717411303424"),
    Crossing("whole", "numpy.int64(5)", np.int64(5), "int", 5, "5"),
    Crossing("number", "1.5", 1.5, "float", 1.5, "1.5"),
    Crossing("number", "numpy.float32(0.5)", np.float32(0.5), "float", 0.5, "0.5"),
    Crossing("text", '"naïve"', "naïve", "str", "naïve", '"naïve"'),
    Crossing("items", "[1, 2]", [1, 2], "list[int]", [1, 2], "[1,2]"),
    Crossing("items", "(1, 2)", (1, 2), "list[int]", [1, 2], "[1,2]"),
    Crossing("pair", '(1, "a")', (1, "a"), "tuple[int, str]", (1, "a"), '[1,"a"]'),
    Crossing("unique", "{2, 1}", {2, 1}, "set[int]", {1, 2}, "[1,2]"),
    Crossing("mapping", '{"a": [1]}', {"a": [1]}, "dict[str, Any]", {"a": [1]}, '{"a":[1]}'),
    Crossing("instant", "datetime(2024, 5, 1, 12, 30, tzinfo=UTC)", WHEN, "datetime", WHEN, _WHEN_JSON),
    Crossing("instant", 'pandas.Timestamp("2024-05-01 12:30Z")', pd.Timestamp(WHEN), "datetime", WHEN, _WHEN_JSON),
    Crossing("day", "date(2024, 5, 1)", dt.date(2024, 5, 1), "date", dt.date(2024, 5, 1), '"2024-05-01"'),
    Crossing("clock", "time(8, 5)", dt.time(8, 5), "time", dt.time(8, 5), '"08:05:00"'),
    Crossing("span", "timedelta(minutes=5)", dt.timedelta(minutes=5), "timedelta", dt.timedelta(minutes=5), '"PT300S"'),
    Crossing("decimal", 'Decimal("1.50")', Decimal("1.50"), "Decimal", Decimal("1.50"), '"1.50"'),
    Crossing("uuid", "UUID(…)", ID, "UUID", ID, f'"{ID}"'),
    Crossing("colour", "Colour.RED", Colour.RED, "Colour", Colour.RED, '"red"'),
    Crossing("point", "Point(1, 2)", Point(1, 2), "Point", Point(1, 2), "[1,2]"),
    Crossing("named", '{"name": "a"}', {"name": "a"}, "Named", {"name": "a"}, '{"name":"a"}'),
    Crossing("model", "Model(km=1.5)", Model(km=1.5), "Model", Model(km=1.5), '{"km":1.5}'),
    Crossing("raw", 'b"hi"', b"hi", "bytes", b"hi", '"aGk="', True),
    Crossing("raw_array", 'bytearray(b"hi")', bytearray(b"hi"), "bytearray", bytearray(b"hi"), '"aGk="', True),
    Crossing("raw", 'memoryview(b"hi")', memoryview(b"hi"), "bytes", b"hi", '"aGk="', True),
    Crossing(
        "array", "numpy.array([[1, 2]])", np.array([[1, 2]]), "numpy.ndarray", np.array([[1, 2]]), "[[1,2]]", True
    ),
    Crossing(
        "floats",
        'numpy.array([0.5], "f4")',
        np.array([0.5], "f4"),
        "NDArray[numpy.float32]",
        np.array([0.5], "f4"),
        "[0.5]",
        True,
    ),
    Crossing("array", "numpy.array([nan])", np.array([np.nan]), "numpy.ndarray", np.array([np.nan]), "a failure", True),
    Crossing(
        "pandas_frame",
        'pandas.DataFrame({"a": [1, 2]})',
        pd.DataFrame({"a": [1, 2]}),
        "pandas.DataFrame",
        pd.DataFrame({"a": [1, 2]}),
        '[{"a":1},{"a":2}]',
        True,
    ),
    Crossing(
        "polars_frame",
        'polars.DataFrame({"a": [1.5, nan]})',
        pl.DataFrame({"a": [1.5, float("nan")]}),
        "polars.DataFrame",
        pl.DataFrame({"a": [1.5, float("nan")]}),
        '[{"a":1.5},{"a":null}]',
        True,
    ),
    Crossing(
        "arrow_table",
        'pyarrow.table({"a": [1, None]})',
        pa.table({"a": [1, None]}),
        "pyarrow.Table",
        pa.table({"a": [1, None]}),
        '[{"a":1},{"a":null}]',
        True,
    ),
    Crossing(
        "pandas_frame",
        'polars.DataFrame({"a": [1]})',
        pl.DataFrame({"a": [1]}),
        "pandas.DataFrame",
        pd.DataFrame({"a": [1]}),
        '[{"a":1}]',
        True,
    ),
    Crossing(
        "photo",
        "Photo(…)",
        PHOTO,
        "Photo",
        PHOTO,
        '{"name":"cat","data":"iVBORw==","pixels":[[1,2]]}',
        True,
    ),
    Crossing("record", 'Record(b"hi")', Record(b"hi"), "Record", Record(b"hi"), '{"data":"aGk="}', True),
    Crossing("anything", 'b"hi"', b"hi", "Any", b"hi", '"aGk="', True),
    Crossing(
        "anything",
        '{"a": [numpy.arange(2)]}',
        {"a": [np.arange(2)]},
        "Any",
        {"a": [np.arange(2)]},
        '{"a":[[0,1]]}',
        True,
    ),
)


def to_line(row: Crossing) -> str:
    """Its line of the guide."""
    json = f"`{row.json}`" if row.json not in ("", "a failure") else row.json
    way = "as it is" if row.beside else "as JSON"
    return f"| `{row.written}` | `{row.annotation}` | `{type(row.arrives).__name__}` | {way} | {json} |"


def same(one: Any, other: Any) -> bool:
    """Equal, and of one type, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, pd.DataFrame | pl.DataFrame | pa.Table):
        return bool(one.equals(other))
    if isinstance(one, Photo):
        return all(same(getattr(one, name), getattr(other, name)) for name in ("name", "data", "pixels"))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
