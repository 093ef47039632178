"""Rows from Parquet files and frames, and frames with results."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from callyard.errors import UsageError
from callyard.worker.builders import IterableSource, Row, open_rows, open_source
from callyard.worker.tables import SLICE_ROWS, FrameSource, check_free, hold, with_results

COLUMNS: dict[str, list[Any]] = {
    "name": ["ada", None, "cy"],
    "km": [1.5, math.nan, math.inf],
    "day": [dt.date(2013, 1, 31), None, dt.date(2013, 2, 1)],
    "whole": [1, 2, 3],
    "raw": [b"\x00\xff", b"", None],
    "tags": [["a"], [], None],
}
EXPECTED = [
    {"name": "ada", "km": 1.5, "day": "2013-01-31", "whole": 1, "raw": "AP8=", "tags": ["a"]},
    {"name": None, "km": None, "day": None, "whole": 2, "raw": "", "tags": []},
    {"name": "cy", "km": None, "day": "2013-02-01", "whole": 3, "raw": None, "tags": None},
]
FRAMES = {
    "polars": lambda: pl.DataFrame(COLUMNS),
    "arrow": lambda: pa.table(COLUMNS),
    "arrow stream": lambda: pa.RecordBatchReader.from_stream(pa.table(COLUMNS)),
}


def decoded(rows: list[Row]) -> list[Any]:
    assert all(row.failure is None for row in rows)
    return [msgspec.json.decode(row.args) for row in rows]


@pytest.mark.requirement("X43")
@pytest.mark.parametrize("library", FRAMES)
def test_a_row_of_a_frame_is_a_mapping_and_an_empty_cell_null(library: str) -> None:
    source = open_rows(FRAMES[library]())
    assert isinstance(source, FrameSource)
    assert list(source.columns) == list(COLUMNS)
    assert decoded(list(source.rows())) == EXPECTED


def test_a_pandas_frame_with_all_its_kinds_of_nothing() -> None:
    frame = pd.DataFrame(
        {
            "name": ["ada", None],
            "km": [1.5, math.nan],
            "at": [pd.Timestamp("2013-01-31 10:00"), pd.NaT],
            "whole": pd.array([1, None], dtype="Int64"),
            "flag": [True, False],
            "kind": pd.Categorical(["x", None]),
        },
        index=[7, 9],
    )
    source = FrameSource(frame)
    assert source.total == 2
    assert decoded(list(source.rows())) == [
        {"name": "ada", "km": 1.5, "at": "2013-01-31T10:00:00", "whole": 1, "flag": True, "kind": "x"},
        {"name": None, "km": None, "at": None, "whole": None, "flag": False, "kind": None},
    ]
    assert source.read_fraction == 1.0


def test_a_frame_longer_than_a_slice_keeps_its_order() -> None:
    count = 2 * SLICE_ROWS + 5
    for frame in (pd.DataFrame({"x": range(count)}), pl.DataFrame({"x": range(count)}), pa.table({"x": range(count)})):
        rows = list(FrameSource(frame).rows())
        assert [row.index for row in rows] == list(range(count))
        assert decoded(rows)[SLICE_ROWS::SLICE_ROWS] == [{"x": SLICE_ROWS}, {"x": 2 * SLICE_ROWS}]


def test_other_iterables_are_no_frames() -> None:
    assert isinstance(open_rows([{"x": 1}]), IterableSource)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            pl.LazyFrame({"x": [1]}),
            r"a Polars LazyFrame has no rows to call with: pass a DataFrame, such as lazy\.collect",
        ),
        (pl.Series("x", [1]), "a Polars Series has no rows"),
        (pd.Series([1]), "a pandas Series has no named columns"),
        (pd.DataFrame([[1, 2]]), r"the pandas frame: expected texts as names of columns, got 0: give each a name"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "two columns are named 'x'"),
    ],
)
def test_what_has_no_named_columns(frame: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_rows(frame)


def test_a_cell_without_json_is_its_rows_failure() -> None:
    first, second = FrameSource(pd.DataFrame({"x": [1 + 2j, 3]}, dtype=object)).rows()
    assert first.failure is not None
    assert first.failure.message.startswith("row 0: /x: ")
    assert second.args == b'{"x":3}'


# --- Parquet --------------------------------------------------------------------------------------------------------


def test_a_parquet_file_with_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({**COLUMNS, "price": [decimal.Decimal("1.10")] * 3}), path, row_group_size=2)
    source = open_source(path)
    assert (source.total, source.may_block, source.line_number) == (3, False, 0)
    assert decoded(list(source.rows())) == [{**row, "price": "1.10"} for row in EXPECTED]
    assert source.read_fraction == 1.0


def test_a_folder_of_parts_is_one_list(tmp_path: Path) -> None:
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    for number in range(3):
        pq.write_table(pa.table({"x": [number]}), folder / f"part-{number}.parquet")
    assert decoded(list(open_source(folder).rows())) == [{"x": 0}, {"x": 1}, {"x": 2}]
    other = folder.rename(tmp_path / "month.01")  # what is in it says it, too
    assert decoded(list(open_source(other).rows())) == [{"x": 0}, {"x": 1}, {"x": 2}]
    folder = other.rename(folder)
    pq.write_table(pa.table({"y": [1]}), folder / "part-9.parquet")
    with pytest.raises(UsageError, match=r"part-9\.parquet: expected the columns of part-0\.parquet \(x\), got y"):
        open_source(folder)


@pytest.mark.requirement("X43")
def test_a_map_is_an_object_and_keeps_a_key_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    kind = pa.map_(pa.string(), pa.int64())
    cells = [[("a", 1), ("b", 2)], [], None]
    within = pa.array([{"m": cell} for cell in cells], pa.struct([("m", kind)]))
    pq.write_table(pa.table({"m": pa.array(cells, kind), "s": within}), path)
    expected = [{"a": 1, "b": 2}, {}, None]
    assert decoded(list(open_source(path).rows())) == [{"m": cell, "s": {"m": cell}} for cell in expected]
    twice = pa.table({"m": pa.array([[("a", 1), ("a", 2)]], kind)})
    assert decoded(list(open_rows(twice).rows())) == [{"m": [["a", 1], ["a", 2]]}]


def test_integers_of_pandas_with_empty_cells_are_integers() -> None:
    """Pandas makes floats of such a column: 1.0 is no integer to a function."""
    frame = pd.DataFrame(
        {
            "whole": [1, None, -3],
            "float": [1.0, 2.0, 3.0],
            "mixed": [1.0, None, 2.5],
            "huge": [2.0**60, None, 1.0],
            "endless": [1.0, None, math.inf],
            "none": [math.nan] * 3,
        }
    )
    rows = [msgspec.json.decode(row.args) for row in open_rows(frame).rows()]
    assert [row["whole"] for row in rows] == [1, None, -3]
    assert type(rows[0]["whole"]) is int
    assert all(type(rows[0][name]) is float for name in ("float", "mixed", "huge", "endless"))
    assert [row["none"] for row in rows] == [None] * 3
    assert frame["whole"].dtype == "float64"  # the frame is not touched


def test_what_is_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"x\n1\n")
    with pytest.raises(UsageError, match=r"cannot read .*a\.parquet as Parquet"):
        open_source(path)
    with pytest.raises(UsageError, match="does not exist"):
        open_source(tmp_path / "gone.parquet")
    with pytest.raises(UsageError, match="cannot be read from standard input"):
        open_source("-", "parquet")
    (tmp_path / "empty.parquet").mkdir()
    with pytest.raises(UsageError, match=r"is a folder without \.parquet files"):
        open_source(tmp_path / "empty.parquet")


def test_a_parquet_file_that_is_damaged_inside(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [str(n) for n in range(50_000)]}), path, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[len(data) // 4 : len(data) // 2] = b"\xff" * (len(data) // 2 - len(data) // 4)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"cannot read .*a\.parquet as Parquet after row \d+"):
        list(open_source(path).rows())


def test_a_missing_pyarrow_prints_its_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"Parquet needs pyarrow: pip install 'callyard\[parquet\]'"):
        open_source(tmp_path / "a.parquet")


# --- frames back ----------------------------------------------------------------------------------------------------


def test_results_are_columns_of_the_same_library() -> None:
    values, errors = [1.5, None], [None, "internal: no"]
    frame = with_results(pd.DataFrame({"x": [1, 2]}, index=[7, 9]), values, errors, "km")
    assert list(frame.columns) == ["x", "km", "km_error"]
    assert list(frame.index) == [7, 9]
    assert with_results(pl.DataFrame({"x": [1, 2]}), values, errors, "km").to_dict(as_series=False) == {
        "x": [1, 2],
        "km": values,
        "km_error": errors,
    }
    table = with_results(hold(pa.RecordBatchReader.from_stream(pa.table({"x": [1, 2]}))), values, errors, "km")
    assert table.to_pydict() == {"x": [1, 2], "km": values, "km_error": errors}


def test_values_of_several_types_become_their_json() -> None:
    values = [1, "a", {"b": None}, None]
    texts = ["1", '"a"', '{"b":null}', None]
    for frame in (pl.DataFrame({"x": range(4)}), pa.table({"x": range(4)})):
        back = with_results(frame, values, [None] * 4, "y")
        got = back["y"].to_list() if isinstance(back, pl.DataFrame) else back["y"].to_pylist()
        assert got == texts


def test_objects_become_structs() -> None:
    values = [{"a": 1}, {"a": 2}]
    assert with_results(pl.DataFrame({"x": [1, 2]}), values, [None] * 2, "y")["y"].to_list() == values


def test_a_name_that_is_taken() -> None:
    with pytest.raises(UsageError, match="the frame has a column 'output_error' already: name the new one with into="):
        check_free(pa.table({"output_error": [1]}), "output")
    with pytest.raises(UsageError, match="expected a pandas or Polars DataFrame or an Arrow table, got list"):
        hold([1])
