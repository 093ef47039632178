"""Results as Parquet: a part for each batch, each whole, all of one form, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from callyard.errors import ErrorKind, UsageError, fail
from callyard.scheduler import CallResult
from callyard.worker import parquet_output
from callyard.worker.disk import DISK
from callyard.worker.journal import Notes, RunHeader
from callyard.worker.outputs import OutputError, OutputSink, check_output, format_line, open_output
from callyard.worker.parquet_output import read_parts
from callyard.worker.results import with_echo
from callyard.worker.resume_plan import Plan, Planner

NUMBER = b'{"type":"number"}'
FARE = msgspec.json.encode(
    {
        "$ref": "#/$defs/Fare",
        "$defs": {
            "Fare": {
                "type": "object",
                "properties": {
                    "rider": {"type": "string"},
                    "stops": {"type": "array", "items": {"type": "integer"}},
                    "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
                    "more": {},
                },
            }
        },
    }
)


def good(index: int, output: Any = 1.5) -> CallResult:
    return CallResult(index, msgspec.json.encode(output), None, 1)


def bad(index: int) -> CallResult:
    return CallResult(index, None, fail(ErrorKind.SCHEMA, "no number", line=7), 0)


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(sink: OutputSink, *results: CallResult) -> None:
    sink.write(results)
    sink.close()


@pytest.mark.requirement("X87")
def test_a_row_per_result(tmp_path: Path) -> None:
    folder = tmp_path / "out.parquet"
    write(open_output(folder, output_schema=NUMBER), good(0), bad(1), good(2, 3))
    table = pq.read_table(folder)
    assert [(field.name, str(field.type)) for field in table.schema][:3] == [
        ("index", "int64"),
        ("ok", "bool"),
        ("output", "double"),
    ]
    rows = table.to_pylist()
    error = {"kind": "schema", "message": "no number", "attempts": 0, "outcome": "not_run", "details": '{"line":7}'}
    assert rows[0] == {"index": 0, "ok": True, "output": 1.5, "error": None, "output_json": None}
    assert rows[1] == {"index": 1, "ok": False, "output": None, "error": error, "output_json": None}
    assert rows[2]["output"] == 3.0


def test_each_batch_is_a_part_and_readers_see_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_output, "PART_ROWS", 3)
    folder = tmp_path / "out.parquet"
    sink = open_output(folder, output_schema=NUMBER)
    sink.write([bad(0), bad(1)])
    assert parts(folder) == []
    sink.write([bad(2), good(3), good(4)])
    assert parts(folder) == ["part-000000.parquet"]  # whole, and on disk
    sink.close()
    assert parts(folder) == ["part-000000.parquet", "part-000001.parquet"]
    assert pq.read_table(folder)["index"].to_pylist() == [0, 1, 2, 3, 4]
    assert pd.read_parquet(folder)["output"].tolist()[3:] == [1.5, 1.5]
    assert pl.read_parquet(folder / "*.parquet")["ok"].to_list() == [False] * 3 + [True] * 2


def test_many_bytes_are_a_part_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_output, "PART_BYTES", 10_000)
    sink = open_output(tmp_path / "out.parquet")
    sink.write([good(0, "x" * 20_000), good(1)])
    assert parts(tmp_path / "out.parquet") == ["part-000000.parquet"]
    sink.close()


def test_results_that_waited_for_long_are_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_output, "PART_AFTER_S", 0.0)
    sink = open_output(tmp_path / "out.parquet")
    sink.write([good(0)])
    assert parts(tmp_path / "out.parquet") == ["part-000000.parquet"]
    sink.close()


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (b'{"type":"integer"}', "int64"),
        (b'{"type":"string"}', "string"),
        (b'{"type":"boolean"}', "bool"),
        (b'{"type":"string","format":"date"}', "date32[day]"),
        (b'{"type":"string","format":"date-time"}', "string"),
        (b'{"type":"array","items":{"type":"number"}}', "list<element: double>"),
        (b'{"anyOf":[{"type":"integer"},{"type":"null"}]}', "int64"),
        (b"{}", "string"),
        (b'{"anyOf":[{"type":"integer"},{"type":"string"}]}', "string"),
        (b'{"type":"object","additionalProperties":{"type":"number"}}', "string"),
        (b'{"$ref":"#/$defs/A","$defs":{"A":{"type":"array","items":{"$ref":"#/$defs/A"}}}}', "string"),
    ],
)
def test_the_column_has_the_type_of_the_result(tmp_path: Path, schema: bytes, kind: str) -> None:
    folder = tmp_path / "out.parquet"
    write(open_output(folder, output_schema=schema))
    assert str(pq.read_table(folder).schema.field("output").type) == kind  # of a run without results too


def test_an_object_is_a_struct_and_what_is_not_typed_in_it_json(tmp_path: Path) -> None:
    folder = tmp_path / "out.parquet"
    fare = {"rider": "ada", "stops": [1, 2], "day": "2013-01-31", "more": "text"}
    write(
        open_output(folder, output_schema=FARE), good(0, fare), good(1, {"rider": "b", "stops": [], "more": {"a": 1}})
    )
    first, second = (row["output"] for row in pq.read_table(folder).to_pylist())
    assert str(first["day"]) == "2013-01-31"
    assert (first["stops"], first["more"]) == ([1, 2], '"text"')
    assert (second["day"], second["more"]) == (None, '{"a":1}')


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (b'{"type":"integer"}', 1 << 70),
        (b'{"type":"integer"}', msgspec.Raw(b"9" * 5_000)),
        (b'{"type":"number"}', msgspec.Raw(b"1e999")),
        (b'{"type":"integer"}', 1.5),
        (b'{"type":"number"}', True),
        (b'{"type":"number"}', (1 << 60) + 1),
        (b'{"type":"string","format":"date"}', "soon"),
        (b'{"type":"string"}', 5),
        (FARE, {"rider": "ada", "other": 1}),
        (FARE, 5),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_not_lost(tmp_path: Path, schema: bytes, value: Any) -> None:
    folder = tmp_path / "out.parquet"
    result = CallResult(0, msgspec.json.encode(value), None, 1)
    write(open_output(folder, output_schema=schema), result, bad(1))
    row = pq.read_table(folder).to_pylist()[0]
    assert (row["ok"], row["output"]) == (True, None)
    assert row["output_json"] == msgspec.json.encode(value).decode()


def test_any_json_is_text_where_the_function_does_not_say(tmp_path: Path) -> None:
    write(open_output(tmp_path / "o.parquet"), good(0, {"a": [1]}), good(1, "x"), good(2, None))
    assert pq.read_table(tmp_path / "o.parquet")["output"].to_pylist() == ['{"a":[1]}', '"x"', "null"]


def test_ids_and_arguments_are_columns(tmp_path: Path) -> None:
    echoes = (b'"id":"A1","args":{"x":1}', b'"id":7,"args":[1]', b"")
    sink = open_output(tmp_path / "o.parquet", repeated=["id", "args"])
    write(sink, *(with_echo(good(n), echo) for n, echo in enumerate(echoes)))
    table = pq.read_table(tmp_path / "o.parquet")
    assert table["id"].to_pylist() == ["A1", "7", None]
    assert table["args"].to_pylist() == ['{"x":1}', "[1]", None]


def test_what_becomes_of_a_folder_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "o.parquet"
    write(open_output(folder), good(0))
    with pytest.raises(OutputError, match="is not empty: give --force to replace its parts, --append to add"):
        check_output(folder)
    write(open_output(folder, existing="append"), good(1))
    assert parts(folder) == ["part-000000.parquet", "part-000001.parquet"]
    sink = open_output(folder, existing="overwrite")
    assert parts(folder) == ["part-000000.parquet", "part-000001.parquet"]  # until there is something in their place
    sink.abort()
    assert pq.read_table(folder)["index"].to_pylist() == [0, 1]
    write(open_output(folder, existing="overwrite"), good(5))
    assert pq.read_table(folder)["index"].to_pylist() == [5]
    (folder / "notes.txt").touch()
    with pytest.raises(OutputError, match=r"holds notes\.txt, which is no part of results"):
        check_output(folder, existing="overwrite")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file.parquet").touch()
    with pytest.raises(OutputError, match="is a file: results as Parquet are a folder of parts"):
        check_output(tmp_path / "file.parquet")
    with pytest.raises(OutputError, match="there is no folder"):
        check_output(tmp_path / "gone" / "o.parquet")
    folder = tmp_path / "in.parquet"
    folder.mkdir()
    pq.write_table(pa.table({"x": [1]}), folder / "part-000000.parquet")
    for source in (folder, folder / "part-000000.parquet"):
        with pytest.raises(OutputError, match="is the input too"):
            check_output(folder, existing="overwrite", source=source)


def test_abort_keeps_what_was_taken(tmp_path: Path) -> None:
    sink = open_output(tmp_path / "o.parquet")
    sink.write([good(0)])
    sink.abort()
    assert pq.read_table(tmp_path / "o.parquet")["index"].to_pylist() == [0]


def plan_again(folder: Path, schema: bytes) -> Plan:
    """Where a run goes on that ended with three results in one part, and gives results of `schema` now."""
    header = RunHeader(
        run_id="r", generation=1, function="f", digest="", shape={}, input=None, hash_seed=1, boot="", folder="",
        base=0, start=(0, 0),
    )  # fmt: skip
    return Planner(
        folder,
        folder.parent / "kept",
        Notes(header=header, settled=(1, 3), ended=True),
        DISK,
        is_parquet=True,
        output_schema=schema,
        repeated=(),
        with_printed=False,
        resume=True,
        retry_failed=False,
        function="f",
        may_run_again=lambda name: True,
    ).plan()


@pytest.mark.requirement("X88")
def test_parts_of_other_columns_are_written_anew_when_a_run_goes_on(tmp_path: Path) -> None:
    """The function's result has another type now: what was JSON is no text, and the folder stays one table."""
    folder = tmp_path / "o.parquet"
    results = good(0, "a"), good(1, 1), bad(2)
    write(open_output(folder), *results)
    lines = [format_line(result) for result in results]
    for schema, fits in ((b"{}", True), (b'{"type":"string"}', False), (FARE, False)):
        assert list(read_parts(folder, 0, 1, schema, (), with_printed=False)) == [(0, line, fits) for line in lines]
        plan = plan_again(folder, schema)
        assert (plan.start, plan.before, plan.kept_standing) == (((1, 3), 3, 0) if fits else ((0, 0), 0, 3))
    sink = open_output(folder, output_schema=b'{"type":"string"}', start=(0, 0))
    sink.write_kept(lines)
    sink.close()
    rows = pq.read_table(folder).to_pylist()
    assert [(row["output"], row["output_json"]) for row in rows] == [("a", None), (None, "1"), (None, None)]


@pytest.mark.requirement("X88")
def test_a_part_that_was_added_behind_a_run_that_ended_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "o.parquet"
    write(open_output(folder), *(good(row) for row in range(3)))
    write(open_output(folder, existing="append"), good(0))
    with pytest.raises(UsageError, match="is not as its run left it: it has a part behind its last one"):
        plan_again(folder, b"{}")
