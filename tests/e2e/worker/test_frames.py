"""Frames in, frames back, with real executors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import callyard
from callyard import UsageError, Worker

TARGET = Path(__file__).parents[1] / "functions_file.py"
FRAMES = {
    "pandas": pd.DataFrame({"x": [1, 2, 3]}),
    "polars": pl.DataFrame({"x": [1, 2, 3]}),
    "arrow": pa.table({"x": [1, 2, 3]}),
}


@pytest.mark.requirement("X43")
@pytest.mark.parametrize("library", FRAMES)
async def test_map_over_a_frame_and_a_frame_back(library: str) -> None:
    frame: Any = FRAMES[library]
    async with Worker(TARGET, executors=1) as worker:
        values = [result.value async for result in worker.map("double", frame)]
        back = await worker.map_frame("double", frame, into="twice")
        failed = await worker.map_frame("boom", frame)
        wide = frame.assign(y=0) if library == "pandas" else frame
        if library == "polars":
            wide = frame.with_columns(y=0)
        if library == "arrow":
            wide = frame.append_column("y", [[0, 0, 0]])
        with pytest.raises(UsageError, match=r"unknown column y: double takes x"):
            await anext(worker.map("double", wide))
        assert [r.value async for r in worker.map("double", wide, extra="ignore")] == [2, 4, 6]
        assert [r.value async for r in worker.map("double", wide, columns=["x"])] == [2, 4, 6]
        with pytest.raises(UsageError, match="the frame has a column 'x' already"):
            await worker.map_frame("double", frame, into="x")
    assert values == [2, 4, 6]
    assert type(back) is type(frame)
    columns = back.to_dict("list") if library == "pandas" else {name: list(_cells(back[name])) for name in _names(back)}
    assert columns == {"x": [1, 2, 3], "twice": [2, 4, 6], "twice_error": [None] * 3}
    assert [text for text in _cells(failed["output_error"]) if isinstance(text, str)] == [
        "internal: ValueError: 3 is divisible by 3"
    ]


def _names(frame: Any) -> list[str]:
    return list(frame.column_names if isinstance(frame, pa.Table) else frame.columns)


def _cells(column: Any) -> list[Any]:
    return list(column.to_pylist() if isinstance(column, pa.ChunkedArray) else column)


def test_run_takes_frames_and_files_with_the_same_options(tmp_path: Path) -> None:
    frame = pl.DataFrame({"id": ["a", "b"], "x": [1, 2]})
    with pytest.raises(UsageError, match="unknown column id"):
        callyard.run(f"{TARGET}:double", frame, executors=1)
    results = callyard.run(f"{TARGET}:double", frame, executors=1, extra="ignore")
    assert [result.value for result in results] == [2, 4]
    frame.write_parquet(tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    summary = callyard.run(f"{TARGET}:double", tmp_path / "in.parquet", out, executors=1, id="id")
    assert (summary.calls, summary.failed) == (2, 0)
    assert pl.read_parquet(out / "*.parquet").select("id", "output").rows() == [("a", 2), ("b", 4)]


def test_rows_of_a_list_are_judged_one_by_one(tmp_path: Path) -> None:
    good, bad = callyard.run(f"{TARGET}:double", [{"x": 1}, {"x": 1, "y": 2}], executors=1)
    assert good.value == 2
    assert bad.error is not None
    assert bad.error.kind == "schema"
